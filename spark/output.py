"""The directory that a report goes into: made beside the one that stands there, and put in its place as a whole.

    out/.making-<id>/    a report that is being made; whoever makes it holds a lock on this directory
    out/                 locked while something is put there or swept away

Any number of reports may be made into one directory at a time: the last that is whole stands there in the end. Locks
are flock(2)'s, which end with their process, however it ends: what a killed one was making is swept away by the next.
Where a file system knows no locks, nothing is swept away.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

JSON, PAGE, PARQUET = "report.json", "report.html", "parquet"
_OURS = {JSON, PAGE, PARQUET}
_MAKING = ".making"
_DISK_FAULTS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}
# What is done under the lock is renamed and removed, and not written.
TURN_WITHIN_S = 60.0
_POLL_S = 0.02


class OutputTaken(Exception):
    """The report cannot be put there. The sentence says why; usage (2) or the file system (73) is at fault."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


@contextmanager
def place(out: Path) -> Iterator[Path]:
    """A directory to make the report in, gone at the end. Raises OutputTaken."""
    if out.exists() and not out.is_dir():
        raise OutputTaken(f"{out} is a file: name a directory with --out", 2)
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    foreign = [name for name in names if name not in _OURS and not name.startswith(_MAKING)]
    if foreign:
        raise OutputTaken(
            f"{out} holds {', '.join(foreign[:3])}{' and more' if len(foreign) > 3 else ''}, which is no report's: name"
            " another directory with --out, or a new one in it",
            2,
        )
    making = out / f"{_MAKING}-{uuid.uuid4().hex}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _turn(out) as has_locks:
            if has_locks:
                _sweep(out)
            making.mkdir()
            held = _locked(making)
    except OSError as fault:
        raise OutputTaken(
            f"{out} cannot be written to ({fault.strerror}): name another directory with --out", 73
        ) from (fault)
    try:
        yield making.absolute()
    except OSError as fault:
        is_ours = str(fault.filename).startswith(str(out.absolute()))
        if is_ours or (fault.filename is None and fault.errno in _DISK_FAULTS):  # Arrow does not name the file
            raise OutputTaken(f"{out} cannot be written to ({fault.strerror})", 73) from fault
        raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
        if held is not None:
            os.close(held)


def put(making: Path, out: Path) -> None:
    """The report that was made takes the place of the one that stands there, all of it at once for all who ask for
    their turn. Raises OutputTaken."""
    before = making / "before"
    before.mkdir()
    with _turn(out):
        for name in (PARQUET, PAGE, JSON):
            if (out / name).exists():
                os.replace(out / name, before / name)
            os.replace(making / name, out / name)


def _sweep(out: Path) -> None:
    """What killed reports have left."""
    for path in out.glob(f"{_MAKING}*"):
        try:
            lock = _locked(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # one that is being made, or was until just now
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def _turn(out: Path) -> Iterator[bool]:
    """Nobody else puts or sweeps meanwhile. False where the file system has no locks."""
    deadline = time.monotonic() + TURN_WITHIN_S
    while True:
        try:
            lock = _locked(out)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OutputTaken(
                    f"another report is being put into {out}: try again, or name another directory with --out", 73
                ) from None
            time.sleep(_POLL_S)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """To be closed in the end. None where there are no locks; raises BlockingIOError when another has it."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(opened)
        raise
    except OSError:
        os.close(opened)
        return None
    return opened
