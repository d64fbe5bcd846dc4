"""The source of a streaming query. Spark calls, in this order, again and again:

    latestOffset   how far may the next micro-batch read?     positions, checkpointed before they are read
    partitions     which tasks does a micro-batch consist of? also for one that began before a crash
    read           the rows of one task                       in a Spark worker

The first two run in one Python process that lives as long as the query; `read` in many. positions.py has the positions,
admission.py the shares of `maxRowsPerTrigger`, log_poller.py the retries.

Exactly-once rests on two properties: a range of offsets below the high watermark always holds the same messages, and no
range is read whose start is not in the checkpoint. Spark records the end of each batch and takes it as the start of the
next; for the first batch it asks again for the start after a crash, when "latest" is elsewhere. So a start that would
not be found again is first recorded by an empty batch.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow

from portalmq.spark.errors import BadOption, DataLoss, NoTopic
from portalmq.spark.options import EARLIEST, LATEST, ReadOptions
from portalmq.spark.origin import Origin, PartitionLog, packed, rows_of, spans_of
from portalmq.spark.reading.admission import shares
from portalmq.spark.reading.log_poller import LASTING, PASSING, PATIENCE_S, FaultDuration, LogPoller
from portalmq.spark.reading.positions import LogPositions, Positions, accept_losses, compare_positions, sorted_positions
from portalmq.spark.topics import is_pattern

POLL_S = 0.25
_LOSSES_LISTED = 3
_log = logging.getLogger("portalmq.spark")

Found = TypeVar("Found")


class MessagesStream(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(
        self,
        reading: ReadOptions,
        columns: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if reading.table != "messages":
            raise BadOption(f"table {reading.table!r} is read by spark.read; only messages are a stream")
        self.reading = reading
        self.columns = tuple(columns)
        self._clock = clock
        self._sleep = sleep
        self._origins: dict[tuple[str, ...] | None, Origin] = {}
        self._origin_of: dict[str, Origin] = {}  # topic -> the origin that saw its logs last
        self._poller = LogPoller(self._read_logs, clock)
        self._doubted: dict[str, float] = {}  # log -> since when
        self._initial: Positions | None = None
        self._unrecorded: Positions | None = None
        self._target: Positions | None = None
        self._last_served = ""
        self._reported: set[str] = set()

    # --- where it begins ---------------------------------------------------------------------------------------------

    def initialOffset(self) -> Positions:
        """Return the starting positions. Spark asks twice before the first batch and expects the same answer."""
        if self._initial is None:
            starts = [(log.name, *self._start_of(log)) for log in self._first_logs()]
            self._initial = sorted_positions({name: offset for name, offset, _ in starts})
            if not all(is_found_again for _, _, is_found_again in starts):
                self._unrecorded = self._initial
        return self._initial

    def _first_logs(self) -> list[PartitionLog]:
        try:
            logs = self._logs_of(self.reading.topics)
        except NoTopic:
            if not all(map(is_pattern, self.reading.topics or ())):
                raise
            logs = self._read_logs()  # finds topics that are created later
        named = {(topic, number) for topic, each in self.reading.starting.offsets.items() for number in each}
        unknown = named - {(log.topic, log.partition) for log in logs}
        if unknown:
            topic, number = min(unknown)
            raise BadOption(f"startingOffsets names partition {number} of {topic!r}, which is not read here")
        return logs

    def _start_of(self, log: PartitionLog) -> tuple[int, bool]:
        """Return the offset, and True if the same options will yield it again after the log has grown."""
        bound = self.reading.starting
        if bound.timestamp_ms is not None:
            offset = self._origin_of[log.topic].offset_at(log, bound.timestamp_ms)
            return offset, offset < log.end_offset
        asked = bound.of(log)
        if asked == EARLIEST:
            return log.start_offset, True
        if asked == LATEST:
            return log.end_offset, False
        if asked > log.end_offset:
            raise BadOption(
                f"startingOffsets: {asked} for {log.topic!r}, partition {log.partition}, which ends at"
                f" {log.end_offset}: name an offset up to that, or {LATEST} for the end"
            )
        if asked < log.start_offset:
            self._report([f"startingOffsets: {asked} for {log.name}, which begins at {log.start_offset} now"])
        return max(asked, log.start_offset), True

    # --- how far the next batch goes ---------------------------------------------------------------------------------

    def getDefaultReadLimit(self) -> ReadLimit:
        rows_max = self.reading.rows_per_trigger_max
        return ReadAllAvailable() if rows_max is None else ReadMaxRows(rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        logs = self._wait_for(lambda: self._poller.logs(fresh=True))
        self._target = {log.name: log.end_offset for log in logs}

    def latestOffset(self, start: Positions, limit: ReadLimit) -> Positions:
        """Return the end of the next batch. Never below `start`, but for a shortened log and failOnDataLoss=false."""
        unrecorded, self._unrecorded = self._unrecorded, None
        if unrecorded is not None and start == unrecorded:
            return start
        if self._target is None:
            now = self._position(start, fresh=False)
        else:  # "nothing new" would end the query: wait until doubts are resolved
            now = self._wait_for(lambda: self._without_doubts(start))
            _cut(now, start, self._target)
        if now is None:
            return start
        end = sorted_positions(self._admitted(now, limit))
        return start if end == start else end

    def _without_doubts(self, start: Positions) -> LogPositions | None:
        now = self._position(start, fresh=True)
        return None if now is None or now.doubts else now

    def _position(self, start: Positions, *, fresh: bool) -> LogPositions | None:
        """Return the positions; None while the logs cannot be read. Raises DataLoss."""
        logs = self._poller.logs(fresh=fresh)
        if logs is None:
            return None
        now, at = compare_positions(start, logs), self._clock()
        self._doubted = {name: self._doubted.get(name, at) for name in now.doubts}
        lasting = [name for name, since in self._doubted.items() if at - since >= PATIENCE_S]
        self._report(now.losses + [now.doubts[name] for name in lasting])
        accept_losses(now, lasting, logs)
        return now

    def _admitted(self, now: LogPositions, limit: ReadLimit) -> Positions:
        if not isinstance(limit, ReadMaxRows):
            return now.ends
        waiting = now.waiting
        given = shares(waiting, limit.max_rows, self._last_served)
        if len(given) < sum(count > 0 for count in waiting.values()):
            self._last_served = list(given)[-1]
        return {name: floor + given.get(name, 0) for name, floor in now.floors.items()}

    def reportLatestOffset(self) -> Positions | None:
        logs = self._poller.last_seen
        return sorted_positions({log.name: log.end_offset for log in logs}) if logs else None

    # --- the pieces of a batch ---------------------------------------------------------------------------------------

    def partitions(self, start: Positions, end: Positions) -> list[InputPartition]:
        """Plan the tasks. A log missing in `start` is new: `end` has its first offset, and this batch skips it."""
        self._unrecorded = None  # a checkpointed batch is read again
        wanted = {name: (start.get(name, high), high) for name, high in end.items() if start.get(name, high) < high}
        if not wanted:
            return []
        patience = FaultDuration(self._clock)
        while True:
            ranges, began = self._ranges(wanted), self._clock()
            try:
                spans = [span for log, low, high in ranges for span in self._origin_of[log.topic].spans(log, low, high)]
                return packed(spans, self.reading.span_offsets)
            except LASTING:
                raise
            except PASSING as fault:  # for example a file removed since the last poll: poll again
                final = patience.ended(fault, began)
                if final is not None:
                    raise final from fault
            self._sleep(POLL_S)

    def _ranges(self, wanted: Mapping[str, tuple[int, int]]) -> list[tuple[PartitionLog, int, int]]:
        """Return the part of the wanted ranges that exists. Raises DataLoss, SourceError."""
        logs = self._wait_for(lambda: self._reaching(wanted))
        losses: list[str] = []
        ranges: list[tuple[PartitionLog, int, int]] = []
        for name, (low, high) in wanted.items():
            log = logs.get(name)
            if log is None:
                losses.append(f"{name} is gone (was its topic deleted?): offsets {low} to {high - 1} were not read")
                continue
            if log.start_offset > low:
                gone = min(log.start_offset, high)
                losses.append(
                    f"offsets {low} to {gone - 1} of {name} were removed before they were read (retention or a purge)"
                )
            if log.end_offset < high:
                losses.append(f"{name} ends at offset {log.end_offset}, and was to be read up to {high}")
            ranges.append((log, max(low, log.start_offset), min(high, log.end_offset)))
        self._report(losses)
        return [(log, low, high) for log, low, high in ranges if low < high]

    def _reaching(self, wanted: Mapping[str, tuple[int, int]]) -> dict[str, PartitionLog] | None:
        """Return the logs once each wanted log exists and is committed as far as when the batch was created; None
        before that. After the patience is over it returns them as they are."""
        seen = self._poller.logs(fresh=True)
        if seen is None:
            return None
        logs, at = {log.name: log for log in seen}, self._clock()
        short = [name for name, (_, high) in wanted.items() if name not in logs or logs[name].end_offset < high]
        self._doubted = {name: self._doubted.get(name, at) for name in short}
        if any(at - since < PATIENCE_S for since in self._doubted.values()):
            return None
        return logs

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        for span in spans_of(partition):
            yield from rows_of(span, self.columns, self.reading.fails_on_data_loss)

    def commit(self, end: Positions) -> None:
        """Do nothing: messages stay until retention removes them."""

    def stop(self) -> None:
        self._origins.clear()
        self._origin_of.clear()

    # --- polling -----------------------------------------------------------------------------------------------------

    def _read_logs(self) -> list[PartitionLog]:
        """Return the logs of the topics that exist: `compare_positions` reports the missing ones."""
        topics = self.reading.topics
        try:
            return self._logs_of(topics)
        except NoTopic:
            found: dict[str, PartitionLog] = {}  # by name: patterns may overlap
            for topic in topics if topics and len(topics) > 1 else ():
                with contextlib.suppress(NoTopic):
                    found |= {log.name: log for log in self._logs_of((topic,))}
            return list(found.values())

    def _logs_of(self, topics: tuple[str, ...] | None) -> list[PartitionLog]:
        if topics not in self._origins:
            self._origins[topics] = replace(self.reading, topics=topics).origin()
        origin = self._origins[topics]
        logs = origin.logs()
        self._origin_of |= {log.topic: origin for log in logs}
        return logs

    def _wait_for(self, look: Callable[[], Found | None]) -> Found:
        """Return the first result of `look`, which ends the wait itself by a result or an error."""
        while (found := look()) is None:
            self._sleep(POLL_S)
        return found

    def _report(self, losses: Sequence[str]) -> None:
        if not losses:
            return
        text = ". ".join(losses[:_LOSSES_LISTED])
        if len(losses) > _LOSSES_LISTED:
            text += f". And {len(losses) - _LOSSES_LISTED} more like these"
        if self.reading.fails_on_data_loss:
            raise DataLoss(text)
        if not self._reported.issuperset(losses):  # the plan of a batch finds the same losses again
            _log.warning("%s. The query goes on with what is there (failOnDataLoss=false)", text)
        self._reported = set(losses)


def _cut(now: LogPositions, start: Positions, target: Positions) -> None:
    """Limit the positions to the target, and drop logs that are newer than it."""
    for name in list(now.ends):
        if name not in target and name not in start:
            del now.floors[name], now.ends[name]
        else:
            now.ends[name] = max(now.floors[name], min(now.ends[name], target.get(name, 0)))
