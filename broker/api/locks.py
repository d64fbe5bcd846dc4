"""Locks: list, show, acquire, renew, release."""

from __future__ import annotations

from flask import Response

from portalmq import wire
from portalmq.broker.api.answers import LockList
from portalmq.broker.api.body import leaves_bytes_unread
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.query import Parameters, whole_number
from portalmq.broker.api.request_context import RequestContext, answer, current, no_content
from portalmq.errors import InvalidRequest


def list_all(context: RequestContext) -> Response:
    """List the locks."""
    return answer(LockList(context.broker.locks.list_all()))


def show(context: RequestContext, lock: str) -> Response:
    """Describe a lock."""
    return answer(context.broker.locks.describe(wire.check_name(lock, "lock")))


def acquire(context: RequestContext, lock: str) -> Response:
    """Acquire a lock, or wait for it."""
    wire.check_name(lock, "lock")
    wanted = wire.decode_json(context.body(), wire.LockRequest)
    with context.parked(wanted.wait_ms):
        return answer(context.broker.locks.acquire(lock, wanted, peer_of(current())))


def renew(context: RequestContext, lock: str) -> Response:
    """Renew a lock: its ttl begins again."""
    wire.check_name(lock, "lock")
    return answer(context.broker.locks.renew(lock, wire.decode_json(context.body(), wire.LockRenewal)))


class ReleaseQuery(Parameters):
    owner: str | None = None
    fencing_token: str | None = None


def release(context: RequestContext, lock: str, query: ReleaseQuery) -> Response:
    """Release a lock. Owner and token are in the query, or in a JSON body, which some clients and proxies drop from a
    DELETE."""
    wire.check_name(lock, "lock")
    owner, token = query.owner, query.fencing_token
    if leaves_bytes_unread(current()) and (body := context.body()):
        if owner is not None or token is not None:
            raise InvalidRequest("give owner and fencing_token in the query, or in the body, and not in both")
        wanted = wire.decode_json(body, wire.LockRelease)
    else:
        if not owner or token is None:
            raise InvalidRequest("owner and fencing_token are needed, in the query or in a JSON body")
        if len(owner) > 190:
            raise InvalidRequest("owner has at most 190 characters")
        wanted = wire.LockRelease(owner, whole_number(token, "fencing_token"))
    context.broker.locks.release(lock, wanted)
    return no_content()
