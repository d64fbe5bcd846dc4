"""A client's connection to the cluster for threads: the calls of calls.py, with I/O that blocks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple, Protocol, TypeVar

from portalmq import wire
from portalmq.network.connection import Address, ConnectionPool, Doubt, PendingAnswer, Watch
from portalmq.network.either import finish
from portalmq.network.forking import reset_in_children
from portalmq.network.http_answer import HttpAnswer
from portalmq.network.tls import NO_FILES, TlsFiles, context_of
from portalmq.transport import system_random
from portalmq.transport.calls import CALL_TIMEOUT_S, BegunCall, ClusterCalls
from portalmq.transport.cluster_metadata import DEFAULT_URL, Bootstrap, ClusterMetadata, bootstrap_addresses
from portalmq.transport.request import Request

__all__ = ["CALL_TIMEOUT_S", "DEFAULT_URL", "Bootstrap", "Request", "Transport", "bootstrap_addresses"]

T = TypeVar("T")


class Pool(Protocol):
    """The part of a connection pool that a transport needs."""

    def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, watch: Watch | None = None
    ) -> HttpAnswer: ...
    def begin(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> PendingAnswer: ...
    def rest(self) -> None: ...
    def hang_up(self) -> None: ...
    def close(self, answers_within_s: float = 0.0) -> None: ...


class ClusterOptions(NamedTuple):
    """What a transport is made from, to make others to the same cluster."""

    bootstrap: Bootstrap
    token: str | None
    timeout_s: float
    tls: TlsFiles
    allow_advertised: bool | None


class _BlockingIo:
    """The I/O of one transport. close() ends its pauses."""

    def __init__(self, pool: Pool, pause: Callable[[float], object] | None) -> None:
        self.pool = pool
        self.closing = threading.Event()
        self._pause = pause

    @property
    def is_closing(self) -> bool:
        return self.closing.is_set()

    async def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, doubt: Doubt | None
    ) -> HttpAnswer:
        return self.pool.exchange(address, method, head, body, timeout_s, _watch(doubt))

    async def begin(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> PendingAnswer:
        return self.pool.begin(address, method, head, body, timeout_s)

    async def read(self, pending: PendingAnswer, timeout_s: float, doubt: Doubt | None) -> HttpAnswer:
        return pending.read(timeout_s, _watch(doubt))

    async def look_up(self, do: Callable[[], T]) -> T:
        return do()

    async def pause(self, seconds: float) -> None:
        (self._pause or self.closing.wait)(seconds)


def _watch(doubt: Doubt | None) -> Watch | None:
    if doubt is None:
        return None
    gives_up: Callable[[], bool] = lambda: finish(doubt.gives_up())  # noqa: E731
    return Watch(doubt.first_s, doubt.every_s, gives_up)


class PendingCall(NamedTuple):
    """A call that was sent, whose answer is not read yet."""

    begun: BegunCall

    def answer(self, timeout_s: float | None = None) -> HttpAnswer:
        """Read the answer, once. Raises a PortalMQError; then the call may be repeated if its request is repeatable."""
        return finish(self.begun.answer(timeout_s))


class Transport:
    """A client's connection to the cluster. Thread-safe."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        token: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        tls: TlsFiles = NO_FILES,
        allow_advertised: bool | None = None,
        pool: Pool | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
        chance: Callable[[], float] = system_random.fraction,
        cluster_metadata: ClusterMetadata | None = None,
    ) -> None:
        """`timeout_s` bounds a call with all its retries. The environment may name files that `tls` does not.
        `allow_advertised=False`: over http send the token to named hosts only (PORTALMQ_ALLOW_ADVERTISED=0).
        `cluster_metadata`: that of another transport to the same cluster. The other last arguments are for tests."""
        self.options = ClusterOptions(bootstrap, token, timeout_s, tls, allow_advertised)
        self._pool: Pool = pool or ConnectionPool(tls=context_of(tls))
        self._io = _BlockingIo(self._pool, pause)
        self.calls = ClusterCalls(
            self._io,
            bootstrap,
            token=token,
            timeout_s=timeout_s,
            allow_advertised=allow_advertised,
            clock=clock,
            chance=chance,
            cluster_metadata=cluster_metadata,
        )
        self.reachability = self.calls.reachability
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        """Keep the known brokers in the child of a fork. The pool resets itself."""
        was_closed, self._io.closing = self._io.is_closing, threading.Event()
        if was_closed:
            self._io.closing.set()
        self.calls.cluster_metadata.reset_in_child()

    def another(self) -> Transport:
        """Return a transport to the same cluster, with connections of its own. What one learns both know: the leaders,
        and which brokers are silent."""
        return Transport(**self.options._asdict(), cluster_metadata=self.calls.cluster_metadata)

    @property
    def urls(self) -> list[str]:
        """The URLs at which this client first looked for brokers."""
        return self.calls.urls

    def call(
        self,
        request: Request,
        *,
        timeout_s: float | None = None,
        waits_for_last_try: bool = False,
        is_repeat: bool = False,
    ) -> HttpAnswer:
        """Try until there is an answer, an error that a repeat cannot help, or the time is over: ClusterCalls.call."""
        return finish(
            self.calls.call(request, timeout_s=timeout_s, waits_for_last_try=waits_for_last_try, is_repeat=is_repeat)
        )

    def pause(self, seconds: float) -> None:
        """Wait between two tries; close() ends the wait."""
        finish(self._io.pause(seconds))

    def get(
        self, path: str, kind: type[T], query: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> T:
        """GET `path` as a `kind`. None values are left out of the query. A try that began in time may end later."""
        return finish(self.calls.get(path, kind, query, timeout_s=timeout_s))

    def send_json(self, method: str, path: str, body: object, kind: type[T], *, timeout_s: float | None = None) -> T:
        """Make a call with a JSON body and a JSON answer. POST is not retried after an unknown outcome. A try that
        began in time may end later."""
        return finish(self.calls.send_json(method, path, body, kind, timeout_s=timeout_s))

    def send_once(self, path: str, body: object, kind: type[T]) -> T:
        """POST a JSON body with an Idempotency-Key, so that repeats have one effect."""
        return finish(self.calls.send_once(path, body, kind))

    def attempt(self, request: Request, deadline: float, *, is_first: bool = False) -> HttpAnswer:
        """Make one try at one broker. Raises a PortalMQError whose outcome says what is known."""
        return finish(self.calls.attempt(request, deadline, is_first=is_first))

    def begin(self, request: Request) -> PendingCall | None:
        """Send a request whose answer is read later, on a connection of its own. Return None if it was not sent; the
        next call finds out why."""
        begun = finish(self.calls.begin(request))
        return None if begun is None else PendingCall(begun)

    def metadata(self, topics: Iterable[str] | None = None, *, deadline: float | None = None) -> wire.Metadata:
        """Return the brokers and leaders as some broker knows them now. Topics that do not exist are left out.

        With `deadline` (on this transport's clock) it is tried once, else like any call.
        """
        return finish(self.calls.metadata(topics, deadline=deadline))

    def leader_of(self, place: tuple[str, int]) -> Address | None:
        """Return the leader of a (topic, partition), if it is known and answers."""
        return self.calls.leader_of(place)

    def leader_reported(self, place: tuple[str, int], url: object) -> bool:
        """Record the leader that a broker reported. Return False if it is not usable: then it is looked up before the
        next try."""
        return self.calls.leader_reported(place, url)

    def rest(self) -> None:
        """Close idle connections; the next call opens one."""
        self._pool.rest()

    def hang_up(self) -> None:
        """Refuse new calls; brokers answer waiting ones as soon as they can."""
        self._io.closing.set()
        self._pool.hang_up()

    def close(self, answers_within_s: float = 0.0) -> None:
        """End waits and retries of other threads, and close the connections. Calls that wait for an answer may have it
        within `answers_within_s`."""
        self._io.closing.set()
        self._pool.close(answers_within_s)
