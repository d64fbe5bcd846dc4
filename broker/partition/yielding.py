"""Long work on the event loop, in pieces.

gevent.sleep(0) is not enough for that: it runs other ready greenlets, but gevent looks at the clock, and then at
sockets and timers, only after ten such calls. So long work yields by a timer that expires at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice
from time import perf_counter
from typing import TypeVar

import gevent

T = TypeVar("T")

# Not zero, which would be gevent.sleep(0). It expires at the next look at the sockets.
_MOMENT_S = 1e-6
# How long a measured time slice may be.
TURN_S = 0.005


def give_way() -> None:
    """Let all other ready greenlets run, those at the sockets too, then continue."""
    gevent.sleep(_MOMENT_S)


class TimeSlice:
    """The time slice of a greenlet, by the clock: for work whose parts differ in cost."""

    def __init__(self) -> None:
        self._ends = perf_counter() + TURN_S

    def pause_if_over(self) -> bool:
        """Let others run if the time slice is over. Return whether it was."""
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
    """Yield the items; let others run before the next one when these have taken a while."""
    if isinstance(items, list | tuple) and len(items) < 2:
        return iter(items)
    return TimeSlice().paced(items)


def in_turns(items: Iterable[T], at_a_time: int) -> Iterator[T]:
    """Yield the items; let others run after each `at_a_time`. For many cheap items of the same cost."""
    return chain.from_iterable(_parts(iter(items), at_a_time))


def _parts(items: Iterator[T], at_a_time: int) -> Iterator[Iterator[T]]:
    """Yield the items in parts. Each part must be taken whole before the next. An item costs no step of a generator."""
    is_later = False
    for first in items:
        if is_later:
            give_way()
        yield chain((first,), islice(items, at_a_time - 1))
        is_later = True
