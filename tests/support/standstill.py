"""Run a command on a simulated overloaded machine, to find tests that depend on how fast something happens.

    python -m support.standstill -- python -m pytest cluster/test_locks.py

One of the command's processes at a time (the command, a broker, ZooKeeper, a JVM), chosen at random, is stopped for a
moment, as on an overloaded machine. A test that fails then waits too short a time, or it checks a guarantee about time:
then the pauses must be shorter than that guarantee. (A process that a test stops during such a pause continues too
soon.) Exits with the command's own status.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import subprocess
import sys
from collections.abc import Sequence

import psutil

# A process that a test has stopped itself stays stopped until that test continues it.
_NOT_OURS = {psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP, psutil.STATUS_ZOMBIE}
SHORTEST_S, LONGEST_S, BETWEEN_S = 0.2, 1.0, 0.5


def run(command: Sequence[str], *, shortest_s: float, longest_s: float, between_s: float, chance: random.Random) -> int:
    """Pauses are distributed evenly from the shortest to the longest; the time between two is `between_s` on
    average."""
    process = subprocess.Popen(command)
    while not _has_ended(process, chance.expovariate(1 / between_s)):
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(process.pid)
            stopped = chance.choice([root, *root.children(recursive=True)])
            if stopped.status() in _NOT_OURS:
                continue
            stopped.suspend()
            try:
                _has_ended(process, chance.uniform(shortest_s, longest_s))
            finally:
                stopped.resume()
    return process.returncode


def _has_ended(process: subprocess.Popen[bytes], within_s: float) -> bool:
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    return process.returncode is not None


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shortest", type=float, default=SHORTEST_S, help="seconds; %(default)s")
    parser.add_argument("--longest", type=float, default=LONGEST_S, help="seconds; %(default)s")
    parser.add_argument("--between", type=float, default=BETWEEN_S, help="seconds between two, on average; %(default)s")
    parser.add_argument("--seed", type=int, help="of the draws; what runs meanwhile is another each time")
    parser.add_argument("command", nargs="+")
    given = parser.parse_args(arguments)
    return run(
        given.command,
        shortest_s=given.shortest,
        longest_s=given.longest,
        between_s=given.between,
        chance=random.Random(given.seed),
    )


if __name__ == "__main__":
    sys.exit(main())
