"""Errors as answers: `application/problem+json` (RFC 9457), for every error."""

from __future__ import annotations

import logging
import math
from http import HTTPStatus

import msgspec
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException
from werkzeug.routing import RequestRedirect

from portalmq import wire
from portalmq.broker.api.http_request import HttpRequest, request_of
from portalmq.broker.api.request_context import ResponseParts
from portalmq.broker.broker import Broker
from portalmq.errors import (
    InvalidRequest,
    MessageTooLarge,
    MethodNotAllowed,
    NotFound,
    PortalMQError,
    Unauthorized,
    UnsupportedMediaType,
)

log = logging.getLogger("portalmq.api")

RETRY_AFTER_STATUSES = frozenset({429, 503})
RETRY_AFTER_DEFAULT_S = 1.0
# A detail may quote the client's input, which may be long.
DETAIL_LENGTH_MAX = 1_000

# Errors of werkzeug and Flask, as errors of the HTTP contract.
_BY_STATUS: dict[int, type[PortalMQError]] = {
    400: InvalidRequest,
    404: NotFound,
    405: MethodNotAllowed,
    413: MessageTooLarge,
    415: UnsupportedMediaType,
}


class InternalError(PortalMQError):
    """A bug in the broker. Whether the request was applied is unknown."""

    code, status, title = "internal", 500, "The broker made a mistake"


def install(app: Flask, broker: Broker) -> None:
    """Register handlers for errors of the framework, and for those that `broker` explains."""

    def answer_fault(fault: Exception) -> Response:
        call = f"{request.method} {request.url_rule or '?'}"
        return of_fault(broker, fault, call, request_of(request.environ)).response()

    app.register_error_handler(HTTPException, answer_http)
    app.register_error_handler(Exception, answer_fault)


def of(error: PortalMQError) -> ResponseParts:
    """Return the answer for `error`."""
    headers: tuple[tuple[str, str], ...] = ()
    if error.status in RETRY_AFTER_STATUSES or error.retry_after_s is not None:
        wait_s = RETRY_AFTER_DEFAULT_S if error.retry_after_s is None else error.retry_after_s
        headers = (("Retry-After", str(max(1, math.ceil(wait_s)))),)
    if isinstance(error, Unauthorized):
        headers = (("WWW-Authenticate", 'Bearer realm="portalmq"'),)
    problem = error.problem()
    if len(error.detail) > DETAIL_LENGTH_MAX:
        problem["detail"] = error.detail[:DETAIL_LENGTH_MAX] + "…"
    return ResponseParts(msgspec.json.encode(problem) + b"\n", error.status, wire.PROBLEM, headers)


def answer_http(fault: HTTPException) -> Response:
    """Return an error of the framework (an unknown path, a wrong method) as a problem document."""
    status = fault.code or 500
    if isinstance(fault, RequestRedirect) or status < 400:
        return fault.get_response()  # type: ignore[return-value]
    cls = _BY_STATUS.get(status)
    response = of(_unnamed(status) if cls is None else cls(_detail(status))).response()
    for name, value in fault.get_headers():
        if name == "Allow":
            response.headers[name] = value
    return response


def of_fault(broker: Broker, fault: Exception, call: str, asked: HttpRequest) -> ResponseParts:
    """Return the answer to a call that raised `fault`. The trace of a bug goes to the log, not to the client."""
    error = broker.explain(fault)
    if error is not None:
        return of(error)
    log.error("%s failed", call, exc_info=fault)
    asked.must_close = True
    sentence = "the broker failed on this request; see the broker's log"
    return of(InternalError(sentence, outcome="unknown", retryable=False))


def _detail(status: int) -> str:
    if status == 404:
        return f"there is nothing at {request.path[:200]!r}"
    if status == 405:
        return f"{request.method[:20]} is not supported at {request.path[:200]!r}; see the Allow header"
    return ""


def _unnamed(status: int) -> PortalMQError:
    """Return an error that the HTTP contract does not name."""
    title = HTTPStatus(status).phrase if status in HTTPStatus._value2member_map_ else "Error"
    named = {"code": title.lower().replace(" ", "_"), "status": status, "title": title}
    error: PortalMQError = type("FrameworkError", (PortalMQError,), named)(
        retryable=False, outcome="not_applied" if status < 500 else "unknown"
    )
    return error
