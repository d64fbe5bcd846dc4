"""The atomic commit of consume, transform, produce: acks of the input and its output in one call, all or nothing.

A commit identifies its input: receipts, or a member's offset. So a commit with an unknown outcome is repeated until it
is answered or its time is over. A repeat gets the answer of the first try, and nothing is published twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from portalmq import wire
from portalmq.message import Message
from portalmq.network.either import settled
from portalmq.producers.outgoing import pack
from portalmq.transport.answers import decode_answer
from portalmq.transport.calls import EitherCalls
from portalmq.transport.request import Request

Output = Mapping[str, Any]

_HEADERS = (("Content-Type", wire.BATCH_MSGPACK), ("Accept", wire.BATCH_MSGPACK))
_OPTIONS = ("partition", "delay_ms", "deliver_at_ms", "ttl_ms")
_FIELDS = {"topic", "value", "value_base64", "key", "key_base64", "headers", "content_type", "priority", *_OPTIONS}


async def commit_receipts(
    transport: EitherCalls, group: str, messages: Sequence[Message], outputs: Iterable[Output]
) -> wire.Committed:
    """Ack messages of one partition and publish `outputs`. Raises StaleReceipt if one of them was acked or leased to
    another consumer, and the error by which a broker refuses an output; then nothing was done."""
    place = partition_of(messages)
    receipts = [message.receipt for message in messages if message.receipt is not None]
    if len(receipts) < len(messages):
        raise ValueError("a message without a receipt was browsed, not received: it has no lease to commit")
    return await send_commit(transport, group, place, wire.PackCommit(publish=packed(outputs), ack=receipts))


async def send_commit(
    transport: EitherCalls, group: str, place: tuple[str, int], commit: wire.PackCommit
) -> wire.Committed:
    """Send a commit to the leader of its partition, repeatedly if need be."""
    path, body = wire.group_path(group, "commit"), msgspec.msgpack.encode(commit)
    request = Request("POST", path, body, _HEADERS, repeatable=True, leader_of=place)
    return decode_answer(await settled(transport.call(request)), wire.Committed)


def partition_of(messages: Sequence[Message]) -> tuple[str, int]:
    """Return the topic and partition of all messages. Raises ValueError if there are several."""
    if not messages:
        raise ValueError("name at least one message to commit")
    places = {(message.topic, message.partition) for message in messages}
    if len(places) > 1:
        raise ValueError(f"the messages are of {len(places)} partitions: commit those of each partition by themselves")
    return places.pop()


def packed(outputs: Iterable[Output]) -> list[wire.PackOutput]:
    """Return the outputs in their wire form. Raises ValueError or TypeError for an invalid one."""
    if isinstance(outputs, Mapping):
        raise TypeError("outputs is a list of messages, each a dict such as {'topic': 't', 'value': b'…'}")
    return [_packed(output, index) for index, output in enumerate(outputs)]


def _packed(output: Output, index: int) -> wire.PackOutput:
    if not isinstance(output, Mapping):
        raise TypeError(f"output {index} is {output!r}: use a dict such as {{'topic': 't', 'value': b'…'}}")
    unknown = set(output) - _FIELDS
    if unknown:
        raise ValueError(f"output {index} has {sorted(map(str, unknown))}; known: {', '.join(sorted(_FIELDS))}")
    topic = wire.check_name(output.get("topic", ""), "topic")
    if ("value" in output) == ("value_base64" in output):
        raise ValueError(f"output {index} needs either value or value_base64")
    message, _ = pack(
        output.get("value", b""),
        output.get("key"),
        output.get("headers"),
        priority=output.get("priority", 0),
        content_type=output.get("content_type"),
    )
    fields = {name: getattr(message, name) for name in ("key", "headers", "content_type", "priority")}
    fields |= {name: output[name] for name in (*_OPTIONS, "key_base64") if output.get(name) is not None}
    if "value_base64" in output:
        return wire.PackOutput(topic=topic, value_base64=output["value_base64"], **fields)
    return wire.PackOutput(topic=topic, value=message.value, **fields)
