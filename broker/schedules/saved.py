"""schedules.jsonl in the data directory: a copy of all definitions, for `portalmq adopt`.

    b94d27b9934d3e08...                     SHA-256 of the lines below
    1700000000000                           when the definitions were taken from memory, in ms
    {"name": ..., "schedule_id": ...}       a definition: ScheduleState
    ...

Each broker of a cluster writes its own, a moment after a change, and at its start. The last one that was written by any
of them is the state of the cluster: `read_ms` is of the time of day that most brokers agree on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from pathlib import Path

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

SCHEDULES_FILE = "schedules.jsonl"
# After a write, as many times its duration pass before the next one, and at least a second.
PAUSE_S_MIN = 1.0
PAUSE_FACTOR = 20


class SavedSchedules(msgspec.Struct, frozen=True):
    read_ms: int
    schedules: list[ScheduleState]


def write_schedules(data_dir: Path, read_ms: int, definitions: list[bytes]) -> None:
    """Replace the file."""
    lines = b"".join([line + b"\n" for line in (b"%d" % read_ms, *definitions)])
    write_atomically(data_dir / SCHEDULES_FILE, _checksum(lines) + b"\n" + lines)


def read_schedules(data_dir: Path) -> SavedSchedules | None:
    """Return the content of the file; None without one. Raises CorruptFile."""
    file = data_dir / SCHEDULES_FILE
    try:
        checksum, _, lines = file.read_bytes().partition(b"\n")
        if checksum != _checksum(lines):
            raise CorruptFile(f"{file} is damaged: its checksum differs")
        read_ms, *definitions = lines.splitlines()
        return SavedSchedules(int(read_ms), [state.decode(line, ScheduleState) for line in definitions])
    except FileNotFoundError:
        return None
    except (ValueError, msgspec.DecodeError) as error:
        raise CorruptFile(f"{file} is damaged: {error}") from error


def _checksum(lines: bytes) -> bytes:
    return hashlib.sha256(lines).hexdigest().encode()


class ScheduleSaver:
    """Writes the file after each `note`. `is_whole` is asked after `known`, and tells whether the control plane that
    they were read from has lost nothing: an emptied one must not empty the file."""

    def __init__(
        self,
        data_dir: Path,
        known: Callable[[], list[ScheduleState]],
        is_whole: Callable[[], bool],
        clock: Clock,
        threads: NativeThreads,
    ) -> None:
        self._data_dir = data_dir
        self._known = known
        self._is_whole = is_whole
        self._clock = clock
        self._threads = threads
        self._noted = Event()
        self._written: list[ScheduleState] | None = None

    def start(self) -> None:
        gevent.spawn(self._run)

    def note(self) -> None:
        self._noted.set()

    def _run(self) -> None:
        while True:
            self._noted.wait()
            self._noted.clear()
            began = time.monotonic()
            try:
                self.save()
            except (OSError, PlaneError) as error:  # the file serves only `portalmq adopt`: go on
                log.warning("the definitions of the schedules could not be saved: %s", error)
                self._noted.set()
            gevent.sleep(max(PAUSE_S_MIN, PAUSE_FACTOR * (time.monotonic() - began)))

    def save(self) -> None:
        """Write the file, unless it would have the same definitions. Raises OSError, PlaneError."""
        read_ms, schedules = self._clock.wall_ms(), self._known()
        if schedules != self._written and self._is_whole():
            definitions = [state.encode(each) for each in in_short_turns(schedules)]
            self._threads.apply(write_schedules, (self._data_dir, read_ms, definitions))
            self._written = schedules
