"""The context of every request: the broker, the settings, the counters, and the bounded room for calls that wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import msgspec
from flask import Response, request

from portalmq import wire
from portalmq.broker.api.answers_in_flight import AnswersInFlight
from portalmq.broker.api.body import BodiesInFlight, read_body
from portalmq.broker.api.http_request import HttpRequest, request_of
from portalmq.broker.api.origin_check import BrokerNames, OriginCheck
from portalmq.broker.api.sessions import Access, Sessions
from portalmq.broker.broker import Broker
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.partition.native import decompressed
from portalmq.broker.storage.batch import Record
from portalmq.compression import BadValues, content_size
from portalmq.errors import Backpressure, InvalidRequest, MessageTooLarge

_encode = msgspec.json.Encoder().encode
_encode_pack = msgspec.msgpack.Encoder().encode


class ResponseParts(NamedTuple):
    """The answer of a view, independent of Flask."""

    body: bytes
    status: int = 200
    content_type: str = wire.JSON
    headers: tuple[tuple[str, str], ...] = ()

    def response(self) -> Response:
        response = Response(self.body, self.status, content_type=self.content_type)
        response.headers.extend(self.headers)
        return response


class HttpSettings(BrokerNames, Protocol):
    """The settings of HTTP."""

    @property
    def body_bytes_max(self) -> int: ...
    @property
    def body_bytes_in_flight_max(self) -> int: ...
    @property
    def body_timeout_s(self) -> float: ...
    @property
    def answer_bytes_in_flight_max(self) -> int: ...
    @property
    def parked_receives_max(self) -> int: ...
    @property
    def no_confirm(self) -> bool: ...


class Authorizer(Protocol):
    """Checks the `Authorization` header, where secrets are `needed`."""

    needed: bool
    sessions: Sessions

    def access(self, authorization: str | None) -> Access | None: ...


class RequestContext:
    """The context of views: the broker, the settings, the metrics, and the limits of bodies, answers and waiting calls.

    Invariant: 0 <= waiting <= config.parked_receives_max.
    """

    def __init__(self, broker: Broker, config: HttpSettings, metrics: Metrics, auth: Authorizer) -> None:
        self.broker = broker
        self.config = config
        self.metrics = metrics
        self.auth = auth
        self.origin_check = OriginCheck(config)
        self.waiting = 0
        self.bodies = BodiesInFlight(config.body_bytes_in_flight_max)
        self.answers = AnswersInFlight(config.answer_bytes_in_flight_max)
        # Returns the description of all routes, as JSON; set by create_app.
        self.description: Callable[[], bytes] = bytes

    def body(self) -> bytes:
        """Return the body of the current request. Raises as `read_body` does."""
        return self.body_of(current())

    def body_of(self, asked: HttpRequest) -> bytes:
        config = self.config
        return read_body(asked, config.body_bytes_max, pause_s=config.body_timeout_s, in_flight=self.bodies)

    def decompress(self, asked: HttpRequest, data: bytes, count: int) -> list[bytes]:
        """Return the `count` values that `data`, a part of the request's body, holds. Raises InvalidRequest,
        Backpressure, and MessageTooLarge when they take more than a body may."""
        try:
            size = content_size(data)
            if size > self.config.body_bytes_max:
                raise MessageTooLarge(f"the values take {size} bytes, the limit is {self.config.body_bytes_max}")
            self.bodies.hold_also(asked, size)
            return decompressed(data, count, size)
        except BadValues as fault:
            raise InvalidRequest(f"the compressed values are not valid: {fault}") from None

    def make_room(self, records: Iterable[Record]) -> None:
        """Take room for these messages in the answer. Raises Backpressure while too many answers are not sent."""
        self.answers.hold(current(), records)

    def streamed(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the parts of an answer whose head is sent. An error can only end it, and is reported to the broker."""
        try:
            yield from parts
        except Exception as fault:
            self.broker.explain(fault)
            raise

    @contextmanager
    def parked(self, wait_ms: int) -> Iterator[None]:
        """Count a call that may wait. Raises Backpressure at the limit.

        Each waiting call holds a connection, and connections are limited: without this, waiting receives would exclude
        every produce.
        """
        if wait_ms <= 0:
            yield
            return
        if self.waiting >= self.config.parked_receives_max:
            raise Backpressure(
                f"{self.waiting} calls wait already: ask again later, or with wait_ms=0", retry_after_s=1
            )
        self.waiting += 1
        try:
            yield
        finally:
            self.waiting -= 1


def current() -> HttpRequest:
    """Return the request that Flask serves."""
    return request_of(request.environ)


def may_forward(asked: HttpRequest) -> bool:
    """Return False when the client asks for NotLeader rather than a forwarded call, to go to the leader itself."""
    return asked.headers.get("portalmq-no-forward", "").strip().lower() not in {"1", "true"}


def accepts_packed(asked: HttpRequest) -> bool:
    """Return whether the client asks for MessagePack."""
    return wire.BATCH_MSGPACK in asked.headers.get("accept", "").lower()


def encoded(value: Any, *, packed: bool = False, status: int = 200) -> ResponseParts:
    """Return `value` as MessagePack, or as JSON with a line feed at its end for terminals."""
    if packed:
        return ResponseParts(_encode_pack(value), status, wire.BATCH_MSGPACK)
    return ResponseParts(_encode(value) + b"\n", status)


def accepts(media_type: str) -> bool:
    """Return whether the request names `media_type` in Accept. Wildcards mean JSON, the default."""
    return media_type in current().headers.get("accept", "").lower()


def answer(value: Any, status: int = 200) -> Response:
    """Return `value` as JSON."""
    return encoded(value, status=status).response()


def answer_packed(body: bytes, status: int = 200) -> Response:
    return Response(body, status, content_type=wire.BATCH_MSGPACK)


def no_content() -> Response:
    return Response(status=204)
