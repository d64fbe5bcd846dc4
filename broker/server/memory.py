"""How much memory this process takes, and how much it may: what an alarm about memory is made of."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_STATM = Path("/proc/self/statm")
# In a container its limit (cgroup v2 and v1).
_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def resident_bytes(statm: Path = _STATM) -> int | None:
    """Of this process, in main memory; None where the system does not tell (it is no Linux)."""
    try:
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return None


def limit_bytes(limits: tuple[Path, ...] = _LIMITS) -> int | None:
    """What the process may take: its container's limit, or all that the machine has; None where neither is told."""
    known = []
    for file in limits:
        with suppress(OSError, ValueError):  # not there, or "max"
            known.append(int(file.read_text()))
    with suppress(OSError, ValueError):
        known.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(known, default=None)
