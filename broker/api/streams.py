"""Stream groups: their members, their offsets, and seeking."""

from __future__ import annotations

from flask import Response

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.query import instant_ms
from portalmq.broker.api.request_context import RequestContext, answer, current, may_forward, no_content
from portalmq.broker.api.single_message import idempotency_key_of
from portalmq.errors import InvalidRequest


def join(context: RequestContext, group: str) -> Response:
    """Join a stream group, or repeat the join after a time-out."""
    wire.check_name(group, "group")
    wanted = wire.decode_json(context.body(), contract.JoinRequest)
    peer, forward = peer_of(current()), may_forward(current())
    return answer(context.broker.group_coordinators.join(group, wanted, peer, forward=forward))


def heartbeat(context: RequestContext, group: str, member: str) -> Response:
    """Stay a member of a stream group, and learn the assignment."""
    wanted = wire.decode_json(context.body(), contract.HeartbeatRequest)
    forward = may_forward(current())
    return answer(context.broker.group_coordinators.heartbeat(group, member, wanted.generation, forward=forward))


def leave(context: RequestContext, group: str, member: str) -> Response:
    """Leave a stream group."""
    context.broker.group_coordinators.leave(group, member, forward=may_forward(current()))
    return no_content()


def commit(context: RequestContext, group: str) -> Response:
    """Commit offsets of a member of a stream group."""
    wanted = wire.decode_json(context.body(), contract.CommitOffsetsRequest)
    return answer(context.broker.offsets.commit(group, wanted, forward=may_forward(current())))


def offsets(context: RequestContext, group: str) -> Response:
    """Return the committed offsets of a group and its lag."""
    return answer(context.broker.offsets.of(group))


def seek(context: RequestContext, group: str) -> Response:
    """Move the committed offsets of a group."""
    wanted = wire.decode_json(context.body(), contract.SeekRequest)
    sought = context.broker.group_coordinators.seek(
        group,
        wanted.topic,
        target_of(wanted.to),
        partition=wanted.partition,
        dry_run=wanted.dry_run,
        idempotency_key=idempotency_key_of(current().headers),
        forward=may_forward(current()),
    )
    return answer(sought)


def target_of(to: str | dict[str, int | str]) -> str | dict[str, int]:
    """Return the target of a seek, with a time in Unix milliseconds. Raises InvalidRequest."""
    if isinstance(to, str):
        if to in {"earliest", "latest"}:
            return to
    elif len(to) == 1:
        ((kind, value),) = to.items()
        if kind == "at" and isinstance(value, str):
            return {"at": instant_ms(value, "`to.at`")}
        if kind in {"at", "offset"} and isinstance(value, int) and 0 <= value <= wire.INTEGER_MAX:
            return {kind: value}
    raise InvalidRequest('`to` is "earliest", "latest", {"offset": 17} or {"at": "2026-01-31T12:00:00Z"}')
