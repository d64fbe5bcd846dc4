"""Groups: their settings, their state, their dead letters. Receiving and settling are in traffic.py."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import msgspec
from flask import Response, request

from portalmq import wire
from portalmq.broker.api.outgoing import json_message
from portalmq.broker.api.query import Query, instant_ms, whole_number
from portalmq.broker.api.request_context import RequestContext, answer, current, may_forward, no_content, query
from portalmq.broker.partition.answer_size import first_of
from portalmq.errors import InvalidRequest

PAGE = 100
PAGE_MAX = 1_000


def list_all(context: RequestContext) -> Response:
    return answer({"groups": context.broker.list_groups()})


def put(context: RequestContext, group: str) -> Response:
    """Create or change a group. `?delivery=` applies when this call creates it; an existing group keeps its own."""
    wire.check_name(group, "group")
    patch = wire.decode_json(context.body(), dict[str, Any])
    start = patch.get("start")
    if isinstance(start, dict) and isinstance(start.get("at"), str):
        patch["start"] = {**start, "at": instant_ms(start["at"], "start.at")}
    delivery = request.args.get("delivery")
    description, created = context.broker.put_group(group, patch, {} if delivery is None else {"delivery": delivery})
    return answer(description, 201 if created else 200)


def show(context: RequestContext, group: str) -> Response:
    return answer(context.broker.describe_group(wire.check_name(group, "group")))


def list_unfinished(context: RequestContext, group: str) -> Response:
    """List a topic's messages that the group has not done, with their states; the first page has their counts. `next`,
    when there is more, is the `after` of the next page. Changes nothing."""
    wire.check_name(group, "group")
    parameters = query("topic", "limit", "after")
    topic = _topic(parameters)
    limit = min(parameters.number("limit", least=1) or PAGE, PAGE_MAX)
    after, forward = _position(parameters.text("after")), may_forward(current())
    counts = context.broker.queue_sizes.look(group, topic, forward=forward) if after is None else None
    found = context.broker.unfinished.messages(group, topic, after=after, forward=forward)
    first, more = first_of(found, attrgetter("stored.record"), limit)
    context.make_room([each.stored.record for each in first])
    messages = [
        wire.UnfinishedOut(
            **msgspec.structs.asdict(json_message(each.stored)) | {"delivery_count": each.deliveries},
            state=each.state,
            available_at_ms=each.available_at_ms,
        )
        for each in first
    ]
    shown: dict[str, Any] = {"messages": messages}
    if counts is not None:
        shown["counts"] = msgspec.structs.asdict(counts)
    if more:
        shown["next"] = messages[-1].id
    return answer(shown)


def _position(after: str | None) -> tuple[int, int] | None:
    if after is None:
        return None
    partition, dash, offset = after.partition("-")
    if not dash:
        raise InvalidRequest(f"after is {after[:100]!r}, but must be the `next` of an earlier page")
    return whole_number(partition, "the partition of after"), whole_number(offset, "the offset of after")


def delete(context: RequestContext, group: str) -> Response:
    context.broker.group_admin.delete(wire.check_name(group, "group"))
    context.metrics.forget_group(group)
    return no_content()


# --- dead letters -----------------------------------------------------------------------------------------------------


def list_dead_letters(context: RequestContext, group: str) -> Response:
    wire.check_name(group, "group")
    parameters = query("topic", "limit", "after")
    listed = context.broker.dead_letters.page(
        group,
        _topic(parameters),
        limit=min(parameters.number("limit", least=1) or PAGE, PAGE_MAX),
        after=parameters.text("after"),
        forward=may_forward(current()),
    )
    context.make_room([stored.record for stored in listed.messages])
    return answer({"messages": [json_message(stored) for stored in listed.messages], "next_after": listed.next_after})


def redrive(context: RequestContext, group: str) -> Response:
    wire.check_name(group, "group")
    wanted = wire.decode_json(context.body(), wire.RedriveRequest)
    wire.check_name(wanted.topic, "topic")
    matched, redriven = context.broker.dead_letters.redrive(
        group,
        wanted.topic,
        ids=wanted.ids,
        where=wanted.where,
        rate_per_s=wanted.rate_per_s,
        dry_run=wanted.dry_run,
        forward=may_forward(current()),
    )
    return answer(wire.Redriven(matched, redriven))


def drop_dead_letters(context: RequestContext, group: str) -> Response:
    """Drop the dead letters with these ids, separated by commas; without ids all of the topic."""
    wire.check_name(group, "group")
    parameters = query("topic", "ids")
    text = parameters.text("ids")
    ids = None if text is None else [each.strip() for each in text.split(",") if each.strip()]
    if ids == []:
        raise InvalidRequest("ids is empty: name dead letters as 0-17,0-18, or leave ids out to drop all")
    topic = _topic(parameters)
    dropped = context.broker.dead_letters.drop(group, topic, ids=ids, forward=may_forward(current()))
    return answer({"dropped": dropped})


def _topic(parameters: Query) -> str:
    topic = parameters.text("topic")
    if topic is None:
        raise InvalidRequest("name the topic: ?topic=<name>")
    return wire.check_name(topic, "topic")
