"""Whose files are tried: their stages, each one run of the process that goes on with the files of the one before, and
the check of what a crash left."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import apsw
from simulation.storage.control import Control, Promised, Tables
from simulation.storage.recorder import Recorder
from simulation.storage.story import PLACE, Allowed, Model, Story

from portalmq.broker.storage.errors import Shortage, StorageFault
from portalmq.control_plane.plane import OutcomeUnknown, PlaneUnavailable

Step = Callable[[Any], None]


@dataclass(frozen=True)
class Subject:
    """`make` returns the story of a process on a disk, `check` opens what a crash left. `ended` are the errors after
    which the process starts again."""

    name: str
    make: Callable[[Recorder, Any], Any]
    model: Callable[[], Any]
    allowed: Callable[[], Any]
    check: Callable[[Path, Any, int], None]
    ended: tuple[type[Exception], ...]
    stages: dict[str, list[Step]]
    goes_on: Step


# --- a partition ------------------------------------------------------------------------------------------------------

STAGES: dict[str, list[Step]] = {
    "begin": [
        Story.lead,
        Story.append,
        Story.append_several,
        Story.save,
        Story.append,
        lambda s: s.append(at_once=True),
    ],
    "write-ahead log": [
        *[lambda s: s.append(20, 200)] * 4,
        Story.checkpoint,
        Story.append,
        Story.append_compressed,
        Story.save,
        Story.append,
        Story.checkpoint,
    ],
    "roll": [Story.append, Story.roll, Story.append, Story.append_and_roll, Story.append, Story.save, Story.lead],
    "seal": [
        Story.append,
        Story.seal,
        Story.append,
        lambda s: s.save(durable=True),
        Story.roll,
        Story.seal,
        Story.read,
    ],
    "truncate": [Story.append, Story.append_several, lambda s: s.truncate(2), Story.lead, Story.append, Story.save],
    "truncate what is sealed": [
        *(Story.append, Story.roll, Story.append, Story.roll, Story.append, Story.seal, Story.save),
        *(lambda s: s.truncate(3), Story.lead, Story.append),
    ],
    "compact": [*[lambda s: s.append(10)] * 2, Story.roll, Story.append, Story.compact, Story.append, Story.read],
    "compact again": [Story.append, Story.compact, Story.append, lambda s: s.truncate(1), Story.append],
    "retention": [
        *(Story.append, Story.roll, Story.append, Story.seal, Story.save, Story.drop, Story.append),
        *(Story.purge, Story.append, Story.save),
    ],
    "rest": [
        *(Story.append, Story.rest, Story.read, Story.append, Story.save, Story.rest, Story.append),
        *(Story.restart, Story.read, Story.rest, Story.restart, Story.append, Story.lead),
    ],
    "reset": [Story.append, Story.roll, Story.append, Story.seal, lambda s: s.reset(40), Story.append, Story.lead],
    "reset to the beginning": [Story.append, lambda s: s.reset(-1), Story.lead, Story.append, Story.save, Story.roll],
    "close": [Story.append, Story.save, Story.restart, Story.append, Story.seal, Story.restart],
}


# How a partition may go on after a crash.
AFTER: list[list[Step]] = [
    [Story.append, Story.lead, lambda s: s.save(durable=True), Story.seal],
    [Story.append, lambda s: s.truncate(1), Story.lead, Story.append, Story.seal],
    [lambda s: s.reset(-1), Story.lead, Story.append, Story.roll, Story.append, Story.seal],
    [lambda s: s.reset(5), Story.lead, Story.append, Story.save],
    [Story.append, Story.compact, Story.save, Story.append],
]


def check_partition(root: Path, allowed: Allowed, number: int) -> None:
    """Open files that a crash left, go on in one of the ways, open them again, and begin anew."""
    story = Story(Recorder(root, {}, {}), Model(epochs=allowed.epochs))
    story.begin(allowed)
    for step in AFTER[number % len(AFTER)]:
        step(story)
    story.restart()
    story.append()
    story.close()
    is_whole(root / PLACE)
    story.reopen()
    story.reset(-1)
    story.append()
    story.restart()
    story.close()
    is_whole(root / PLACE)


def is_whole(directory: Path) -> None:
    """Check closed files without the product: SQLite's own check, the manifest's sums, nothing left over. The manifest
    may still list dropped segments."""
    names = {path.name for path in directory.iterdir()}
    for path in sorted(directory.glob("*.sqlite")):
        flags = apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
        with closing(apsw.Connection(f"file:{quote(str(path))}?immutable=1", flags=flags)) as connection:
            found = connection.execute("PRAGMA integrity_check").get
            assert found == "ok", f"{path.name}: {found}"
    if "manifest.json" in names:
        for entry in json.loads((directory / "manifest.json").read_bytes())["segments"]:
            if entry["file"] not in names and entry["file"] < min(names):
                continue
            found = hashlib.sha256((directory / entry["file"]).read_bytes()).hexdigest()
            assert found == entry["sha256"], f"{entry['file']} is not the file that the manifest describes"
    strange = {name for name in names if not name.endswith(".sqlite") and name != "manifest.json"}
    assert not strange, f"left over: {sorted(strange)}"


PARTITION = Subject(
    "partition", Story, Model, Allowed, check_partition, (StorageFault,), STAGES, lambda s: (s.append(), s.save())
)

# --- a data directory and its control plane ---------------------------------------------------------------------------


def check_control(root: Path, allowed: Promised, number: int) -> None:
    """Start on files that a crash left; go on, and start again."""
    story = Control(Recorder(root, {}, {}), Tables(number=1_000 + number))
    try:
        story.begin(allowed)
        story.create()
        story.restart()
        story.change()
        story.restart()
    finally:
        story.close()


CONTROL = Subject(
    "control plane",
    Control,
    Tables,
    Promised,
    check_control,
    (OutcomeUnknown, PlaneUnavailable, StorageFault, Shortage, OSError),
    {
        "journal": [Control.create, Control.create, Control.change, lambda s: s.create(4_000), Control.change],
        "journal rewritten": [*[Control.create] * 3, *[Control.change, lambda s: s.create(2_000)] * 4, Control.restart],
        "journal again": [Control.create, Control.restart, Control.change, Control.restart, Control.create],
    },
    Control.create,
)
SUBJECTS = (PARTITION, CONTROL)
