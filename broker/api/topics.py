"""Topics: create, list, show, alter, delete, purge."""

from __future__ import annotations

from flask import Response, request

from portalmq import wire
from portalmq.broker.api.query import whole_number
from portalmq.broker.api.request_context import RequestContext, answer, current, may_forward, no_content, query
from portalmq.errors import InvalidRequest


def list_all(context: RequestContext) -> Response:
    return answer({"topics": context.broker.list_topics()})


def create(context: RequestContext, topic: str) -> Response:
    """Create a topic. With ?first_use=true only if a first message would create it too: producers use that rule."""
    wire.check_name(topic, "topic")
    wanted = wire.decode_json(context.body(), wire.CreateTopic)
    if request.args.get("first_use") == "true":
        if wanted != wire.CreateTopic():
            raise InvalidRequest("a topic created at its first use has default settings: leave the settings out")
        context.broker.use_topic(topic)
        return answer(context.broker.describe_topic(topic))
    description, created = context.broker.create_topic(topic, wanted)
    return answer(description, 201 if created else 200)


def show(context: RequestContext, topic: str) -> Response:
    return answer(context.broker.describe_topic(wire.check_name(topic, "topic")))


def alter(context: RequestContext, topic: str) -> Response:
    wire.check_name(topic, "topic")
    forces = query("force").choice("force", "false", "true", "false") == "true"
    return answer(context.broker.alter_topic(topic, wire.decode_json(context.body(), wire.AlterTopic), force=forces))


def delete(context: RequestContext, topic: str) -> Response:
    context.broker.delete_topic(wire.check_name(topic, "topic"))
    context.metrics.forget_topic(topic)
    return no_content()


def digest(context: RequestContext, topic: str, partition: str) -> Response:
    """Return the digest of a part of one replica: all replicas have the same up to the high watermark."""
    wire.check_name(topic, "topic")
    parameters = query("broker", "offset", "below", "batches", "files")
    broker_id = parameters.number("broker")
    return answer(
        context.broker.digests.of_replica(
            topic,
            whole_number(partition, "the partition"),
            context.broker.broker_id if broker_id is None else broker_id,
            offset=parameters.number("offset") or 0,
            below=parameters.number("below") or 0,
            lists=parameters.choice("batches", "false", "true", "false") == "true",
            files=parameters.choice("files", "false", "true", "false") == "true",
        )
    )


def purge(context: RequestContext, topic: str) -> Response:
    wire.check_name(topic, "topic")
    parameters = query("partition", "before_offset")
    context.broker.browser.purge(
        topic,
        partition=parameters.number("partition"),
        before_offset=parameters.number("before_offset"),
        forward=may_forward(current()),
    )
    return no_content()
