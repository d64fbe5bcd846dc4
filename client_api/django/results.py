"""Results in a compacted topic, whose key is the id of a task: records that each replace the one before.

No broker finds a message by its key. But the id of a task tells when it was enqueued, and its results come later. So a
look-up reads one partition from that time on, page by page, up to the record of success or the end. The next look-up of
the id in this process goes on from there. The cost is the records of other tasks in 1 of `result_partitions` partitions
since the task was enqueued, or since the last look-up; a page has up to 1,000 of them.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import OrderedDict
from datetime import UTC, datetime

import msgspec

from portalmq.admin import Admin
from portalmq.errors import MessageNotFound, OffsetOutOfRange, TopicExists, TopicNotFound, Unavailable
from portalmq.wire import PackBrowsePage

PAGE_MESSAGES = 1_000
REMEMBERED_IDS = 10_000
READ_S_MAX = 30.0
# Leaders differ by up to two tolerances of a cluster's clocks (broker/partition/clock.py), 2 s each.
CLOCKS_MS = 5_000

SUCCESSFUL = "SUCCESSFUL"


class StoredError(msgspec.Struct):
    exception_class_path: str
    traceback: str


class ResultRecord(msgspec.Struct, omit_defaults=True):
    """What is known of a task. Times are Unix seconds of the worker's clock."""

    status: str
    worker_ids: list[str]
    started_at: float | None = None
    last_attempted_at: float | None = None
    finished_at: float | None = None
    errors: list[StoredError] = []
    return_value: object = None


class _LookUp(msgspec.Struct):
    """How far an id was looked up, and its last record up to there."""

    next_offset: int | None = None
    found_at: int | None = None
    is_final: bool = False


class ResultTopic:
    """Reads the results of one topic. Thread-safe."""

    def __init__(self, admin: Admin, topic: str) -> None:
        self._admin = admin
        self.topic = topic
        self._lock = threading.Lock()
        self._partitions = 0
        self._seen: OrderedDict[str, _LookUp] = OrderedDict()

    def create(self, partitions: int, ttl_s: float) -> None:
        """Create the topic, unless it exists. The number of partitions has to stay: it places the keys."""
        config = {"cleanup": "compact", "retention_ms": round(ttl_s * 1000)}
        try:
            self._admin.create_topic(self.topic, partitions=partitions, config=config)
        except TopicExists:
            return

    def latest(self, uid: str, since_ms: int) -> ResultRecord | None:
        """Return the last record of a task that was enqueued at `since_ms`, or None. Raises Unavailable if there is too
        much to read in 30 s; a repeat goes on."""
        partition = self._partition_of(uid)
        if partition is None:
            return None
        with self._lock:
            seen = msgspec.structs.replace(self._seen.get(uid) or _LookUp())
        try:
            record = None if seen.is_final else self._read(uid, since_ms, partition, seen)
            if record is None and seen.found_at is not None:
                record = _decoded(self._admin.message(self.topic, f"{partition}-{seen.found_at}").value)
            return record
        except (MessageNotFound, TopicNotFound):
            return None  # it is past its time to live
        finally:
            with self._lock:
                self._seen[uid] = seen
                self._seen.move_to_end(uid)
                while len(self._seen) > REMEMBERED_IDS:
                    self._seen.popitem(last=False)

    def _read(self, uid: str, since_ms: int, partition: int, seen: _LookUp) -> ResultRecord | None:
        """Read on from where the last look-up ended."""
        record, key = None, uid.encode()
        deadline = time.monotonic() + READ_S_MAX
        while True:
            for message in (page := self._page(since_ms, partition, seen)).messages:
                if message.key == key:
                    record, seen.found_at = _decoded(message.value), message.offset
                    if record.status == SUCCESSFUL:
                        seen.is_final = True
                        return record
            is_end = page.next_offset >= page.high_watermark or page.next_offset == seen.next_offset
            seen.next_offset = page.next_offset
            if is_end:
                return record
            if time.monotonic() > deadline:
                raise Unavailable(
                    f"{self.topic} has more results since the task was enqueued than are read in {READ_S_MAX:g} s:"
                    " repeat, or give the topic more partitions when it is created (result_partitions)"
                )

    def _page(self, since_ms: int, partition: int, seen: _LookUp) -> PackBrowsePage:
        if seen.next_offset is not None:
            try:
                return self._admin.browse(self.topic, partition, offset=seen.next_offset, limit=PAGE_MESSAGES)
            except OffsetOutOfRange:  # retention has removed what was not read
                pass
        begin = datetime.fromtimestamp(max(0, since_ms - CLOCKS_MS) / 1000, UTC)
        return self._admin.browse(self.topic, partition, at=begin, limit=PAGE_MESSAGES)

    def _partition_of(self, uid: str) -> int | None:
        """Return the partition of a key, or None while there is no topic."""
        if not self._partitions:
            try:
                self._partitions = len(self._admin.describe(self.topic).partitions)
            except TopicNotFound:
                return None
        return zlib.crc32(uid.encode()) % self._partitions


def _decoded(value: bytes) -> ResultRecord:
    return msgspec.json.decode(value, type=ResultRecord)
