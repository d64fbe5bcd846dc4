"""Replaces what the shell takes from the machine: clocks, randomness, threads, addresses. For a process of its own.

Imported before anything of portalmq, once. `use(world)` then connects the replacements with a run.
"""

from __future__ import annotations

from gevent import monkey

monkey.patch_all(thread=True, select=False, socket=False, signal=False, subprocess=False, os=False)

import os  # noqa: E402
import random  # noqa: E402
import time  # noqa: E402
import uuid  # noqa: E402
from collections.abc import Callable  # noqa: E402
from itertools import count  # noqa: E402
from typing import Any  # noqa: E402

import gevent  # noqa: E402
import gevent.event  # noqa: E402

real_perf_counter = time.perf_counter
process_time = time.process_time

_now_ns: Callable[[], int] = time.monotonic_ns
_wall_ns: Callable[[], int] = time.time_ns
_bytes: Callable[[int], bytes] = os.urandom


def use(now_ns: Callable[[], int], wall_ns: Callable[[], int], random_bytes: Callable[[int], bytes]) -> None:
    global _now_ns, _wall_ns, _bytes
    _now_ns, _wall_ns, _bytes = now_ns, wall_ns, random_bytes


time.monotonic = lambda: _now_ns() / 1e9
time.monotonic_ns = lambda: _now_ns()
time.perf_counter = lambda: _now_ns() / 1e9
time.time = lambda: _wall_ns() / 1e9
time.time_ns = lambda: _wall_ns()
time.clock_gettime = lambda clock: _now_ns() / 1e9
time.clock_gettime_ns = lambda clock: _now_ns()
os.urandom = lambda size: _bytes(size)
random._urandom = lambda size: _bytes(size)  # type: ignore[attr-defined]
uuid.uuid4 = lambda: uuid.UUID(bytes=_bytes(16), version=4)

_numbers = count()


def _numbered(kind: Any) -> Any:
    """Return the class with a hash that is not an address: sets of its objects have one order in all processes."""

    class Numbered(kind):  # type: ignore[misc]
        def __new__(cls, *values: Any, **named: Any) -> Any:
            made = super().__new__(cls, *values, **named)
            made.number = next(_numbers)
            return made

        def __hash__(self) -> int:
            return self.number  # type: ignore[no-any-return]

    Numbered.__name__ = kind.__name__
    return Numbered


gevent.event.Event = _numbered(gevent.event.Event)
