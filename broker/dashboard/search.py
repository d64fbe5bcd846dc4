"""Messages of a topic over all its partitions, the newest or the oldest first, filtered by a `where`.

Each partition is browsed in windows, backwards or forwards, and the heads of all partitions are merged by time. Other
greenlets run between messages. A search that finds little ends after SEARCH_S or SCANNED_MAX messages, one that finds
much after FOUND_BYTES_MAX, and each says where it goes on. Windows are small where messages are large.
"""

from __future__ import annotations

from heapq import heapify, heappop, heapreplace
from time import monotonic
from typing import Any, NamedTuple

from gevent.lock import BoundedSemaphore

from portalmq import wire
from portalmq.broker.core.queue.predicate import Candidate, Predicate
from portalmq.broker.messages.browse import MessageBrowser, StoredMessage
from portalmq.broker.partition.answer_size import size_of
from portalmq.broker.partition.yielding import TimeSlice
from portalmq.broker.queues.outbox import HEADER_DEAD_REASON, HEADER_DELIVERY_COUNT
from portalmq.errors import Backpressure, InvalidRequest

SEARCH_S = 2.0
SCANNED_MAX = 20_000
# The first window of each partition, until the size of its messages is known.
WINDOW_FIRST = 2
WINDOW_MAX = 1_000
WINDOW_BYTES_MAX = 1024 * 1024
PARTITIONS_MAX = 1_000
FOUND_BYTES_MAX = 4 * 1024 * 1024
# Searches that run at a time; others wait for their turn.
SEARCHES_MAX = 4
TURN_WITHIN_S = 10.0
# Of all windows of a search together, and what they are to have.
HELD_BYTES_MAX = 64 * 1024 * 1024
HELD_BYTES = 32 * 1024 * 1024


_searches = BoundedSemaphore(SEARCHES_MAX)


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
    """The messages of one partition in the order of the search. `edge`: what is beyond it is not read yet.
    `held_bytes`: of the messages that wait."""

    def __init__(self, browser: MessageBrowser, search: Search, number: int) -> None:
        self._browser = browser
        self._search = search
        self._number = number
        self._window = WINDOW_FIRST
        self.held_bytes = 0
        self.waiting: list[StoredMessage] = []  # the next one is the last
        position = (search.positions or {}).get(number)
        if position is None and search.at_ms is not None:
            page = browser.browse(search.topic, number, at_ms=search.at_ms, limit=1)
        else:
            page = browser.browse(search.topic, number, position="latest", limit=1)
        self.start, self.end = page.log_start_offset, page.high_watermark
        if position is not None:
            self.edge = min(max(position, self.start), self.end)
        elif not search.oldest_first:
            self.edge = self.end
        elif search.at_ms is None:
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

    @property
    def order(self) -> int:
        """The place of its next message in time."""
        at_ms = self.waiting[-1].timestamp_ms
        return at_ms if self._search.oldest_first else -at_ms

    def fill(self) -> int:
        """Read windows until there is a message; return how many messages were read."""
        while not self.waiting and not self.is_done:
            size = self._window
            if self._search.oldest_first:
                page = self._browser.browse(self._search.topic, self._number, offset=self.edge, limit=size)
                self.waiting = page.messages[::-1]
                self.edge = max(page.next_offset, self.edge + 1) if not page.messages else page.next_offset
            else:
                begin = max(self.start, self.edge - size)
                page = self._browser.browse(self._search.topic, self._number, offset=begin, limit=size)
                if page.messages and page.next_offset < self.edge and self.edge - begin > 1:
                    # Less than the window fits an answer, and its newest messages are what is left out.
                    self._window = max(1, min(len(page.messages), size - 1))
                    continue
                self.waiting = [message for message in page.messages if message.offset < self.edge]
                self.edge = begin
            self._size_up(size)
        return len(self.waiting)

    def _size_up(self, size: int) -> None:
        """Set the next window by the messages of this one."""
        self.held_bytes = sum([size_of(message.record) for message in self.waiting])
        wanted = min(WINDOW_BYTES_MAX, HELD_BYTES // len(self._search.partitions))
        fit = wanted * len(self.waiting) // self.held_bytes if self.held_bytes else WINDOW_MAX
        self._window = max(1, min(2 * size, fit, WINDOW_MAX))


def find(browser: MessageBrowser, search: Search) -> Found:
    """Return the messages that match, in order. Raises TopicNotFound, PartitionNotFound, Backpressure."""
    if len(search.partitions) > PARTITIONS_MAX:
        raise InvalidRequest(f"the topic has more than {PARTITIONS_MAX} partitions: name one")
    if not _searches.acquire(timeout=TURN_WITHIN_S):
        raise Backpressure(f"{SEARCHES_MAX} searches run already: repeat in a moment", retry_after_s=1)
    try:
        return _found(browser, search)
    finally:
        _searches.release()


def _found(browser: MessageBrowser, search: Search) -> Found:
    turn, ends_at = TimeSlice(), monotonic() + SEARCH_S
    parts = [_Partition(browser, search, number) for number in turn.paced(search.partitions)]
    found: list[StoredMessage] = []
    scanned = found_bytes = held_bytes = 0
    heads: list[tuple[int, int, _Partition]] = []
    for part in turn.paced(parts):
        scanned += part.fill()
        held_bytes += part.held_bytes
        if held_bytes > HELD_BYTES_MAX and len(parts) > 1:
            raise InvalidRequest("the messages are too large to merge those of all partitions: name a partition")
        if part.waiting:
            heads.append((part.order, len(heads), part))
    heapify(heads)
    while heads and len(found) < search.limit and found_bytes < FOUND_BYTES_MAX:
        turn.pause_if_over()
        _, number, part = heads[0]
        message = part.waiting.pop()
        if search.predicate is None or search.predicate.matches(_candidate(message)):
            found.append(message)
            found_bytes += size_of(message.record)
        if scanned > SCANNED_MAX or monotonic() > ends_at:
            break
        if not part.waiting:
            held_bytes -= part.held_bytes
            scanned += part.fill()
            held_bytes += part.held_bytes
            if held_bytes > HELD_BYTES_MAX:
                break
        if part.waiting:
            heapreplace(heads, (part.order, number, part))
        else:
            heappop(heads)
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
