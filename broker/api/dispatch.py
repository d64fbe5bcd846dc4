"""Dispatch in front of Flask: for traffic, and for calls from other brokers.

Flask's context, routing and response cost as much as the rest of a small call. Routes marked as traffic, with paths
like /v1/<first>/<name>/<last>, are served here, with the same checks, counts and problem documents as every other
route. All other requests go to Flask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from http import HTTPStatus
from time import perf_counter
from typing import Any

from flask import Flask

from portalmq import wire
from portalmq.broker.api import internal, problems
from portalmq.broker.api.body import close_after_answer, leaves_bytes_unread
from portalmq.broker.api.request_context import RequestContext, ResponseParts
from portalmq.errors import Unauthorized, Unavailable

Environ = dict[str, Any]
StartResponse = Any  # PEP 3333's
WsgiView = Callable[..., Any]  # returns ResponseParts for the context, the environment and the name

_STATUS_LINES = {status.value: f"{status.value} {status.phrase}" for status in HTTPStatus}


def check_caller(context: RequestContext, environ: Environ) -> None:
    """Raise Unauthorized without a needed token, Forbidden for the brokers' credential. Where no token is needed, raise
    Forbidden for requests of web pages of another origin."""
    authorization = environ.get("HTTP_AUTHORIZATION")
    internal.check_no_peer(authorization)
    if not context.auth.needed:
        context.origin_check.check(environ)
    elif not context.auth.allows(authorization):
        raise Unauthorized(
            "one of the broker's tokens is needed: `Authorization: Bearer <token>` in HTTP, token= in Python, "
            "--token-file with commands"
        )


def check_ready(context: RequestContext) -> None:
    """Raise Unavailable while the broker starts or drains."""
    if not context.broker.ready:
        raise Unavailable("the broker is starting or draining: use another, or repeat", retry_after_s=1)


class Dispatcher:
    """The WSGI application of the broker: serves traffic and calls from other brokers, passes the rest to Flask."""

    def __init__(self, app: Flask, context: RequestContext, traffic: Mapping[str, WsgiView]) -> None:
        """`traffic` maps the paths of POST routes to their views."""
        self._flask = app.wsgi_app
        self._context = context
        self._views: dict[tuple[str, str], tuple[str, WsgiView]] = {}
        for path, view in traffic.items():
            match path.split("/"):
                case ["", "v1", first, _, last]:
                    self._views[first, last] = (path, view)

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        try:
            if environ["REQUEST_METHOD"] == "POST":
                parts = path.split("/")
                if len(parts) == 5 and parts[1] == "v1" and parts[3]:
                    found = self._views.get((parts[2], parts[4]))
                    if found is not None:
                        route, view = found
                        answer = partial(self._call_view, view, parts[3], environ)
                        return self._respond(route, environ, start_response, answer)
            if path.startswith(wire.INTERNAL_PATH):
                name = path.removeprefix(wire.INTERNAL_PATH)
                route = path if name in self._context.broker.calls else f"{wire.INTERNAL_PATH}<name>"
                return self._respond(
                    route, environ, start_response, partial(internal.serve, self._context, environ, name)
                )
            return self._flask(environ, start_response)
        finally:
            self._context.bodies.release(environ)

    def _call_view(self, view: WsgiView, name: str, environ: Environ) -> ResponseParts:
        check_caller(self._context, environ)
        check_ready(self._context)
        answer: ResponseParts = view(self._context, environ, _text(name))
        return answer

    def _respond(
        self, route: str, environ: Environ, start_response: StartResponse, view: Callable[[], ResponseParts]
    ) -> Iterable[bytes]:
        started = perf_counter()
        method = environ["REQUEST_METHOD"]
        try:
            answer = view()
        except Exception as fault:  # noqa: BLE001 - the outermost handler
            answer = problems.of_fault(self._context.broker, fault, f"{method} {route}", environ)
        if leaves_bytes_unread(environ):
            close_after_answer(environ)
        self._context.metrics.request(
            route, method if method == "POST" else "any", answer.status, perf_counter() - started
        )
        headers = [
            ("Content-Type", answer.content_type),
            ("Content-Length", str(len(answer.body))),
            *answer.headers,
        ]
        start_response(_STATUS_LINES[answer.status], headers)
        return [] if method == "HEAD" else self._context.answers.sent(environ, answer.body)


def _text(name: str) -> str:
    """Return a name as UTF-8; WSGI decodes paths as Latin-1 (PEP 3333)."""
    return name if name.isascii() else name.encode("latin-1").decode("utf-8", "replace")
