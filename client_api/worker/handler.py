"""Handler: a function, the messages that it handles, and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from portalmq.worker.decoding import Arguments

# How many messages a process handles at a time, for each handler that does not say so.
CONCURRENCY = 8
CONCURRENCY_MAX = 1_000


@dataclass(frozen=True, slots=True)
class Handler:
    """A function, and the messages that it handles. `settings` are those of the group that the program fixes;
    `concurrency` is None where the worker decides."""

    name: str
    function: Callable[..., Any]
    arguments: Arguments
    is_async: bool
    topics: tuple[str, ...]
    group: str
    concurrency: int | None
    timeout_s: float | None
    visibility_timeout_s: float
    settings: dict[str, object]
