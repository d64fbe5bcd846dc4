"""SIGSTOP, and the wait for its effect: on a busy machine the threads of a process run on for a while after `kill`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

WITHIN_S = 60.0


def stop(pid: int) -> None:
    """Stop a process, and return when none of its threads runs."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + WITHIN_S
    while not _stands_still(pid):
        assert time.monotonic() < deadline, f"process {pid} is not stopped within {WITHIN_S:g} s"
        time.sleep(0.001)


def _stands_still(pid: int) -> bool:
    """Tell whether each thread is stopped, or the process has ended. proc(5): the state follows the name."""
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):  # a thread ended meanwhile
        return not Path(f"/proc/{pid}").exists()
    return all(stat.rpartition(")")[2].split()[0] in "TtZX" for stat in stats)
