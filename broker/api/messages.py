"""Messages: browse a partition, follow its tail, read a whole topic, list what is scheduled. (Produce: traffic.py.)"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any

import msgspec
from flask import Response, request

from portalmq import wire
from portalmq.broker.api import outgoing
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.query import whole_number
from portalmq.broker.api.request_context import (
    RequestContext,
    accepts,
    answer,
    answer_packed,
    current,
    may_forward,
    no_content,
    query,
)
from portalmq.broker.cluster.rpc.messages import SchedulePosition
from portalmq.broker.messages.scheduled import BEGINNING
from portalmq.broker.partition.answer_size import blocks_of, first_of
from portalmq.errors import InvalidRequest, Unavailable

BROWSE_MESSAGES = 100
TAIL_COMMENT_MS = 15_000
TAIL_RETRY_MS = 1_000

_record_of = attrgetter("record")
_encode_json = msgspec.json.Encoder().encode


# --- browse ----------------------------------------------------------------------------------------------------------


def browse(context: RequestContext, topic: str, partition: str) -> Response:
    wire.check_name(topic, "topic")
    number = whole_number(partition, "the partition")
    parameters = query("offset", "at", "limit", "wait_ms")
    offset, position = _start(parameters.text("offset"))
    at_ms = parameters.instant_ms("at")
    if at_ms is not None and (offset is not None or position is not None):
        raise InvalidRequest("give offset, or at, and not both")
    limit = min(parameters.number("limit", least=1) or BROWSE_MESSAGES, wire.BROWSE_MESSAGES_MAX)
    wait_ms = parameters.number("wait_ms") or 0
    if wait_ms > wire.WAIT_MS_MAX:
        raise InvalidRequest(f"wait_ms is {wait_ms}, but must be at most {wire.WAIT_MS_MAX}")
    forward = may_forward(current())
    start: dict[str, Any] = {"offset": offset, "position": position, "at_ms": at_ms}
    if accepts(wire.EVENT_STREAM):
        return _tail(context, topic, number, start, forward)
    with context.parked(wait_ms):
        peer = peer_of(current())
        page = context.broker.browser.browse(
            topic, number, **start, limit=limit, wait_ms=wait_ms, peer=peer, forward=forward
        )
    context.make_room(map(_record_of, page.messages))
    if accepts(wire.NDJSON):
        response = Response(b"".join(map(outgoing.json_line, page.messages)), content_type=wire.NDJSON)
        response.headers["PortalMQ-Next-Offset"] = str(page.next_offset)
        response.headers["PortalMQ-High-Watermark"] = str(page.high_watermark)
        return response
    packed = accepts(wire.BATCH_MSGPACK)
    body = outgoing.encode_page(page, packed=packed)
    return answer_packed(body) if packed else Response(body, content_type=wire.JSON)


def _start(text: str | None) -> tuple[int | None, str | None]:
    if text is None or text in {"earliest", "latest"}:
        return None, text
    return whole_number(text, "offset (a number, earliest or latest)"), None


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


def read_all(context: RequestContext, topic: str) -> Response:
    """Return every message of the topic: streamed as NDJSON, or a page of at most 1,000 with `more`."""
    wire.check_name(topic, "topic")
    limit = query("limit").number("limit", least=1)
    forward = may_forward(current())
    if accepts(wire.NDJSON):
        lines = _lines(context.broker.browser.read_all(topic, limit, forward=forward))
        return Response(b"" if request.method == "HEAD" else context.streamed(lines), content_type=wire.NDJSON)
    size = min(limit or wire.BROWSE_MESSAGES_MAX, wire.BROWSE_MESSAGES_MAX)
    stored, more = first_of(context.broker.browser.read_all(topic, size + 1, forward=forward), _record_of, size)
    context.make_room(map(_record_of, stored))
    return answer({"messages": [outgoing.json_message(each) for each in stored], "more": more})


def _lines(messages: Iterator[Any]) -> Iterator[bytes]:
    """Return lines in blocks, each of which is one write. The first block is read at once: a missing topic is answered
    with a problem."""
    blocks = blocks_of(messages, _record_of, BROWSE_MESSAGES)
    first = next(blocks, [])
    return (b"".join(map(outgoing.json_line, block)) for block in chain([first], blocks) if block)


# --- scheduled -------------------------------------------------------------------------------------------------------


def list_scheduled(context: RequestContext, topic: str) -> Response:
    """List scheduled messages, the next due first; `next`, when there is more, is the `after` of the next page."""
    wire.check_name(topic, "topic")
    parameters = query("limit", "after")
    limit = min(parameters.number("limit", least=1) or BROWSE_MESSAGES, wire.BROWSE_MESSAGES_MAX)
    after = _due(parameters.text("after"))
    page = context.broker.scheduled_messages.page(topic, after=after, limit=limit, forward=may_forward(current()))
    context.make_room(map(_record_of, page.messages))
    shown: dict[str, Any] = {"messages": [outgoing.json_message(stored) for stored in page.messages]}
    if page.after is not None:
        shown["next"] = str(page.after)
    return answer(shown)


def _due(text: str | None) -> SchedulePosition:
    if text is None:
        return BEGINNING
    parts = text.split("-")
    if len(parts) != 3:
        raise InvalidRequest(f"after is {text[:100]!r}, but must be the `next` of an earlier page")
    return SchedulePosition(*[whole_number(part, "each number of after") for part in parts])


def cancel_scheduled(context: RequestContext, topic: str, message_id: str) -> Response:
    wire.check_name(topic, "topic")
    query()
    number, _, offset = message_id.partition("-")
    context.broker.scheduled_messages.cancel(
        topic,
        whole_number(number, "the partition of a message's id (<partition>-<offset>)"),
        whole_number(offset, "the offset of a message's id (<partition>-<offset>)"),
        forward=may_forward(current()),
    )
    return no_content()


# --- producers -------------------------------------------------------------------------------------------------------


def new_producer(context: RequestContext) -> Response:
    named = wire.decode_json(context.body(), wire.ProducerIdRequest)
    if named.name is not None:
        wire.check_name(named.name, "producer")
    elif named.instance or named.renews:
        raise InvalidRequest("instance and renews belong to a named producer: give its name")
    return answer(context.broker.new_producer(named.name, instance=named.instance, renews=named.renews))
