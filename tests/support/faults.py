"""Faults for a broker process of a test: Python that runs first in the process, controlled by a file.

prelude = disk_that_fills(tmp_path / "full")     # the disk is full while the file exists: the broker knows, and refuses
                                                 # with AT_ITS_END in the file only a write fails
prelude = clock_moved_by(tmp_path / "shift")     # the time of day is off by the seconds in the file
"""

from __future__ import annotations

from pathlib import Path

AT_ITS_END = "end"


def disk_that_fills(file: Path) -> str:
    return f"""
from portalmq.broker.storage import disk as _disk, errors as _errors, log as _log
_free_bytes, _append = _disk.DiskGuard.free_bytes, _log.Log._append
def _word():
    try:
        with open({str(file)!r}) as file:
            return file.read()
    except FileNotFoundError:
        return None
def _append_if_room(self, batches, **more):
    if _word() == {AT_ITS_END!r}:
        raise _errors.DiskFull("no room, says the test")
    return _append(self, batches, **more)
_disk.DiskGuard.free_bytes = lambda self: _free_bytes(self) if _word() in (None, {AT_ITS_END!r}) else 0
_log.Log._append = _append_if_room
"""


def clock_moved_by(file: Path) -> str:
    return f"""
import time as _time
_real, _real_ns, _looked = _time.time, _time.time_ns, [0.0, 0.0]
def _shift_s():
    now = _time.monotonic()
    if now - _looked[0] > 0.02:
        _looked[0] = now
        try:
            with open({str(file)!r}) as file:
                _looked[1] = float(file.read() or 0)
        except OSError:
            _looked[1] = 0.0
    return _looked[1]
_time.time = lambda: _real() + _shift_s()
_time.time_ns = lambda: _real_ns() + int(_shift_s() * 1e9)
"""
