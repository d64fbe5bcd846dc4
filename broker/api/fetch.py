"""The bulk path of stream readers: frames of many partitions in one answer."""

from __future__ import annotations

from typing import Any

import msgspec

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.request_context import Answer, Room

_encode = msgspec.msgpack.Encoder().encode


def fetch(room: Room, environ: dict[str, Any]) -> Answer:
    wanted = wire.decode_json(room.body_of(environ), contract.FetchRequest)
    room.answers.check()
    with room.parked(wanted.wait_ms):
        fetched = room.domain.fetching.fetch(wanted, peer_of(environ))
    room.answers.hold_bytes(environ, sum([frame.size_bytes for each in fetched for frame in each.frames]))
    return Answer(_encode({"partitions": fetched}), 200, contract.FRAMES_MSGPACK)
