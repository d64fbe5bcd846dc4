"""The brokers' HTTP interface as an origin, for a Spark cluster without access to their disks.

Planning asks any broker for the leaders, and each leader once for the start and end of its logs. Each task then fetches
its offsets from the leader of its partition: stored batches, checksums included, one answer ahead of Spark; at most two
answers are in memory. It follows the leader when that changes: it never fetches delivered offsets again, and waits for
those that a new leader does not show yet.

    logs      GET /v1/metadata, then POST /v1/fetch of an offset that no log reaches: the leader's refusal has the
              topic's id and the start and end of the log, and costs no reading
    offset_at GET .../messages?at=
    batches   POST /v1/fetch

Every answer names the topic's id, so a topic that was created again is not taken for the planned one. Every wait is
bounded by `patience_s` without progress, and ends in an error that names the addresses.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec
import pyarrow as pa

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.errors import Forbidden, NotFound, OffsetOutOfRange, PortalMQError, TopicNotFound, Unauthorized
from portalmq.network.connection import Address
from portalmq.network.tls import NO_FILES, TlsFiles
from portalmq.spark.errors import BadOption, DataLoss, NoTopic, SourceError, Unreachable
from portalmq.spark.http_api.frames import batches_of
from portalmq.spark.origin import SPAN_OFFSETS, PartitionLog, Span
from portalmq.spark.topics import is_pattern, is_wanted, not_found
from portalmq.transport.answers import decode_answer
from portalmq.transport.request import LONG_POLL_GRACE_S, Request, json_request, with_query
from portalmq.transport.retries import Backoff, DeadlinePassed
from portalmq.transport.transport import Transport

PATIENCE_S = 30.0
# Before the first answer a wrong address is more likely than that all brokers are away for a moment.
FIRST_CONTACT_S = 10.0
NAMES_MAX = 10
FETCH_BYTES = 8 * 1024 * 1024
FETCH_WAIT_MS = 500
FETCH_TIMEOUT_S = 10.0  # a leader that is silent for so long may be paused, and another one leads by then
NEVER = wire.INTEGER_MAX  # an offset that no log reaches

TopicPartition = tuple[str, int]

_decode_answer = msgspec.msgpack.Decoder(contract.FetchAnswer).decode


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """Address and credentials of the brokers. Pickled for the workers."""

    bootstrap: str
    token: str | None = field(default=None, repr=False)
    patience_s: float = PATIENCE_S
    tls: TlsFiles = NO_FILES


def transport_of(bootstrap: str, token: str | None, tls: TlsFiles, timeout_s: float) -> Transport:
    """Return a transport that has not connected yet. Raises BadOption."""
    try:
        return Transport(bootstrap, token=token, timeout_s=timeout_s, tls=tls)
    except ValueError as error:
        raise BadOption(f"bootstrap, token or tls_…: {error}") from error


class ClusterApi:
    """The requests of this package to the brokers: each bounded, each failure a SourceError. Thread-safe."""

    def __init__(self, access: BrokerAccess) -> None:
        """Raise BadOption for a malformed address or token, and for TLS files that cannot be used."""
        self.access = access
        self._has_answered = False
        self.transport = transport_of(access.bootstrap, access.token, access.tls, access.patience_s)

    def close(self) -> None:
        self.transport.close()

    def retry(self, ask: Callable[[float], Any]) -> Any:
        """Call `ask` with a deadline, and retry while that may help. Raises SourceError."""
        patience_s = self.access.patience_s if self._has_answered else min(self.access.patience_s, FIRST_CONTACT_S)
        deadline = time.monotonic() + patience_s
        backoff = Backoff()
        last_error: PortalMQError | None = None
        while True:
            try:
                answer = ask(deadline)
            except PortalMQError as error:
                if last_error is None or not isinstance(error, DeadlinePassed):
                    last_error = error
                pause_s = backoff.next_s(error.retry_after_s)
                if not error.retryable or time.monotonic() + pause_s >= deadline:
                    raise self.as_source_error(last_error, patience_s) from error
                self.transport.pause(pause_s)
            else:
                self._has_answered = True
                return answer

    def metadata(self, topics: Collection[str] | None) -> wire.Metadata:
        """Return the metadata of these topics, or of all when their names would make the URL too long."""
        names = topics if topics is not None and len(topics) <= NAMES_MAX else None
        metadata: wire.Metadata = self.retry(lambda deadline: self.transport.metadata(names, deadline=deadline))
        return metadata

    def get(self, path: str, kind: type[Any], leader_of: TopicPartition | None = None, **query: object) -> Any:
        """Return the decoded answer. NotFound and OffsetOutOfRange pass through."""
        request = Request("GET", with_query(path, query), repeatable=True, leader_of=leader_of)

        def ask(deadline: float) -> Any:
            try:
                return decode_answer(self.transport.attempt(request, deadline), kind)
            except (NotFound, OffsetOutOfRange) as refused:
                return refused

        answer = self.retry(ask)
        if isinstance(answer, PortalMQError):
            raise answer
        return answer

    def fetch(
        self, asked: list[contract.PartitionOffset], *, max_bytes: int, wait_ms: int, deadline: float
    ) -> list[contract.FetchedPartition]:
        """Fetch once from the leader of the first partition. Raises PortalMQError."""
        request = json_request(
            "POST",
            contract.FETCH_PATH,
            contract.FetchRequest(asked, max_bytes, wait_ms),
            accept=contract.FRAMES_ACCEPTED,
            leader_of=(asked[0].topic, asked[0].partition),
            wait_s=FETCH_TIMEOUT_S - LONG_POLL_GRACE_S,
        )
        answer = self.transport.attempt(request, deadline)
        try:
            partitions = _decode_answer(answer.body).partitions
        except msgspec.DecodeError as error:
            raise Unreachable(f"what answers at {self.where} is no PortalMQ broker ({error})") from error
        self._has_answered = True
        return partitions

    @property
    def where(self) -> str:
        return ", ".join(self.transport.urls)

    def as_source_error(self, error: PortalMQError, patience_s: float) -> SourceError:
        if isinstance(error, Unauthorized | Forbidden):
            return SourceError(f"the broker at {self.where} refuses to be read ({error}): give the option token")
        if isinstance(error, NotFound):
            return SourceError(f"{self.where}: {error}. Is it a PortalMQ broker that bootstrap names?")
        if error.retryable:
            return Unreachable(
                f"no broker answered within {patience_s:g} s; looked at {self.where} ({error}). Start one, or name one"
                " that runs, and that the machines of Spark reach, in the option bootstrap"
            )
        return Unreachable(f"{self.where} cannot be read: {error}")


class Brokers:
    """A cluster through its HTTP interface. Implements Origin."""

    def __init__(
        self,
        bootstrap: Sequence[str],
        topics: Sequence[str] | None = None,
        span_offsets: int = SPAN_OFFSETS,
        *,
        token: str | None = None,
        patience_s: float = PATIENCE_S,
        tls: TlsFiles = NO_FILES,
    ) -> None:
        """Select `topics` as topics.py describes."""
        self._access = BrokerAccess(",".join(bootstrap), token, patience_s, tls)
        self._topics = None if topics is None else tuple(topics)
        self._span_offsets = span_offsets
        self._open: ClusterApi | None = ClusterApi(self._access)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_open": None}

    @property
    def _cluster(self) -> ClusterApi:
        if self._open is None:
            self._open = ClusterApi(self._access)
        return self._open

    def logs(self) -> list[PartitionLog]:
        ends = _LogEnds(self._cluster, self._access.patience_s)
        logs = ends.of(self._topic_partitions())
        self._check_found({log.topic for log in logs})
        return sorted(logs, key=lambda log: (log.topic, log.topic_id, log.partition))

    def offset_at(self, log: PartitionLog, timestamp_ms: int) -> int:
        if timestamp_ms <= 0:
            return log.start_offset
        try:
            moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
        except (ValueError, OverflowError, OSError):
            return log.end_offset  # beyond the year 9999
        at = moment.isoformat(timespec="milliseconds")
        path = wire.partition_messages_path(log.topic, log.partition)
        try:
            page = self._cluster.get(path, wire.BrowsePage, (log.topic, log.partition), at=at, limit=1)
        except NotFound as error:
            raise DataLoss(f"{log.name} is gone: {error}") from error
        offset = page.messages[0]["offset"] if page.messages else log.end_offset
        return min(max(offset, log.start_offset), log.end_offset)

    def spans(self, log: PartitionLog, start: int, end: int) -> list[Span]:
        return [
            BrokerSpan(log, low, min(low + self._span_offsets, end), self._access)
            for low in range(start, end, self._span_offsets)
        ]

    def _topic_partitions(self) -> list[TopicPartition]:
        names = None if self._topics is None or any(map(is_pattern, self._topics)) else self._topics
        metadata = self._cluster.metadata(names)
        found = {topic.name: len(topic.partitions) for topic in metadata.topics if is_wanted(topic.name, self._topics)}
        for name in not_found(self._topics, found):
            if not is_pattern(name):  # created a moment ago, perhaps: this call asks the control plane
                try:
                    found[name] = len(self._cluster.get(wire.topic_path(name), wire.TopicDescription).partitions)
                except NotFound:
                    continue
                except PortalMQError as error:
                    raise self._cluster.as_source_error(error, self._access.patience_s) from error
        self._check_found(found)
        return [(name, number) for name, partitions in found.items() for number in range(partitions)]

    def _check_found(self, topics: Collection[str]) -> None:
        for name in not_found(self._topics, topics):
            raise NoTopic(f"there is no topic {name!r} at {self._cluster.where}")
        if not topics:
            raise NoTopic(f"there are no topics at {self._cluster.where} yet")


class _LogEnds:
    """The start and end of logs. It asks all leaders until each has answered."""

    def __init__(self, cluster: ClusterApi, patience_s: float) -> None:
        self._cluster = cluster
        self._patience_s = patience_s
        self._found: dict[TopicPartition, PartitionLog] = {}
        self._deleted: set[str] = set()
        self._last_error = ""

    def of(self, wanted: Sequence[TopicPartition]) -> list[PartitionLog]:
        """Return the logs, without those of topics deleted during the call. Raises SourceError."""
        deadline = time.monotonic() + self._patience_s
        backoff = Backoff()
        while waiting := self._waiting(wanted):
            for asked in self._by_leader(waiting):
                self._ask(asked, deadline)
            self._drop_mixed()
            missing = self._waiting(wanted)
            if len(missing) < len(waiting):
                deadline = time.monotonic() + self._patience_s
            if missing:
                self._pause(backoff.next_s(), deadline, missing)
        return [log for log in self._found.values() if log.topic not in self._deleted]

    def _waiting(self, wanted: Sequence[TopicPartition]) -> list[TopicPartition]:
        return [key for key in wanted if key not in self._found and key[0] not in self._deleted]

    def _by_leader(self, wanted: Sequence[TopicPartition]) -> Iterator[list[TopicPartition]]:
        by_leader: dict[Address | None, list[TopicPartition]] = defaultdict(list)
        for key in wanted:
            by_leader[self._cluster.transport.leader_of(key)].append(key)
        for group in by_leader.values():
            for first in range(0, len(group), contract.FETCH_PARTITIONS_MAX):
                yield group[first : first + contract.FETCH_PARTITIONS_MAX]

    def _ask(self, wanted: Sequence[TopicPartition], deadline: float) -> None:
        asked = [contract.PartitionOffset(*key, NEVER) for key in wanted]
        try:
            answers = self._cluster.fetch(asked, max_bytes=1, wait_ms=0, deadline=deadline)
        except PortalMQError as error:
            if not error.retryable:
                raise self._cluster.as_source_error(error, self._patience_s) from error
            if not (self._last_error and isinstance(error, DeadlinePassed)):
                self._last_error = str(error)
            return
        for answer in answers:
            self._take_answer(answer, answer.error or {})

    def _take_answer(self, answer: contract.FetchedPartition, problem: dict[str, Any]) -> None:
        key = (answer.topic, answer.partition)
        code = problem.get("code")
        if code == OffsetOutOfRange.code:
            start, end = problem["log_start_offset"], problem["high_watermark"]
            self._found[key] = PartitionLog(answer.topic, answer.topic_id, answer.partition, min(start, end), end)
        elif code == "not_leader":
            self._cluster.transport.leader_reported(key, problem.get("leader_url"))
        elif code == TopicNotFound.code:
            self._deleted.add(answer.topic)
        else:
            self._last_error = str(problem.get("detail"))

    def _drop_mixed(self) -> None:
        """Drop partitions of a topic's earlier life, when it was created again during the call, and ask again."""
        ids = {log.topic: log.topic_id for log in self._found.values()}
        self._found = {key: log for key, log in self._found.items() if log.topic_id == ids[log.topic]}

    def _pause(self, seconds: float, deadline: float, missing: Sequence[TopicPartition]) -> None:
        if time.monotonic() + seconds >= deadline:
            topic, number = missing[0]
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise Unreachable(
                f"partition {number} of {topic!r}{more} has no leader that answers, for {self._patience_s:g} s:"
                f" {self._last_error or 'it has no leader'}. Looked at {self._cluster.where}:"
                " start the brokers that hold it"
            )
        self._cluster.transport.pause(seconds)
        self._cluster.metadata(sorted({topic for topic, _ in missing}))


class BrokerSpan(Span):
    """Offsets that a task fetches from the partition's leader."""

    def __init__(self, log: PartitionLog, start: int, end: int, access: BrokerAccess) -> None:
        super().__init__(log, start, end)
        self.access = access

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        with closing(ClusterApi(self.access)) as cluster, ThreadPoolExecutor(1) as ahead:
            fetcher = _Fetcher(cluster, self.log, self.end)
            try:
                position = self.start
                pending = ahead.submit(fetcher.read, position) if position < self.end else None
                while pending is not None:
                    fetched = pending.result()
                    following = fetched.next_offset
                    pending = ahead.submit(fetcher.read, following) if following < self.end else None
                    yield from batches_of(fetched.frames, self.log, position, self.end, columns)
                    position = following
            finally:
                fetcher.end()


class _Fetcher:
    """Fetches of one partition. Each makes progress or fails."""

    def __init__(self, cluster: ClusterApi, log: PartitionLog, end: int) -> None:
        self._cluster = cluster
        self._log = log
        self._end = end
        self._key: TopicPartition = (log.topic, log.partition)
        self._ended = threading.Event()

    def end(self) -> None:
        """Abort a fetch in flight, whose result nothing reads."""
        self._ended.set()
        self._cluster.close()

    def read(self, position: int) -> contract.FetchedPartition:
        """Return what follows `position`: whole batches, checksums verified, and `next_offset` > `position`.

        Raises DataLoss, SourceError.
        """
        patience_s = self._cluster.access.patience_s
        deadline = time.monotonic() + patience_s
        backoff = Backoff()
        last_error = ""
        while True:
            pause_s = 0.0
            try:
                fetched = self._fetch(position, deadline)
                fault = self._fault(fetched, position)
                if fault is None:
                    return fetched
                last_error = fault
            except PortalMQError as error:
                if not error.retryable:
                    raise self._cluster.as_source_error(error, patience_s) from error
                if not (last_error and isinstance(error, DeadlinePassed)):
                    last_error = str(error)
                pause_s = error.retry_after_s or 0.0
            pause_s = backoff.next_s(pause_s)
            if self._ended.is_set() or time.monotonic() + pause_s >= deadline:
                raise Unreachable(
                    f"offset {position} of {self._log.topic!r}, partition {self._log.partition}, could not be read for"
                    f" {patience_s:g} s: {last_error}. Looked at {self._cluster.where}; start the query again once the"
                    " brokers that hold it run"
                )
            self._cluster.transport.pause(pause_s)

    def _fetch(self, position: int, deadline: float) -> contract.FetchedPartition:
        asked = contract.PartitionOffset(*self._key, position)
        (fetched,) = self._cluster.fetch([asked], max_bytes=FETCH_BYTES, wait_ms=FETCH_WAIT_MS, deadline=deadline)
        return fetched

    def _fault(self, fetched: contract.FetchedPartition, position: int) -> str | None:
        """Return the reason to fetch again; None for a good answer. Raises DataLoss, SourceError for a final one."""
        if fetched.topic_id and fetched.topic_id != self._log.topic_id:
            raise DataLoss(
                f"topic {self._log.topic!r} was deleted and made again (its id was {self._log.topic_id}, and is"
                f" {fetched.topic_id}): offsets {position} to {self._end - 1} of partition {self._log.partition} are"
                " gone"
            )
        if fetched.error is not None:
            return self._refusal(fetched.error, position)
        if fetched.next_offset <= position:
            return f"its leader has committed up to {fetched.high_watermark} only"
        if any(zlib.crc32(frame.body, zlib.crc32(frame.header)) != frame.crc for frame in fetched.frames):
            return "a batch came with a wrong checksum, again and again: something on the way changes bytes"
        return None

    def _refusal(self, problem: dict[str, Any], position: int) -> str:
        code, detail = problem.get("code"), str(problem.get("detail"))
        missing = f"offsets {position} to {self._end - 1} of {self._log.name}"
        if code == OffsetOutOfRange.code:
            begins, ends = problem["log_start_offset"], problem["high_watermark"]
            if begins > position:
                raise DataLoss(
                    f"offsets {position} to {min(begins, self._end) - 1} of {self._log.name} were removed before they"
                    " were read (retention or a purge)",
                    begins,
                )
            raise DataLoss(f"{missing} are gone: the log ends at {ends} (a leader was elected that did not have them)")
        if problem.get("status") == 404:
            raise DataLoss(f"{missing} are gone: {detail}")
        if code == "not_leader":
            self._cluster.transport.leader_reported(self._key, problem.get("leader_url"))
        elif not problem.get("retryable"):
            raise SourceError(f"{missing} cannot be read: {detail}")
        return detail
