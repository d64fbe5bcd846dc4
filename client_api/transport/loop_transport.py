"""A client's connection to the cluster for an asyncio event loop: the calls of calls.py, with I/O that suspends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from portalmq.network.connection import Address, Doubt
from portalmq.network.forking import reset_in_children
from portalmq.network.http_answer import HttpAnswer
from portalmq.network.loop_connection import LoopAnswer, LoopPool
from portalmq.network.tls import NO_FILES, TlsFiles, context_of
from portalmq.transport import system_random
from portalmq.transport.calls import CALL_TIMEOUT_S, ClusterCalls
from portalmq.transport.cluster_metadata import Bootstrap, ClusterMetadata

T = TypeVar("T")


class LoopNetwork(Protocol):
    """The part of a pool that a transport needs."""

    async def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, doubt: Doubt | None = None
    ) -> HttpAnswer: ...
    async def begin(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> LoopAnswer: ...
    async def read(self, pending: LoopAnswer, timeout_s: float, doubt: Doubt | None = None) -> HttpAnswer: ...
    def rest(self) -> None: ...
    def hang_up(self) -> None: ...
    async def close(self, answers_within_s: float = 0.0) -> None: ...


class _LoopIo:
    def __init__(self, pool: LoopNetwork) -> None:
        self.closing = asyncio.Event()
        self.exchange, self.begin, self.read = pool.exchange, pool.begin, pool.read

    @property
    def is_closing(self) -> bool:
        return self.closing.is_set()

    def reset(self) -> None:
        was_closed, self.closing = self.is_closing, asyncio.Event()
        if was_closed:
            self.closing.set()

    async def look_up(self, do: Callable[[], T]) -> T:
        return await asyncio.to_thread(do)

    async def pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.closing.wait(), seconds)


class LoopTransport(ClusterCalls):
    """For one event loop. Its calls are those of ClusterCalls."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        token: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        tls: TlsFiles = NO_FILES,
        allow_advertised: bool | None = None,
        pool: LoopNetwork | None = None,
        context: ssl.SSLContext | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = system_random.fraction,
        cluster_metadata: ClusterMetadata | None = None,
    ) -> None:
        """The arguments are those of Transport. `context`: of another transport, in place of one from the files."""
        self._context = context or context_of(tls)
        self._pool = pool or LoopPool(tls=self._context)
        self._options = (bootstrap, token, timeout_s, tls, allow_advertised)
        self._loop_io = _LoopIo(self._pool)
        super().__init__(
            self._loop_io,
            bootstrap,
            token=token,
            timeout_s=timeout_s,
            allow_advertised=allow_advertised,
            clock=clock,
            chance=chance,
            cluster_metadata=cluster_metadata,
        )
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        self._loop_io.reset()
        self.cluster_metadata.reset_in_child()

    def another(self) -> LoopTransport:
        """Return a transport to the same cluster, with connections of its own, as Transport.another."""
        bootstrap, token, timeout_s, tls, allowed = self._options
        return LoopTransport(
            bootstrap,
            token=token,
            timeout_s=timeout_s,
            tls=tls,
            allow_advertised=allowed,
            context=self._context,
            cluster_metadata=self.cluster_metadata,
        )

    async def pause(self, seconds: float) -> None:
        """Wait between two tries; close() ends the wait."""
        await self._loop_io.pause(seconds)

    def rest(self) -> None:
        """Close idle connections; the next call opens one."""
        self._pool.rest()

    def hang_up(self) -> None:
        """Refuse new calls; brokers answer waiting ones as soon as they can."""
        self._loop_io.closing.set()
        self._pool.hang_up()

    async def close(self, answers_within_s: float = 0.0) -> None:
        """End pauses and close the connections. Calls that wait for an answer may have it within `answers_within_s`."""
        self._loop_io.closing.set()
        await self._pool.close(answers_within_s)
