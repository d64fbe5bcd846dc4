"""The commit call: acks of input and orders of output, as one record in the log of the input's partition.

    receipts (queue)            \
    offset of a member (stream) -+-> checked here -> leader of the partition -> Commit record -> outbox.py
    messages to publish         /

Everything is checked before anything is appended: the signatures of the receipts, and all of the outputs (names, sizes,
headers, partitions). The leader checks the input against the group's fold. A message that is done already, or leased to
another consumer, refuses the call with nothing appended. A commit that is in the fold already gets its first answer
again. So a call with an unknown outcome can be repeated, also at another leader.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from portalmq import wire
from portalmq.broker.cluster.routing import LocalWork, one_by_one
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.rpc.queues import COMMIT, CommitCall, CommitResult, LeaseOffsets, MemberOffset
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.core.fold import SpanFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.records import Commit, LanePosition, Output, Range
from portalmq.broker.core.stream.offsets import StreamOffsets
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.messages.produce import size_of, with_default_ttl
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.yielding import give_way, in_turns
from portalmq.broker.queues.group_partition import GroupPartition, ReceiptSpan
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.outbox import Outbox, Outboxes, OutputTopics
from portalmq.broker.queues.settle import Settlement
from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.control_plane.state import GroupState
from portalmq.errors import (
    GroupModeMismatch,
    IllegalGeneration,
    InvalidRequest,
    MessageTooLarge,
    OffsetMoved,
    OffsetOutOfRange,
    StaleReceipt,
    StorageFull,
    Unavailable,
)

OUTPUT_TOPICS_MAX = 100
OUTPUTS_MAX = 10_000
# Receipts, and outputs, that are handled before other greenlets run.
RECEIPTS_A_TURN = 500
OUTPUTS_A_TURN = 1_000

_encode = msgspec.msgpack.Encoder().encode
_decode_commit = msgspec.msgpack.Decoder(Commit).decode


class _ReceiptCheck(NamedTuple):
    """The result of a check of receipts: how many are stale, the ranges and positions of a record that acks the others,
    and the offsets that are not done. `spans` are the spans of the fold that the result depends on, when the check had
    pauses."""

    refused: int
    ranges: tuple[Range, ...]
    ahead: tuple[LanePosition, ...]
    open: set[int]
    spans: Sequence[SpanFold] = ()


@dataclass(frozen=True, slots=True)
class OutputMessage:
    """A message to append to `topic`; `partition` is None when the request names none."""

    topic: str
    record: Record
    partition: int | None = None


@dataclass(eq=False, repr=False)
class GroupCommits:
    """Commit calls of clients, and those that other brokers forward."""

    _groups: Groups
    _receipts: Settlement
    _topics: OutputTopics
    _outboxes: Outboxes
    _clock: Clock
    _metrics: Metrics
    # Raises IllegalGeneration for a generation that a stream group has not reached.
    _check_reached: Callable[[GroupState, int], None]

    # --- the broker that the client calls ----------------------------------------------------------------------------

    def commit_receipts(
        self, name: str, receipts: list[str], publications: list[OutputMessage], *, forward: bool
    ) -> wire.Committed:
        """Ack messages of one partition and order outputs. Raises InvalidRequest, GroupModeMismatch, StaleReceipt, with
        nothing done."""
        group = self._of_mode(name, "queue")
        if group.config.delivery == "at_most_once":
            raise InvalidRequest(
                f"group {name!r} delivers at_most_once: its messages are acked before delivery, so there is nothing to"
                " commit. Produce the outputs directly, or use another group"
            )
        shares = self._receipts.checked(group, receipts)
        if len(shares) > 1:
            raise InvalidRequest(
                f"the receipts are of {len(shares)} partitions, and a commit is one record in the log of one partition:"
                " send one commit for each partition"
            )
        place, shown = next(iter(shares.items()))
        call = CommitCall(
            name,
            group.group_id,
            *place,
            self._outputs(publications),
            [each.of_lease() for each in shown],
        )
        return self._forward(call, place, forward)

    def commit_offset(
        self,
        name: str,
        topic: str,
        number: int,
        stream: MemberOffset,
        publications: list[OutputMessage],
        *,
        forward: bool,
    ) -> wire.Committed:
        """Commit a member's offset and order outputs. Raises IllegalGeneration when the member does not own the
        partition, OffsetMoved when the input does not begin at the group's offset, OffsetOutOfRange for an offset that
        cannot be committed or is committed already. Then nothing is done."""
        group = self._of_mode(name, "stream")
        self._check_reached(group, stream.generation)
        place = self._groups.topics.known(topic).place(number)
        call = CommitCall(name, group.group_id, *place, self._outputs(publications), stream=stream)
        return self._forward(call, place, forward)

    def _of_mode(self, name: str, mode: str) -> GroupState:
        group = self._groups.get(name, mode=mode)
        if group.config.mode != mode:
            raise GroupModeMismatch(
                f"group {name!r} is a {group.config.mode} group: its commits have {_shape(group.config.mode)}, and no"
                f" {_shape(mode)}"
            )
        return group

    def _forward(self, call: CommitCall, place: TopicPartition, forward: bool) -> wire.Committed:
        if not forward:
            self._groups.leaders.check_led_here([place])
        try:
            done = self._groups.leaders.call_one(
                COMMIT, call, self._local_commit(call), forward=forward, repeatable=True
            )
        except (StaleReceipt, IllegalGeneration, OffsetMoved, OffsetOutOfRange) as error:
            # The leader knows all commits of this partition: an earlier try is not among them, and never will be.
            error.outcome = "not_applied"
            raise
        return wire.Committed(done.acked, done.published, f"{place.number}-{done.offset}")

    def _outputs(self, publications: list[OutputMessage]) -> list[Output]:
        """Return the outputs as the record holds them. Missing topics are created. Raises the refusal of an invalid
        output, which names its index."""
        if len(publications) > OUTPUTS_MAX:
            raise MessageTooLarge(
                f"{len(publications)} messages to publish, the limit is {OUTPUTS_MAX}: split the input"
            )
        records: dict[str, list[Record]] = {}
        for publication in in_turns(publications, OUTPUTS_A_TURN):
            records.setdefault(publication.topic, []).append(publication.record)
        if len(records) > OUTPUT_TOPICS_MAX:
            raise InvalidRequest(f"outputs for {len(records)} topics in one commit, the limit is {OUTPUT_TOPICS_MAX}")
        topics = {name: self._topics.get_or_create(name) for name in records}
        for name, topic in topics.items():
            size_of(topic, records[name])
        wall_ms = self._clock.wall_ms()
        outputs: list[Output] = []
        for publication in in_turns(publications, OUTPUTS_A_TURN):
            topic = topics[publication.topic]
            (record,) = with_default_ttl(topic, [publication.record], wall_ms)
            outputs.append(Output(publication.topic, record, _partition_of(topic, publication)))
        return outputs

    # --- the leader --------------------------------------------------------------------------------------------------

    def local_commit(self, call: CommitCall) -> LocalWork[CommitResult]:
        """Apply a commit that another broker has checked, to a partition that this one leads."""
        self._group_of(call)
        return self._local_commit(call)

    def _local_commit(self, call: CommitCall) -> LocalWork[CommitResult]:
        return one_by_one(lambda place: self._apply(call, place))

    def _apply(self, call: CommitCall, place: TopicPartition) -> CommitResult:
        """Append the commit unless the fold has it; the record is committed on return."""
        if call.stream is None:
            return self._apply_queue(call, place)
        self._group_of(call)
        return self._apply_stream(self._groups.partition(place), call, call.stream)

    def _group_of(self, call: CommitCall) -> GroupState:
        return self._groups.get_by_id(call.group, call.group_id)

    def _apply_queue(self, call: CommitCall, place: TopicPartition) -> CommitResult:
        shown = [
            (delivery, epoch, sorted(set(offsets)))
            for delivery, epoch, offsets in in_turns(call.shown, RECEIPTS_A_TURN)
        ]
        commit_id = _id_of("queue", sorted(shown))
        offsets = {offset for _, _, own in shown for offset in own}
        checked = self._check_in_turns(call, place, shown) if len(offsets) > RECEIPTS_A_TURN else None
        at = self._at(call, place)
        first = at.delivery.commits.get(commit_id)
        if first is not None:
            return self._first_answer(at.partition, first, call, len(offsets))
        if checked is None or not at.delivery.are_unchanged(checked.spans):
            checked = _check(at, shown)
        if checked.refused:
            self._wait_refusal_final(at)
            raise StaleReceipt(
                f"{checked.refused} of {sum([len(own) for _, _, own in shown])} leases have expired or moved on:"
                " nothing was acked or published"
            )
        if checked.open != offsets:
            self._wait_refusal_final(at)
            raise StaleReceipt(
                f"{len(offsets - checked.open)} of {len(offsets)} messages are done already, by an ack or another"
                " commit: nothing was acked or published"
            )
        record = Commit(commit_id, self._clock.now_ms(), tuple(call.outputs), checked.ranges, checked.ahead)
        offset = self._append(at.partition, call.group, record)
        self._metrics.acked(call.topic, call.group, len(offsets))
        at.notify()
        return CommitResult(len(offsets), len(call.outputs), offset)

    def _check_in_turns(
        self, call: CommitCall, place: TopicPartition, shown: list[LeaseOffsets]
    ) -> _ReceiptCheck | None:
        """Check many receipts in parts, with pauses for other greenlets. The result holds while the spans are the
        same: stale receipts stay stale, done messages stay done. Return None when the log has no grant of a message."""
        delivery = self._at(call, place).delivery
        refused = 0
        ranges: list[Range] = []
        spans: list[SpanFold] = []
        open_now: set[int] = set()
        for part in _parts(shown):
            checked = _check(self._at(call, place, delivery), part)
            if checked.ahead:
                return None
            refused += checked.refused
            ranges += checked.ranges
            open_now |= checked.open
            for _, _, own in part:
                spans += delivery.spans_of(own)
            give_way()
        self._at(call, place, delivery)
        return _ReceiptCheck(refused, tuple(sorted(ranges)), (), open_now, spans)

    def _at(self, call: CommitCall, place: TopicPartition, before: GroupDelivery | None = None) -> GroupPartition:
        """Return the group on the partition. Raises Unavailable when its fold was replaced during a pause."""
        at = self._groups.at(self._group_of(call), place)
        if before is not None and at.delivery is not before:
            raise Unavailable("the group has changed: repeat", retry_after_s=0.1)
        return at

    def _wait_refusal_final(self, at: GroupPartition) -> None:
        """Wait until a refusal is final: first for the records that it depends on, which the disk may still refuse;
        then for the leadership, as another leader may have an earlier try of the same commit."""
        at.wait_refused()
        at.partition.wait_led()

    def _apply_stream(self, partition: Partition, call: CommitCall, shown: MemberOffset) -> CommitResult:
        stream = partition.streams.get(call.group)
        if stream is None:
            partition.wait_final()
            raise IllegalGeneration(
                f"no member of group {call.group!r} owns partition {call.number} of topic {call.topic!r}: join the"
                " group, and send a heartbeat to learn the assignment"
            )
        place = (shown.member, shown.generation, shown.offset)
        commit_id = _id_of("stream", place if shown.committed is None else (*place, shown.committed))
        first = stream.commits.get(commit_id)
        if first is not None:
            return self._first_answer(partition, first, call, 0)
        try:
            self._check_stream(stream, partition, shown)
        except (IllegalGeneration, OffsetMoved, OffsetOutOfRange):
            partition.wait_final()
            raise
        record = Commit(
            commit_id,
            self._clock.now_ms(),
            tuple(call.outputs),
            offset=shown.offset,
            member=shown.member,
            generation=shown.generation,
        )
        return CommitResult(0, len(call.outputs), self._append(partition, call.group, record))

    def _check_stream(self, stream: StreamOffsets, partition: Partition, shown: MemberOffset) -> None:
        stream.check_owner(shown.member, shown.generation)
        if shown.committed is not None:
            stream.check_begin(shown.committed, partition.log.log_start_offset)
        if not stream.check_commit(shown.member, shown.generation, shown.offset, partition.high_watermark):
            raise OffsetOutOfRange(
                f"offset {shown.offset} is not above the committed offset {stream.committed}: that input is done"
                " already, and nothing was published",
                committed=stream.committed,
            )

    def _append(self, partition: Partition, group: str, record: Commit) -> int:
        """Append the record, wait for its commit, and return its offset."""
        size = len(_encode(record.outputs))
        outbox: Outbox | None = None
        if record.outputs:
            outbox = self._outboxes.of(partition)
            if outbox is None:
                raise Unavailable("this broker was elected and does not lead the partition yet", retry_after_s=0.1)
            outbox.check_room(size)
            partition.check_room()
        pending = partition.append_group_record(group, record)
        if outbox is not None:
            outbox.ordered(pending.base_offset, size)
        pending.wait()
        return pending.base_offset

    def _first_answer(self, partition: Partition, offset: int, call: CommitCall, acked: int) -> CommitResult:
        """Return the answer of a commit that is in the log, after a wait until it is committed."""
        partition.wait_settled(offset)
        published, record = len(call.outputs), None
        with suppress(Unavailable, StorageFull):  # the commit is done, whether its record can be read or not
            record = partition.reader.control_at(offset)
        if record is not None and record.kind == BatchKind.COMMIT:
            published = len(_decode_commit(record.body).outputs)
        return CommitResult(acked, published, offset)


def _shape(mode: str) -> str:
    return '"ack"' if mode == "queue" else '"member_id", "generation" and "offsets"'


def _id_of(mode: str, shown: object) -> bytes:
    """Return the id of a commit: a hash of its receipts or its offset."""
    return blake2b(_encode((mode, shown)), digest_size=16).digest()


def _check(at: GroupPartition, shown: list[LeaseOffsets]) -> _ReceiptCheck:
    refused, unfinished = at.check_receipts(_numbered(shown))
    ranges, ahead = at.finished(unfinished)
    open_now = {offset for start, end in ranges for offset in range(start, end)}
    open_now |= {spot[2] for spot in ahead if not at.delivery.is_ahead(spot[2])}
    return _ReceiptCheck(len(refused), ranges, ahead, open_now)


def _parts(shown: list[LeaseOffsets]) -> Iterator[list[LeaseOffsets]]:
    """Split the receipts into parts for one turn each."""
    part: list[LeaseOffsets] = []
    left = RECEIPTS_A_TURN
    for delivery, epoch, offsets in shown:
        first = 0
        while first < len(offsets):
            own = offsets[first : first + left]
            part.append((delivery, epoch, own))
            first += len(own)
            left -= len(own)
            if left == 0:
                yield part
                part, left = [], RECEIPTS_A_TURN
    if part:
        yield part


def _numbered(shown: list[LeaseOffsets]) -> list[ReceiptSpan]:
    """The receipts with their places in a row."""
    numbered: list[ReceiptSpan] = []
    first = 0
    for delivery, leader_epoch, offsets in shown:
        numbered.append(ReceiptSpan(delivery, leader_epoch, range(first, first + len(offsets)), offsets))
        first += len(offsets)
    return numbered


def _partition_of(topic: Topic, publication: OutputMessage) -> int | None:
    """Return the partition of an output. One with a key is fixed here, so that later growth of the topic does not move
    it. Raises PartitionNotFound."""
    if publication.partition is not None:
        return topic.place(publication.partition).number
    if publication.record.key is not None:
        return zlib.crc32(publication.record.key) % topic.state.partitions
    return None
