"""Fetch for stream readers: frames of many partitions in one answer."""

from __future__ import annotations

import msgspec

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.api.request_context import RequestContext, ResponseParts

_encode = msgspec.msgpack.Encoder().encode


def fetch(context: RequestContext, request: HttpRequest) -> ResponseParts:
    """Return stored batches of many partitions, for stream clients."""
    wanted = wire.decode_json(context.body_of(request), contract.FetchRequest)
    context.answers.check()
    with context.parked(wanted.wait_ms):
        knows_compressed = "values=zstd" in request.headers.get("accept", "").lower()
        fetched = context.broker.reader_fetch.fetch(wanted, peer_of(request), knows_compressed=knows_compressed)
    context.answers.hold_bytes(request, sum([frame.size_bytes for each in fetched for frame in each.frames]))
    return ResponseParts(_encode({"partitions": fetched}), 200, contract.FRAMES_MSGPACK)
