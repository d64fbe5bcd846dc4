"""The routes of the older queues' protocols."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flask import Response, request
from werkzeug.exceptions import MethodNotAllowed

from portalmq.broker.api.request_context import RequestContext
from portalmq.broker.api.routes import Route
from portalmq.broker.protocols import miniq, wonderq
from portalmq.broker.protocols import portal_mq as portal


def _taking(view: Callable[[RequestContext], Response], other: str) -> Callable[[RequestContext], Response]:
    """Refuse HEAD for a view that consumes by GET: Flask routes HEAD to it too, whose answer cannot carry the message.
    `other` is the other method of the path."""

    def taken(context: RequestContext) -> Response:
        if request.method != "GET":
            raise MethodNotAllowed(valid_methods=["GET", other])
        return view(context)

    return taken


PROTOCOL_ROUTES = (
    Route("POST", "/publish", portal.publish),
    Route("POST", "/read", portal.read),
    Route("POST", "/consume", portal.consume),
    Route("POST", "/topic/create", portal.create_topic),
    Route("POST", "/topic/delete", portal.delete_topic),
    Route("POST", "/topic/exists", portal.topic_exists),
    *(
        Route("POST", f"/{kind}/{verb}", partial(view, kind=kind))
        for kind in ("producer", "consumer")
        for verb, view in (
            ("create", portal.create_program),
            ("delete", portal.delete_program),
            ("exists", portal.program_exists),
        )
    ),
    Route("POST", "/message", miniq.post),
    Route("GET", "/message", _taking(miniq.get, "POST")),
    Route("POST", "/confirm", miniq.confirm),
    Route("GET", "/messages", miniq.read_all),
    Route("POST", "/miniq/command", miniq.command),
    Route("POST", "/v1/publish", wonderq.publish),
    Route("GET", "/v1/consumer", _taking(wonderq.consume, "DELETE")),
    Route("DELETE", "/v1/consumer", wonderq.delete),
    Route("GET", "/v1/queue", wonderq.state),
)
