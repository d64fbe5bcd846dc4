"""A queue with one offset that all consumers share: all of them see the same message until one of them ends it.

    head       the first message at or above the offset
    advance    end the message at this offset, if it is the head; else nothing changes

The offset belongs to a stream group without members: a claim without an owner in generation 0, and commits without a
member. The leader of the partition decides in the order of the log, so when two consumers end one message, one of them
does. A member that joins the group claims the partition, and from then on only it moves the offset.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from portalmq.broker.cluster.lookup import Lookup
from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.peers import Peers
from portalmq.broker.cluster.routing import LeaderRouter
from portalmq.broker.cluster.rpc import Outcomes, Result, TopicPartition, result_of
from portalmq.broker.cluster.rpc.streams import Fronts, SharedOffsetCall, SharedOffsetResult
from portalmq.broker.cluster.topics import Topic
from portalmq.broker.core.queue.records import Claim, CommitOffset
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.groups import Groups
from portalmq.broker.storage.batch import Record
from portalmq.broker.streams.stream_partitions import target
from portalmq.control_plane.state import GroupState
from portalmq.errors import GroupModeMismatch, PortalMQError, Unavailable

TURN_TIMEOUT_S = 15.0
NOBODY = ""


_Fronts = list[Result[SharedOffsetResult]]
_decode_turn = msgspec.msgpack.Decoder(SharedOffsetCall).decode
_decode_fronts = msgspec.msgpack.Decoder(Fronts).decode
_encode = msgspec.msgpack.Encoder().encode


class QueueHead(NamedTuple):
    """The head of a queue. `message` is None when there is none: the next one gets `offset` or a higher one."""

    message: StoredMessage | None
    offset: int


@dataclass(slots=True)
class _Looking:
    shared_offsets: SharedOffsets
    group: GroupState

    def here(self, places: Sequence[TopicPartition]) -> Outcomes[SharedOffsetResult]:
        """Waits for nobody's followers: the partitions that need a wait are tried again together, within one bound,
        and not at all once another one has a message."""
        outcomes: Outcomes[SharedOffsetResult] = {}
        for place in places:
            try:
                outcomes[place] = turned = self.shared_offsets.here(self.group, place, None, patient=False)
            except PortalMQError as error:
                outcomes[place] = error
            else:
                if turned.message is not None:
                    outcomes = {each: SharedOffsetResult(False) for each in places}
                    outcomes[place] = turned
                    break
        return outcomes

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> Outcomes[SharedOffsetResult]:
        numbers = [place.number for place in places]
        call = Fronts(self.group.name, self.group.group_id, places[0].topic, places[0].topic_id, numbers)
        results = self.shared_offsets.peers.call(broker_id, "fronts", call, _Fronts, timeout_s=TURN_TIMEOUT_S)
        return {place: result.outcome() for place, result in zip(places, results, strict=True)}


class SharedOffsets:
    """Reads and moves shared offsets. `known` finds a topic by name, and waits for one that was just created."""

    def __init__(
        self,
        groups: Groups,
        known: Callable[[str], Topic],
        metadata_cache: MetadataCache,
        leaders: LeaderRouter,
        peers: Peers,
        clock: Clock,
    ) -> None:
        self.peers = peers
        self._groups = groups
        self._topic = known
        self._metadata_cache = metadata_cache
        self._leaders = leaders
        self._clock = clock

    def partitions(self, topic: str) -> int:
        """Return the topic's number of partitions. Raises TopicNotFound."""
        return self._topic(topic).state.partitions

    def head(self, name: str, topic: str, number: int, *, forward: bool = True) -> QueueHead:
        """Return the head of the partition, and the offset. Raises TopicNotFound, PartitionNotFound."""
        turned = self._turn(name, topic, number, None, forward)
        stored = StoredMessage(topic, number, *turned.message) if turned.message is not None else None
        return QueueHead(stored, turned.offset)

    def first_head(self, name: str, topic: str, numbers: Sequence[int]) -> QueueHead:
        """Return the head of the first of these partitions that has a message, else that of the first one. Usually the
        first one has a message; only if not, the leaders of the others are asked, in parallel."""
        known, work = self._topic(topic), _Looking(self, self._group(name))
        places = [known.place(number) for number in numbers]
        outcomes: Outcomes[SharedOffsetResult] = {}
        # A message of one partition must not wait for the leader of another.
        for asked, patience_s in ((places[:1], 0.0), (places[1:], 0.0), (places, None)):
            left = [place for place in asked if isinstance(outcomes.get(place), PortalMQError | None)]
            if left:
                outcomes |= self._leaders.run(left, work, repeatable=True, patience_s=patience_s)
            for place in left:
                outcome = outcomes[place]
                if not isinstance(outcome, PortalMQError) and outcome.message is not None:
                    return QueueHead(StoredMessage(topic, place.number, *outcome.message), outcome.offset)
        for outcome in outcomes.values():
            if isinstance(outcome, PortalMQError):
                raise outcome
        first = outcomes[places[0]]
        assert isinstance(first, SharedOffsetResult)
        return QueueHead(None, first.offset)

    def advance(self, name: str, topic: str, number: int, offset: int, *, forward: bool = True) -> bool:
        """End the message at `offset`, durably; return False when it was not the head. After an error with an unknown
        outcome a repeat returns False for a message that the first call ended."""
        return self._turn(name, topic, number, offset, forward).advanced

    def _turn(self, name: str, topic: str, number: int, done: int | None, forward: bool) -> SharedOffsetResult:
        place = self._topic(topic).place(number)
        group = self._group(name)
        call = SharedOffsetCall(name, group.group_id, *place, done)
        return self._leaders.one(place, self._lookup(group, call), forward=forward, repeatable=done is None)

    def _group(self, name: str) -> GroupState:
        """Return the stream group; create it if it is missing."""
        group = self._groups.find_of(name, "stream")
        if group is None:
            self._groups.put(name, {"mode": "stream"})
            group = self._groups.get(name)
        if group.config.mode != "stream":
            raise GroupModeMismatch(f"group {name!r} is a queue group: it leases messages and has no shared offset")
        return group

    def here(
        self, group: GroupState, place: TopicPartition, done: int | None, *, patient: bool = True
    ) -> SharedOffsetResult:
        """On a partition that is led here. Raises Unavailable while its followers do not vouch; if not `patient`, at
        once."""
        partition = self._metadata_cache.partition(place)
        partition.wait_vouched(patient=patient)
        self._groups.check_same(group)  # it may have been deleted during the wait
        if group.name not in partition.streams:
            self._claim(group, partition)
        stream = partition.streams[group.name]
        offset = max(stream.committed, partition.log.log_start_offset)
        message = _first_message(partition, offset)
        if done is None:
            return SharedOffsetResult(False, message, offset)
        if message is None or message[0] != done:
            # An append that is not committed yet may have ended it: wait for that before the answer.
            partition.wait_settled(partition.replica.next_offset - 1)
            return SharedOffsetResult(False)
        stream.check_commit(NOBODY, stream.generation, done + 1, partition.high_watermark)
        record = CommitOffset(done + 1, NOBODY, stream.generation, self._clock.now_ms())
        pending = partition.append_group_record(group.name, record)
        partition.wait_settled(pending.base_offset)
        return SharedOffsetResult(True)

    def _claim(self, group: GroupState, partition: Partition) -> None:
        configured = group.config.start
        start = target(partition, configured if isinstance(configured, str) else {"at": configured["at"]})
        partition.append_group_record(group.name, Claim(NOBODY, 0, start, self._clock.now_ms()))

    def serve_fronts(self, body: bytes) -> bytes:
        call = _decode_fronts(body)
        group = self._same_group(call.group, call.group_id)
        places = [TopicPartition(call.topic, call.topic_id, number) for number in call.numbers]
        outcomes = self._leaders.run(places, _Looking(self, group), forward=False)
        return _encode([result_of(outcomes[place]) for place in places])

    def _same_group(self, name: str, group_id: str) -> GroupState:
        group = self._groups.get(name, group_id=group_id)
        if group.group_id != group_id:
            raise Unavailable(f"group {name!r} was just deleted", retry_after_s=0.1)
        return group

    def serve(self, body: bytes) -> bytes:
        call = _decode_turn(body)
        group = self._same_group(call.group, call.group_id)
        place = TopicPartition(call.topic, call.topic_id, call.number)
        return _encode(self._leaders.one(place, self._lookup(group, call), forward=False))

    def _lookup(self, group: GroupState, call: SharedOffsetCall) -> Lookup[SharedOffsetResult]:
        return Lookup(
            "turn",
            call,
            SharedOffsetResult,
            lambda place: self.here(group, place, call.done),
            self.peers,
            timeout_s=TURN_TIMEOUT_S,
        )


def _first_message(partition: Partition, offset: int) -> tuple[int, int, Record] | None:
    piece = next(partition.pieces(offset, partition.high_watermark, 1), None)
    if piece is None:
        return None
    return piece.start, piece.batch.appended_at_ms, piece.records()[0]
