"""A queue with one offset that all consumers share: all of them see the same message until one of them ends it.

    head       the first message at or above the offset
    advance    end the message at this offset, if it is the head; else nothing changes

The offset belongs to a stream group without members: a claim without an owner in generation 0, and commits without a
member. The leader of the partition decides in the order of the log, so when two consumers end one message, one of them
does. A member that joins the group claims the partition, and from then on only it moves the offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from portalmq.broker.cluster.routing import LocalWork, one_by_one, outcome_of
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition, values_of
from portalmq.broker.cluster.rpc.streams import FRONTS, TURN, Fronts, SharedOffsetCall, SharedOffsetResult
from portalmq.broker.core.queue.records import Claim, CommitOffset
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.groups import Groups
from portalmq.broker.storage.batch import Record
from portalmq.broker.streams.stream_partitions import target
from portalmq.control_plane.state import GroupState
from portalmq.errors import GroupModeMismatch, PortalMQError

NOBODY = ""


class QueueHead(NamedTuple):
    """The head of a queue. `message` is None when there is none: the next one gets `offset` or a higher one."""

    message: StoredMessage | None
    offset: int


class SharedOffsets:
    """Reads and moves shared offsets."""

    def __init__(self, groups: Groups, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock

    def partitions(self, topic: str) -> int:
        """Return the topic's number of partitions. Raises TopicNotFound."""
        return self._groups.topics.known(topic).state.partitions

    def head(self, name: str, topic: str, number: int, *, forward: bool = True) -> QueueHead:
        """Return the head of the partition, and the offset. Raises TopicNotFound, PartitionNotFound."""
        turned = self._turn(name, topic, number, None, forward)
        stored = StoredMessage(topic, number, *turned.message) if turned.message is not None else None
        return QueueHead(stored, turned.offset)

    def first_head(self, name: str, topic: str, numbers: Sequence[int]) -> QueueHead:
        """Return the head of the first of these partitions that has a message, else that of the first one. Usually the
        first one has a message; only if not, the leaders of the others are asked, in parallel."""
        known, group = self._groups.topics.known(topic), self._group(name)
        local = self._local_fronts(group)
        places = [known.place(number) for number in numbers]
        request = Fronts(name, group.group_id, topic, known.state.topic_id, list(numbers))
        outcomes: Outcomes[SharedOffsetResult] = {}
        # A message of one partition must not wait for the leader of another.
        for asked, patience_s in ((places[:1], 0.0), (places[1:], 0.0), (places, None)):
            left = [place for place in asked if isinstance(outcomes.get(place), PortalMQError | None)]
            if left:
                found: Outcomes[SharedOffsetResult] = self._groups.leaders.call(
                    FRONTS, request.only(left), local, repeatable=True, patience_s=patience_s
                )
                outcomes |= found
            for place in left:
                outcome = outcomes[place]
                if not isinstance(outcome, PortalMQError) and outcome.message is not None:
                    return QueueHead(StoredMessage(topic, place.number, *outcome.message), outcome.offset)
        return QueueHead(None, values_of(outcomes)[places[0]].offset)

    def advance(self, name: str, topic: str, number: int, offset: int, *, forward: bool = True) -> bool:
        """End the message at `offset`, durably; return False when it was not the head. After an error with an unknown
        outcome a repeat returns False for a message that the first call ended."""
        return self._turn(name, topic, number, offset, forward).advanced

    def _turn(self, name: str, topic: str, number: int, done: int | None, forward: bool) -> SharedOffsetResult:
        place = self._groups.topics.known(topic).place(number)
        group = self._group(name)
        request = SharedOffsetCall(name, group.group_id, *place, done)
        local = self._local_turn(group, done)
        return self._groups.leaders.call_one(TURN, request, local, forward=forward, repeatable=done is None)

    def _group(self, name: str) -> GroupState:
        """Return the stream group; create it if it is missing."""
        group = self._groups.ensure_stream(name)
        if group.config.mode != "stream":
            raise GroupModeMismatch(f"group {name!r} is a queue group: it leases messages and has no shared offset")
        return group

    def _here(
        self, group: GroupState, place: TopicPartition, done: int | None, *, patient: bool = True
    ) -> SharedOffsetResult:
        """On a partition that is led here. Raises Unavailable while its followers do not vouch; if not `patient`, at
        once."""
        partition = self._groups.partition(place)
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

    def local_turn(self, request: SharedOffsetCall) -> LocalWork[SharedOffsetResult]:
        return self._local_turn(self._groups.get_same(request.group, request.group_id), request.done)

    def _local_turn(self, group: GroupState, done: int | None) -> LocalWork[SharedOffsetResult]:
        return one_by_one(lambda place: self._here(group, place, done))

    def local_fronts(self, request: Fronts) -> LocalWork[SharedOffsetResult]:
        return self._local_fronts(self._groups.get_same(request.group, request.group_id))

    def _local_fronts(self, group: GroupState) -> LocalWork[SharedOffsetResult]:
        """Does not wait for followers: the router tries the partitions that need a wait again, together and within one
        bound, and not at all once another partition has a message."""

        front = partial(self._here, group, done=None, patient=False)

        def local(places: Sequence[TopicPartition]) -> Outcomes[SharedOffsetResult]:
            outcomes: Outcomes[SharedOffsetResult] = {}
            for place in places:
                outcomes[place] = found = outcome_of(front, place)
                if not isinstance(found, PortalMQError) and found.message is not None:
                    outcomes = {each: SharedOffsetResult(False) for each in places}
                    outcomes[place] = found
                    break
            return outcomes

        return local


def _first_message(partition: Partition, offset: int) -> tuple[int, int, Record] | None:
    piece = next(partition.reader.pieces(offset, partition.high_watermark, 1), None)
    if piece is None:
        return None
    return piece.start, piece.batch.appended_at_ms, piece.records()[0]
