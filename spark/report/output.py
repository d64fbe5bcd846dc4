"""The output directory of a report: a new report is made beside the existing one, and replaces it as a whole.

    out/.making-<id>/    a report in progress; its process holds a lock on this directory
    out/                 locked during a replacement or a cleanup

Any number of reports may be made for one directory at a time: the last complete one remains. Locks are flock(2)'s,
which end with their process: the next report removes what a killed one left. Without locks in the file system nothing
is removed.
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
# Files are only renamed and removed under the lock, not written.
TURN_WITHIN_S = 60.0
_POLL_S = 0.02


class OutputUnusable(Exception):
    """The report cannot be written there. The text says why; usage (2) or the file system (73) is at fault."""

    def __init__(self, what: str, exit_code: int) -> None:
        super().__init__(what)
        self.exit_code = exit_code


@contextmanager
def workspace(out: Path) -> Iterator[Path]:
    """Yield a directory to make the report in, which is removed at the end. Raises OutputUnusable."""
    if out.exists() and not out.is_dir():
        raise OutputUnusable(f"{out} is a file: name a directory with --out", 2)
    names = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
    foreign = [name for name in names if name not in _OURS and not name.startswith(_MAKING)]
    if foreign:
        raise OutputUnusable(
            f"{out} holds {', '.join(foreign[:3])}{' and more' if len(foreign) > 3 else ''}, which is no report's: name"
            " another directory with --out, or a new one in it",
            2,
        )
    making = out / f"{_MAKING}-{uuid.uuid4().hex}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _exclusive(out) as has_locks:
            if has_locks:
                _sweep(out)
            making.mkdir()
            held = _locked(making)
    except OSError as fault:
        raise OutputUnusable(
            f"{out} cannot be written to ({fault.strerror}): name another directory with --out", 73
        ) from (fault)
    try:
        yield making.absolute()
    except OSError as fault:
        is_ours = str(fault.filename).startswith(str(out.absolute()))
        if is_ours or (fault.filename is None and fault.errno in _DISK_FAULTS):  # Arrow does not name the file
            raise OutputUnusable(f"{out} cannot be written to ({fault.strerror})", 73) from fault
        raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
        if held is not None:
            os.close(held)


def publish(making: Path, out: Path) -> None:
    """Replace the existing report by the new one, at once for all that take the lock. Raises OutputUnusable."""
    before = making / "before"
    before.mkdir()
    with _exclusive(out):
        for name in (PARQUET, PAGE, JSON):
            if (out / name).exists():
                os.replace(out / name, before / name)
            os.replace(making / name, out / name)


def _sweep(out: Path) -> None:
    """Remove what killed reports have left."""
    for path in out.glob(f"{_MAKING}*"):
        try:
            lock = _locked(path)
        except (BlockingIOError, FileNotFoundError):
            continue  # in progress, or just finished
        shutil.rmtree(path, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def _exclusive(out: Path) -> Iterator[bool]:
    """Hold the lock on the output directory. Yields False where the file system has no locks."""
    deadline = time.monotonic() + TURN_WITHIN_S
    while True:
        try:
            lock = _locked(out)
            break
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise OutputUnusable(
                    f"another report is being put into {out}: try again, or name another directory with --out", 73
                ) from None
            time.sleep(_POLL_S)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _locked(directory: Path) -> int | None:
    """Return a locked descriptor, to be closed by the caller; None without locks. Raises BlockingIOError when it is
    taken."""
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
