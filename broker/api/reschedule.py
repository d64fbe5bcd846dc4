"""Changes of scheduled messages: run now, move to another time, cancel; one by its id, or many by a predicate."""

from __future__ import annotations

from typing import TypeVar

from flask import Response

from portalmq import wire
from portalmq.broker.api import schedule
from portalmq.broker.api.answers import CancelledMessages, MovedMessage, RunMessages
from portalmq.broker.api.query import Parameters, place_of_id
from portalmq.broker.api.request_context import RequestContext, answer, current, may_forward, no_content
from portalmq.broker.messages.scheduled import ScheduleChange
from portalmq.broker.partition.yielding import in_turns
from portalmq.errors import InvalidRequest

S = TypeVar("S", bound=wire.ScheduledSelection)

IDS_A_TURN = 1_000


def run(context: RequestContext, topic: str, message_id: str, query: Parameters) -> Response:
    """Deliver the message now. Its copy does so; it has a new id."""
    _move(context, topic, message_id, 0)
    return no_content()


def move(context: RequestContext, topic: str, message_id: str, query: Parameters) -> Response:
    """Deliver the message at another time. Its copy does so; it has a new id."""
    time = wire.decode_json(context.body(), wire.DeliveryTime)
    deliver_at_ms = _time(time.delay_ms, time.deliver_at_ms, context.broker.wall_ms())
    _move(context, topic, message_id, deliver_at_ms)
    return answer(MovedMessage(f"{topic}/{message_id}", deliver_at_ms or context.broker.wall_ms()))


def _move(context: RequestContext, topic: str, message_id: str, deliver_at_ms: int) -> None:
    wire.check_name(topic, "topic")
    number, offset = place_of_id(message_id)
    context.broker.scheduled_messages.move(topic, number, offset, deliver_at_ms, forward=may_forward(current()))


def _time(delay_ms: int | None, deliver_at_ms: int | None, now_ms: int) -> int:
    """Return the new time of delivery, 0 for now."""
    if delay_ms is None and deliver_at_ms is None:
        raise InvalidRequest("name the time: deliver_at_ms, or delay_ms")
    at_ms, _ = schedule.moments(delay_ms, deliver_at_ms, None, now_ms, "the message")
    return at_ms if at_ms is not None and at_ms > now_ms else 0


def run_many(context: RequestContext, topic: str, query: Parameters) -> Response:
    """Deliver scheduled messages now: copies of them, with new ids."""
    matched, done = _change(context, topic, _selected(context, topic, wire.ScheduledSelection), ScheduleChange())
    return answer(RunMessages(matched, done))


def move_many(context: RequestContext, topic: str, query: Parameters) -> Response:
    """Deliver scheduled messages at another time: copies of them, with new ids."""
    wanted = _selected(context, topic, wire.MoveScheduled)
    deliver_at_ms = _time(wanted.delay_ms, wanted.deliver_at_ms, context.broker.wall_ms())
    matched, done = _change(context, topic, wanted, ScheduleChange(deliver_at_ms))
    return answer(wire.Moved(matched, done))


def cancel_many(context: RequestContext, topic: str, query: Parameters) -> Response:
    """Cancel scheduled messages: they are not delivered."""
    wanted = _selected(context, topic, wire.ScheduledSelection)
    matched, done = _change(context, topic, wanted, ScheduleChange(cancels=True))
    return answer(CancelledMessages(matched, done))


def _selected(context: RequestContext, topic: str, kind: type[S]) -> S:
    wire.check_name(topic, "topic")
    return wire.decode_json(context.body(), kind)


def _change(
    context: RequestContext, topic: str, wanted: wire.ScheduledSelection, change: ScheduleChange
) -> tuple[int, int]:
    ids = None
    if wanted.ids is not None:
        ids = [place_of_id(each) for each in in_turns(list(dict.fromkeys(wanted.ids)), IDS_A_TURN)]
    how = change._replace(ids=ids, where=wanted.where, limit=wanted.limit, dry_run=wanted.dry_run)
    return context.broker.scheduled_messages.change(topic, how, forward=may_forward(current()))
