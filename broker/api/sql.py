"""SQL over the files of the broker that is asked."""

from __future__ import annotations

from time import perf_counter

from flask import Response

from portalmq import wire
from portalmq.broker.api.request_context import RequestContext, answer


def query(context: RequestContext) -> Response:
    """Run one SELECT over the segment files of the broker that is asked."""
    wanted = wire.decode_json(context.body(), wire.SqlRequest)
    started = perf_counter()
    found = context.broker.sql_queries.run(wanted.query, limit=wanted.limit, timeout_ms=wanted.timeout_ms)
    elapsed_ms = round((perf_counter() - started) * 1000, 1)
    return answer(wire.SqlResult(found.columns, found.rows, found.truncated, elapsed_ms))
