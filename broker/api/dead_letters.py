"""Dead letters of a group: list, redrive, drop."""

from __future__ import annotations

from flask import Response, request

from portalmq import wire
from portalmq.broker.api.outgoing import json_message
from portalmq.broker.api.query import Query
from portalmq.broker.api.request_context import RequestContext, answer, may_forward, query
from portalmq.errors import InvalidRequest

LIMIT = 100
LIMIT_MAX = 1_000


def list_some(context: RequestContext, group: str) -> Response:
    wire.check_name(group, "group")
    parameters = query("topic", "limit", "after")
    limit = parameters.number("limit", least=1)
    listed = context.broker.dead_letters.page(
        group,
        _topic(parameters),
        limit=min(LIMIT if limit is None else limit, LIMIT_MAX),
        after=parameters.text("after"),
        forward=may_forward(request.environ),
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
        forward=may_forward(request.environ),
    )
    return answer(wire.Redriven(matched, redriven))


def drop(context: RequestContext, group: str) -> Response:
    """Drop the dead letters with these ids, separated by commas; without ids all of the topic."""
    wire.check_name(group, "group")
    parameters = query("topic", "ids")
    text = parameters.text("ids")
    ids = None if text is None else [each.strip() for each in text.split(",") if each.strip()]
    if ids == []:
        raise InvalidRequest("ids is empty: name dead letters as 0-17,0-18, or leave ids out to drop all")
    topic = _topic(parameters)
    dropped = context.broker.dead_letters.drop(group, topic, ids=ids, forward=may_forward(request.environ))
    return answer({"dropped": dropped})


def _topic(parameters: Query) -> str:
    topic = parameters.text("topic")
    if topic is None:
        raise InvalidRequest("name the topic: ?topic=<name>")
    return wire.check_name(topic, "topic")
