"""A budget for the files that the logs and state files of a broker hold open.

A partition at work holds 5 to 9 descriptors for its log and 3 for its state. Beyond the budget the least recently used
ones close theirs before another opens its own; they reopen them when they are used. Connections and the rest of the
process have what the budget leaves.
"""

from __future__ import annotations

import resource
from itertools import count
from typing import Protocol

from portalmq.broker.storage.fair_lock import FairLock

# One of SHARE parts of the process's descriptors is for logs and state files.
SHARE = 3
# When files must be closed, this part of the budget is freed, and not more than so many descriptors: to close a log
# syncs it, and the event loop may wait for that.
SPARE = 16
SPARE_MAX = 32
ENDLESS = 1_000_000

# Numbers all uses in order, for `last_used`.
use_counter = count(1)


class Holder(Protocol):
    """A log or a state file. `last_used` rises with each use."""

    last_used: int

    @property
    def descriptors(self) -> int:
        """The approximate number of descriptors it holds while it is open."""
        ...

    def try_park(self) -> bool:
        """Close the files until the next use, unless they are in use now; return whether they are closed. Never
        waits."""
        ...


def descriptor_limit() -> int:
    """Return how many descriptors this process may have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return ENDLESS if soft == resource.RLIM_INFINITY else soft


class OpenFiles:
    """The open files of one broker. Any thread may call it, also while it holds the lock of the holder that it
    opens: nothing here waits for another holder's lock.

    `_open` has each open holder's descriptors as they were at its last opening, so rather too many: a log may have
    closed readers of sealed segments since. These are counted again when there is something to close. More is closed
    than must be, so that a thousand openings look through all holders a few times, and not a thousand times.
    """

    def __init__(self, budget: int | None = None) -> None:
        self.budget = descriptor_limit() // SHARE if budget is None else budget
        self._open: dict[Holder, int] = {}
        # The sum of all of them: to add them up again at each of ten thousand openings takes seconds.
        self._total = 0
        self._count = FairLock()

    def opening(self, holder: Holder) -> None:
        """Take that `holder` opens its files, did, or opens more of them: others close theirs for it. If all are in use
        there are too many for a while."""
        self._note(holder, holder.descriptors)
        if self._total <= self.budget:
            return
        others = [other for other in tuple(self._open) if other is not holder]
        excess = holder.descriptors + sum([other.descriptors for other in others]) - self.budget
        if excess <= 0:
            return
        excess += min(self.budget // SPARE, SPARE_MAX)
        for other in sorted(others, key=lambda other: other.last_used):
            if other.try_park():
                excess -= other.descriptors
                if excess <= 0:
                    return

    def closed(self, holder: Holder) -> None:
        self._note(holder, 0)

    def _note(self, holder: Holder, descriptors: int) -> None:
        with self._count:
            self._total += descriptors - self._open.pop(holder, 0)
            if descriptors:
                self._open[holder] = descriptors
