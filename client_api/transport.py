"""How a client reaches the cluster: where to go, when to try again, and what a failure means.

A call goes to the leader of its partition when that is known (from `/v1/metadata`), else to any broker, which forwards
it. A broker that cannot be reached, or says that another one leads, makes the next try look the leader up again.

A repeat is safe when the request is repeatable (it names what it wants done, so that twice is once: reads, PUT, DELETE,
acks, a batch with a producer's stamp) or when the failure says `not_applied`. Nothing else is repeated, and once one
try of a call ended unknown, the whole call did, whatever the later tries say.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar
from urllib.parse import urlencode

import msgspec

from portalmq import wire
from portalmq.connection import Address, Answer, ConnectionPool, NoAnswer, NotSent, parse_address
from portalmq.errors import (
    ERRORS_BY_CODE,
    NotLeader,
    PortalMQError,
    Unavailable,
    error_from_problem,
)

DEFAULT_URL = "http://localhost:5000"
REQUEST_TIMEOUT_S = 15.0
CALL_TIMEOUT_S = 120.0
RETRY_AFTER_S_MAX = 30.0
TIMEOUT_S_MIN = 0.01
# How long a broker that refused a connection is left out while others can be asked.
SHUN_S = 1.0

Bootstrap = str | Iterable[str] | None
T = TypeVar("T")


def bootstrap_addresses(bootstrap: Bootstrap) -> list[Address]:
    """The brokers to start from: a URL, several (a list, or commas between them), or PORTALMQ_URL when None."""
    if bootstrap is None:
        bootstrap = os.environ.get("PORTALMQ_URL") or DEFAULT_URL
    texts = bootstrap.split(",") if isinstance(bootstrap, str) else list(bootstrap)
    addresses = [parse_address(text) for text in texts if text.strip()]
    if not addresses:
        raise ValueError(f"no broker is named; write for instance {DEFAULT_URL}")
    return list(dict.fromkeys(addresses))


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `leader_of` is the (topic, partition) whose leader serves it best; `wait_s` is how long the broker
    itself may wait before it answers (a long poll)."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    repeatable: bool = False
    leader_of: tuple[str, int] | None = None
    wait_s: float = 0.0


class Exchanger(Protocol):
    """What a transport needs from a pool of connections."""

    def exchange(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> Answer: ...
    def rest(self) -> None: ...
    def close(self) -> None: ...


class Backoff:
    """Exponential pauses with jitter: 20 ms, doubled up to 1 s, each cut by up to a half (so that clients that failed
    together do not come back together). A Retry-After is honoured up to RETRY_AFTER_S_MAX."""

    FIRST_S = 0.02
    MAX_S = 1.0

    def __init__(self, chance: Callable[[], float] = random.random) -> None:
        self._chance = chance
        self._full_s = self.FIRST_S

    def next_s(self, retry_after_s: float | None = None) -> float:
        pause = self._full_s * (0.5 + 0.5 * self._chance())
        self._full_s = min(self._full_s * 2, self.MAX_S)
        return max(pause, min(retry_after_s or 0.0, RETRY_AFTER_S_MAX))


class Transport:
    """The cluster as one client sees it. Thread-safe."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        token: str | None = None,
        timeout_s: float = CALL_TIMEOUT_S,
        pool: Exchanger | None = None,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], object] | None = None,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`timeout_s` bounds a call with all its retries. The last four are for tests."""
        self.bootstrap = bootstrap_addresses(bootstrap)
        self._scheme = self.bootstrap[0].scheme
        self._timeout_s = timeout_s
        self._pool: Exchanger = pool or ConnectionPool()
        self._clock = clock
        self._closing = threading.Event()
        self._wait = pause or self._closing.wait
        self._chance = chance
        self._common_headers = _common_headers(token)
        self._brokers = list(self.bootstrap)
        self._leaders: dict[tuple[str, int], Address] = {}
        self._outdated: set[str] = set()
        self._shunned: dict[Address, float] = {}

    # --- one call, tried until it is settled -------------------------------------------------------------------------

    def call(self, request: Request, *, timeout_s: float | None = None) -> Answer:
        """Try until there is an answer, a failure that a repeat does not mend, or the time is over.

        Raises the PortalMQError of the last try.
        """
        deadline = self._clock() + (self._timeout_s if timeout_s is None else timeout_s)
        backoff = Backoff(self._chance)
        was_unknown = False
        while True:
            try:
                return self.attempt(request, deadline)
            except PortalMQError as error:
                was_unknown = was_unknown or error.outcome == "unknown"
                wait_s = backoff.next_s(error.retry_after_s)
                if may_repeat(error, request.repeatable) and self._clock() + wait_s < deadline:
                    self.pause(wait_s)
                    if self._clock() < deadline and not self._closing.is_set():
                        continue
                if was_unknown and error.outcome == "not_applied" and request.method != "GET":
                    error.outcome = "unknown"
                raise

    def pause(self, seconds: float) -> None:
        """Wait between two tries; close() ends it."""
        self._wait(seconds)

    def get(self, path: str, kind: type[T], query: Mapping[str, object] | None = None) -> T:
        """GET `path` as a `kind`. None values are left out of the query."""
        answer = self.call(Request("GET", with_query(path, query), repeatable=True))
        return decode_answer(answer, kind)

    def send_json(self, method: str, path: str, body: object, kind: type[T]) -> T:
        """A call with a JSON body and a JSON answer. POST is not repeated after an unknown outcome."""
        request = Request(
            method,
            path,
            msgspec.json.encode(body),
            (("Content-Type", wire.JSON),),
            repeatable=method in {"PUT", "DELETE", "PATCH"},
        )
        return decode_answer(self.call(request), kind)

    # --- one try -----------------------------------------------------------------------------------------------------

    def attempt(self, request: Request, deadline: float) -> Answer:
        """One try at one broker. Raises a PortalMQError whose outcome tells what is known.

        A kept connection that turns out to be closed is no try: it is replaced at once, when that is safe.
        """
        if self._clock() >= deadline:
            raise Unavailable("the time for this call is over", outcome="not_applied")
        topic = None if request.leader_of is None else request.leader_of[0]
        if topic is not None and topic in self._outdated:
            self._look_up_leaders(topic, deadline)
        address, is_leader = self._where(request.leader_of)
        head = self._head(address, request, forward=not is_leader)
        try:
            answer, was_repeated = self._exchange(address, head, request, deadline)
        except (NotSent, NoAnswer) as fault:
            self._shun(address, topic)
            raise self._unreachable(address, fault) from fault
        if answer.status < 300:
            return answer
        error = error_of_answer(answer)
        if topic is not None and (isinstance(error, NotLeader) or error.status == 503):
            self._outdated.add(topic)
        if was_repeated and error.outcome == "not_applied" and request.method != "GET":
            # That holds for the second request. What became of the first one nobody knows.
            error.outcome = "unknown"
        raise error

    def _exchange(self, address: Address, head: bytes, request: Request, deadline: float) -> tuple[Answer, bool]:
        """The answer, and whether it took a second connection to get it."""
        stale: NoAnswer | None = None
        while True:
            timeout_s = min(REQUEST_TIMEOUT_S + request.wait_s, max(deadline - self._clock(), TIMEOUT_S_MIN))
            try:
                answer = self._pool.exchange(address, request.method, head, request.body, timeout_s)
                return answer, stale is not None
            except NoAnswer as fault:
                if not fault.stale or stale is not None or not request.repeatable or self._closing.is_set():
                    raise
                stale = fault
            except NotSent:
                if stale is not None and request.method != "GET":
                    raise stale from None
                raise

    def _head(self, address: Address, request: Request, *, forward: bool) -> bytes:
        lines = [f"{request.method} {address.prefix}{request.path} HTTP/1.1\r\nHost: {address.netloc}\r\n"]
        if request.body or request.method not in {"GET", "DELETE"}:
            lines.append(f"Content-Length: {len(request.body)}\r\n")
        for name, value in request.headers:
            if "\r" in value or "\n" in value:
                raise ValueError(f"the header {name} must be one line")
            lines.append(f"{name}: {value}\r\n")
        if not forward:
            lines.append(f"{wire.HEADER_NO_FORWARD}: 1\r\n")
        lines.append(self._common_headers)
        return "".join(lines).encode("latin-1")

    def _unreachable(self, address: Address, fault: NotSent | NoAnswer) -> Unavailable:
        if isinstance(fault, NoAnswer):
            return Unavailable(f"the broker at {address.url} gave no answer: {fault}", outcome="unknown")
        return Unavailable(
            f"no PortalMQ broker could be reached at {address.url}: {fault}",
            outcome="not_applied",
            looked_at=[known.url for known in self._brokers],
        )

    # --- who leads ---------------------------------------------------------------------------------------------------

    def metadata(self, topics: Iterable[str] | None = None, *, deadline: float | None = None) -> wire.Metadata:
        """Brokers and leaders, as some broker knows them now. Topics that do not exist are left out.

        With `deadline` (on this transport's clock) it is tried once, else like any call.
        """
        query = None if topics is None else {"topics": ",".join(topics)}
        request = Request("GET", with_query("/v1/metadata", query), repeatable=True)
        answer = self.call(request) if deadline is None else self.attempt(request, deadline)
        metadata = decode_answer(answer, wire.Metadata)
        self._learn(metadata)
        return metadata

    def _learn(self, metadata: wire.Metadata) -> None:
        advertised = [self._member(broker.url) for broker in metadata.brokers if broker.live]
        self._brokers = list(dict.fromkeys([*self.bootstrap, *(one for one in advertised if one is not None)]))
        for topic in metadata.topics:
            for partition in topic.partitions:
                leader = None if partition.leader_url is None else self._member(partition.leader_url)
                if leader is None:
                    self._leaders.pop((topic.name, partition.partition), None)
                else:
                    self._leaders[topic.name, partition.partition] = leader

    def _member(self, url: str) -> Address | None:
        """The address a broker advertises; None when a token would travel less safely to it than to the bootstrap."""
        try:
            address = parse_address(url)
        except ValueError:
            return None
        return address if address.scheme == self._scheme else None

    def _look_up_leaders(self, topic: str, deadline: float) -> None:
        self._outdated.discard(topic)
        try:
            self.metadata([topic], deadline=deadline)
        except PortalMQError:
            # The call itself goes on to any broker, which forwards it.
            self._outdated.add(topic)

    def _where(self, leader_of: tuple[str, int] | None) -> tuple[Address, bool]:
        now = self._clock()
        leader = None if leader_of is None else self._leaders.get(leader_of)
        if leader is not None and self._shunned.get(leader, 0.0) <= now:
            return leader, True
        for address in self._brokers:
            if self._shunned.get(address, 0.0) <= now:
                return address, False
        return min(self._brokers, key=lambda address: self._shunned.get(address, 0.0)), False

    def _shun(self, address: Address, topic: str | None) -> None:
        self._shunned[address] = self._clock() + SHUN_S
        if topic is not None:
            self._outdated.add(topic)

    def rest(self) -> None:
        """Close idle connections; the next call opens one."""
        self._pool.rest()

    def close(self) -> None:
        """End waits and retries of other threads, close the connections."""
        self._closing.set()
        self._pool.close()


def _common_headers(token: str | None) -> str:
    lines = "User-Agent: portalmq-python\r\n"
    if token is not None:
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError("a token is one line of printable ASCII characters")
        lines += f"Authorization: Bearer {token}\r\n"
    return lines + "\r\n"


def may_repeat(error: PortalMQError, repeatable: bool) -> bool:
    """True when trying again may help and cannot do the same thing twice."""
    return error.retryable and (repeatable or error.outcome == "not_applied")


def with_query(path: str, query: Mapping[str, object] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path


def decode_answer(answer: Answer, kind: type[T]) -> T:
    """The body of a 2xx answer as a `kind`, from MessagePack or JSON as its Content-Type says."""
    packed = answer.headers.get("Content-Type", "").startswith(wire.BATCH_MSGPACK)
    try:
        if packed:
            return msgspec.msgpack.decode(answer.body, type=kind)
        return msgspec.json.decode(answer.body or b"null", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise Unavailable(f"the answer is none of PortalMQ's: {fault}", retryable=False, outcome="unknown") from fault


def error_of_answer(answer: Answer) -> PortalMQError:
    """The error that a status of 300 or more stands for, from its problem document when it has one."""
    retry_after_s = _seconds(answer.headers.get("Retry-After"))
    if answer.headers.get("Content-Type", "").startswith(wire.PROBLEM):
        try:
            problem: dict[str, Any] = msgspec.json.decode(answer.body, type=dict[str, Any])
        except (msgspec.DecodeError, UnicodeDecodeError):
            problem = {}
        if "code" in problem:
            return error_from_problem(problem, retry_after_s=retry_after_s)
    return _error_of_stranger(answer, retry_after_s)


def _error_of_stranger(answer: Answer, retry_after_s: float | None) -> PortalMQError:
    """Something else than a broker answered, a proxy perhaps: only the status speaks."""
    excerpt = answer.body[:200].decode("utf-8", "replace").strip()
    detail = f"the answer was HTTP {answer.status}, and not in PortalMQ's form: {excerpt or 'an empty body'}"
    if answer.status < 400:
        location = answer.headers.get("Location", "elsewhere")
        return Unavailable(
            f"the broker redirects to {location}; redirects are not followed, name that address yourself",
            retryable=False,
        )
    if answer.status >= 500:
        return Unavailable(
            detail, retryable=answer.status in {502, 503, 504}, outcome="unknown", retry_after_s=retry_after_s
        )
    by_status = {cls.status: cls for cls in reversed(list(ERRORS_BY_CODE.values()))}
    # 404 has several classes: the general one says no more than is known.
    cls = ERRORS_BY_CODE["not_found"] if answer.status == 404 else by_status.get(answer.status, PortalMQError)
    return cls(detail, retryable=answer.status in {408, 429}, outcome="not_applied", retry_after_s=retry_after_s)


def _seconds(text: str | None) -> float | None:
    try:
        return max(0.0, float(text)) if text else None
    except ValueError:
        return None
