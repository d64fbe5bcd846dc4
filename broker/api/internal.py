"""Calls between brokers: POST /internal/v1/<name> with MessagePack, authenticated by the cluster's secret.

Tokens of clients are not accepted here, and the secret is not accepted on clients' routes. Calls are served while the
broker starts and drains: followers fetch, and leadership moves, at these times.
"""

from __future__ import annotations

import msgspec

from portalmq import wire
from portalmq.broker.api import problems
from portalmq.broker.api.body import read_body
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.api.request_context import RequestContext, ResponseParts
from portalmq.broker.cluster.peers import CREDENTIAL_SCHEME, check_credential
from portalmq.errors import Forbidden, InvalidRequest, MethodNotAllowed

# A forwarded batch has another encoding, which may be longer than the client's.
BODY_BYTES_MAX = 64 * 1024 * 1024


def serve(context: RequestContext, request: HttpRequest, name: str) -> ResponseParts:
    check_credential(request.headers.get("authorization"), context.broker.cluster_secret)
    if request.client is not None:
        request.client.trust()
    if request.method != "POST":
        refused = problems.of(MethodNotAllowed(f"{request.method[:20]} is not supported here"))
        return refused._replace(headers=(("Allow", "POST"),))
    body = read_body(request, BODY_BYTES_MAX, pause_s=context.config.body_timeout_s)
    try:
        return ResponseParts(context.broker.serve_peer(name, body, peer_of(request)), 200, wire.MSGPACK)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        if not _is_broken(body):
            raise  # the error is not of this body
        raise InvalidRequest(f"the body of {name[:100]!r} is not MessagePack: {fault}") from None


def _is_broken(body: bytes) -> bool:
    try:
        msgspec.msgpack.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return True
    return False


def check_no_peer(authorization: str | None) -> None:
    """Raise Forbidden for the brokers' credential on a route for clients."""
    if authorization is not None and authorization[: len(CREDENTIAL_SCHEME)].lower() == CREDENTIAL_SCHEME.lower():
        raise Forbidden("the brokers' credential is for their own paths only")
