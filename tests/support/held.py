"""Calls on native threads that a test holds back."""

from __future__ import annotations

from _queue import SimpleQueue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def held(monkeypatch: pytest.MonkeyPatch, owner: object, method: str) -> Iterator[Callable[[], None]]:
    """Hold calls of `method` on a native thread until the yielded function is called or the block ends."""
    gate: SimpleQueue[None] = SimpleQueue()
    original = getattr(owner, method)

    def waiting(*args, **more):
        gate.get()
        gate.put(None)
        return original(*args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(owner, method, waiting)
        try:
            yield lambda: gate.put(None)
        finally:
            gate.put(None)
