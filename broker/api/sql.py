"""SQL over the files of the broker that is asked."""

from __future__ import annotations

from functools import partial
from time import perf_counter

from flask import Response

from portalmq import wire
from portalmq.broker.api.client_watch import peer_of
from portalmq.broker.api.request_context import RequestContext, answer, current


def query(context: RequestContext) -> Response:
    """Run one SELECT over the segment files of the broker that is asked."""
    asked = current()
    wanted = wire.decode_json(context.body(), wire.SqlRequest)
    started = perf_counter()
    found = context.broker.sql_queries.run(
        wanted.query,
        limit=wanted.limit,
        timeout_ms=wanted.timeout_ms,
        peer=peer_of(asked),
        make_room=partial(context.answers.hold_bytes, asked),
    )
    elapsed_ms = round((perf_counter() - started) * 1000, 1)
    # A wire.SqlResult, whose rows are JSON already.
    shown = {"columns": found.columns, "rows": found.rows, "truncated": found.truncated, "elapsed_ms": elapsed_ms}
    return answer(shown)
