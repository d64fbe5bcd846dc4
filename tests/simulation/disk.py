"""A broker's disk with one partition: the fsynced data, and the part of the rest that may survive a crash.

    synced batches ........ | written, not synced
    a crash keeps all       | and any prefix of these

Persisted: the log, the epochs and producers of dropped records below its start, the highest epoch seen, and an earlier
high watermark. Nothing else.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from operator import attrgetter

from simulation.content import Control, Mail

from portalmq.broker.core.fold import ProducerFold
from portalmq.broker.core.replica.events import BatchHead
from portalmq.broker.core.replica.producers import Producers


@dataclass(slots=True, eq=False)
class Batch:
    """A batch, created once; replicas share the object.

    `uid` represents its payload; `parent` is the uid of the batch before it in the log it was created for, 0 at the
    beginning. `mail` are its messages, or `control` its record. `state` is the groups' part of a STATE record, encoded;
    once that is committed the log may begin at `log_start`.
    """

    head: BatchHead
    uid: int
    parent: int = 0
    mail: tuple[Mail, ...] = ()
    control: Control | None = None
    state: bytes | None = None
    log_start: int = 0
    base: int = field(init=False)
    end: int = field(init=False)

    def __post_init__(self) -> None:
        self.base = self.head.base_offset
        self.end = self.base + self.head.count

    def __str__(self) -> str:
        kind = "start" if self.head.is_epoch_start else "state" if self.head.producers is not None else "batch"
        return f"{kind}#{self.uid}[{self.base},{self.end})e{self.head.leader_epoch}"


_base_of = attrgetter("base")


@dataclass(slots=True, eq=False)
class Disk:
    """Invariant: `batches` are dense from `start` on; all are synced."""

    store_uuid: str
    generation: int = 0
    start: int = 0
    batches: list[Batch] = field(default_factory=list)
    highest_epoch: int = 0
    saved_high_watermark: int = 0
    base_epochs: list[tuple[int, int]] = field(default_factory=list)
    base_producers: list[ProducerFold] = field(default_factory=list)
    flipped: set[int] = field(default_factory=set)  # uids of batches that no longer fit their CRC
    full: bool = False
    slow_ms: int = 0
    forgot_upto: int = 0  # the end of its lost fsynced records
    acted_epoch: int = 0  # the checker's: the highest epoch that a replica on this disk fetched or wrote in

    @property
    def replica_store(self) -> str:
        return f"{self.store_uuid}/{self.generation}" if self.generation else self.store_uuid

    @property
    def end(self) -> int:
        return self.batches[-1].end if self.batches else self.start

    def index_from(self, offset: int) -> int:
        """Of the first batch at or above `offset`."""
        return bisect_left(self.batches, offset, key=_base_of)

    def ending_at(self, offset: int) -> Batch | None:
        batches = self.batches
        if batches and batches[-1].end == offset:
            return batches[-1]
        index = bisect_left(batches, offset, key=_base_of)
        return batches[index - 1] if index and batches[index - 1].end == offset else None

    def epochs(self) -> list[tuple[int, int]]:
        own = [(batch.head.leader_epoch, batch.base) for batch in self.batches if batch.head.is_epoch_start]
        return [*self.base_epochs, *own]

    def producers(self) -> Producers:
        return _fold(self.base_producers, self.batches)

    @property
    def is_forgetful(self) -> bool:
        return self.end < self.forgot_upto

    # --- changes -----------------------------------------------------------------------------------------------------

    def append(self, batches: list[Batch]) -> None:
        self.batches += batches

    def truncate(self, to_offset: int) -> None:
        if to_offset < self.start:
            self.reset(to_offset, [entry for entry in self.base_epochs if entry[1] < to_offset])
            return
        index = self.index_from(to_offset)
        if index and self.batches[index - 1].end > to_offset:  # a batch is whole or not at all
            index -= 1
        del self.batches[index:]
        self.saved_high_watermark = min(self.saved_high_watermark, self.end)

    def reset(self, offset: int, epochs: list[tuple[int, int]]) -> None:
        self.batches.clear()
        self.start = self.saved_high_watermark = offset
        self.base_epochs = epochs
        self.base_producers = []

    def forget(self, batches: int) -> None:
        """The last fsynced batches are lost. A replica that lacks records it knew to be committed starts from
        nothing."""
        self.forgot_upto = max(self.forgot_upto, self.end)
        del self.batches[-batches:]
        if self.saved_high_watermark > self.end:
            self.empty()

    def drop_below(self, offset: int) -> None:
        """Retention: the log begins at `offset` from now on."""
        index = self.index_from(offset)
        dropped, self.batches = self.batches[:index], self.batches[index:]
        self.base_producers = _fold(self.base_producers, dropped).snapshot()
        self.base_epochs += [(b.head.leader_epoch, b.base) for b in dropped if b.head.is_epoch_start]
        self.start = offset

    def empty(self) -> None:
        """The disk was damaged and set aside: a new replica begins on this disk. The highest epoch seen remains."""
        self.generation += 1
        self.forgot_upto = 0
        self.reset(0, [])
        self.flipped.clear()


def _fold(base: list[ProducerFold], batches: list[Batch]) -> Producers:
    producers = Producers(base)
    for batch in batches:
        if batch.head.producers is not None:
            producers = Producers(list(batch.head.producers))
        if batch.head.stamp is not None:
            producers.add(batch.head.stamp, batch.head.count, batch.base, batch.head.appended_at_ms)
    return producers
