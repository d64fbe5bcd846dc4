"""Blocking work on native threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from gevent.threadpool import ThreadPool

P = ParamSpec("P")
T = TypeVar("T")


def attempt(pool: ThreadPool, work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T | Exception:
    """Return the result of `work` on a native thread, or its error. gevent would print an error that leaves the thread
    as an exception."""
    found: T | Exception = pool.apply(_caught, (work, *arguments), more)
    return found


def _caught(work: Callable[P, T], *arguments: P.args, **more: P.kwargs) -> T | Exception:
    try:
        return work(*arguments, **more)
    except Exception as error:  # noqa: BLE001
        return error
