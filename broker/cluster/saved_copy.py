"""Copies of what only the control plane has, in each data directory, for `portalmq adopt`: `schedules.jsonl` and
`groups.jsonl`.

    b94d27b9934d3e08...                     SHA-256 of the lines below
    1700000000000                           when the states were taken from memory, in ms
    {"name": ..., "schedule_id": ...}       a state: ScheduleState, GroupState
    ...

Each broker of a cluster writes its own, a moment after a change, and at its start. The last one that was written by any
of them is the state of the cluster: `read_ms` is of the time of day that most brokers agree on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import gevent
import msgspec
from gevent.event import Event

from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.native import NativeThreads
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.storage.errors import CorruptFile
from portalmq.broker.storage.files import write_atomically
from portalmq.control_plane import state
from portalmq.control_plane.plane import PlaneError
from portalmq.control_plane.schedules import ScheduleState

log = logging.getLogger(__name__)

# After a write, as many times its duration pass before the next one, and at least a second.
PAUSE_S_MIN = 1.0
PAUSE_FACTOR = 20
# States that are gone are looked for again after this time.
FEWER_FOR_S = 10.0

StateT = TypeVar("StateT", bound=ScheduleState | state.GroupState)


@dataclass(frozen=True)
class Saved(Generic[StateT]):
    read_ms: int
    states: list[StateT]


@dataclass(frozen=True)
class SavedCopy(Generic[StateT]):
    """A file of such a name, with states of this type."""

    file: str
    type: type[StateT]

    def write(self, data_dir: Path, read_ms: int, states: list[bytes]) -> None:
        """Replace the file."""
        lines = b"".join([line + b"\n" for line in (b"%d" % read_ms, *states)])
        write_atomically(data_dir / self.file, _checksum(lines) + b"\n" + lines)

    def read(self, data_dir: Path) -> Saved[StateT] | None:
        """Return the content of the file; None without one. Raises CorruptFile."""
        file = data_dir / self.file
        try:
            checksum, _, lines = file.read_bytes().partition(b"\n")
            if checksum != _checksum(lines):
                raise CorruptFile(f"{file} is damaged: its checksum differs")
            read_ms, *states = lines.splitlines()
            return Saved(int(read_ms), [state.decode(line, self.type) for line in states])
        except FileNotFoundError:
            return None
        except (ValueError, msgspec.DecodeError) as error:
            raise CorruptFile(f"{file} is damaged: {error}") from error


SCHEDULES = SavedCopy("schedules.jsonl", ScheduleState)
GROUPS = SavedCopy("groups.jsonl", state.GroupState)


def _checksum(lines: bytes) -> bytes:
    return hashlib.sha256(lines).hexdigest().encode()


class CopySaver(Generic[StateT]):
    """Writes the file after each `note`. `is_whole` is asked after `known`, and tells whether the control plane that
    they were read from has lost nothing: an emptied one must not empty the file."""

    def __init__(
        self,
        copy: SavedCopy[StateT],
        data_dir: Path,
        known: Callable[[], list[StateT]],
        is_whole: Callable[[], bool],
        clock: Clock,
        threads: NativeThreads,
    ) -> None:
        self._copy = copy
        self._data_dir = data_dir
        self._known = known
        self._is_whole = is_whole
        self._clock = clock
        self._threads = threads
        self._noted = Event()
        self._written: list[StateT] | None = None
        self._names: set[str] = set()

    def start(self) -> None:
        gevent.spawn(self._run)

    def note(self) -> None:
        self._noted.set()

    def _run(self) -> None:
        self._names = self._names_in_file()
        while True:
            self._noted.wait()
            self._noted.clear()
            if self._names - {each.name for each in self._known()}:
                gevent.sleep(FEWER_FOR_S)  # of a tree that somebody removes, the cluster's id may go last
            began = time.monotonic()
            try:
                self.save()
            except (OSError, PlaneError) as error:  # the file serves only `portalmq adopt`: go on
                log.warning("%s could not be saved: %s", self._copy.file, error)
                self._noted.set()
            gevent.sleep(max(PAUSE_S_MIN, PAUSE_FACTOR * (time.monotonic() - began)))

    def save(self) -> None:
        """Write the file, unless it would have the same states. Raises OSError, PlaneError."""
        read_ms, states = self._clock.wall_ms(), self._known()
        if states != self._written and self._is_whole():
            encoded = [state.encode(each) for each in in_short_turns(states)]
            self._threads.apply(self._copy.write, (self._data_dir, read_ms, encoded))
            self._written, self._names = states, {each.name for each in states}

    def _names_in_file(self) -> set[str]:
        try:
            saved = self._threads.apply(self._copy.read, (self._data_dir,))
        except (OSError, CorruptFile) as error:
            log.warning("%s is written again: %s", self._copy.file, error)
            return set()
        return set() if saved is None else {each.name for each in saved.states}
