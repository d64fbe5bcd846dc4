"""Idempotent producers (KIP-98): the batches of each producer that the partition holds.

The sequences of one (producer id, epoch) are contiguous. A batch whose sequence is still remembered is a duplicate, and
is answered with its first offset. A gap, an unknown producer that does not begin at 0, and a sequence older than those
remembered are refused for good; a lower epoch is fenced. The state is a fold over the log's batch headers, so it is
replicated, recovered and truncated with the log.

A schedule is a producer too, and the moment of a tick is its epoch: no tick is appended twice, nor after a later one.
Its last tick is remembered however old it is.
"""

from __future__ import annotations

import msgspec

from portalmq.broker.core.fold import ProducerFold
from portalmq.contract.schedules import SCHEDULE_IDS_FROM
from portalmq.errors import Backpressure, Fenced, OutOfOrderSequence

BATCHES_REMEMBERED = 16
# Beyond this number only producers whose last batch is younger than RECENT_MS are remembered: a retry comes sooner.
PRODUCERS_MAX = 10_000
RECENT_MS = 600_000
# New producers are refused while this many are remembered.
PRODUCERS_FULL = 50_000
# Of more schedules than this, twice as many as a cluster has, the least recent are forgotten like other producers.
SCHEDULES_REMEMBERED = 20_000


class Stamp(msgspec.Struct, frozen=True):
    """Sequence identity of a batch (KIP-98). `sequence` is that of its first message."""

    producer_id: int
    producer_epoch: int
    sequence: int


class Producers:
    """The producers of one partition. `expire` works by the log's time, never by the wall clock."""

    def __init__(self, folds: list[ProducerFold]) -> None:
        self._by_id = {
            fold.producer_id: ProducerFold(fold.producer_id, fold.epoch, list(fold.batches)) for fold in folds
        }

    def snapshot(self) -> list[ProducerFold]:
        return [ProducerFold(fold.producer_id, fold.epoch, list(fold.batches)) for fold in self._by_id.values()]

    def find_duplicate(self, stamp: Stamp, count: int) -> tuple[int, int] | None:
        """Return (base_offset, appended_at_ms) of a batch that is in the log already, None for the next new one.
        Raise Fenced or OutOfOrderSequence; nothing is applied then."""
        known = self._by_id.get(stamp.producer_id)
        if known is not None and stamp.producer_epoch < known.epoch:
            raise Fenced(
                f"producer {stamp.producer_id} is in epoch {known.epoch} now, this batch is of epoch"
                f" {stamp.producer_epoch}: another instance of the producer has taken over"
            )
        if known is None or stamp.producer_epoch > known.epoch:
            self._check_begins(stamp)
            return None
        repeated = _batch_of(known, stamp, count)
        if repeated is not None:
            return repeated
        last_sequence, length, _, _ = known.batches[-1]
        if stamp.sequence != last_sequence + length:
            raise OutOfOrderSequence(
                f"producer {stamp.producer_id} (epoch {known.epoch}) sent sequence {stamp.sequence}, the next is"
                f" {last_sequence + length}: take a new epoch with POST /v1/producers",
                expected_sequence=last_sequence + length,
            )
        return None

    def repeated_by(self, stamp: Stamp, count: int) -> tuple[int, int] | None:
        """Return (base_offset, appended_at_ms) of a batch that is in the log already; None for any other batch, also
        for one that find_duplicate refuses."""
        known = self._by_id.get(stamp.producer_id)
        return None if known is None or known.epoch != stamp.producer_epoch else _batch_of(known, stamp, count)

    def epoch_of(self, producer_id: int) -> int | None:
        """Return the newest epoch of a producer in the log, not yet committed batches included; None without one."""
        known = self._by_id.get(producer_id)
        return None if known is None else known.epoch

    def last_offset_of(self, producer_id: int) -> int | None:
        """Return the offset of a producer's last batch; None without one."""
        known = self._by_id.get(producer_id)
        return None if known is None else known.batches[-1][2]

    def _check_begins(self, stamp: Stamp) -> None:
        is_new = stamp.producer_id < SCHEDULE_IDS_FROM and stamp.producer_id not in self._by_id
        if is_new and len(self._by_id) >= PRODUCERS_FULL:
            raise Backpressure(
                f"the partition has seen {PRODUCERS_FULL} producers recently: use one producer for more messages",
                retry_after_s=60,
            )
        if stamp.sequence != 0:
            raise OutOfOrderSequence(
                f"producer {stamp.producer_id} is not known here in epoch {stamp.producer_epoch}, so its first"
                f" sequence must be 0, not {stamp.sequence}: take a new epoch with POST /v1/producers",
                expected_sequence=0,
            )

    def add(self, stamp: Stamp, count: int, base_offset: int, appended_at_ms: int) -> None:
        """Fold a batch of the log."""
        known = self._by_id.get(stamp.producer_id)
        if known is None or stamp.producer_epoch > known.epoch:
            known = self._by_id[stamp.producer_id] = ProducerFold(stamp.producer_id, stamp.producer_epoch, [])
        known.batches.append((stamp.sequence, count, base_offset, appended_at_ms))
        del known.batches[:-BATCHES_REMEMBERED]

    def expire(self, before_ms: int) -> None:
        """Forget producers whose last batch is older than `before_ms`, a time of the log. Beyond PRODUCERS_MAX, also
        forget the least recent ones."""
        schedules = [fold for key, fold in self._by_id.items() if key >= SCHEDULE_IDS_FROM]
        if len(schedules) > SCHEDULES_REMEMBERED:
            schedules = sorted(schedules, key=_last_batch_ms, reverse=True)[:SCHEDULES_REMEMBERED]
        self._by_id = {key: fold for key, fold in self._by_id.items() if _last_batch_ms(fold) >= before_ms}
        others = [fold for key, fold in self._by_id.items() if key < SCHEDULE_IDS_FROM]
        if len(others) > PRODUCERS_MAX:
            folds = sorted(others, key=_last_batch_ms, reverse=True)
            recent_ms = _last_batch_ms(folds[0]) - RECENT_MS
            kept = [fold for at, fold in enumerate(folds) if at < PRODUCERS_MAX or _last_batch_ms(fold) > recent_ms]
            self._by_id = {fold.producer_id: fold for fold in kept}
        self._by_id |= {fold.producer_id: fold for fold in schedules}


def _batch_of(known: ProducerFold, stamp: Stamp, count: int) -> tuple[int, int] | None:
    for sequence, length, base_offset, appended_at_ms in known.batches:
        if sequence == stamp.sequence and length == count:
            return base_offset, appended_at_ms
    return None


def _last_batch_ms(fold: ProducerFold) -> int:
    return fold.batches[-1][3]
