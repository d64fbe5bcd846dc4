"""Dispatch in front of Flask: for traffic, and for calls from other brokers.

WSGI and Flask's context, routing and response cost more than the rest of a small call. Routes marked as traffic, with
fixed paths or like /v1/<first>/<name>/<last>, are served here, with the same checks, counts and problem documents as
every other route. All other requests go to Flask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from http import HTTPStatus
from time import perf_counter
from typing import Any

from flask import Flask
from werkzeug.wsgi import ClosingIterator

from portalmq import wire
from portalmq.broker.api import internal, problems
from portalmq.broker.api.body import leaves_bytes_unread
from portalmq.broker.api.http_request import HttpRequest, request_of
from portalmq.broker.api.origin_check import is_reading
from portalmq.broker.api.query import decoder_of
from portalmq.broker.api.request_context import RequestContext, ResponseParts
from portalmq.broker.api.route import Route
from portalmq.errors import Forbidden, Unauthorized, Unavailable

Environ = dict[str, Any]
StartResponse = Any  # PEP 3333's
# Queries of traffic are few: their decoded parameters are kept.
QUERIES_KEPT = 256

# POST routes that change nothing.
READING_POSTS = frozenset({"/v1/fetch"})

_STATUS_LINES = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}


def check_caller(context: RequestContext, request: HttpRequest) -> None:
    """Raise Unauthorized without a needed token or session, Forbidden for the brokers' credential, and for a change by
    a token that may only read. Where no token is needed, or a session stands for it, raise Forbidden for requests of
    web pages of another origin."""
    authorization = request.headers.get("authorization")
    internal.check_no_peer(authorization)
    if not context.auth.needed:
        context.origin_check.check(request)
        return
    access = context.auth.access(authorization)
    if access is None and authorization is None:
        access = context.auth.sessions.access(request.headers.get("cookie", ""))
        if access is not None:
            context.origin_check.check_session(request)
    if access is None:
        raise Unauthorized(
            "one of the broker's tokens is needed: `Authorization: Bearer <token>` in HTTP, token= in Python, "
            "--token-file with commands"
        )
    if access == "read" and not is_reading(request) and request.path not in READING_POSTS:
        raise Forbidden(
            "this token may read messages and settings, and neither change anything nor run SQL: use a full token"
        )


def check_ready(context: RequestContext) -> None:
    """Raise Unavailable while the broker starts or drains."""
    if not context.broker.ready:
        raise Unavailable("the broker is starting or draining: use another, or repeat", retry_after_s=1)


class _TrafficRoute:
    """A route that is served without Flask."""

    __slots__ = ("_parameters_of", "_view", "path")

    def __init__(self, route: Route) -> None:
        self.path = route.path
        self._view: Callable[..., Any] = route.view
        self._parameters_of = None if route.query is None else lru_cache(QUERIES_KEPT)(decoder_of(route.query))

    def serve(self, context: RequestContext, request: HttpRequest, *names: str) -> ResponseParts:
        check_caller(context, request)
        check_ready(context)
        if self._parameters_of is None:
            answer: ResponseParts = self._view(context, request, *names)
        else:
            answer = self._view(context, request, *names, query=self._parameters_of(request.query))
        return answer


class Dispatcher:
    """The application of the broker. `answer` serves traffic and calls from other brokers; as a WSGI application, the
    same and, by Flask, every other route."""

    def __init__(self, app: Flask, context: RequestContext, routes: Iterable[Route]) -> None:
        self._flask = app.wsgi_app
        self._context = context
        self._traffic: dict[tuple[str, str], _TrafficRoute] = {}
        for route in routes:
            if route.is_traffic:
                match route.path.split("/"):
                    case ["", "v1", first, _, last]:
                        self._traffic[first, last] = _TrafficRoute(route)
                    case _:
                        self._traffic[route.path, ""] = _TrafficRoute(route)

    def answer(self, request: HttpRequest) -> ResponseParts | None:
        """Return the answer, or None if Flask serves the route. Call `sent` when the answer is sent."""
        path = request.path
        if request.method == "POST":
            parts = path.split("/")
            if len(parts) == 5 and parts[1] == "v1" and parts[3]:
                found = self._traffic.get((parts[2], parts[4]))
                if found is not None:
                    return self._counted(request, found.path, found.serve, _text(parts[3]))
            elif (found := self._traffic.get((path, ""))) is not None:
                return self._counted(request, path, found.serve)
        if path.startswith(wire.INTERNAL_PATH):
            name = path.removeprefix(wire.INTERNAL_PATH)
            route = path if name in self._context.broker.calls else f"{wire.INTERNAL_PATH}<name>"
            return self._counted(request, route, internal.serve, name)
        return None

    def sent(self, request: HttpRequest) -> None:
        """Release the room of an answer that is sent, or whose client is gone."""
        if request.answer_bytes_held:
            self._context.answers.release(request)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        request = request_of(environ)
        answer = self.answer(request)
        if answer is None:
            try:
                return self._flask(environ, start_response)
            finally:
                self._context.bodies.release(request)
        headers = [("Content-Type", answer.content_type), ("Content-Length", str(len(answer.body))), *answer.headers]
        start_response(status_line(answer.status), headers)
        body = [] if request.method == "HEAD" else [answer.body]
        return ClosingIterator(body, lambda: self.sent(request))

    def _counted(
        self, request: HttpRequest, route: str, serve: Callable[..., ResponseParts], *arguments: Any
    ) -> ResponseParts:
        started = perf_counter()
        method = request.method
        context = self._context
        try:
            answer = serve(context, request, *arguments)
        except Exception as fault:  # noqa: BLE001 - the outermost handler
            answer = problems.of_fault(context.broker, fault, f"{method} {route}", request)
        finally:
            context.bodies.release(request)
        if leaves_bytes_unread(request):
            request.must_close = True
        context.metrics.request(route, method if method == "POST" else "any", answer.status, perf_counter() - started)
        return answer


def status_line(status: int) -> str:
    return _STATUS_LINES[status]


def _text(name: str) -> str:
    """Return a name as UTF-8; paths are decoded as Latin-1 (PEP 3333)."""
    return name if name.isascii() else name.encode("latin-1").decode("utf-8", "replace")
