"""System calls that differ between POSIX systems: one function each, with a fallback for systems other than Linux.

The tests run on Linux. They force each fallback by removing the Linux call.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
# The memory limit of a container: cgroup v2 and v1.
MEMORY_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
PR_SET_PDEATHSIG = 1
PARENT_CHECK_S = 1.0
# macOS: fsync leaves data in the cache of the drive, this does not.
F_FULLFSYNC = 51
# The errors of a file system without F_FULLFSYNC.
NO_FULL_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.ENOTTY}
# macOS refuses an unlimited number of open files, and accepts this one (OPEN_MAX).
OPEN_FILES_MAX = 10_240
ZEROS = bytes(1024 * 1024)

IS_DARWIN = sys.platform == "darwin"


# --- time ------------------------------------------------------------------------------------------------------------


def steady_clock() -> int:
    """Return the id of a clock that never jumps and continues while the machine is suspended; if there is none, of one
    that never jumps."""
    fallback = time.CLOCK_MONOTONIC_RAW if IS_DARWIN else time.CLOCK_MONOTONIC
    return int(getattr(time, "CLOCK_BOOTTIME", fallback))


def steady_s() -> float:
    """Return the time of the steady clock, in seconds."""
    return time.clock_gettime(steady_clock())


# --- disks -----------------------------------------------------------------------------------------------------------


def sync(descriptor: int) -> None:
    """Flush a file or a directory to disk, through the drive's cache."""
    if IS_DARWIN:
        import fcntl

        try:
            fcntl.fcntl(descriptor, F_FULLFSYNC)
            return
        except OSError as error:
            if error.errno not in NO_FULL_SYNC:
                raise
    os.fsync(descriptor)


def sync_data(descriptor: int) -> None:
    """Flush a file to disk, without attributes that reading it does not need."""
    if IS_DARWIN or not hasattr(os, "fdatasync"):
        sync(descriptor)
    else:
        os.fdatasync(descriptor)


def drop_cached(descriptor: int) -> None:
    """Have the next read of a file come from its disk, where the system can do that."""
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def allocate(descriptor: int, size: int) -> None:
    """Reserve `size` bytes of disk for a file. Raises OSError (ENOSPC) if they are not free."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
        return
    written = 0
    while written < size:
        written += os.pwrite(descriptor, ZEROS[: size - written], written)


def open_locked(path: Path, mode: int = 0o600) -> int:
    """Open a file that this process alone has locked, until the descriptor is closed; create a missing one. Raises
    BlockingIOError if another process has it."""
    import fcntl

    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def raise_open_files_limit() -> None:
    """Raise the soft limit of open files to the hard one, or as far as the system allows."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    except (OSError, ValueError):
        if 0 <= soft < OPEN_FILES_MAX:
            with contextlib.suppress(OSError, ValueError):
                resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES_MAX, hard))


# --- processes -------------------------------------------------------------------------------------------------------


def die_with(parent: int) -> bool:
    """Have the kernel kill this process when its parent ends for any reason. Return False if the kernel cannot."""
    prctl = _prctl()
    is_tied = prctl is not None and prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) == 0
    if os.getppid() != parent:  # it ended before the call took effect
        os._exit(1)
    return is_tied


def dies_with_this_process() -> Callable[[], None]:
    """Return a `preexec_fn` for subprocess.Popen: the new process is killed when this one ends for any reason.

    On Linux the kernel does it, when the thread that started the process ends. Elsewhere a small process does: it waits
    for the end of a pipe whose writing end only this process holds.
    """
    parent = os.getpid()
    lifeline = None if _prctl() is not None else _lifeline(parent)

    def prepare() -> None:
        me = os.getpid()
        if lifeline is not None and os.fork() == 0:
            _kill_at_end_of(lifeline, me)
        die_with(parent)

    return prepare


def _prctl() -> Callable[..., int] | None:
    import ctypes

    prctl: Callable[..., int] | None = getattr(ctypes.CDLL(None), "prctl", None)
    return prctl


@cache
def _lifeline(pid: int) -> int:
    """Return the reading end of a pipe that ends with this process, `pid`."""
    return os.pipe()[0]  # the writing end is never closed, and no new program inherits it


def _kill_at_end_of(lifeline: int, parent: int) -> None:
    """Kill the parent when the pipe ends; end with the parent."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for name in os.listdir("/dev/fd"):
            if int(name) != lifeline:
                with contextlib.suppress(OSError):
                    os.close(int(name))
        while os.getppid() == parent:
            if select.select([lifeline], [], [], PARENT_CHECK_S)[0] and os.getppid() == parent:
                os.kill(parent, signal.SIGKILL)
                break
    finally:
        os._exit(0)


def boot_id() -> str:
    """Return the id of this boot of the machine; "" if the system has none: there `start_of` alone is unique."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def start_of(pid: int) -> int | None:
    """Return the start of the process: in clock ticks since boot or, without /proc, in Unix seconds. None if there is
    no such process, or only its exit code is left."""
    if _has_proc():
        try:
            fields = _stat_of(pid)
        except OSError:
            return None
        return None if fields[0] in {"Z", "X"} else int(fields[19])
    state, _, started = _ps("-o", "stat=", "-o", "lstart=", "-p", str(pid)).strip().partition(" ")
    if not state or state[0] == "Z":
        return None
    when = datetime.strptime(" ".join(started.split()), "%a %b %d %H:%M:%S %Y")
    return int(when.replace(tzinfo=UTC).timestamp())


def children_of(pid: int) -> list[int]:
    if _has_proc():
        return [int(child) for task in (PROC / f"{pid}/task").glob("*/children") for child in task.read_text().split()]
    pairs = (line.split() for line in _ps("-A", "-o", "pid=", "-o", "ppid=").splitlines())
    return [int(child) for child, parent in pairs if int(parent) == pid]


def threads_of(pid: int) -> list[int]:
    """Return the ids of the threads; without /proc only that of the process."""
    return [int(task.name) for task in (PROC / f"{pid}/task").glob("*")] or [pid]


class Usage(NamedTuple):
    resident_bytes: int
    processor_s: float


def usage_of(pid: int) -> Usage:
    """Return the resident memory of a process, and its processor time."""
    if _has_proc():
        fields = _stat_of(pid)
        ticks = int(fields[11]) + int(fields[12])
        return Usage(_pages_of(str(pid)) * os.sysconf("SC_PAGE_SIZE"), ticks / os.sysconf("SC_CLK_TCK"))
    kibibytes, taken = _ps("-o", "rss=", "-o", "time=", "-p", str(pid)).split()
    days, _, clock = taken.rpartition("-")  # [days-][hours:]minutes:seconds[.hundredths]
    seconds = 0.0
    for part in clock.split(":"):
        seconds = 60 * seconds + float(part)
    return Usage(int(kibibytes) * 1024, 86_400 * int(days or 0) + seconds)


def resident_bytes() -> int | None:
    """Return the resident memory of this process; None if only another process could measure it."""
    try:
        return _pages_of("self") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def memory_limit_bytes(limits: Sequence[Path] = MEMORY_LIMITS) -> int | None:
    """Return the memory that this process may use: the limit of its container, or the machine's memory; None if neither
    is known."""
    known = []
    for file in limits:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            known.append(int(file.read_text()))
    with contextlib.suppress(OSError, ValueError):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(known, default=None)


def peak_resident_bytes(pid: int) -> int | None:
    """Return the peak resident memory of a process; None if the system does not report it."""
    if not _has_proc():
        return None
    found = re.search(r"VmHWM:\s+(\d+) kB", (PROC / f"{pid}/status").read_text())
    return int(found[1]) * 1024 if found is not None else None


def cores() -> list[int]:
    """Return the processors that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin(pid: int, to: Sequence[int]) -> None:
    """Bind a thread or a process to these processors, if the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(pid, to)


def _has_proc() -> bool:
    return (PROC / "self/stat").exists()


def return_free_memory() -> None:
    """Return freed memory to the system, where the C library keeps it (glibc). May take some milliseconds."""
    trim = _malloc_trim()
    if trim is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    import ctypes

    trim: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim


def _stat_of(pid: int) -> list[str]:
    # The name is in parentheses and may contain any character; the numeric fields follow it.
    return (PROC / f"{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()


def _pages_of(process: str) -> int:
    return int((PROC / process / "statm").read_text("ascii").split()[1])


def _ps(*options: str) -> str:
    """Return the output of `ps`; "" if it finds no process."""
    environment = {**os.environ, "LC_ALL": "C", "TZ": "UTC"}
    return subprocess.run(["ps", *options], capture_output=True, text=True, check=False, env=environment).stdout
