"""Topics: create, list, show, alter, delete, purge."""

from __future__ import annotations

from flask import Response, request

from portalmq import wire
from portalmq.broker.api.request_context import Room, answer, no_content, query
from portalmq.broker.api.traffic import may_forward
from portalmq.errors import InvalidRequest


def list_all(room: Room) -> Response:
    return answer({"topics": room.domain.list_topics()})


def create(room: Room, topic: str) -> Response:
    """With ?first_use=true only where a first message would make it too: who produces has that rule from here."""
    wire.check_name(topic, "topic")
    wanted = wire.decode_json(room.body(), wire.CreateTopic)
    if request.args.get("first_use") == "true":
        if wanted != wire.CreateTopic():
            raise InvalidRequest("a topic that is made at its first use has no settings of its own: leave them out")
        room.domain.use_topic(topic)
        return answer(room.domain.describe_topic(topic))
    description, created = room.domain.create_topic(topic, wanted)
    return answer(description, 201 if created else 200)


def show(room: Room, topic: str) -> Response:
    return answer(room.domain.describe_topic(wire.check_name(topic, "topic")))


def alter(room: Room, topic: str) -> Response:
    wire.check_name(topic, "topic")
    forces = query("force").choice("force", "false", "true", "false") == "true"
    return answer(room.domain.alter_topic(topic, wire.decode_json(room.body(), wire.AlterTopic), force=forces))


def delete(room: Room, topic: str) -> Response:
    room.domain.delete_topic(wire.check_name(topic, "topic"))
    room.metrics.forget_topic(topic)
    return no_content()


def purge(room: Room, topic: str) -> Response:
    wire.check_name(topic, "topic")
    parameters = query("partition", "before_offset")
    room.domain.purge(
        topic,
        partition=parameters.number("partition"),
        before_offset=parameters.number("before_offset"),
        forward=may_forward(request.environ),
    )
    return no_content()
