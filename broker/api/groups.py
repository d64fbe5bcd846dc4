"""Groups: their settings and their state. Receiving and settling are in traffic.py."""

from __future__ import annotations

from typing import Any

from flask import Response

from portalmq import wire
from portalmq.broker.api.query import instant_ms
from portalmq.broker.api.room import Room, answer, no_content


def list_all(room: Room) -> Response:
    return answer({"groups": room.domain.list_groups()})


def put(room: Room, group: str) -> Response:
    wire.check_name(group, "group")
    patch = wire.decode_json(room.body(), dict[str, Any])
    start = patch.get("start")
    if isinstance(start, dict) and isinstance(start.get("at"), str):
        patch["start"] = {**start, "at": instant_ms(start["at"], "start.at")}
    description, created = room.domain.put_group(group, patch)
    return answer(description, 201 if created else 200)


def show(room: Room, group: str) -> Response:
    return answer(room.domain.describe_group(wire.check_name(group, "group")))


def delete(room: Room, group: str) -> Response:
    room.domain.delete_group(wire.check_name(group, "group"))
    room.metrics.forget_group(group)
    return no_content()
