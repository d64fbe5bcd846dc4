"""Sends the rows of one task to the leaders of their partitions: in order, bounded, until each outcome is known.

    put --> Lane.waiting --full--> a request, one at a time for each lane --> results
            (one lane a partition)

A lane with no request in flight sends as soon as a request is worth it (REQUEST_ROWS_MIN), so that the leaders start at
once; while they are busy it gathers larger requests, which cost them less a row.

A request with an unknown outcome is sent again: each message in it carries its identity. A lane sends its next request
after the answer to the last, which keeps the order of its rows; rows gather during that time. So memory holds at most
two requests of a lane, and in all BYTES_WAITING_MAX plus the content of REQUESTS_MAX requests.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Final

import msgspec

from portalmq import wire
from portalmq.errors import MessageTooLarge, PortalMQError, TopicExists
from portalmq.network.tls import NO_FILES, TlsFiles
from portalmq.spark.errors import BadRow, NotWritten, Unreachable
from portalmq.spark.http_api.brokers import transport_of
from portalmq.spark.writing.rows import RoutedRow, Row
from portalmq.transport.answers import decode_answer
from portalmq.transport.request import Request, json_request
from portalmq.transport.transport import Transport

REQUEST_ROWS_MIN: Final = 1_000
# The broker's maximum: its index of identities costs about a page for each identity and request.
REQUEST_ROWS_MAX: Final = wire.BATCH_MESSAGES_MAX
REQUEST_BYTES_MAX: Final = 2_500_000
REQUESTS_MAX: Final = 8
BYTES_WAITING_MAX: Final = 32 * 1024 * 1024
DELIVERY_TIMEOUT_S: Final = 120.0
# Overhead of a row beside its value, key and headers.
ROW_BYTES: Final = 150

_HEADERS = (("Content-Type", wire.BATCH_MSGPACK), ("Accept", wire.BATCH_MSGPACK))
_encode = msgspec.msgpack.Encoder().encode


class _Batch(msgspec.Struct):
    messages: list[Row]


class _Result(msgspec.Struct):
    """The result of one row. Its offset is not needed here."""

    error: dict[str, object] | None = None


class _Results(msgspec.Struct):
    results: list[_Result]


@dataclass(slots=True)
class _Topic:
    partitions: int
    first_partitions: int


@dataclass(slots=True)
class _Lane:
    topic: str
    partition: int
    rows: list[Row] = field(default_factory=list)
    size: int = 0
    sent: Future[None] | None = None

    def __str__(self) -> str:
        return f"{self.topic}, partition {self.partition}"


class Sender:
    """Rows in, messages in the log out: `flush` returns when all are written. For one thread."""

    def __init__(
        self,
        bootstrap: Sequence[str],
        token: str | None,
        tls: TlsFiles = NO_FILES,
        *,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
    ) -> None:
        self._timeout_s = delivery_timeout_s
        self._transport = transport_of(",".join(bootstrap), token, tls, delivery_timeout_s)
        self._pool = ThreadPoolExecutor(REQUESTS_MAX, thread_name_prefix="portalmq-sink")
        self._topics: dict[str, _Topic] = {}
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._sent: set[Future[None]] = set()
        self._waiting = 0

    def put_all(self, rows: Sequence[RoutedRow]) -> None:
        """Take rows, which have their keys. Blocks while too much is in flight. Raises NotWritten, BadRow,
        Unreachable."""
        for routed, message_id in zip(
            rows, wire.message_ids_of([each.row.idempotency_key for each in rows]), strict=True
        ):
            self._put(routed, message_id)

    def _put(self, routed: RoutedRow, message_id: bytes) -> None:
        row = routed.row
        lane = self._lane(routed, message_id)
        size = len(row.value) + ROW_BYTES + len(row.key or b"")
        if row.headers:
            size += sum([len(name) + 4 * len(text) + 8 for name, text in row.headers.items()])
        if lane.rows and lane.size + size > REQUEST_BYTES_MAX:
            self._send(lane)
        lane.rows.append(row)
        lane.size += size
        self._waiting += size
        if len(lane.rows) >= REQUEST_ROWS_MAX or (
            len(lane.rows) >= REQUEST_ROWS_MIN and (lane.sent is None or lane.sent.done())
        ):
            self._send(lane)
        elif self._waiting > BYTES_WAITING_MAX:
            self._send(max(self._lanes.values(), key=lambda each: each.size))

    def flush(self) -> None:
        """Return when every row is in the log, with the safety of acks=all. Raises NotWritten."""
        for lane in self._lanes.values():
            if lane.rows:
                self._send(lane)
        while self._sent:
            self._wait_for_one()

    def close(self) -> None:
        """Abort requests in flight. Their outcome is unknown."""
        self._transport.close()
        self._pool.shutdown(wait=True, cancel_futures=True)

    # --- partitions --------------------------------------------------------------------------------------------------

    def _lane(self, routed: RoutedRow, message_id: bytes) -> _Lane:
        row, number = routed.row, routed.partition
        topic = self._topics.get(routed.topic) or self._load_topic(routed.topic)
        if number is None:
            # A key has one partition for all its messages; else the identity decides, so that a repeat finds it again.
            if row.key is not None:
                number = zlib.crc32(row.key) % topic.partitions
            else:
                number = zlib.crc32(message_id) % topic.first_partitions
        elif number >= topic.partitions:
            topic = self._load_topic(routed.topic)  # it may have grown
            if number >= topic.partitions:
                raise BadRow(
                    f"partition is {number}, and topic {routed.topic} has 0 to {topic.partitions - 1}: name one of"
                    " these, or leave it to the key"
                )
        lane = self._lanes.get((routed.topic, number))
        if lane is None:
            lane = self._lanes[routed.topic, number] = _Lane(routed.topic, number)
        return lane

    def _load_topic(self, name: str) -> _Topic:
        deadline = time.monotonic() + self._timeout_s
        found = partitions_of(self._transport, name)
        while found is None and time.monotonic() < deadline:
            # Created as the first send of a Producer creates it; shortly after every broker knows it.
            found = _create_topic(self._transport, name)
        if found is None:
            raise Unreachable(f"topic {name} was created, and no broker knows it after {self._timeout_s:g} s")
        self._topics[name] = found
        return found

    # --- requests ----------------------------------------------------------------------------------------------------

    def _send(self, lane: _Lane) -> None:
        while len(self._sent) >= REQUESTS_MAX or (lane.sent is not None and lane.sent in self._sent):
            self._wait_for_one()
        rows, lane.rows = lane.rows, []
        self._waiting -= lane.size
        lane.size = 0
        lane.sent = self._pool.submit(self._deliver, lane, rows)
        self._sent.add(lane.sent)

    def _wait_for_one(self) -> None:
        done, self._sent = wait(self._sent, return_when=FIRST_COMPLETED)
        for future in done:
            future.result()

    def _deliver(self, lane: _Lane, rows: Sequence[Row]) -> None:
        """Send the rows, in a thread of the pool: until the leader has them all, or the time is over."""
        request = Request(
            "POST",
            f"{wire.messages_path(lane.topic)}?partition={lane.partition}",
            _encode(_Batch(list(rows))),
            _HEADERS,
            repeatable=True,
            leader_of=(lane.topic, lane.partition),
        )
        try:
            answer = decode_answer(self._transport.call(request), _Results)
        except MessageTooLarge as error:
            if len(rows) == 1:
                raise NotWritten(str(lane), f"a message of {len(rows[0].value)} bytes: {error}") from error
            middle = len(rows) // 2
            self._deliver(lane, rows[:middle])
            self._deliver(lane, rows[middle:])
        except PortalMQError as error:
            raise NotWritten(str(lane), f"{error} ({error.code}, tried for {self._timeout_s:g} s at most)") from error
        else:
            refused = [result.error for result in answer.results if result.error is not None]
            if refused or len(answer.results) != len(rows):
                raise NotWritten(str(lane), f"{len(refused)} of {len(rows)}, the first one: {refused[:1]}")


def partitions_of(transport: Transport, name: str) -> _Topic | None:
    """Return the topic's partitions; None when it does not exist. Raises Unreachable, NotWritten."""
    try:
        metadata = transport.metadata([name])
    except PortalMQError as error:
        raise _topic_fault(transport, name, error) from error
    for topic in metadata.topics:
        if topic.name == name:
            return _Topic(len(topic.partitions), topic.first_partitions or len(topic.partitions))
    return None


def _create_topic(transport: Transport, name: str) -> _Topic | None:
    path = f"{wire.topic_path(name)}?first_use=true"  # refused by a cluster that does not create topics on first use
    try:
        transport.call(json_request("PUT", path, {}))
    except TopicExists:
        pass  # another client was first, with settings of its own
    except PortalMQError as error:
        raise _topic_fault(transport, name, error) from error
    found = partitions_of(transport, name)
    if found is None:
        transport.pause(0.1)
    return found


def _topic_fault(transport: Transport, name: str, error: PortalMQError) -> Unreachable | NotWritten:
    if error.code == "unavailable":
        return Unreachable(
            f"no broker answers at {', '.join(transport.urls)}: {error}. Is one running there, and reachable from this"
            " machine? Name several in bootstrap, so that one may be down"
        )
    return NotWritten(name, f"{error} ({error.code})")
