"""Groups: settings, receive, and what is done with a receipt."""

from __future__ import annotations

from typing import Any

from flask import Response, request

from portalmq import wire
from portalmq.broker.api import outgoing
from portalmq.broker.api.peer import peer_of
from portalmq.broker.api.room import Room, accepts, answer, answer_packed, no_content
from portalmq.errors import StaleReceipt


def list_all(room: Room) -> Response:
    return answer({"groups": room.domain.list_groups()})


def put(room: Room, group: str) -> Response:
    wire.check_name(group, "group")
    description, created = room.domain.put_group(group, wire.decode_json(room.body(), dict[str, Any]))
    return answer(description, 201 if created else 200)


def show(room: Room, group: str) -> Response:
    return answer(room.domain.describe_group(wire.check_name(group, "group")))


def delete(room: Room, group: str) -> Response:
    room.domain.delete_group(wire.check_name(group, "group"))
    room.metrics.forget_group(group)
    return no_content()


def receive(room: Room, group: str) -> Response:
    wire.check_name(group, "group")
    wanted = wire.decode_json(room.body(), wire.ReceiveRequest)
    for topic in wanted.topics:
        wire.check_name(topic, "topic")
    with room.parked(wanted.wait_ms):
        delivered = room.domain.receive(group, wanted, peer_of(request.environ))
    packed = accepts(wire.BATCH_MSGPACK)
    body = outgoing.encode_received(delivered, packed=packed)
    return answer_packed(body) if packed else Response(body, content_type=wire.JSON)


def ack(room: Room, group: str) -> Response:
    wire.check_name(group, "group")
    wanted = wire.decode_json(room.body(), wire.AckRequest)
    return _settled(wanted.receipts, room.domain.ack(group, wanted.receipts))


def nack(room: Room, group: str) -> Response:
    wire.check_name(group, "group")
    wanted = wire.decode_json(room.body(), wire.NackRequest)
    return _settled(wanted.receipts, room.domain.nack(group, wanted.receipts, wanted.delay_ms, wanted.reason))


def extend(room: Room, group: str) -> Response:
    wire.check_name(group, "group")
    wanted = wire.decode_json(room.body(), wire.ExtendRequest)
    return _settled(wanted.receipts, room.domain.extend(group, wanted.receipts, wanted.visibility_timeout_ms))


def _settled(receipts: list[str], applied: list[bool]) -> Response:
    results = [
        wire.ReceiptResult(receipt, "ok" if ok else "stale_receipt")
        for receipt, ok in zip(receipts, applied, strict=True)
    ]
    if not all(applied):
        raise StaleReceipt(
            f"{applied.count(False)} of {len(applied)} leases have passed on; `results` tells which were applied",
            outcome="partial",
            results=results,
        )
    return answer(wire.ReceiptResults(results))
