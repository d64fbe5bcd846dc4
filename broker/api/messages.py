"""Messages: browse a partition, follow its tail, read a whole topic, list what is scheduled. (Produce: traffic.py.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Annotated, Any, Literal

import msgspec
from flask import Response, request

from portalmq import wire
from portalmq.broker.api import cloud_events, outgoing
from portalmq.broker.api.answers import ScheduledPage, TopicMessages, TracePage
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.query import Instant, Parameters, place_of_id, read_by, whole_number
from portalmq.broker.api.request_context import (
    RequestContext,
    accepts,
    answer,
    answer_packed,
    current,
    may_forward,
    no_content,
)
from portalmq.broker.cluster.rpc.messages import SchedulePosition
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.messages.scheduled import BEGINNING
from portalmq.broker.partition.answer_size import blocks_of, first_of
from portalmq.broker.queues.message_traces import EVENTS_MAX
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, Unavailable
from portalmq.wire import NonNegative, Positive, WaitMs

BROWSE_MESSAGES = 100
TAIL_COMMENT_MS = 15_000
TAIL_RETRY_MS = 1_000

_record_of = attrgetter("record")
_encode_json = msgspec.json.Encoder().encode


# --- browse ----------------------------------------------------------------------------------------------------------


def _start(text: str, what: str) -> int | str:
    if text in {"earliest", "latest"}:
        return text
    return whole_number(text, f"{what} (a number, earliest or latest)")


class BrowseQuery(Parameters):
    """`offset`, or the time `at`: the first message; by default the earliest. `limit`: more than 1,000 counts as 1,000.
    `wait_ms`: how long to wait for a message."""

    offset: Annotated[NonNegative | Literal["earliest", "latest"], read_by(_start)] | None = None
    at: Instant | None = None
    limit: Positive = BROWSE_MESSAGES
    wait_ms: WaitMs = 0


def browse(context: RequestContext, topic: str, partition: str, query: BrowseQuery) -> Response:
    """Read messages of a partition from an offset or a time on. Consumes nothing. As `text/event-stream` it follows the
    end of the partition; `Last-Event-ID` resumes."""
    wire.check_name(topic, "topic")
    number = whole_number(partition, "the partition")
    if query.at is not None and query.offset is not None:
        raise InvalidRequest("give offset, or at, and not both")
    as_event, as_events = accepts(wire.CLOUD_EVENT), accepts(wire.CLOUD_EVENTS)
    limit, wait_ms = 1 if as_event else min(query.limit, wire.BROWSE_MESSAGES_MAX), query.wait_ms
    forward = may_forward(current())
    start: dict[str, Any] = {"offset": None, "position": None, "at_ms": query.at}
    start["position" if isinstance(query.offset, str) else "offset"] = query.offset
    if accepts(wire.EVENT_STREAM):
        return _tail(context, topic, number, start, forward)
    with context.parked(wait_ms):
        peer = peer_of(current())
        page = context.broker.browser.browse(
            topic, number, **start, limit=limit, wait_ms=wait_ms, peer=peer, forward=forward
        )
    context.make_room(map(_record_of, page.messages))
    if accepts(wire.NDJSON) or as_event or as_events:
        if as_event:
            response = _single_event(page.messages)
        elif as_events:
            response = Response(cloud_events.encode_events(page.messages), content_type=wire.CLOUD_EVENTS)
        else:
            response = Response(b"".join(map(outgoing.json_line, page.messages)), content_type=wire.NDJSON)
        response.headers["PortalMQ-Next-Offset"] = str(page.next_offset)
        response.headers["PortalMQ-High-Watermark"] = str(page.high_watermark)
        return response
    packed = accepts(wire.BATCH_MSGPACK)
    body = outgoing.encode_page(page, packed=packed)
    return answer_packed(body) if packed else Response(body, content_type=wire.JSON)


def _single_event(messages: list[StoredMessage]) -> Response:
    if not messages:
        return no_content()
    return Response(cloud_events.encode_event(messages[0]), content_type=wire.CLOUD_EVENT)


def _tail(context: RequestContext, topic: str, partition: int, start: dict[str, Any], forward: bool) -> Response:
    """Stream the partition as server-sent events, until the client disconnects or the broker drains."""
    last_id = current().headers.get("last-event-id")
    if last_id:
        start = {"offset": whole_number(last_id, "Last-Event-ID") + 1, "position": None, "at_ms": None}
    peer = peer_of(current())
    # The first page is read before the answer begins, so that a wrong topic or offset is answered with a problem.
    read = partial(context.broker.browser.browse, topic, partition, limit=BROWSE_MESSAGES, peer=peer, forward=forward)
    page = read(**start)

    def events(page: Any) -> Iterator[bytes]:
        yield b"retry: %d\n\n" % TAIL_RETRY_MS
        while True:
            if page.messages:
                yield b"".join(map(outgoing.server_sent_event, page.messages))
            elif not context.broker.ready or (peer is not None and peer.gone()):
                return
            else:
                yield b": still here\n\n"
            try:
                page = read(offset=page.next_offset, wait_ms=TAIL_COMMENT_MS)
            except Exception as fault:
                error = context.broker.explain(fault)
                if error is None:
                    raise
                if not isinstance(error, Unavailable):  # else draining: the client resumes from its last event's id
                    yield b"event: error\ndata: %s\n\n" % _encode_json(error.problem())
                return

    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if request.method == "HEAD":
        return Response(b"", content_type=wire.EVENT_STREAM, headers=headers)
    # Count the waiting call before the answer begins, while it can still be refused, until the answer ends.
    slot = ExitStack()
    slot.enter_context(context.parked(TAIL_COMMENT_MS))
    response = Response(events(page), content_type=wire.EVENT_STREAM, headers=headers)
    response.call_on_close(slot.close)
    return response


class ReadAllQuery(Parameters):
    limit: Positive | None = None


def read_all(context: RequestContext, topic: str, query: ReadAllQuery) -> Response:
    """Return every message of the topic: streamed as NDJSON, or a page of at most 1,000 with `more`."""
    wire.check_name(topic, "topic")
    limit, forward = query.limit, may_forward(current())
    if accepts(wire.NDJSON):
        lines = _lines(context.broker.browser.read_all(topic, limit, forward=forward))
        return Response(b"" if request.method == "HEAD" else context.streamed(lines), content_type=wire.NDJSON)
    size = min(limit or wire.BROWSE_MESSAGES_MAX, wire.BROWSE_MESSAGES_MAX)
    stored, more = first_of(context.broker.browser.read_all(topic, size + 1, forward=forward), _record_of, size)
    context.make_room(map(_record_of, stored))
    if accepts(wire.CLOUD_EVENTS):
        response = Response(cloud_events.encode_events(stored), content_type=wire.CLOUD_EVENTS)
        response.headers["PortalMQ-More"] = str(more).lower()
        return response
    return answer(TopicMessages([outgoing.json_message(each) for each in stored], more))


def _lines(messages: Iterator[Any]) -> Iterator[bytes]:
    """Return lines in blocks, each of which is one write. The first block is read at once: a missing topic is answered
    with a problem."""
    blocks = blocks_of(messages, _record_of, BROWSE_MESSAGES)
    first = next(blocks, [])
    return (b"".join(map(outgoing.json_line, block)) for block in chain([first], blocks) if block)


# --- trace -----------------------------------------------------------------------------------------------------------


class TraceQuery(Parameters):
    """`after`: the `next` of an earlier page. `limit`: more than 1,000 counts as 1,000. `local`: as this broker's own
    replica knows it, also as a follower."""

    after: NonNegative = 0
    limit: Positive = EVENTS_MAX
    local: bool = False


def trace(context: RequestContext, topic: str, message_id: str, query: TraceQuery) -> Response:
    """Tell the life of a message: who appended it, who got it and when, and what became of it."""
    wire.check_name(topic, "topic")
    number, offset = place_of_id(message_id)
    found = context.broker.message_traces.trace(
        topic,
        number,
        offset,
        after=query.after,
        limit=min(query.limit, EVENTS_MAX),
        local=query.local,
        forward=may_forward(current()),
    )
    record = found.record or Record(b"", "")
    if found.record is not None:
        context.make_room([record])
    message = outgoing.json_message(StoredMessage(topic, number, offset, found.timestamp_ms, record))
    if found.record is None:  # it is purged
        message.value = msgspec.UNSET
    unset = msgspec.UNSET
    following = unset if found.next is None else found.next
    incomplete_below = unset if found.incomplete_below is None else found.incomplete_below
    return answer(TracePage(message, found.events, found.replicas, found.as_of, following, incomplete_below))


# --- scheduled -------------------------------------------------------------------------------------------------------


def _due(text: str, what: str) -> SchedulePosition:
    parts = text.split("-")
    if len(parts) != 3:
        raise InvalidRequest(f"{what} is {text[:100]!r}, but must be the `next` of an earlier page")
    return SchedulePosition(*[whole_number(part, f"each number of {what}") for part in parts])


class ScheduledQuery(Parameters):
    """`limit`: more than 1,000 counts as 1,000. `after`: the `next` of an earlier page."""

    limit: Positive = BROWSE_MESSAGES
    after: Annotated[SchedulePosition, read_by(_due, type="string", pattern=r"^\d{1,15}-\d{1,15}-\d{1,15}$")] = (
        BEGINNING
    )


def list_scheduled(context: RequestContext, topic: str, query: ScheduledQuery) -> Response:
    """List scheduled messages, the next due first; `next`, when there is more, is the `after` of the next page."""
    wire.check_name(topic, "topic")
    limit = min(query.limit, wire.BROWSE_MESSAGES_MAX)
    page = context.broker.scheduled_messages.page(topic, after=query.after, limit=limit, forward=may_forward(current()))
    context.make_room(map(_record_of, page.messages))
    shown = [outgoing.json_message(stored) for stored in page.messages]
    return answer(ScheduledPage(shown, msgspec.UNSET if page.after is None else str(page.after)))


def cancel_scheduled(context: RequestContext, topic: str, message_id: str, query: Parameters) -> Response:
    """Cancel a scheduled message: it is not delivered."""
    wire.check_name(topic, "topic")
    number, offset = place_of_id(message_id)
    context.broker.scheduled_messages.cancel(topic, number, offset, forward=may_forward(current()))
    return no_content()


# --- producers -------------------------------------------------------------------------------------------------------


def new_producer(context: RequestContext) -> Response:
    """Return an identity for an idempotent producer. One with a name fences the earlier ones of that name."""
    named = wire.decode_json(context.body(), wire.ProducerIdRequest)
    if named.name is not None:
        wire.check_name(named.name, "producer")
    elif named.instance or named.renews:
        raise InvalidRequest("instance and renews belong to a named producer: give its name")
    return answer(context.broker.new_producer(named.name, instance=named.instance, renews=named.renews))
