"""Groups: their settings, their state, their dead letters. Receiving and settling are in traffic.py."""

from __future__ import annotations

from operator import attrgetter
from typing import Annotated, Any

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api import cloud_events
from portalmq.broker.api.answers import DeadLetterPage, DroppedDeadLetters, GroupList, UnfinishedPage
from portalmq.broker.api.outgoing import json_message
from portalmq.broker.api.query import Instant, Parameters, TopicName, instant_ms, read_by, whole_number
from portalmq.broker.api.request_context import RequestContext, accepts, answer, current, may_forward, no_content
from portalmq.broker.cluster.rpc.queues import QueueSize
from portalmq.broker.partition.answer_size import first_of
from portalmq.errors import InvalidRequest
from portalmq.wire import Positive

PAGE = 100
PAGE_MAX = 1_000


def list_all(context: RequestContext) -> Response:
    """List the groups with their counts."""
    return answer(GroupList(context.broker.list_groups()))


class PutGroupQuery(msgspec.Struct):
    """`delivery` applies when this call creates the group; an existing group keeps its own."""

    delivery: str | None = None


def put(context: RequestContext, group: str, query: PutGroupQuery) -> Response:
    """Create or change a group."""
    wire.check_name(group, "group")
    patch = wire.decode_json(context.body(), dict[str, Any])
    start = patch.get("start")
    if isinstance(start, dict) and isinstance(start.get("at"), str):
        patch["start"] = {**start, "at": instant_ms(start["at"], "start.at")}
    initial: dict[str, object] = {} if query.delivery is None else {"delivery": query.delivery}
    description, created = context.broker.put_group(group, patch, initial)
    return answer(description, 201 if created else 200)


class GroupQuery(msgspec.Struct):
    """`at`: the counts of that time, without the settings."""

    at: Instant | None = None


def show(context: RequestContext, group: str, query: GroupQuery) -> Response:
    """Describe a group: its settings and counts; with `at` its counts then, in sum and by partition."""
    wire.check_name(group, "group")
    if query.at is not None:
        return answer(context.broker.group_past.describe(group, query.at))
    return answer(context.broker.describe_group(group))


def _position(text: str, what: str) -> tuple[int, int]:
    partition, dash, offset = text.partition("-")
    if not dash:
        raise InvalidRequest(f"{what} is {text[:100]!r}, but must be the `next` of an earlier page")
    return whole_number(partition, f"the partition of {what}"), whole_number(offset, f"the offset of {what}")


class UnfinishedQuery(Parameters):
    """`limit`: more than 1,000 counts as 1,000. `after`: the `next` of an earlier page. `at`: as it was then, without
    the counts."""

    topic: TopicName
    limit: Positive = PAGE
    after: Annotated[tuple[int, int], read_by(_position, type="string", pattern=r"^\d+-\d+$")] | None = None
    at: Instant | None = None


def list_unfinished(context: RequestContext, group: str, query: UnfinishedQuery) -> Response:
    """List a topic's messages that the group has not done, with their states; the first page has their counts. `next`,
    when there is more, is the `after` of the next page. Changes nothing."""
    wire.check_name(group, "group")
    topic, after, forward = query.topic, query.after, may_forward(current())
    counts: QueueSize | None = None
    if query.at is not None:
        found = context.broker.group_past.messages(group, topic, query.at, after=after, forward=forward)
    else:
        counts = context.broker.queue_sizes.look(group, topic, forward=forward) if after is None else None
        found = context.broker.unfinished.messages(group, topic, after=after, forward=forward)
    first, more = first_of(found, attrgetter("stored.record"), min(query.limit, PAGE_MAX))
    context.make_room([each.stored.record for each in first])
    messages = [
        wire.UnfinishedOut(
            **msgspec.structs.asdict(json_message(each.stored)) | {"delivery_count": each.deliveries},
            state=each.state,
            available_at_ms=each.available_at_ms,
        )
        for each in first
    ]
    unset = msgspec.UNSET
    shown = unset if counts is None else wire.QueueCounts(**msgspec.structs.asdict(counts))
    return answer(UnfinishedPage(messages, shown, messages[-1].id if more else unset))


def delete(context: RequestContext, group: str) -> Response:
    """Delete a group with its state."""
    context.broker.group_admin.delete(wire.check_name(group, "group"))
    context.metrics.forget_group(group)
    return no_content()


def pause(context: RequestContext, group: str, query: Parameters) -> Response:
    """Deliver no messages to the group until it is resumed. A paused group stays as it is."""
    wanted = wire.decode_json(context.body(), wire.PauseRequest)
    name = wire.check_name(group, "group")
    context.broker.group_admin.pause(name, paused=True, reason=wanted.reason, by=wanted.by)
    return no_content()


def resume(context: RequestContext, group: str, query: Parameters) -> Response:
    """Deliver messages to the group again."""
    wanted = wire.decode_json(context.body(), wire.PauseRequest)
    name = wire.check_name(group, "group")
    context.broker.group_admin.pause(name, paused=False, reason=wanted.reason, by=wanted.by)
    return no_content()


def move(context: RequestContext, group: str, query: Parameters) -> Response:
    """Move what the group has ready in a topic to another one."""
    wanted = wire.decode_json(context.body(), wire.MoveRequest)
    for topic in (wanted.topic, wanted.to_topic):
        wire.check_name(topic, "topic")
    name = wire.check_name(group, "group")
    return answer(context.broker.group_moves.move(name, wanted, forward=may_forward(current())))


# --- dead letters -----------------------------------------------------------------------------------------------------


class DeadLettersQuery(Parameters):
    """`limit`: more than 1,000 counts as 1,000. `after`: the `next_after` of an earlier page."""

    topic: TopicName
    limit: Positive = PAGE
    after: str | None = None


def list_dead_letters(context: RequestContext, group: str, query: DeadLettersQuery) -> Response:
    """List dead letters of the group."""
    wire.check_name(group, "group")
    listed = context.broker.dead_letters.page(
        group,
        query.topic,
        limit=min(query.limit, PAGE_MAX),
        after=query.after,
        forward=may_forward(current()),
    )
    context.make_room([stored.record for stored in listed.messages])
    if accepts(wire.CLOUD_EVENTS):
        response = Response(cloud_events.encode_events(listed.messages), content_type=wire.CLOUD_EVENTS)
        if listed.next_after is not None:
            response.headers["PortalMQ-Next-After"] = listed.next_after
        return response
    return answer(DeadLetterPage([json_message(stored) for stored in listed.messages], listed.next_after))


def redrive(context: RequestContext, group: str) -> Response:
    """Deliver dead letters again, to this group alone."""
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


def _ids(text: str, what: str) -> list[str]:
    ids = [each.strip() for each in text.split(",") if each.strip()]
    if not ids:
        raise InvalidRequest(f"{what} is empty: name dead letters as 0-17,0-18, or leave it out to drop all")
    return ids


class DropDeadLettersQuery(Parameters):
    """`ids`: those to drop, separated by commas; by default all of the topic."""

    topic: TopicName
    ids: Annotated[list[str], read_by(_ids, type="string", pattern=r"^ *\d+-\d+ *(, *\d+-\d+ *)*$")] | None = None


def drop_dead_letters(context: RequestContext, group: str, query: DropDeadLettersQuery) -> Response:
    """Drop dead letters."""
    wire.check_name(group, "group")
    dropped = context.broker.dead_letters.drop(group, query.topic, ids=query.ids, forward=may_forward(current()))
    return answer(DroppedDeadLetters(dropped))
