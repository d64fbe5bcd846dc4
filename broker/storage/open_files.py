"""How many files the logs and state files of a broker may hold open together.

A partition at work holds 5 to 9 descriptors for its log and 3 for its state. Beyond the budget the least recently used
close theirs before another opens its own; they open them again when they are used. Connections and the rest of the
process have what the budget leaves.
"""

from __future__ import annotations

import resource
from itertools import count
from typing import Protocol

# Of the descriptors that a process may have, this part is for logs and state files.
SHARE = 3
ENDLESS = 1_000_000

# The order of all uses, for `last_used`.
use_counter = count(1)


class Holder(Protocol):
    """A log or a state file. `last_used` rises with each use."""

    last_used: int

    @property
    def descriptors(self) -> int:
        """How many it holds, about, while it is open."""
        ...

    def try_park(self) -> bool:
        """Close the files until the next use, unless they are in use now; whether they are closed. Never waits."""
        ...


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENDLESS if soft == resource.RLIM_INFINITY else soft


class OpenFiles:
    """Those of one broker. Any thread may call it, also one that has its turn in the holder that it opens: nothing here
    waits for another holder's turn."""

    def __init__(self, budget: int | None = None) -> None:
        self.budget = descriptor_limit() // SHARE if budget is None else budget
        self._open: set[Holder] = set()

    def opening(self, holder: Holder) -> None:
        """`holder` opens its files, or just did: others make way for it. If all are in use there are too many for a
        while."""
        self._open.add(holder)
        others = [other for other in tuple(self._open) if other is not holder]
        excess = holder.descriptors + sum([other.descriptors for other in others]) - self.budget
        if excess <= 0:
            return
        for other in sorted(others, key=lambda other: other.last_used):
            if other.try_park():
                excess -= other.descriptors
                if excess <= 0:
                    return

    def closed(self, holder: Holder) -> None:
        self._open.discard(holder)
