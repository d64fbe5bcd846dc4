"""A client's calls to the cluster: which broker to ask, when to retry, and the meaning of a failure.

A call goes to the leader of its partition if that is known (from `/v1/metadata`, or a broker's not_leader answer), else
to any broker, which forwards it. A broker that is unreachable, silent or cannot answer now is excluded for a while, and
the next try goes to another one at once.

A retry is safe if the request is repeatable (its effect is the same once or twice: reads, PUT, DELETE, acks, a batch
with a producer's stamp) or if the failure says `not_applied`. Nothing else is retried. Once one try of a call ended
unknown, so did the whole call, whatever later tries answer.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from portalmq import wire
from portalmq.errors import NotLeader, PortalMQError, Unavailable
from portalmq.network.connection import Address, Doubt, NoAnswer, NotSent
from portalmq.network.either import Either
from portalmq.network.http_answer import HttpAnswer
from portalmq.network.trust import advertised_allowed, warn_of_plain_text
from portalmq.transport.answers import decode_answer, error_of_answer
from portalmq.transport.cluster_metadata import Bootstrap, ClusterMetadata
from portalmq.transport.reachability import Reachability
from portalmq.transport.request import Request, json_request, with_query
from portalmq.transport.retries import Backoff, DeadlinePassed, may_repeat
from portalmq.transport.zookeeper_bootstrap import CONNECT_WITHIN_S

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


class CallIo(Protocol):
    """The network of a client. Its methods block the thread, or suspend the coroutine."""

    @property
    def is_closing(self) -> bool: ...
    async def exchange(
        self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float, doubt: Doubt | None
    ) -> HttpAnswer:
        """Raises NotSent or NoAnswer."""

    async def begin(self, address: Address, method: str, head: bytes, body: bytes, timeout_s: float) -> Any:
        """Send a request, and return what `read` needs. Raises NotSent."""

    async def read(self, pending: Any, timeout_s: float, doubt: Doubt | None) -> HttpAnswer:
        """Read an answer, once. Raises NotSent or NoAnswer."""

    async def look_up(self, do: Callable[[], T]) -> T:
        """Return the result of `do`, which may block."""

    async def pause(self, seconds: float) -> None:
        """Wait between two tries, until the end of this client."""


class BegunCall(NamedTuple):
    """A call that was sent, whose answer is not read yet."""

    calls: ClusterCalls
    request: Request
    address: Address
    pending: Any

    async def answer(self, timeout_s: float | None = None) -> HttpAnswer:
        """Read the answer, once. Raises a PortalMQError; then the call may be repeated if its request is repeatable."""
        return await self.calls.read(self, self.request.try_timeout_s if timeout_s is None else timeout_s)


class Answering(Protocol):
    """A call that was sent."""

    def answer(self, timeout_s: float | None = None) -> Either[HttpAnswer]: ...


class EitherCalls(Protocol):
    """The calls of a transport that blocks, or of one for an event loop: for code that serves both."""

    @property
    def reachability(self) -> Reachability: ...
    def call(
        self,
        request: Request,
        *,
        timeout_s: float | None = None,
        waits_for_last_try: bool = False,
        is_repeat: bool = False,
    ) -> Either[HttpAnswer]: ...
    def attempt(self, request: Request, deadline: float, *, is_first: bool = False) -> Either[HttpAnswer]: ...
    def begin(self, request: Request) -> Either[Answering | None]: ...
    def get(
        self, path: str, kind: type[T], query: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> Either[T]: ...
    def send_json(
        self, method: str, path: str, body: object, kind: type[T], *, timeout_s: float | None = None
    ) -> Either[T]: ...
    def metadata(
        self, topics: Iterable[str] | None = None, *, deadline: float | None = None
    ) -> Either[wire.Metadata]: ...
    def pause(self, seconds: float) -> Either[None]: ...
    def rest(self) -> None: ...


class ClusterCalls:
    """The calls of one client, over `io`."""

    def __init__(
        self,
        io: CallIo,
        bootstrap: Bootstrap,
        *,
        token: str | None,
        timeout_s: float,
        allow_advertised: bool | None,
        clock: Callable[[], float],
        chance: Callable[[], float],
        cluster_metadata: ClusterMetadata | None = None,
    ) -> None:
        is_open = advertised_allowed(allow_advertised)
        self.cluster_metadata = cluster_metadata or ClusterMetadata(
            bootstrap, clock, shows_token=token is not None, is_open=is_open
        )
        if token is not None:
            warn_of_plain_text(self.cluster_metadata.bootstrap)
        self.reachability = Reachability(clock)
        self._io = io
        self._timeout_s = timeout_s
        self._clock = clock
        self._chance = chance
        self._common_headers = _common_headers(token)
        self._heads: dict[tuple[object, ...], bytes] = {}
        self._has_flow = False
        self._outdated: set[str] = set()

    @property
    def urls(self) -> list[str]:
        """The URLs at which this client first looked for brokers."""
        return self.cluster_metadata.urls

    # --- one call, tried until it is settled -------------------------------------------------------------------------

    async def call(
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
                answer = await self.attempt(request, try_until, is_first=is_first)
                return msgspec.structs.replace(answer, is_repeat=True) if is_repeat or was_unknown else answer
            except PortalMQError as error:
                is_first = False
                was_unknown = was_unknown or error.outcome == "unknown"
                wait_s = backoff.next_s(error.retry_after_s)
                give_up_at = self.reachability.limit(deadline, began)
                if may_repeat(error, request.repeatable) and self._clock() + wait_s < give_up_at:
                    await self._io.pause(wait_s)
                    if self._clock() < give_up_at and not self._io.is_closing:
                        continue
                if was_unknown and request.method != "GET":
                    error.outcome = "unknown"
                raise

    async def get(
        self,
        path: str,
        kind: type[T],
        query: Mapping[str, object] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> T:
        """GET `path` as a `kind`. None values are left out of the query. A try that began in time may end later."""
        request = Request("GET", with_query(path, query), repeatable=True)
        return decode_answer(
            await self.call(request, timeout_s=timeout_s, waits_for_last_try=timeout_s is not None), kind
        )

    async def send_json(
        self, method: str, path: str, body: object, kind: type[T], *, timeout_s: float | None = None
    ) -> T:
        """Make a call with a JSON body and a JSON answer. POST is not retried after an unknown outcome. A try that
        began in time may end later."""
        request = json_request(method, path, body, repeatable=method in {"PUT", "DELETE", "PATCH"})
        return decode_answer(
            await self.call(request, timeout_s=timeout_s, waits_for_last_try=timeout_s is not None), kind
        )

    async def send_once(self, path: str, body: object, kind: type[T]) -> T:
        """POST a JSON body with an Idempotency-Key, so that repeats have one effect."""
        headers = (("Content-Type", wire.JSON), ("Idempotency-Key", uuid.uuid4().hex))
        return decode_answer(
            await self.call(Request("POST", path, msgspec.json.encode(body), headers, repeatable=True)), kind
        )

    # --- one try -----------------------------------------------------------------------------------------------------

    async def attempt(self, request: Request, deadline: float, *, is_first: bool = False) -> HttpAnswer:
        """Make one try at one broker. Raises a PortalMQError whose outcome says what is known.

        A kept connection that turns out to be closed does not count: it is replaced at once, if that is safe.
        """
        if self._io.is_closing:
            # Not retryable: after close() no pause would separate the tries.
            raise Unavailable("this client is closed", retryable=False, outcome="not_applied")
        began = self._clock()
        if began >= deadline:
            raise DeadlinePassed("the time for this call is over", outcome="not_applied")
        if self._outdated and (topic := request.topic) is not None and topic in self._outdated:
            await self._look_up_leaders(topic, deadline)
            began = self._clock()
        try:
            address, is_leader = await self._choose_broker(request, deadline - began)
        except Unavailable as unresolved:
            if not self._io.is_closing:
                self.reachability.failed(None, (), unresolved, began)
            raise
        began = self._clock()
        is_first = is_first and request.marks_first_try
        try:
            answer, was_repeated = await self._exchange(
                address, request, deadline, forward=not is_leader, is_first=is_first
            )
        except (NotSent, NoAnswer) as fault:
            raise self._failed(address, request, began, fault) from fault
        if request.wait_s:
            self._has_flow = self._clock() - began < min(FLOW_S, request.wait_s / 2)
        return self._accepted(address, request, answer, was_repeated)

    async def begin(self, request: Request) -> BegunCall | None:
        """Send a request whose answer is read later, on a connection of its own. Return None if it was not sent; the
        next call finds out why."""
        if self._io.is_closing or request.topic in self._outdated:
            return None
        try:
            address, is_leader = await self._choose_broker(request, LOOK_UP_S_MIN)
            head = self._head(address, request, forward=not is_leader, is_first=request.marks_first_try)
            pending = await self._io.begin(address, request.method, head, request.body, request.try_timeout_s)
        except (Unavailable, NotSent):
            return None
        return BegunCall(self, request, address, pending)

    async def read(self, call: BegunCall, timeout_s: float) -> HttpAnswer:
        """Return the answer to a call that was begun. Raises a PortalMQError, as `attempt` does."""
        address, request = call.address, call.request
        began = self._clock()
        try:
            answer = await self._io.read(call.pending, timeout_s, self._doubt(address, request))
        except (NotSent, NoAnswer) as fault:
            if isinstance(fault, NoAnswer) and fault.stale:  # as in _exchange: this says nothing about the broker
                raise self._unreachable(address, fault) from fault
            raise self._failed(address, request, began, fault) from fault
        return self._accepted(address, request, answer, was_repeated=False)

    def _failed(self, address: Address, request: Request, began: float, fault: NotSent | NoAnswer) -> Unavailable:
        """Leave a broker that gave no answer, and return the error to raise."""
        if request.topic is not None:
            self._outdated.add(request.topic)
        error = self._unreachable(address, fault)
        # Not by the end of this client, of which the broker knows nothing.
        if not self._io.is_closing and not (request.may_be_slow and isinstance(fault, NoAnswer)):
            self.cluster_metadata.mark_unreachable(address)
            # A long poll is not silence while the broker may wait.
            since = min(began + request.wait_s, self._clock())
            self.reachability.failed(address, self.cluster_metadata.known, error, since)
        return error

    def _accepted(self, address: Address, request: Request, answer: HttpAnswer, was_repeated: bool) -> HttpAnswer:
        """Return an answer, or raise the error that it says."""
        self.cluster_metadata.answered(address)
        self.reachability.answered()
        if answer.status < 300:
            return msgspec.structs.replace(answer, is_repeat=True) if was_repeated else answer
        refusal = error_of_answer(answer)
        self._learn_from(refusal, address, request)
        if was_repeated and request.method != "GET":
            # This applies to the second request. The outcome of the first is unknown.
            refusal.outcome = "unknown"
        raise refusal

    def _learn_from(self, error: PortalMQError, address: Address, request: Request) -> None:
        """Choose where the next try goes. If there is another broker, it is asked without the pause that this one asks
        for."""
        topic = request.topic
        if isinstance(error, NotLeader) and request.leader_of is not None:
            if not self.cluster_metadata.leads(request.leader_of, error.extra.get("leader_url")):
                self._outdated.add(request.leader_of[0])
        elif isinstance(error, Unavailable) and error.retryable:
            if topic is not None:
                self._outdated.add(topic)
            self.cluster_metadata.mark_busy(address, error.retry_after_s)
            if self.cluster_metadata.other_than(address):
                error.retry_after_s = None
        elif error.status == 503 and topic is not None:
            self._outdated.add(topic)

    async def _exchange(
        self, address: Address, request: Request, deadline: float, *, forward: bool, is_first: bool
    ) -> tuple[HttpAnswer, bool]:
        """Return the answer, and whether it took a second connection."""
        stale: NoAnswer | None = None
        while True:
            head = self._head(address, request, forward=forward, is_first=is_first and stale is None)
            timeout_s = self._try_timeout_s(address, request, deadline)
            try:
                doubt = None if self.cluster_metadata.is_alone else self._doubt(address, request)
                answer = await self._io.exchange(address, request.method, head, request.body, timeout_s, doubt)
                return answer, stale is not None
            except NoAnswer as fault:
                if not fault.stale or stale is not None or not request.repeatable or self._io.is_closing:
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
        if request.anywhere and timeout_s > ANYWHERE_TIMEOUT_S and self.cluster_metadata.other_than(address):
            return ANYWHERE_TIMEOUT_S
        return timeout_s

    def _doubt(self, address: Address, request: Request) -> Doubt | None:
        """Return the check that asks others while a leader is silent, or a broker that forwards to it. Only a
        repeatable request may leave its broker."""
        if not request.repeatable or self.cluster_metadata.is_alone:
            return None
        place = request.leader_of or request.near
        epoch = -1 if place is None else self.cluster_metadata.epoch_of(place)
        if place is None or (epoch < 0 and self.cluster_metadata.leader_of(place) != address):
            # The leader is not known, nor whether it has changed: only a broker that answers nothing is left.
            return Doubt(request.wait_s + STALLED_AFTER_S, STALLED_AFTER_S, partial(self._is_stalled, address))
        first_s = every_s = ASK_OTHERS_AFTER_S
        if request.wait_s > FLOW_S:
            first_s, every_s = (FLOW_S, every_s) if self._has_flow else (ASK_OTHERS_WITHOUT_FLOW_S,) * 2
        elif request.wait_s:
            first_s += request.wait_s
        return Doubt(first_s, every_s, partial(self._leader_moved, place, address, epoch))

    async def _is_stalled(self, address: Address) -> bool:
        """Return whether a broker does not even say that it lives, while another one does."""
        other = None if self._io.is_closing else self.cluster_metadata.other_than(address)
        return other is not None and not await self._says_it_lives(address) and await self._says_it_lives(other)

    async def _says_it_lives(self, address: Address) -> bool:
        request = Request("GET", "/livez", repeatable=True, anywhere=True)
        try:
            await self._exchange(address, request, self._clock() + ANYWHERE_TIMEOUT_S, forward=True, is_first=False)
        except (NotSent, NoAnswer):
            return False
        return True

    async def _leader_moved(self, place: tuple[str, int], address: Address, epoch: int) -> bool:
        """Return whether the partition has a later leader than `address` in `epoch`, by another broker's metadata or by
        what this client has learned since: metadata for one partition covers the whole topic."""
        if self.cluster_metadata.epoch_of(place) > epoch and self.cluster_metadata.leader_of(place) != address:
            return True
        other = None if self._io.is_closing else self.cluster_metadata.other_than(address)
        if other is None:
            return False
        request = _metadata_request([place[0]])
        try:
            deadline = self._clock() + METADATA_TIMEOUT_S
            answer, _ = await self._exchange(other, request, deadline, forward=True, is_first=False)
            metadata = decode_answer(answer, wire.Metadata) if answer.status < 300 else None
        except (NotSent, NoAnswer):
            if not self._io.is_closing:
                self.cluster_metadata.mark_unreachable(other)
            return False
        except PortalMQError:
            return False
        if metadata is None or not self.cluster_metadata.has_moved(place, metadata):
            return False
        self.cluster_metadata.learn(metadata)
        return self.cluster_metadata.leader_of(place) != address

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
        looked_at = [known.url for known in self.cluster_metadata.known]
        detail = f"no PortalMQ broker could be reached at {address.url}: {fault}"
        if not self.reachability.was_reached:
            detail = (
                f"no broker answers at {', '.join(looked_at)} ({fault}). Start a cluster with `portalmq up`, a single"
                " broker with `portalmq dev`, or name yours with bootstrap= (PORTALMQ_URL)"
            )
        return Unavailable(detail, outcome="not_applied", looked_at=looked_at)

    # --- who leads ---------------------------------------------------------------------------------------------------

    async def metadata(self, topics: Iterable[str] | None = None, *, deadline: float | None = None) -> wire.Metadata:
        """Return the brokers and leaders as some broker knows them now. Topics that do not exist are left out.

        With `deadline` (on this transport's clock) it is tried once, else like any call.
        """
        request = _metadata_request(topics)
        answer = await (self.call(request) if deadline is None else self.attempt(request, deadline))
        metadata = decode_answer(answer, wire.Metadata)
        self.cluster_metadata.learn(metadata)
        return metadata

    def leader_of(self, place: tuple[str, int]) -> Address | None:
        """Return the leader of a (topic, partition), if it is known and answers."""
        return self.cluster_metadata.leader_of(place)

    def leader_reported(self, place: tuple[str, int], url: object) -> bool:
        """Record the leader that a broker reported. Return False if it is not usable: then it is looked up before the
        next try."""
        if self.cluster_metadata.leads(place, url):
            return True
        self._outdated.add(place[0])
        return False

    async def _look_up_leaders(self, topic: str, deadline: float) -> None:
        self._outdated.discard(topic)
        for _ in range(LOOK_UPS_MAX):
            try:
                await self.metadata([topic], deadline=min(deadline, self._clock() + METADATA_TIMEOUT_S))
            except PortalMQError:
                continue  # the next try asks another broker
            return
        # The call itself goes to any broker, which forwards it.
        self._outdated.add(topic)

    async def _choose_broker(self, request: Request, within_s: float) -> tuple[Address, bool]:
        """Return a broker, and whether it leads all that the request concerns. Raises Unavailable if ZooKeeper names
        none in time."""
        if request.leader_of is not None:
            leader = self.cluster_metadata.leader_of(request.leader_of)
            if leader is not None:
                return leader, True
        near = None if request.near is None else self.cluster_metadata.leader_of(request.near)
        if near is not None:
            return near, False
        find = partial(self.cluster_metadata.any, max(LOOK_UP_S_MIN, min(within_s, CONNECT_WITHIN_S)))
        return (await self._io.look_up(find) if self.cluster_metadata.asks_zookeeper else find()), False


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
