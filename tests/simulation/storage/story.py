"""One partition's files at work, and what must be found of them after a crash at any moment.

Before and after each call of the product the story notes what may be on disk (`Allowed`): in between, either what was
there or what the call makes of it, or one of the states between that log.py names; after it only that. So an
acknowledged record may be missing from none, and one that was never written, or refused, may be in none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from simulation.storage.recorder import Recorder
from support.compressed import with_compressed_values
from support.log_files import IDENTITY, open_log

from portalmq.broker.core.fold import GroupFold, PartitionFold, SpanFold, encode_fold
from portalmq.broker.partition.folding import recover
from portalmq.broker.partition.following import _reset, _truncated
from portalmq.broker.storage.batch import HOLE, Batch, BatchKind, Record, checksum
from portalmq.broker.storage.compaction import Compaction, CompactionOrder
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.errors import Shortage
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.reading import ReplicaStart
from portalmq.broker.storage.state import StateFile

PLACE = Path("partitions/orders@topic-id-1/0")
KEYS = 7
Saved = tuple[bytes, int]


@dataclass(frozen=True)
class Content:
    """What a log holds: `batches` up to one of `ends`, from one of `starts` on. Messages at `removable` may be gone."""

    batches: tuple[Batch, ...] = ()
    ends: frozenset[int] = frozenset({0})
    starts: frozenset[int] = frozenset({0})
    removable: frozenset[int] = frozenset()

    def holds(self, found: list[Batch], start: int, end: int) -> bool:
        """Return whether a log of `found` batches between `start` and `end` is one of these."""
        if start not in self.starts or end not in self.ends:
            return False
        wanted = [batch for batch in self.batches if start < batch.end_offset <= end]
        return len(wanted) == len(found) and all(map(self._is, found, wanted))

    def _is(self, found: Batch, wanted: Batch) -> bool:
        if _head(found) != _head(wanted) or len(found.records) != len(wanted.records):
            return False
        return all(
            (mine is HOLE and offset in self.removable) or mine == theirs
            for offset, (mine, theirs) in enumerate(zip(found.records, wanted.records, strict=True), found.base_offset)
        )


def _head(batch: Batch) -> Batch:
    return msgspec.structs.replace(batch, records=(), crc=0, holes=0, compressed=b"")


@dataclass(frozen=True)
class Allowed:
    """What may be found: a log that is one of `logs`, one of the `saved` folds with its high watermark (None: none),
    and a highest epoch in `epochs`. `is_given_up`: the log is being replaced, and may lack what was before it."""

    logs: tuple[Content, ...] = (Content(),)
    saved: tuple[Saved | None, ...] = (None,)
    epochs: tuple[int, int] = (-1, -1)
    is_given_up: bool = False

    def check(self, log: Log, state: StateFile) -> None:
        """Check files that were just opened; fail with AssertionError."""
        _all(log)  # an interrupted change is read from the files first
        found = log.read(log.log_start_offset)
        start, end = log.log_start_offset, log.end_offset
        offsets = [(batch.base_offset, batch.end_offset) for batch in found]
        assert any(content.holds(found, start, end) for content in self.logs), (
            f"the log holds {offsets} in [{start}, {end}), expected ends"
            f" {[sorted(content.ends) for content in self.logs]}, starts {[sorted(each.starts) for each in self.logs]}"
        )
        assert log.messages_before(end) == log.message_count_total - sum(batch.holes for batch in _all(log))
        loaded = state.load()
        saved = None if loaded is None else (encode_fold(loaded[0]), loaded[1])
        assert saved in self.saved, f"the saved fold {loaded} was never saved, or superseded durably"
        lowest, highest = self.epochs
        assert lowest <= state.highest_epoch() <= highest, f"epoch {state.highest_epoch()}, promised {self.epochs}"
        recovered = recover(log, state)
        assert self.is_given_up or not recovered.lost, recovered.lost
        assert recovered.high_watermark <= end, (recovered.high_watermark, end)
        assert recovered.highest_epoch >= lowest


def _all(log: Log) -> list[Batch]:
    return log.read_to_copy(log.base_offset, max_bytes=1 << 40, below=log.end_offset)


@dataclass
class Model:
    """What the story knows to be on disk: the log's batches, with those below its start; the rest as in Allowed."""

    batches: tuple[Batch, ...] = ()
    begin: int = 0
    messages_begin: int = 0
    start: int = 0
    removable: frozenset[int] = frozenset()
    saved: tuple[Saved | None, ...] = (None,)
    epochs: tuple[int, int] = (-1, -1)
    epoch_starts: tuple[tuple[int, int], ...] = ()
    clock_ms: int = 1_000
    is_given_up: bool = False

    @property
    def end(self) -> int:
        return self.batches[-1].end_offset if self.batches else self.begin

    @property
    def messages(self) -> int:
        return (
            self.messages_begin
            if not self.batches
            else self.batches[-1].messages_before + self.batches[-1].message_count
        )

    def content(self, **more: Any) -> Content:
        return Content(
            **{
                "batches": self.batches,
                "ends": frozenset({self.end}),
                "starts": frozenset({self.start}),
                "removable": self.removable,
                **more,
            }
        )

    def allowed(self) -> Allowed:
        return Allowed((self.content(),), self.saved, self.epochs, self.is_given_up)

    def ends_from(self, offset: int) -> frozenset[int]:
        """Return the borders of batches from `offset` on."""
        borders = {self.begin, *(batch.end_offset for batch in self.batches)}
        return frozenset(border for border in borders if border >= offset)


@dataclass
class Story:
    """The files of a partition under `disk`, which are open after `begin`. `acked` counts the messages that were."""

    disk: Recorder
    model: Model
    log: Log = field(init=False)
    epochs: EpochFile = field(init=False)
    state: StateFile = field(init=False)
    allowed: Allowed = field(init=False)
    acked: int = 0

    @property
    def directory(self) -> Path:
        return self.disk.root / PLACE

    # --- opening and closing -------------------------------------------------------------------------------------

    def begin(self, allowed: Allowed) -> None:
        """Open the files as the start of a broker does. What they claim then is durable."""
        self.note(allowed)
        self.open()
        self.allowed.check(self.log, self.state)
        self.adopt()

    def open(self) -> None:
        self.log = open_log(self.directory)
        self.epochs = EpochFile(self.disk.root)
        self.state = StateFile(self.directory, identity=IDENTITY, epochs=self.epochs)

    def adopt(self, *, is_start: bool = True) -> None:
        """Take what the files claim for true, and durable; the saved fold only at a start."""
        model, log = self.model, self.log
        found = _all(log)
        known = {batch.base_offset: batch for content in self.allowed.logs for batch in content.batches}
        model.batches = tuple(known[batch.base_offset] for batch in found)
        model.begin = log.base_offset
        model.messages_begin = log.message_count_total if not found else found[0].messages_before
        model.start = log.log_start_offset
        model.clock_ms = max(model.clock_ms, log.last_timestamp_ms)
        model.removable = frozenset().union(*(content.removable for content in self.allowed.logs))
        starts = [(batch.leader_epoch, batch.base_offset) for batch in model.batches if batch.kind == 1]
        model.epoch_starts = tuple(each for each in model.epoch_starts if each[1] < log.base_offset) + tuple(starts)
        loaded = self.state.load()
        saved = None if loaded is None else (encode_fold(loaded[0]), loaded[1])
        model.saved = (*(() if is_start else (each for each in self.allowed.saved if each != saved)), saved)
        model.epochs = (self.state.highest_epoch(), self.allowed.epochs[1])
        model.is_given_up = bool(recover(log, self.state).lost)
        self.note(model.allowed())

    def note(self, allowed: Allowed) -> None:
        self.allowed = allowed
        self.disk.note(allowed)

    def restart(self) -> None:
        """Close the files, and open them again."""
        self.close()
        self.reopen()

    def close(self) -> None:
        self.log.close()
        self.state.close()
        self.epochs.close()

    def reopen(self) -> None:
        self.open()
        self.allowed.check(self.log, self.state)
        self.adopt()

    def rest(self) -> None:
        """Close the files until they are used again."""
        self.log.park()
        self.state.park()
        self.epochs.close()

    # --- the log -------------------------------------------------------------------------------------------------

    @contextmanager
    def change(self, after: Content, *between: Content) -> Iterator[None]:
        """Expect `after` from the call in the block; while it runs, the present content or one of `between` as well.
        Without room, a call in several steps may have done some of them; any other none."""
        before = self.allowed
        self.note(replace(before, logs=(*before.logs, after, *between)))
        try:
            yield
        except Shortage:
            if not between:
                self.note(before)
            raise
        self.note(replace(self.allowed, logs=(after,)))

    def batch(self, kind: int, records: tuple[Record, ...] = (), body: bytes = b"", epoch: int | None = None) -> Batch:
        model = self.model
        count = len(records) or 1
        epoch = max(1, model.epochs[1]) if epoch is None else epoch
        model.clock_ms += 10
        batch = Batch(model.end, count, model.messages, kind, epoch, model.clock_ms, records=records, body=body)
        return msgspec.structs.replace(batch, crc=checksum(batch))

    def messages(self, count: int, size: int = 30) -> tuple[Record, ...]:
        first = self.model.end
        return tuple(
            Record(b'{"n": "%d %s"}' % (at, b"x" * (size + at % 50)), "application/json", b"key %d" % (at % KEYS))
            for at in range(first, first + count)
        )

    def put(self, *batches: Batch, at_once: bool = False, stored: Batch | None = None) -> None:
        """Append `batches`, which follow each other, in one transaction. Acknowledged on return."""
        model, before = self.model, self.model.batches
        model.batches += batches
        after = model.content()
        model.batches = before
        with self.change(after):
            if at_once:
                assert self.log.append_at_once(batches)
            else:
                self.log.append([stored] if stored else batches)
        model.batches += batches
        self.acked += sum(batch.message_count for batch in batches)

    def append(self, count: int = 3, size: int = 30, **more: Any) -> None:
        self.put(self.batch(BatchKind.MESSAGES, self.messages(count, size)), **more)

    def append_several(self) -> None:
        first = self.batch(BatchKind.MESSAGES, self.messages(3))
        ack = self.batch(BatchKind.MESSAGES, tuple(Record(b"%d" % n, "text/plain") for n in range(5)))
        second = msgspec.structs.replace(
            ack, base_offset=first.end_offset, messages_before=first.messages_before + first.message_count
        )
        self.put(first, msgspec.structs.replace(second, crc=checksum(second)))

    def append_compressed(self) -> None:
        batch = self.batch(BatchKind.MESSAGES, self.messages(20))
        self.put(batch, stored=with_compressed_values(batch))

    def append_state(self) -> None:
        """Write a STATE record, as retention does before it drops segments."""
        self.put(self.batch(BatchKind.STATE, body=encode_fold(self.fold())))

    def roll(self) -> None:
        self.log.roll()

    def append_and_roll(self) -> None:
        """Let an append find the segment full."""
        before, self.log.segment_bytes = self.log.segment_bytes, 1
        try:
            self.append()
        finally:
            self.log.segment_bytes = before

    def checkpoint(self) -> None:
        self.log.checkpoint()

    def seal(self) -> None:
        self.log.seal(self.log.end_offset)

    def read(self) -> None:
        if self.log._closed:  # a shortage came between the close and the open
            self.open()
        self.allowed.check(self.log, self.state)

    def compact(self) -> None:
        """Roll and seal what is below the end, and remove superseded messages there."""
        model, upto = self.model, self.model.end
        newest: dict[bytes, int] = {}
        keyed = [
            (record.key, offset)
            for batch in model.batches
            for offset, record in enumerate(batch.records, batch.base_offset)
            if record.key
        ]
        newest.update(keyed)
        gone = frozenset(offset for key, offset in keyed if newest[key] > offset)
        after = model.content(removable=model.removable | gone)
        with self.change(after, after):
            self.log.roll_below(upto)
            while not self.log.is_compacted(upto, 0):
                self.log.seal(upto)
                work = Compaction(self.log, CompactionOrder(upto, 0, model.clock_ms))
                try:
                    while work.step():
                        pass
                finally:
                    work.close()
        model.removable |= gone

    def truncate(self, back: int) -> None:
        """Remove the last `back` batches, as a follower of a new leader does."""
        model = self.model
        kept = model.batches[: len(model.batches) - back]
        to_offset = kept[-1].end_offset if kept else model.begin
        after = model.content(batches=kept, ends=frozenset({to_offset}))
        between = model.content(ends=model.ends_from(to_offset))
        self.note(replace(self.allowed, saved=(*model.saved, None)))
        with self.change(after, between):
            recovered = _truncated(self.log, self.state, to_offset, to_offset)
        assert model.is_given_up or not recovered.lost, recovered.lost
        model.batches = kept
        model.epoch_starts = tuple(each for each in model.epoch_starts if each[1] < to_offset)
        forgotten = any(saved is not None and saved[1] > to_offset for saved in model.saved)
        model.saved = (None,) if forgotten else model.saved
        self.note(model.allowed())

    def reset(self, ahead: int) -> None:
        """Begin an empty log `ahead` of the end, or at 0."""
        model = self.model
        base = model.end + ahead if ahead >= 0 else 0
        messages = model.messages + ahead if ahead >= 0 else 0
        epochs = list(model.epoch_starts) if base else []
        fold = PartitionFold(applied=base, log_start_offset=base, epochs=epochs)
        after = Content(ends=frozenset({base}), starts=frozenset({base}))
        nothing = Content()
        some = model.content(ends=model.ends_from(0))
        saved = (encode_fold(fold), base)
        self.note(replace(self.allowed, saved=(*model.saved, saved), is_given_up=True))
        with self.change(after, some, nothing):
            recovered = _reset(self.log, self.state, ReplicaStart(base, messages, model.clock_ms), epochs)
        assert not recovered.lost, recovered.lost
        model.is_given_up = False
        model.batches, model.begin, model.start, model.messages_begin = (), base, base, messages
        model.removable, model.epoch_starts = frozenset(), tuple(epochs)
        model.saved = (saved,)
        self.note(model.allowed())

    def drop(self, keep: int = 1) -> None:
        """Drop sealed segments, as retention does, after a STATE record."""
        bases = [entry.end_offset for entry in self.log.sealed_segments]
        if not bases:  # done before a shortage
            return
        upto = bases[-keep]
        self.append_state()
        model = self.model
        after = model.content(starts=frozenset({max(model.start, upto)}))
        with self.change(after, after):
            assert self.log.drop_segments_below(upto)
        model.start = max(model.start, upto)
        model.batches = tuple(batch for batch in model.batches if batch.base_offset >= self.log.base_offset)
        model.begin = self.log.base_offset
        self.note(model.allowed())

    def purge(self, back: int = 1) -> None:
        """Delete all but the newest messages."""
        model = self.model
        start = model.batches[-back].base_offset
        after = model.content(starts=frozenset({start}))
        with self.change(after):
            self.log.advance_log_start(start)
        model.start = start

    # --- the state file --------------------------------------------------------------------------------------------

    def fold(self) -> PartitionFold:
        model = self.model
        spans = [SpanFold(model.start, model.end, 1, 0, True, model.clock_ms, model.clock_ms + 30_000)]
        groups = [GroupFold("workers", model.start, model.end, spans if model.end > model.start else [])]
        return PartitionFold(
            applied=model.end, log_start_offset=model.start, epochs=list(model.epoch_starts), groups=groups
        )

    def save(self, *, durable: bool = False) -> None:
        """Save the fold. An earlier one may be found after a power cut, unless `durable`."""
        model = self.model
        saved = (encode_fold(self.fold()), model.end)
        before = self.allowed
        self.note(replace(before, saved=(*model.saved, saved)))
        try:
            self.state.save(self.fold(), model.end, self.log.messages_before, durable=durable)
        except Shortage:
            self.note(before)
            raise
        model.saved = (saved,) if durable else (*model.saved, saved)
        self.note(model.allowed())

    def lead(self) -> None:
        """See a higher epoch: durable before anything is done in it. Then begin it in the log."""
        model, before = self.model, self.allowed
        epoch = model.epochs[1] + 1
        model.epochs = (model.epochs[0], epoch)
        self.note(replace(before, epochs=model.epochs))
        self.state.save_highest_epoch(epoch)
        model.epochs = (epoch, epoch)
        self.note(model.allowed())
        starts = model.epoch_starts
        model.epoch_starts = (*starts, (epoch, model.end))
        try:
            self.put(self.batch(BatchKind.EPOCH_START, epoch=epoch))
        except BaseException:
            model.epoch_starts = starts
            raise
