"""Health, readiness, metrics, and descriptions of the cluster."""

from __future__ import annotations

from flask import Response

from portalmq import wire
from portalmq.broker.api.dispatch import check_caller, check_ready
from portalmq.broker.api.request_context import RequestContext, answer, current, query
from portalmq.errors import Forbidden, Unauthorized


def live(context: RequestContext) -> Response:
    """Answer that the process runs. Checks nothing else, so nothing else makes a supervisor restart it."""
    return answer({"status": "ok"})


def ready(context: RequestContext) -> Response:
    """Answer whether the broker takes calls; authorized callers get its id."""
    check_ready(context)
    return answer(
        {"status": "ready", "broker_id": context.broker.broker_id} if _is_known(context) else {"status": "ready"}
    )


def health(context: RequestContext) -> Response:
    """Answer as `ready` does; authorized callers get the single checks."""
    check_ready(context)
    return answer({"status": "ready", **context.broker.health()} if _is_known(context) else {"status": "ok"})


def _is_known(context: RequestContext) -> bool:
    """Return whether the caller is authorized. Others get only what a load balancer needs."""
    try:
        check_caller(context, current())
    except (Unauthorized, Forbidden):
        return False
    return True


def describe(context: RequestContext) -> Response:
    return answer(context.broker.overview.cluster())


def metadata(context: RequestContext) -> Response:
    topics = query("topics").text("topics")
    names = None if topics is None else [name for name in topics.split(",") if name]
    for name in names or []:
        wire.check_name(name, "topic")
    return answer(context.broker.overview.metadata(names))


def exposition(context: RequestContext) -> Response:
    return Response(context.metrics.exposition(), content_type=context.metrics.content_type)
