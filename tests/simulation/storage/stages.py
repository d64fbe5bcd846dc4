"""One run of a process on a recorded disk, between two points of its life."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from simulation.storage.image import Disk
from simulation.storage.recorder import Op, recorded
from simulation.storage.subjects import Subject

from portalmq.broker.storage import log as log_module
from portalmq.control_plane import standalone


@dataclass
class Point:
    """The disk and the promises between two stages."""

    disk: Disk
    model: Any
    allowed: Any


@dataclass
class Run:
    """One stage that ran from `start`: what it did, and its story. `error` is a fault that ended it."""

    start: Point
    ops: list[Op]
    story: Any

    def end(self) -> Point:
        """Return the disk as it is after the run, and what may be found of it."""
        disk = self.start.disk.copy()
        allowed = self.start.allowed
        for op in self.ops:
            if op.kind == "note":
                allowed = op.note
            else:
                disk.apply(op)
        return Point(disk, deepcopy(self.story.model), allowed)


def first_point(subject: Subject) -> Point:
    return Point(Disk(), subject.model(), subject.allowed())


@contextmanager
def at_work(subject: Subject, start: Point, root: Path) -> Iterator[Any]:
    """Write what the system shows of the disk to `root`, and let the process of `subject` work there."""
    story: Any = None
    root.mkdir()
    inodes, sizes = start.disk.restarted(root)
    small = patch.multiple(log_module, WAL_BYTES_MAX=64 * 1024, WAL_BYTES_DUE=48 * 1024)
    small_journal = patch.object(standalone, "_COMPACT_BYTES_MIN", 800)
    try:
        with recorded(root, inodes, sizes) as disk, small, small_journal:
            story = subject.make(disk, deepcopy(start.model))
            yield story
    finally:
        with suppress(Exception):  # after a fault files are closed as they are
            story.close()
        shutil.rmtree(root)


def runs(subject: Subject, root: Path) -> Iterator[tuple[str, Run]]:
    """Yield the run of each stage, without faults."""
    point = first_point(subject)
    for name, steps in subject.stages.items():
        with at_work(subject, point, root / "stage") as story:
            story.begin(point.allowed)
            for step in steps:
                step(story)
        run = Run(point, story.disk.ops, story)
        yield name, run
        point = run.end()
