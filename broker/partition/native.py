"""Blocking work on native threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gevent import get_hub
from gevent.threadpool import ThreadPool

from portalmq.compression import content_size, values_of

P = ParamSpec("P")
T = TypeVar("T")

# Values of this size are decompressed in a quarter of a millisecond: a change to another thread and back takes as long.
LARGE_VALUES_BYTES = 256 * 1024


def attempt(pool: ThreadPool, work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T | Exception:
    """Return the result of `work` on a native thread, or its error. gevent would print an error that leaves the thread
    as an exception."""
    found: T | Exception = pool.apply(_caught, (work, *arguments), more)
    return found


def decompressed(data: bytes, count: int, bytes_max: int | None = None) -> list[bytes]:
    """Call compression.values_of, on a native thread where it takes long."""
    if content_size(data) < LARGE_VALUES_BYTES:
        return values_of(data, count, bytes_max)
    found = attempt(get_hub().threadpool, values_of, data, count, bytes_max)
    if isinstance(found, Exception):
        raise found
    return found


def _caught(work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T | Exception:
    try:
        return work(*arguments, **more)
    except Exception as error:  # noqa: BLE001
        return error
