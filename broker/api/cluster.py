"""The broker and its cluster: who is there, who leads what, is it well."""

from __future__ import annotations

from flask import Response, request

from portalmq import wire
from portalmq.broker.api.dispatch import check_caller
from portalmq.broker.api.request_context import Room, answer, query
from portalmq.errors import Forbidden, Unauthorized, Unavailable


def live(room: Room) -> Response:
    """The process answers. Touches nothing else, so that nothing else can make a supervisor restart it."""
    return answer({"status": "ok"})


def ready(room: Room) -> Response:
    """The broker takes calls. Its id is for known callers."""
    _check_ready(room)
    return answer({"status": "ready", "broker_id": room.domain.broker_id} if _is_known(room) else {"status": "ready"})


def health(room: Room) -> Response:
    """What `ready` says, with the single checks for known callers."""
    _check_ready(room)
    return answer({"status": "ready", **room.domain.health()} if _is_known(room) else {"status": "ok"})


def _is_known(room: Room) -> bool:
    """True when the caller may call the routes that are not open, too. Others learn what a load balancer needs."""
    try:
        check_caller(room, request.environ)
    except (Unauthorized, Forbidden):
        return False
    return True


def _check_ready(room: Room) -> None:
    if not room.domain.ready:
        raise Unavailable("the broker is starting or draining: use another, or ask again", retry_after_s=1)


def describe(room: Room) -> Response:
    return answer(room.domain.cluster())


def metadata(room: Room) -> Response:
    topics = query("topics").text("topics")
    names = None if topics is None else [name for name in topics.split(",") if name]
    for name in names or []:
        wire.check_name(name, "topic")
    return answer(room.domain.metadata(names))


def exposition(room: Room) -> Response:
    return Response(room.metrics.exposition(), content_type=room.metrics.content_type)
