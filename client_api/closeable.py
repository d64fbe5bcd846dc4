"""A base class for objects that `with` and `async with` close."""

from __future__ import annotations

import atexit
import weakref
from abc import ABC, abstractmethod
from typing import Self


class Closeable(ABC):
    """`with X(...) as x:` gives x, and calls x.close() at the end, also after an error."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        self.close()


class AsyncCloseable(ABC):
    """`async with X(...) as x:` gives x, and awaits x.close() at the end, also after an error."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *fault: object) -> None:
        await self.close()


def close_at_exit(thing: Closeable) -> None:
    """Close it when the program ends, so that one that forgets close() loses nothing."""
    reference = weakref.ref(thing)

    def close() -> None:
        thing = reference()
        if thing is not None:
            thing.close()

    atexit.register(close)
    weakref.finalize(thing, atexit.unregister, close).atexit = False
