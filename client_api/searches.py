"""The calls of Admin that look into messages by their content: a search, and SQL."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import msgspec

from portalmq import wire
from portalmq.message import Message, message_from_json
from portalmq.transport.answers import decode_answer
from portalmq.transport.request import json_request
from portalmq.transport.transport import Transport


class _Found(msgspec.Struct):
    """A page of a search; `next` is where the next one goes on."""

    messages: list[wire.DecodedJsonMessage]
    next: str | None = None


wire.prepare(_Found)


class SearchCalls:
    """The part of Admin that is about searches."""

    _transport: Transport

    def search(
        self,
        topic: str,
        where: Mapping[str, Any] | None = None,
        *,
        partition: int | None = None,
        at: datetime | None = None,
    ) -> Iterator[Message]:
        """Yield the messages that match `where`, which is that of `redrive`, or all: the newest first, over all
        partitions or in one; with `at` those from that time on, the oldest first. Consumes nothing.

            admin.search("orders", {"value.total": {"gt": 100}})
        """
        query: dict[str, object] = {"topic": wire.check_name(topic, "topic"), "partition": partition}
        query |= {"where": None if where is None else msgspec.json.encode(where).decode()}
        query |= {"order": "newest" if at is None else "oldest"}
        start: dict[str, object] = {} if at is None else {"at": at.astimezone(UTC).isoformat()}
        while True:
            page = self._transport.get("/ui/data/messages", _Found, {**query, **start})
            yield from map(message_from_json, page.messages)
            if page.next is None:
                return
            start = {"after": page.next}

    def sql(self, query: str, *, limit: int = 1_000, timeout_s: float = 5) -> wire.SqlResult:
        """Return at most `limit` rows of one SELECT over the segment files of the broker that answers;
        docs/DASHBOARD.md has the tables. Raises InvalidRequest for anything else, QueryLimit for what takes too long
        or too much memory."""
        order = wire.SqlRequest(query, limit, round(timeout_s * 1000))
        return decode_answer(
            self._transport.call(json_request("POST", "/v1/sql", order, repeatable=True)), wire.SqlResult
        )
