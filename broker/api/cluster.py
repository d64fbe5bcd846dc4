"""Health, readiness, metrics, and descriptions of the cluster."""

from __future__ import annotations

from typing import Annotated

from flask import Response

from portalmq import wire
from portalmq.broker.api.answers import Status
from portalmq.broker.api.dispatch import check_caller, check_ready
from portalmq.broker.api.query import Parameters, read_by
from portalmq.broker.api.request_context import RequestContext, answer, current
from portalmq.errors import Forbidden, Unauthorized


def live(context: RequestContext) -> Response:
    """Answer that the process runs. Checks nothing else, so nothing else makes a supervisor restart it."""
    return answer(Status("ok"))


def ready(context: RequestContext) -> Response:
    """Answer whether the broker takes calls; authorized callers get its id."""
    check_ready(context)
    return answer(Status("ready", context.broker.broker_id) if _is_known(context) else Status("ready"))


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
    """Return the brokers, and which of them is the controller."""
    return answer(context.broker.overview.cluster())


def _names(text: str, what: str) -> list[str]:
    return [wire.check_name(name, "topic") for name in text.split(",") if name]


class MetadataQuery(Parameters):
    """`topics`: their names, separated by commas; by default all."""

    topics: Annotated[list[str], read_by(_names, type="string", pattern="^[A-Za-z0-9._,-]*$")] | None = None


def metadata(context: RequestContext, query: MetadataQuery) -> Response:
    """Return the leader of every partition, for clients. Topics that do not exist are left out."""
    return answer(context.broker.overview.metadata(query.topics))


def exposition(context: RequestContext) -> Response:
    """Return the metrics, for Prometheus."""
    return Response(context.metrics.exposition(), content_type=context.metrics.content_type)
