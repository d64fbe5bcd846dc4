"""Messages of a topic over all its partitions, the newest or the oldest first, filtered by a `where`.

Each partition is browsed in windows, backwards or forwards, and the heads of all partitions are merged by time. A
search that finds little ends after SEARCH_S or SCANNED_MAX messages, and says where it goes on.
"""

from __future__ import annotations

from time import monotonic
from typing import Any, NamedTuple

from portalmq import wire
from portalmq.broker.core.queue.predicate import Candidate, Predicate
from portalmq.broker.messages.browse import MessageBrowser, StoredMessage
from portalmq.broker.queues.outbox import HEADER_DEAD_REASON, HEADER_DELIVERY_COUNT
from portalmq.errors import InvalidRequest

SEARCH_S = 2.0
SCANNED_MAX = 20_000
WINDOW_MIN = 64
WINDOW_MAX = 1_000
PARTITIONS_MAX = 1_000


class Search(NamedTuple):
    """What is wanted. `positions`: where each partition is read from: upwards from there with `oldest_first`, else
    downwards; a partition without one is read from its end, or from `at_ms` on."""

    topic: str
    partitions: list[int]
    oldest_first: bool
    limit: int
    at_ms: int | None = None
    positions: dict[int, int] | None = None
    predicate: Predicate | None = None


class Found(NamedTuple):
    """`positions`: where the next search goes on; `ends`: the ends of the partitions; `is_end`: nothing is left."""

    messages: list[StoredMessage]
    positions: dict[int, int]
    ends: dict[int, int]
    scanned: int
    is_end: bool


class _Partition:
    """The messages of one partition in the order of the search. `edge`: what is beyond it is not read yet."""

    def __init__(self, browser: MessageBrowser, search: Search, number: int) -> None:
        self._browser = browser
        self._search = search
        self._number = number
        self._window = max(WINDOW_MIN, search.limit // len(search.partitions))
        self.waiting: list[StoredMessage] = []  # the next one is the last
        position = (search.positions or {}).get(number)
        at_ms = search.at_ms if position is None else None
        page = browser.browse(search.topic, number, at_ms=at_ms, limit=1)
        self.start, self.end = page.log_start_offset, page.high_watermark
        if position is not None:
            self.edge = min(max(position, self.start), self.end)
        elif not search.oldest_first:
            self.edge = self.end
        elif at_ms is None:
            self.edge = self.start
        else:
            self.edge = page.messages[0].offset if page.messages else self.end

    @property
    def position(self) -> int:
        """Where the next search goes on."""
        if not self.waiting:
            return self.edge
        return self.waiting[-1].offset + (not self._search.oldest_first)

    @property
    def is_done(self) -> bool:
        return not self.waiting and (self.edge >= self.end if self._search.oldest_first else self.edge <= self.start)

    def fill(self) -> int:
        """Read windows until there is a message; return how many messages were read."""
        while not self.waiting and not self.is_done:
            size, self._window = self._window, min(2 * self._window, WINDOW_MAX)
            if self._search.oldest_first:
                page = self._browser.browse(self._search.topic, self._number, offset=self.edge, limit=size)
                self.waiting = page.messages[::-1]
                self.edge = max(page.next_offset, self.edge + 1) if not page.messages else page.next_offset
            else:
                begin = max(self.start, self.edge - size)
                page = self._browser.browse(self._search.topic, self._number, offset=begin, limit=size)
                self.waiting = [message for message in page.messages if message.offset < self.edge]
                self.edge = begin
        return len(self.waiting)


def find(browser: MessageBrowser, search: Search) -> Found:
    """Return the messages that match, in order. Raises TopicNotFound, PartitionNotFound."""
    if len(search.partitions) > PARTITIONS_MAX:
        raise InvalidRequest(f"the topic has more than {PARTITIONS_MAX} partitions: name one")
    parts = [_Partition(browser, search, number) for number in search.partitions]
    found: list[StoredMessage] = []
    scanned, ends_at = 0, monotonic() + SEARCH_S
    while len(found) < search.limit:
        for part in parts:
            scanned += part.fill() if not part.waiting else 0
        heads = [part for part in parts if part.waiting]
        if not heads:
            break
        best = (min if search.oldest_first else max)(heads, key=lambda part: part.waiting[-1].timestamp_ms)
        message = best.waiting.pop()
        if search.predicate is None or search.predicate.matches(_candidate(message)):
            found.append(message)
        if scanned > SCANNED_MAX or monotonic() > ends_at:
            break
    return Found(
        found,
        {number: part.position for number, part in zip(search.partitions, parts, strict=True)},
        {number: part.end for number, part in zip(search.partitions, parts, strict=True)},
        scanned,
        all(part.is_done for part in parts),
    )


def _candidate(message: StoredMessage) -> Candidate:
    record: Any = message.record
    headers = record.headers or {}
    count = headers.get(HEADER_DELIVERY_COUNT, "")
    return Candidate(
        record.value,
        wire.is_json_type(record.content_type),
        headers,
        record.key,
        headers.get(HEADER_DEAD_REASON, ""),
        int(count) if count.isascii() and count.isdigit() and len(count) < 10 else 0,
    )
