"""Faults at the Nth change of every stage, and a small disk: no acknowledged record is lost, the error is clear and
true, and the process goes on.

    no room            Shortage: nothing of the call is applied. With room it succeeds, in the same process
    any other error    the outcome is unknown. The process starts again and goes on with what the system still shows
    killed             the process starts again

What it claims after a restart has to be on disk: it must survive a power cut at the next moment. One during the restart
loses nothing either.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from simulation.storage.crashes import check_image, images
from simulation.storage.recorder import KINDS, PAGE, Fault
from simulation.storage.stages import Point, Run, at_work, runs
from simulation.storage.subjects import Step, Subject

from portalmq.broker.storage.errors import Shortage

SMALL_DISK = "small disk"
# How many power cuts are tried during a start after a fault.
CUTS = 2


class Unclear(AssertionError):
    """A failure of the disk came out as another error than it should."""


def run_until_fault(subject: Subject, story: Any, start: Point, steps: list[Step]) -> bool:
    """Run a stage. With a shortage, make room and go on. Return False when a fault has ended it."""
    story.note(start.allowed)
    try:
        try:
            story.begin(start.allowed)
        except Shortage:
            if Shortage in subject.ended:
                raise
            make_room(story)
            story.begin(start.allowed)
        for step in steps:
            try:
                step(story)
            except Shortage:
                if Shortage in subject.ended:
                    raise
                with suppress(Shortage):
                    story.read()
                make_room(story)
                story.read()
                story.adopt(is_start=False)
                step(story)
    except subject.ended:
        return False
    except Exception as error:
        if story.disk.is_dead:  # what a process does after it was killed has no effect
            return False
        raise Unclear(f"{type(error).__name__}: {error}") from error
    return True


def make_room(story: Any) -> None:
    assert story.disk.failures, "there was room"
    story.disk.fault, story.disk.room = None, None


def fail(subject: Subject, root: Path, start: Point, steps: list[Step], kind: str, at: int) -> bool:
    """Run a stage with a fault, and check what follows. Return False if the fault did not come."""
    with at_work(subject, start, root / "stage") as story:
        if kind == SMALL_DISK:
            story.disk.room = story.disk.used() + (at - 1) * PAGE
        else:
            story.disk.fault = Fault(kind, at)
        goes_on = run_until_fault(subject, story, start, steps)
        if not story.disk.failures:
            return False
        story.disk.fault = story.disk.room = None
        if goes_on:
            story.read()
    point = Run(start, story.disk.ops, story).end()
    if not goes_on:
        point = started_again(subject, root, point, at)
    survives(subject, root, point, at)
    return True


def started_again(subject: Subject, root: Path, point: Point, number: int) -> Point:
    """Start again with what the system shows, and go on a little. The power may be cut during the start."""
    with at_work(subject, point, root / "again") as story:
        story.begin(point.allowed)
        start = Run(point, list(story.disk.ops), story)
        claimed = start.end()
        subject.goes_on(story)
    survives(subject, root, claimed, number)
    chance = random.Random(number)
    during = [(image, allowed) for _, image, allowed in images(start, chance, 1)]
    for image, allowed in chance.sample(during, min(CUTS, len(during))):
        check_image(subject, image, allowed, root / "image", number)
    return Run(point, story.disk.ops, story).end()


def survives(subject: Subject, root: Path, point: Point, number: int) -> None:
    """Cut the power now, and check what is on disk."""
    check_image(subject, point.disk.image("synced", random.Random(0)), point.allowed, root / "image", number)


def failures(
    subject: Subject,
    root: Path,
    *,
    every: int = 1,
    kinds: Collection[str] = (*KINDS, SMALL_DISK),
    only: Collection[str] = (),
) -> Iterator[tuple[str, str | None]]:
    """Let the Nth change of all stages, or of some, fail in each way: each N, or every so many. Yield each one's kind
    and failure."""
    for name, run in runs(subject, root):
        if only and name not in only:
            continue
        for kind in kinds:
            at = random.Random(f"{name}, {kind}").randint(1, every)  # the same with and without `only`
            while True:
                try:
                    if not fail(subject, root, run.start, subject.stages[name], kind, at):
                        break
                except Exception as error:  # noqa: BLE001 - each is a finding
                    yield kind, f"{name}, {kind} at {at}: {type(error).__name__}: {error}"
                else:
                    yield kind, None
                at += every
