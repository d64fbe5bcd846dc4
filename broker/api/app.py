"""The Flask application: registers the route table, checks callers before every route, counts requests after it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from importlib.metadata import version
from time import perf_counter

import msgspec
from flask import Flask, Response, g, request
from werkzeug.routing import Map

from portalmq.broker.api import problems
from portalmq.broker.api.body import leaves_bytes_unread
from portalmq.broker.api.dispatch import Dispatcher, check_caller, check_ready
from portalmq.broker.api.openapi import describe
from portalmq.broker.api.query import decoder_of
from portalmq.broker.api.request_context import Authorizer, HttpSettings, RequestContext, ResponseParts, current
from portalmq.broker.api.route import Route
from portalmq.broker.api.routes import ROUTES
from portalmq.broker.broker import Broker
from portalmq.broker.messages.metrics import Metrics


def create_app(
    broker: Broker,
    config: HttpSettings,
    metrics: Metrics,
    auth: Authorizer,
    *,
    more: Sequence[Route] = (),
    pages: Sequence[Route] = (),
) -> Flask:
    """Return the WSGI application of a broker: the routes of the table, those in `more`, and those of `pages`, which
    the description of the API leaves out."""
    context = RequestContext(broker, config, metrics, auth)
    metrics.waiting = lambda: context.waiting
    app = Flask(__name__, static_folder=None)
    open_endpoints, early_endpoints = set(), set()
    routes = (*ROUTES, *more)
    context.description = cache(
        lambda: msgspec.json.encode(describe(routes, version("portalmq"), needs_token=auth.needed))
    )
    app.url_map = _url_map(tuple((route.method, route.path) for route in (*routes, *pages)))
    for route in (*routes, *pages):
        endpoint = _endpoint(route.method, route.path)
        app.view_functions[endpoint] = partial(_respond, route, context)
        if route.is_open:
            open_endpoints.add(endpoint)
        if route.while_starting:
            early_endpoints.add(endpoint)

    def guard() -> None:
        g.started = perf_counter()
        endpoint = request.endpoint
        if endpoint not in open_endpoints:
            check_caller(context, current())
        if endpoint is not None and endpoint not in early_endpoints:
            check_ready(context)

    def count(response: Response) -> Response:
        asked = current()
        if leaves_bytes_unread(asked):
            asked.must_close = True
        context.answers.send(asked, response)
        rule = request.url_rule
        metrics.request(
            rule.rule if rule is not None else "unknown",
            request.method if rule is not None else "any",
            response.status_code,
            perf_counter() - g.started,
        )
        return response

    app.before_request(guard)
    app.after_request(count)
    problems.install(app, broker)
    app.wsgi_app = Dispatcher(app, context, routes)  # type: ignore[method-assign]
    return app


def _endpoint(method: str, path: str) -> str:
    return f"{method} {path}"


@cache
def _url_map(routes: tuple[tuple[str, str], ...]) -> Map:
    """Return Werkzeug's table of these methods and paths. Making one takes 50 ms, so the applications of a process,
    such as those of tests, share it."""
    table = Flask(__name__, static_folder=None)
    # Both would answer a misspelt path with a redirect, and a redirected POST loses its body in many clients.
    table.url_map.strict_slashes = False
    table.url_map.merge_slashes = False
    for method, path in routes:
        table.add_url_rule(path, _endpoint(method, path), methods=[method])
    return table.url_map


def _respond(route: Route, context: RequestContext, **names: str) -> Response:
    asked = current()
    given = {} if route.query is None else {"query": decoder_of(route.query)(asked.query)}
    answer = route.view(context, *((asked,) if route.is_traffic else ()), **names, **given)
    return answer.response() if isinstance(answer, ResponseParts) else answer
