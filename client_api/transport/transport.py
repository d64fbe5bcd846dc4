"""A client's calls to the cluster: which broker to ask, when to retry, and the meaning of a failure.

A call goes to the leader of its partition if that is known (from `/v1/metadata`, or a broker's not_leader answer), else
to any broker, which forwards it. A broker that is unreachable, silent or cannot answer now is excluded for a while, and
the next try goes to another one at once.

A retry is safe if the request is repeatable (its effect is the same once or twice: reads, PUT, DELETE, acks, a batch
with a producer's stamp) or if the failure says `not_applied`. Nothing else is retried. Once one try of a call ended
unknown, so did the whole call, whatever later tries answer.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from portalmq import wire
from portalmq.errors import NotLeader, PortalMQError, Unavailable
from portalmq.network.connection import Address, ConnectionPool, NoAnswer, NotSent, PendingAnswer, Watch
from portalmq.network.forking import reset_in_children
from portalmq.network.http_answer import HttpAnswer
from portalmq.network.tls import NO_FILES, TlsFiles, context_of
from portalmq.network.trust import advertised_allowed, warn_of_plain_text
from portalmq.transport import system_random
from portalmq.transport.answers import decode_answer, error_of_answer
from portalmq.transport.cluster_metadata import DEFAULT_URL, Bootstrap, ClusterMetadata, bootstrap_addresses
from portalmq.transport.reachability import Reachability
from portalmq.transport.request import Request, json_request, with_query
from portalmq.transport.retries import Backoff, DeadlinePassed, may_repeat
from portalmq.transport.zookeeper_bootstrap import CONNECT_WITHIN_S

__all__ = ["DEFAULT_URL", "Bootstrap", "Request", "Transport", "bootstrap_addresses"]

METADATA_TIMEOUT_S = 2.0
# A leader that is silent for this long may be paused: others are asked, each time it passes, who leads.
ASK_OTHERS_AFTER_S = 0.4
# In a long poll silence is usual. It is less so if the one before was answered within this time: messages were coming.
FLOW_S = 1.0
ASK_OTHERS_WITHOUT_FLOW_S = 2.5
# A broker that has not answered by then what any broker knows is left for another, if there is one.
ANYWHERE_TIMEOUT_S = 0.3
# A broker that is silent for this long, and to which the leader's name does not matter, is asked whether it lives.
STALLED_AFTER_S = 1.0
HEADS_KEPT = 256
CALL_TIMEOUT_S = 120.0
TIMEOUT_S_MIN = 0.01
LOOK_UPS_MAX = 3
LOOK_UP_S_MIN = 0.1

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


class PendingCall(NamedTuple):
    """A call that was sent, whose answer is not read yet."""

    transport: Transport
    request: Request
    address: Address
    pending: PendingAnswer

    def answer(self, timeout_s: float | None = None) -> HttpAnswer:
        """Read the answer, once. Raises a PortalMQError; then the call may be repeated if its request is repeatable."""
        return self.transport.read(self, self.request.try_timeout_s if timeout_s is None else timeout_s)


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
    ) -> None:
        """`timeout_s` bounds a call with all its retries. The environment may name files that `tls` does not.
        `allow_advertised=False`: over http send the token to named hosts only (PORTALMQ_ALLOW_ADVERTISED=0). The last
        four arguments are for tests."""
        options = {"token": token, "timeout_s": timeout_s, "tls": tls, "allow_advertised": allow_advertised}
        self._another: Callable[[], Transport] = partial(Transport, bootstrap, **options)  # type: ignore[arg-type]
        is_open = advertised_allowed(allow_advertised)
        self._cluster_metadata = ClusterMetadata(bootstrap, clock, shows_token=token is not None, is_open=is_open)
        if token is not None:
            warn_of_plain_text(self._cluster_metadata.bootstrap)
        self._timeout_s = timeout_s
        self.reachability = Reachability(clock)
        self._pool: Pool = pool or ConnectionPool(tls=context_of(tls))
        self._clock = clock
        self._closing = threading.Event()
        self._pause = pause
        self._chance = chance
        self._common_headers = _common_headers(token)
        self._heads: dict[tuple[object, ...], bytes] = {}
        self._has_flow = False
        self._outdated: set[str] = set()
        reset_in_children(self)

    def _reset_in_child(self) -> None:
        """Keep the known brokers in the child of a fork. The pool resets itself."""
        was_closed, self._closing = self._closing.is_set(), threading.Event()
        if was_closed:
            self._closing.set()
        self._cluster_metadata.reset_in_child()

    def another(self) -> Transport:
        """Return a transport to the same cluster, with connections of its own."""
        return self._another()

    @property
    def urls(self) -> list[str]:
        """The URLs at which this client first looked for brokers."""
        return self._cluster_metadata.urls

    # --- one call, tried until it is settled -------------------------------------------------------------------------

    def call(
        self,
        request: Request,
        *,
        timeout_s: float | None = None,
        waits_for_last_try: bool = False,
        is_repeat: bool = False,
    ) -> HttpAnswer:
        """Try until there is an answer, an error that a repeat cannot help, or the time is over.

        With `waits_for_last_try` a try that began in time may end later. `is_repeat`: an earlier call has tried this
        request. Raises the PortalMQError of the last try.
        """
        began = self._clock()
        deadline = began + (self._timeout_s if timeout_s is None else timeout_s)
        backoff = Backoff(self._chance)
        was_unknown = False
        is_first = not is_repeat
        while True:
            try:
                try_until = self._clock() + request.try_timeout_s if waits_for_last_try else deadline
                return self.attempt(request, try_until, is_first=is_first)
            except PortalMQError as error:
                is_first = False
                was_unknown = was_unknown or error.outcome == "unknown"
                wait_s = backoff.next_s(error.retry_after_s)
                give_up_at = self.reachability.limit(deadline, began)
                if may_repeat(error, request.repeatable) and self._clock() + wait_s < give_up_at:
                    self.pause(wait_s)
                    if self._clock() < give_up_at and not self._closing.is_set():
                        continue
                if was_unknown and error.outcome == "not_applied" and request.method != "GET":
                    error.outcome = "unknown"
                raise

    def pause(self, seconds: float) -> None:
        """Wait between two tries; close() ends the wait."""
        (self._pause or self._closing.wait)(seconds)

    def get(
        self,
        path: str,
        kind: type[T],
        query: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> T:
        """GET `path` as a `kind`. None values are left out of the query. A try that began in time may end later."""
        request = Request("GET", with_query(path, query), repeatable=True)
        return decode_answer(self.call(request, timeout_s=timeout_s, waits_for_last_try=timeout_s is not None), kind)

    def send_json(self, method: str, path: str, body: object, kind: type[T], *, timeout_s: float | None = None) -> T:
        """Make a call with a JSON body and a JSON answer. POST is not retried after an unknown outcome. A try that
        began in time may end later."""
        request = json_request(method, path, body, repeatable=method in {"PUT", "DELETE", "PATCH"})
        return decode_answer(self.call(request, timeout_s=timeout_s, waits_for_last_try=timeout_s is not None), kind)

    def send_once(self, path: str, body: object, kind: type[T]) -> T:
        """POST a JSON body with an Idempotency-Key, so that repeats have one effect."""
        headers = (("Content-Type", wire.JSON), ("Idempotency-Key", uuid.uuid4().hex))
        return decode_answer(
            self.call(Request("POST", path, msgspec.json.encode(body), headers, repeatable=True)), kind
        )

    # --- one try -----------------------------------------------------------------------------------------------------

    def attempt(self, request: Request, deadline: float, *, is_first: bool = False) -> HttpAnswer:
        """Make one try at one broker. Raises a PortalMQError whose outcome says what is known.

        A kept connection that turns out to be closed does not count: it is replaced at once, if that is safe.
        """
        if self._closing.is_set():
            # Not retryable: after close() no pause would separate the tries.
            raise Unavailable("this client is closed", retryable=False, outcome="not_applied")
        began = self._clock()
        if began >= deadline:
            raise DeadlinePassed("the time for this call is over", outcome="not_applied")
        if self._outdated and (topic := request.topic) is not None and topic in self._outdated:
            self._look_up_leaders(topic, deadline)
            began = self._clock()
        try:
            address, is_leader = self._choose_broker(request, deadline - began)
        except Unavailable as unresolved:
            if not self._closing.is_set():
                self.reachability.failed(None, (), unresolved, began)
            raise
        began = self._clock()
        is_first = is_first and request.marks_first_try
        try:
            answer, was_repeated = self._exchange(address, request, deadline, forward=not is_leader, is_first=is_first)
        except (NotSent, NoAnswer) as fault:
            raise self._failed(address, request, began, fault) from fault
        if request.wait_s:
            self._has_flow = self._clock() - began < min(FLOW_S, request.wait_s / 2)
        return self._accepted(address, request, answer, was_repeated)

    def begin(self, request: Request) -> PendingCall | None:
        """Send a request whose answer is read later, on a connection of its own. Return None if it was not sent; the
        next call finds out why."""
        if self._closing.is_set() or request.topic in self._outdated:
            return None
        try:
            address, is_leader = self._choose_broker(request, LOOK_UP_S_MIN)
            head = self._head(address, request, forward=not is_leader, is_first=request.marks_first_try)
            pending = self._pool.begin(address, request.method, head, request.body, request.try_timeout_s)
        except (Unavailable, NotSent):
            return None
        return PendingCall(self, request, address, pending)

    def read(self, call: PendingCall, timeout_s: float) -> HttpAnswer:
        """Return the answer to a call that was begun. Raises a PortalMQError, as `attempt` does."""
        address, request = call.address, call.request
        began = self._clock()
        try:
            answer = call.pending.read(timeout_s, self._watch(address, request))
        except (NotSent, NoAnswer) as fault:
            if isinstance(fault, NoAnswer) and fault.stale:  # as in _exchange: this says nothing about the broker
                raise self._unreachable(address, fault) from fault
            raise self._failed(address, request, began, fault) from fault
        return self._accepted(address, request, answer, was_repeated=False)

    def _failed(self, address: Address, request: Request, began: float, fault: NotSent | NoAnswer) -> Unavailable:
        """Leave a broker that gave no answer, and return the error to raise."""
        self._cluster_metadata.mark_unreachable(address)
        if request.topic is not None:
            self._outdated.add(request.topic)
        error = self._unreachable(address, fault)
        if not self._closing.is_set():
            # A long poll is not silence while the broker may wait.
            since = min(began + request.wait_s, self._clock())
            self.reachability.failed(address, self._cluster_metadata.known, error, since)
        return error

    def _accepted(self, address: Address, request: Request, answer: HttpAnswer, was_repeated: bool) -> HttpAnswer:
        """Return an answer, or raise the error that it says."""
        self._cluster_metadata.answered(address)
        self.reachability.answered()
        if answer.status < 300:
            return answer
        refusal = error_of_answer(answer)
        self._learn_from(refusal, address, request)
        if was_repeated and refusal.outcome == "not_applied" and request.method != "GET":
            # This applies to the second request. The outcome of the first is unknown.
            refusal.outcome = "unknown"
        raise refusal

    def _learn_from(self, error: PortalMQError, address: Address, request: Request) -> None:
        """Choose where the next try goes. If there is another broker, it is asked without the pause that this one asks
        for."""
        topic = request.topic
        if isinstance(error, NotLeader) and request.leader_of is not None:
            if not self._cluster_metadata.leads(request.leader_of, error.extra.get("leader_url")):
                self._outdated.add(request.leader_of[0])
        elif isinstance(error, Unavailable) and error.retryable:
            if topic is not None:
                self._outdated.add(topic)
            self._cluster_metadata.mark_busy(address, error.retry_after_s)
            if self._cluster_metadata.other_than(address):
                error.retry_after_s = None
        elif error.status == 503 and topic is not None:
            self._outdated.add(topic)

    def _exchange(
        self, address: Address, request: Request, deadline: float, *, forward: bool, is_first: bool
    ) -> tuple[HttpAnswer, bool]:
        """Return the answer, and whether it took a second connection."""
        stale: NoAnswer | None = None
        while True:
            head = self._head(address, request, forward=forward, is_first=is_first and stale is None)
            timeout_s = self._try_timeout_s(address, request, deadline)
            try:
                watch = None if self._cluster_metadata.is_alone else self._watch(address, request)
                answer = self._pool.exchange(address, request.method, head, request.body, timeout_s, watch)
                return answer, stale is not None
            except NoAnswer as fault:
                if not fault.stale or stale is not None or not request.repeatable or self._closing.is_set():
                    raise
                stale = fault
            except NotSent:
                if stale is not None and request.method != "GET":
                    raise stale from None
                raise

    def _try_timeout_s(self, address: Address, request: Request, deadline: float) -> float:
        timeout_s = request.try_timeout_s
        left_s = deadline - self._clock()
        if left_s < timeout_s:
            timeout_s = max(left_s, TIMEOUT_S_MIN)
        if request.anywhere and timeout_s > ANYWHERE_TIMEOUT_S and self._cluster_metadata.other_than(address):
            return ANYWHERE_TIMEOUT_S
        return timeout_s

    def _watch(self, address: Address, request: Request) -> Watch | None:
        """Return the watch that asks others while a leader is silent, or a broker that forwards to it. Only a
        repeatable request may leave its broker."""
        if not request.repeatable or self._cluster_metadata.is_alone:
            return None
        place = request.leader_of or request.near
        epoch = -1 if place is None else self._cluster_metadata.epoch_of(place)
        if place is None or (epoch < 0 and self._cluster_metadata.leader_of(place) != address):
            # The leader is not known, nor whether it has changed: only a broker that answers nothing is left.
            return Watch(request.wait_s + STALLED_AFTER_S, STALLED_AFTER_S, lambda: self._is_stalled(address))
        first_s = every_s = ASK_OTHERS_AFTER_S
        if request.wait_s > FLOW_S:
            first_s, every_s = (FLOW_S, every_s) if self._has_flow else (ASK_OTHERS_WITHOUT_FLOW_S,) * 2
        elif request.wait_s:
            first_s += request.wait_s
        return Watch(first_s, every_s, lambda: self._leader_moved(place, address, epoch))

    def _is_stalled(self, address: Address) -> bool:
        """Return whether a broker does not even say that it lives, while another one does."""
        other = None if self._closing.is_set() else self._cluster_metadata.other_than(address)
        return other is not None and not self._says_it_lives(address) and self._says_it_lives(other)

    def _says_it_lives(self, address: Address) -> bool:
        request = Request("GET", "/livez", repeatable=True, anywhere=True)
        try:
            self._exchange(address, request, self._clock() + ANYWHERE_TIMEOUT_S, forward=True, is_first=False)
        except (NotSent, NoAnswer):
            return False
        return True

    def _leader_moved(self, place: tuple[str, int], address: Address, epoch: int) -> bool:
        """Return whether the partition has a later leader than `address` in `epoch`, by another broker's metadata or by
        what this client has learned since: metadata for one partition covers the whole topic."""
        if self._cluster_metadata.epoch_of(place) > epoch and self._cluster_metadata.leader_of(place) != address:
            return True
        other = None if self._closing.is_set() else self._cluster_metadata.other_than(address)
        if other is None:
            return False
        request = _metadata_request([place[0]])
        try:
            deadline = self._clock() + METADATA_TIMEOUT_S
            answer, _ = self._exchange(other, request, deadline, forward=True, is_first=False)
            metadata = decode_answer(answer, wire.Metadata) if answer.status < 300 else None
        except (NotSent, NoAnswer):
            self._cluster_metadata.mark_unreachable(other)
            return False
        except PortalMQError:
            return False
        if metadata is None or not self._cluster_metadata.has_moved(place, metadata):
            return False
        self._cluster_metadata.learn(metadata)
        return self._cluster_metadata.leader_of(place) != address

    def _head(self, address: Address, request: Request, *, forward: bool, is_first: bool) -> bytes:
        """Return the head of a request. All but its Content-Length is kept for the next one of its kind."""
        has_length = bool(request.body) or request.method not in {"GET", "DELETE"}
        kind = (address, request.method, request.path, request.headers, forward, is_first, has_length)
        head = self._heads.get(kind)
        if head is None:
            lines = [f"{request.method} {address.prefix}{request.path} HTTP/1.1\r\nHost: {address.netloc}\r\n"]
            for name, value in request.headers:
                if "\r" in value or "\n" in value:
                    raise ValueError(f"the header {name} must be one line")
                lines.append(f"{name}: {value}\r\n")
            if not forward:
                lines.append(f"{wire.HEADER_NO_FORWARD}: 1\r\n")
            if is_first:
                lines.append(f"{wire.HEADER_FIRST_TRY}: 1\r\n")
            lines += [self._common_headers, "Content-Length: " if has_length else "\r\n"]
            if len(self._heads) >= HEADS_KEPT:
                self._heads.clear()
            head = self._heads[kind] = "".join(lines).encode("latin-1")
        return b"%b%d\r\n\r\n" % (head, len(request.body)) if has_length else head

    def _unreachable(self, address: Address, fault: NotSent | NoAnswer) -> Unavailable:
        if isinstance(fault, NoAnswer):
            return Unavailable(f"the broker at {address.url} gave no answer: {fault}", outcome="unknown")
        looked_at = [known.url for known in self._cluster_metadata.known]
        detail = f"no PortalMQ broker could be reached at {address.url}: {fault}"
        if not self.reachability.was_reached:
            detail = (
                f"no broker answers at {', '.join(looked_at)} ({fault}). Start a cluster with `portalmq up`, a single"
                " broker with `portalmq dev`, or name yours with bootstrap= (PORTALMQ_URL)"
            )
        return Unavailable(detail, outcome="not_applied", looked_at=looked_at)

    # --- who leads ---------------------------------------------------------------------------------------------------

    def metadata(self, topics: Iterable[str] | None = None, *, deadline: float | None = None) -> wire.Metadata:
        """Return the brokers and leaders as some broker knows them now. Topics that do not exist are left out.

        With `deadline` (on this transport's clock) it is tried once, else like any call.
        """
        request = _metadata_request(topics)
        answer = self.call(request) if deadline is None else self.attempt(request, deadline)
        metadata = decode_answer(answer, wire.Metadata)
        self._cluster_metadata.learn(metadata)
        return metadata

    def leader_of(self, place: tuple[str, int]) -> Address | None:
        """Return the leader of a (topic, partition), if it is known and answers."""
        return self._cluster_metadata.leader_of(place)

    def leader_reported(self, place: tuple[str, int], url: object) -> bool:
        """Record the leader that a broker reported. Return False if it is not usable: then it is looked up before the
        next try."""
        if self._cluster_metadata.leads(place, url):
            return True
        self._outdated.add(place[0])
        return False

    def _look_up_leaders(self, topic: str, deadline: float) -> None:
        self._outdated.discard(topic)
        for _ in range(LOOK_UPS_MAX):
            try:
                self.metadata([topic], deadline=min(deadline, self._clock() + METADATA_TIMEOUT_S))
            except PortalMQError:
                continue  # the next try asks another broker
            return
        # The call itself goes to any broker, which forwards it.
        self._outdated.add(topic)

    def _choose_broker(self, request: Request, within_s: float) -> tuple[Address, bool]:
        """Return a broker, and whether it leads all that the request concerns. Raises Unavailable if ZooKeeper names
        none in time."""
        if request.leader_of is not None:
            leader = self._cluster_metadata.leader_of(request.leader_of)
            if leader is not None:
                return leader, True
        near = None if request.near is None else self._cluster_metadata.leader_of(request.near)
        return near or self._cluster_metadata.any(max(LOOK_UP_S_MIN, min(within_s, CONNECT_WITHIN_S))), False

    def rest(self) -> None:
        """Close idle connections; the next call opens one."""
        self._pool.rest()

    def hang_up(self) -> None:
        """Refuse new calls; brokers answer waiting ones as soon as they can."""
        self._closing.set()
        self._pool.hang_up()

    def close(self, answers_within_s: float = 0.0) -> None:
        """End waits and retries of other threads, and close the connections. Calls that wait for an answer may have it
        within `answers_within_s`."""
        self._closing.set()
        self._pool.close(answers_within_s)


def _common_headers(token: str | None) -> str:
    lines = "User-Agent: portalmq-python\r\n"
    if token is not None:
        if not token or not token.isascii() or not token.isprintable():
            raise ValueError("a token is one line of printable ASCII characters")
        lines += f"Authorization: Bearer {token}\r\n"
    return lines


def _metadata_request(topics: Iterable[str] | None) -> Request:
    query = None if topics is None else {"topics": ",".join(topics)}
    return Request("GET", with_query("/v1/metadata", query), repeatable=True, anywhere=True)
