"""Long work on the event loop, in pieces.

gevent.sleep(0) is not enough for that: it lets greenlets run that are ready, and gevent looks at the clock, and then at
sockets and timers, after ten such turns only. So long work gives way by a timer that is over at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from time import perf_counter
from typing import TypeVar

import gevent

T = TypeVar("T")

# Not zero, which would be gevent.sleep(0). It is over at the next look at the sockets.
_MOMENT_S = 1e-6
# So long may a turn be, where that is measured.
TURN_S = 0.005


def give_way() -> None:
    """Serve everybody else who is ready, those at the sockets too, then go on."""
    gevent.sleep(_MOMENT_S)


class TimeSlice:
    """The turn of a greenlet, by the clock: for work whose parts do not cost alike."""

    def __init__(self) -> None:
        self._ends = perf_counter() + TURN_S

    def pause_if_over(self) -> bool:
        """Whether others had theirs."""
        if perf_counter() < self._ends:
            return False
        give_way()
        self._ends = perf_counter() + TURN_S
        return True

    def paced(self, items: Iterable[T]) -> Iterator[T]:
        """The items; a pause comes before an item when the turn is over. Many loops may share one turn."""
        for item in items:
            self.pause_if_over()
            yield item


def in_short_turns(items: Iterable[T]) -> Iterator[T]:
    """The items; others have their turn before the next one when these have taken a while."""
    return TimeSlice().paced(items)


def in_turns(items: Iterable[T], at_a_time: int) -> Iterator[T]:
    """The items; others have their turn after each `at_a_time`. For many that cost little, and all alike."""
    return chain.from_iterable(_parts(iter(items), at_a_time))


def _parts(items: Iterator[T], at_a_time: int) -> Iterator[Iterator[T]]:
    """Each part is to be taken whole before the next one is asked for. No item costs a step of a generator."""
    is_later = False
    for first in items:
        if is_later:
            give_way()
        yield chain((first,), islice(items, at_a_time - 1))
        is_later = True
