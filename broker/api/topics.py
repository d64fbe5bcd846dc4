"""Topics: create, list, show, alter, delete, purge."""

from __future__ import annotations

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api.answers import TopicList
from portalmq.broker.api.query import Parameters, whole_number
from portalmq.broker.api.request_context import RequestContext, answer, current, may_forward, no_content
from portalmq.errors import InvalidRequest
from portalmq.wire import NonNegative


def list_all(context: RequestContext) -> Response:
    """List the topics."""
    return answer(TopicList(context.broker.list_topics()))


class CreateTopicQuery(msgspec.Struct):
    """`first_use`: create the topic only if a first message would create it too: producers use that rule."""

    first_use: bool = False


def create(context: RequestContext, topic: str, query: CreateTopicQuery) -> Response:
    """Create a topic. 200 if it exists with the same settings."""
    wire.check_name(topic, "topic")
    wanted = wire.decode_json(context.body(), wire.CreateTopic)
    if query.first_use:
        if wanted != wire.CreateTopic():
            raise InvalidRequest("a topic created at its first use has default settings: leave the settings out")
        context.broker.use_topic(topic)
        return answer(context.broker.describe_topic(topic))
    description, created = context.broker.create_topic(topic, wanted)
    return answer(description, 201 if created else 200)


def show(context: RequestContext, topic: str) -> Response:
    """Describe a topic: its settings, and its partitions with their leaders and replicas."""
    return answer(context.broker.describe_topic(wire.check_name(topic, "topic")))


class AlterTopicQuery(Parameters):
    """`force`: add partitions even if a group reads the topic in key order."""

    force: bool = False


def alter(context: RequestContext, topic: str, query: AlterTopicQuery) -> Response:
    """Change settings of a topic, or add partitions."""
    wire.check_name(topic, "topic")
    wanted = wire.decode_json(context.body(), wire.AlterTopic)
    return answer(context.broker.alter_topic(topic, wanted, force=query.force))


class DeleteTopicQuery(Parameters):
    """`force`: delete it even while outputs of its commits, or copies of its dead letters, are still to be appended."""

    force: bool = False


def delete(context: RequestContext, topic: str, query: DeleteTopicQuery) -> Response:
    """Delete a topic with its messages."""
    context.broker.delete_topic(wire.check_name(topic, "topic"), force=query.force)
    context.metrics.forget_topic(topic)
    return no_content()


class DigestQuery(Parameters):
    """`broker`: the replica on this broker, by default the one that is asked. `offset`, `below`: the part of the log.
    `batches`: with a digest of each batch. `files`: read from the files."""

    broker: NonNegative | None = None
    offset: NonNegative = 0
    below: NonNegative = 0
    batches: bool = False
    files: bool = False


def digest(context: RequestContext, topic: str, partition: str, query: DigestQuery) -> Response:
    """Return the digest of a part of one replica: all replicas have the same up to the high watermark."""
    wire.check_name(topic, "topic")
    return answer(
        context.broker.digests.of_replica(
            topic,
            whole_number(partition, "the partition"),
            context.broker.broker_id if query.broker is None else query.broker,
            offset=query.offset,
            below=query.below,
            lists=query.batches,
            files=query.files,
        )
    )


class PurgeQuery(Parameters):
    """`before_offset`: purge only messages below it, of the one `partition` if given."""

    partition: NonNegative | None = None
    before_offset: NonNegative | None = None


def purge(context: RequestContext, topic: str, query: PurgeQuery) -> Response:
    """Purge messages of a topic: all, or those below an offset."""
    wire.check_name(topic, "topic")
    context.broker.browser.purge(
        topic,
        partition=query.partition,
        before_offset=query.before_offset,
        forward=may_forward(current()),
    )
    return no_content()
