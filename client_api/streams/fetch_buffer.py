"""What a stream consumer reads ahead: for each partition that is assigned to it, the batches that were fetched.

    fetch threads --frames--> Feed: position ... buffered ... --take--> handed out --finish--> done --> committed

A feed stands for one partition and one `since`: when the partition is taken away, or the group is set to another place,
the feed is `gone`, and what it had buffered with it. Batches are kept as they came, and decoded when they are taken.
"""

from __future__ import annotations

import logging
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.errors import PortalMQError
from portalmq.network.connection import Address
from portalmq.transport.transport import Request, Transport

_log = logging.getLogger("portalmq.consumer")

PREFETCH_BYTES = 16 * 1024 * 1024
FEED_BYTES_MIN = 256 * 1024
FETCH_WAIT_S = 1.0
FETCH_TIMEOUT_S = 10.0
FETCHERS_MAX = 8
AGAIN_S = 0.1
GONE_AGAIN_S = 1.0

Place = tuple[str, int]

_decode_head = msgspec.msgpack.Decoder(contract.FrameHead).decode
_decode_records = msgspec.msgpack.Decoder(tuple[contract.FrameRecord, ...]).decode
_decode_records_with_holes = msgspec.msgpack.Decoder(tuple[contract.FrameRecord | None, ...]).decode
_decode_answer = msgspec.msgpack.Decoder(contract.FetchAnswer).decode


class Feed:
    """One assigned partition. `position` is fetched next; everything below `handed` was handed out, below `done` is
    finished, below `committed` committed.

    Invariant: committed <= done <= handed <= position.
    """

    __slots__ = (
        "again_at",
        "buffered_bytes",
        "committed",
        "current",
        "done",
        "frames",
        "gone",
        "handed",
        "in_flight",
        "place",
        "position",
        "revoked",
        "since",
    )

    def __init__(self, assigned: contract.AssignedPartition) -> None:
        self.place: Place = (assigned.topic, assigned.partition)
        self.since = assigned.since
        self.position = self.handed = self.done = self.committed = assigned.offset
        self.frames: deque[contract.Frame] = deque()
        self.buffered_bytes = 0
        self.current: Taken | None = None
        self.in_flight = False
        self.again_at = 0.0
        # Nothing more is handed out; `revoked` says that what is in hand may still be finished and committed.
        self.revoked = False
        self.gone = False


class Taken:
    """The messages of one batch, (offset, record) in order, of which those from index `next` on are still to be handed
    out. `end` is where the batch ends."""

    __slots__ = ("end", "feed", "next", "records", "timestamp_ms")

    def __init__(
        self, feed: Feed, records: list[tuple[int, contract.FrameRecord]], timestamp_ms: int, end: int
    ) -> None:
        self.feed = feed
        self.records = records
        self.timestamp_ms = timestamp_ms
        self.end = end
        self.next = 0


def _numbered(body: bytes, skipped: int, base_offset: int) -> list[tuple[int, contract.FrameRecord]]:
    """The messages of a batch without the first `skipped`, by offset. Where compaction has removed one, nil stands."""
    try:
        records = _decode_records(body)
    except msgspec.ValidationError:
        numbered = enumerate(_decode_records_with_holes(body)[skipped:], base_offset + skipped)
        return [(offset, record) for offset, record in numbered if record is not None]
    return list(enumerate(records[skipped:] if skipped else records, base_offset + skipped))


class Feeds:
    """Thread-safe; `lock` guards everything, and is notified when something has arrived or has changed. `mutex` is the
    lock in it, which costs a third to take."""

    def __init__(self, transport: Transport, wall_ms: Callable[[], int], prefetch_bytes: int = PREFETCH_BYTES) -> None:
        self.mutex = threading.RLock()
        self.lock = threading.Condition(self.mutex)
        self.by_place: dict[Place, Feed] = {}
        self.paused: set[Place] = set()
        self.closed = False
        self._transport = transport
        self._wall_ms = wall_ms
        self._prefetch_bytes = prefetch_bytes
        self._turn: deque[Feed] = deque()
        self._fetchers = 0
        self._idle = 0

    # --- the assignment ----------------------------------------------------------------------------------------------

    def add(self, assigned: Iterable[contract.AssignedPartition]) -> None:
        """Read these too. One that is known is another one from here on, when its `since` is."""
        with self.lock:
            for each in assigned:
                feed = Feed(each)
                self._drop(feed.place)
                self.by_place[feed.place] = feed
                self._turn.append(feed)
            self._wake()

    def drop(self, places: Iterable[Place]) -> None:
        with self.lock:
            for place in list(places):
                self._drop(place)
            self.lock.notify_all()

    def _drop(self, place: Place) -> None:
        feed = self.by_place.pop(place, None)
        if feed is not None:
            feed.gone = True
            feed.frames.clear()
            feed.current = None
            self._turn.remove(feed)

    def close(self) -> None:
        with self.lock:
            self.closed = True
            self.lock.notify_all()

    # --- handing out -------------------------------------------------------------------------------------------------

    def take(self) -> Taken | None:
        """The next batch of which something is to be handed out, the partitions in turn. The caller holds the lock."""
        for _ in range(len(self._turn)):
            feed = self._turn[0]
            self._turn.rotate(-1)
            if feed.revoked or feed.place in self.paused:
                continue
            if feed.current is not None and feed.current.next < len(feed.current.records):
                return feed.current
            while feed.frames:
                feed.current = self._decoded(feed)
                if feed.current is not None:
                    return feed.current
        return None

    def _decoded(self, feed: Feed) -> Taken | None:
        """The next batch of the feed; None when none of its messages is to be shown."""
        frame = feed.frames.popleft()
        was_full = feed.buffered_bytes >= self._feed_bytes()
        feed.buffered_bytes -= len(frame.body)
        if was_full:
            self._wake()
        head = _decode_head(frame.header)
        skipped = max(0, feed.handed - head.base_offset)
        numbered = _numbered(frame.body, skipped, head.base_offset)
        if any(record.expires_at_ms is not None for _, record in numbered):
            now_ms = self._wall_ms()
            numbered = [
                (offset, record)
                for offset, record in numbered
                if record.expires_at_ms is None or record.expires_at_ms > now_ms
            ]
        end = head.base_offset + head.count
        if numbered:
            return Taken(feed, numbered, head.appended_at_ms, end)
        if feed.done == feed.handed:
            feed.done = max(feed.done, end)
        feed.handed = max(feed.handed, end)
        return None

    # --- fetching ----------------------------------------------------------------------------------------------------

    def _feed_bytes(self) -> int:
        return max(FEED_BYTES_MIN, self._prefetch_bytes // max(1, len(self.by_place)))

    def _wake(self) -> None:
        """There may be something to fetch."""
        self.lock.notify_all()
        if self.by_place and not self._idle and self._fetchers < FETCHERS_MAX and not self.closed:
            self._fetchers += 1
            threading.Thread(target=self._fetch, name="portalmq-fetcher", daemon=True).start()

    def _wanted(self, now: float) -> list[Feed]:
        """What is to be fetched next: feeds with room whose partitions have one leader."""
        full = self._feed_bytes()
        found: list[Feed] = []
        leader: Address | None = None
        for feed in self._turn:
            if feed.in_flight or feed.revoked or feed.buffered_bytes >= full or feed.again_at > now:
                continue
            if feed.place in self.paused:
                continue
            of_feed = self._transport.leader_of(feed.place)
            if not found:
                leader = of_feed
            if of_feed == leader and len(found) < contract.FETCH_PARTITIONS_MAX:
                found.append(feed)
        return found

    def _fetch(self) -> None:
        """A fetcher's life: as long as there are partitions to read."""
        while True:
            with self.lock:
                feeds = self._wanted(time.monotonic())
                if not feeds:
                    if self.closed or not self.by_place:
                        self._fetchers -= 1
                        return
                    self._idle += 1
                    self.lock.wait(AGAIN_S)
                    self._idle -= 1
                    continue
                for feed in feeds:
                    feed.in_flight = True
                if self._wanted(time.monotonic()):
                    self._wake()  # others are led elsewhere
                asked = [contract.PartitionOffset(*feed.place, feed.position) for feed in feeds]
                max_bytes = min(contract.FETCH_BYTES, self._feed_bytes() * len(feeds))
            self._ask(feeds, asked, max_bytes)

    def _ask(self, feeds: list[Feed], asked: list[contract.PartitionOffset], max_bytes: int) -> None:
        request = contract.FetchRequest(asked, max_bytes, round(FETCH_WAIT_S * 1000))
        call = Request(
            "POST",
            contract.FETCH_PATH,
            msgspec.json.encode(request),
            (("Content-Type", wire.JSON), ("Accept", contract.FRAMES_MSGPACK)),
            repeatable=True,
            leader_of=feeds[0].place,
            wait_s=FETCH_WAIT_S,
        )
        try:
            answer = _decode_answer(self._transport.call(call, timeout_s=FETCH_TIMEOUT_S).body)
        except (PortalMQError, msgspec.DecodeError) as error:
            if not self.closed:
                _log.debug("a fetch is tried again: %s", error)
            self._failed(feeds, AGAIN_S)
            return
        with self.lock:
            by_place = {(each.topic, each.partition): each for each in answer.partitions}
            for feed in feeds:
                feed.in_flight = False
                fetched = by_place.get(feed.place)
                if fetched is not None and not feed.gone:
                    self._arrived(feed, fetched)
            self.lock.notify_all()

    def _failed(self, feeds: Iterable[Feed], seconds: float) -> None:
        with self.lock:
            for feed in feeds:
                feed.in_flight = False
                feed.again_at = time.monotonic() + seconds

    def _arrived(self, feed: Feed, fetched: contract.FetchedPartition) -> None:
        if fetched.error is not None:
            self._refused(feed, fetched.error)
            return
        for frame in fetched.frames:
            if zlib.crc32(frame.body, zlib.crc32(frame.header)) != frame.crc:
                _log.warning("a batch of %s came with a wrong checksum, and is fetched again", feed.place)
                feed.again_at = time.monotonic() + AGAIN_S
                return
            feed.frames.append(frame)
            feed.buffered_bytes += len(frame.body)
            head = _decode_head(frame.header)
            feed.position = head.base_offset + head.count
        feed.position = max(feed.position, fetched.next_offset)

    def _refused(self, feed: Feed, problem: dict[str, object]) -> None:
        code = problem.get("code")
        start, end = problem.get("log_start_offset"), problem.get("high_watermark")
        pause_s = AGAIN_S
        if code == "not_leader":
            if self._transport.heard_leader(feed.place, problem.get("leader_url")):
                pause_s = 0.0
        elif code == "offset_out_of_range" and isinstance(start, int) and isinstance(end, int):
            goes_on = start if feed.position < start else min(feed.position, end)
            _log.warning(
                "%s-%d: offset %d is not there any more, reading goes on at %d", *feed.place, feed.position, goes_on
            )
            feed.position = goes_on
        elif problem.get("status") != 503:
            pause_s = GONE_AGAIN_S  # the topic was deleted, for instance: the assignment will tell
        feed.again_at = time.monotonic() + pause_s
