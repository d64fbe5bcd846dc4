"""Stream groups at the partitions' leaders: claims, commits, seeks and positions.

Claims, commits and seeks are one record each in the partition's log, checked by its fold (core/stream/offsets.py) and
answered after their commit. A call has many partitions. A leader appends all records before it waits for the first one,
so that they share a transaction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from portalmq import wire
from portalmq.broker.cluster.routing import LocalWork, one_by_one, together
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition
from portalmq.broker.cluster.rpc.streams import (
    CLAIM,
    COMMIT_OFFSETS,
    OFFSETS,
    SEEK,
    ClaimCall,
    ClaimShare,
    CommitShare,
    GroupPosition,
    GroupPositionsCall,
    SeekCall,
    Start,
    StreamCommitCall,
)
from portalmq.broker.core.queue.records import Claim, CommitOffset, Seek
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.queues.groups import Groups
from portalmq.control_plane.state import GroupState
from portalmq.errors import GroupModeMismatch, IllegalGeneration, OffsetOutOfRange, PortalMQError, Unavailable

BEGUN_MAX = 10_000
SOUGHT = -1

T = TypeVar("T")


class StreamPartitions:
    def __init__(self, groups: Groups, clock: Clock) -> None:
        self._groups = groups
        self._clock = clock
        # Groups that have begun on a topic: (group id, topic id).
        self._begun: set[tuple[str, str]] = set()

    # --- claims ------------------------------------------------------------------------------------------------------

    def claim(self, group: GroupState, shares: Sequence[ClaimShare]) -> Outcomes[int]:
        """Claim partitions for members; return the offset at which each continues.

        A group's start at the latest, or at a time, applies to the partitions that its topic had then; partitions that
        were added since are read from their beginning. So partition 0 is claimed last: a group that is known there has
        begun on all partitions that existed then.
        """
        outcomes: Outcomes[int] = {}
        by_topic: dict[str, list[ClaimShare]] = {}
        for share in shares:
            by_topic.setdefault(share.topic_id, []).append(share)
        if group.config.start == "earliest":
            return self._claim(group, "earliest", shares)
        for topic_id, of_topic in by_topic.items():
            outcomes |= self._claim_topic(group, topic_id, of_topic)
        return outcomes

    def _claim_topic(self, group: GroupState, topic_id: str, shares: Sequence[ClaimShare]) -> Outcomes[int]:
        mark = (group.group_id, topic_id)
        first = TopicPartition(shares[0].topic, topic_id, 0)
        if mark not in self._begun:
            position = self.positions(group.name, [first])[first]
            if isinstance(position, PortalMQError):
                return {share.place: position for share in shares}
            if position.committed >= 0:
                self._remember(mark)
        if mark in self._begun:
            return self._claim(group, "earliest", shares)
        configured = group.config.start
        start: Start = configured if isinstance(configured, str) else {"at": configured["at"]}
        outcomes = self._claim(group, start, [share for share in shares if share.number])
        failed = next((outcome for outcome in outcomes.values() if isinstance(outcome, PortalMQError)), None)
        rest = [share for share in shares if not share.number]
        if failed is not None:
            return outcomes | {share.place: failed for share in rest}
        outcomes |= self._claim(group, start, rest)
        if rest and not isinstance(outcomes[first], PortalMQError):
            self._remember(mark)
        return outcomes

    def _remember(self, mark: tuple[str, str]) -> None:
        if len(self._begun) >= BEGUN_MAX:
            self._begun.clear()  # the next calls ask the leaders again
        self._begun.add(mark)

    def _group_of(self, request: ClaimCall | StreamCommitCall | SeekCall) -> GroupState:
        return self._groups.get_same(request.group, request.group_id)

    def _claim(self, group: GroupState, start: Start, shares: Sequence[ClaimShare]) -> Outcomes[int]:
        if not shares:
            return {}
        request = ClaimCall(group.name, group.group_id, start, list(shares))
        return self._groups.leaders.call(CLAIM, request, self.local_claim(request, group), repeatable=True)

    def local_claim(self, request: ClaimCall, known: GroupState | None = None) -> LocalWork[int]:
        group, by_place = known or self._group_of(request), request.by_place()
        return together(lambda place: self._claim_here(group, request.start, by_place[place]))

    def _claim_here(self, group: GroupState, start: Start, share: ClaimShare) -> Callable[[], int]:
        partition = self._groups.partition(share.place)
        self._groups.check_same(group)
        return _with_final_refusal(partition, lambda: self._claim_led(partition, group, start, share))

    def _claim_led(self, partition: Partition, group: GroupState, start: Start, share: ClaimShare) -> Callable[[], int]:
        stream = partition.streams.get(group.name)
        if stream is None:
            record = Claim(share.member_id, share.since, target(partition, start), self._clock.now_ms())
            pending = partition.append_group_record(group.name, record)
        elif (stream.member, stream.generation) == (share.member_id, share.since):
            # The claim is in the log already; it and later commits of the member may not be committed yet.
            end = partition.replica.next_offset
            committed = stream.committed
            return lambda: _settled(partition, end, committed)
        else:
            stream.check_claim(share.since)
            record = Claim(share.member_id, share.since, stream.committed, self._clock.now_ms())
            pending = partition.append_group_record(group.name, record)
        committed = partition.streams[group.name].committed

        def finish() -> int:
            pending.wait()
            return max(committed, partition.log.log_start_offset)

        return finish

    # --- commits -----------------------------------------------------------------------------------------------------

    def commit(
        self, group: GroupState, member_id: str, generation: int, shares: Sequence[CommitShare], *, forward: bool = True
    ) -> Outcomes[bool]:
        """Commit offsets; return True for each that was not committed before."""
        request = StreamCommitCall(group.name, group.group_id, member_id, generation, list(shares))
        local = self.local_commit(request, group)
        return self._groups.leaders.call(COMMIT_OFFSETS, request, local, forward=forward, repeatable=True)

    def local_commit(self, request: StreamCommitCall, known: GroupState | None = None) -> LocalWork[bool]:
        group, by_place = known or self._group_of(request), request.by_place()
        return together(lambda place: self._commit_here(group, request.member_id, request.generation, by_place[place]))

    def _commit_here(
        self, group: GroupState, member_id: str, generation: int, share: CommitShare
    ) -> Callable[[], bool]:
        partition = self._groups.partition(share.place)
        self._groups.check_same(group)
        return _with_final_refusal(partition, lambda: self._commit_led(partition, group, member_id, generation, share))

    def _commit_led(
        self, partition: Partition, group: GroupState, member_id: str, generation: int, share: CommitShare
    ) -> Callable[[], bool]:
        stream = partition.streams.get(group.name)
        if stream is None:
            raise IllegalGeneration(
                f"no member of group {group.name!r} owns partition {share.number} of topic {share.topic!r}: join, and"
                " commit the partitions of the assignment"
            )
        if not stream.check_commit(member_id, generation, share.offset, partition.high_watermark):
            end = partition.replica.next_offset
            return lambda: _settled(partition, end, False)
        record = CommitOffset(share.offset, member_id, generation, self._clock.now_ms())
        pending = partition.append_group_record(group.name, record)

        def finish() -> bool:
            pending.wait()
            return True

        return finish

    # --- seeks -------------------------------------------------------------------------------------------------------

    def seek(
        self, group: GroupState, to: Start, generation: int, places: Sequence[TopicPartition], seek_id: bytes = b""
    ) -> Outcomes[tuple[int, int]]:
        """Move the group to other offsets in `generation`; with generation 0 only return them. Returns (from, to) by
        partition."""
        request = SeekCall(group.name, group.group_id, to, generation, list(places), seek_id)
        return self._groups.leaders.call(SEEK, request, self.local_seek(request, group), repeatable=True)

    def local_seek(self, request: SeekCall, known: GroupState | None = None) -> LocalWork[tuple[int, int]]:
        group = known or self._group_of(request)
        return together(lambda place: self._seek_here(group, request.to, request.generation, request.seek_id, place))

    def _seek_here(
        self, group: GroupState, to: Start, generation: int, seek_id: bytes, place: TopicPartition
    ) -> Callable[[], tuple[int, int]]:
        partition = self._groups.partition(place)
        self._groups.check_same(group)
        return _with_final_refusal(partition, lambda: self._seek_led(partition, group, to, generation, seek_id))

    def _seek_led(
        self, partition: Partition, group: GroupState, to: Start, generation: int, seek_id: bytes
    ) -> Callable[[], tuple[int, int]]:
        stream = partition.streams.get(group.name)
        before = max(stream.committed if stream else 0, partition.log.log_start_offset)
        if stream is not None and seek_id in stream.commits:
            end = partition.replica.next_offset
            return lambda: _settled(partition, end, (before, SOUGHT))
        offset = target(partition, to)
        if not generation:
            return lambda: (before, offset)
        now_ms = self._clock.now_ms()
        if stream is None:
            partition.append_group_record(group.name, Claim("", generation, before, now_ms))
        else:
            stream.check_claim(generation)
        pending = partition.append_group_record(group.name, Seek(offset, generation, now_ms, seek_id))

        def finish() -> tuple[int, int]:
            pending.wait()
            return before, offset

        return finish

    # --- positions ---------------------------------------------------------------------------------------------------

    def positions(
        self, group: str, places: Sequence[TopicPartition], *, ages: bool = True, patience_s: float | None = None
    ) -> Outcomes[GroupPosition]:
        """Return the group's positions from the partitions' leaders."""
        request = GroupPositionsCall(group, list(places), ages)
        local = self.local_positions(request)
        return self._groups.leaders.call(OFFSETS, request, local, repeatable=True, patience_s=patience_s)

    def local_positions(self, request: GroupPositionsCall) -> LocalWork[GroupPosition]:
        return one_by_one(lambda place: self._position_here(request.group, place, request.ages))

    def _position_here(self, group: str, place: TopicPartition, ages: bool) -> GroupPosition:
        partition = self._groups.partition(place)
        stream = partition.streams.get(group)
        high_watermark = partition.high_watermark
        if stream is None:
            return GroupPosition(-1, high_watermark, 0, 0)
        if stream.moved_at >= high_watermark:
            raise Unavailable(f"a commit of group {group!r} in {partition} is under way", retry_after_s=0.1)
        committed = min(max(stream.committed, partition.log.log_start_offset), high_watermark)
        log = partition.log
        lag = max(0, log.messages_before(high_watermark) - log.messages_before(committed))
        lag_ms = 0
        if lag and ages:
            first = next(partition.reader.pieces(committed, high_watermark, 1), None)
            lag_ms = max(0, self._clock.wall_ms() - first.batch.appended_at_ms) if first is not None else 0
        return GroupPosition(committed, high_watermark, lag, lag_ms)


def target(partition: Partition, to: Start) -> int:
    """Return the offset of `to` on this partition. Raises OffsetOutOfRange."""
    start, end = partition.log.log_start_offset, partition.high_watermark
    if to == "earliest":
        return start
    if to == "latest":
        return end
    assert isinstance(to, dict), to
    if "at" in to:
        return min(max(partition.log.offset_for_time(to["at"]), start), end)
    offset = to["offset"]
    if not start <= offset <= end:
        raise OffsetOutOfRange(
            f"offset {offset} is not in {partition}, which has offsets {start} to {end}",
            log_start_offset=start,
            high_watermark=end,
        )
    return offset


def _with_final_refusal(partition: Partition, begin: Callable[[], Callable[[], T]]) -> Callable[[], T]:
    """Return what `begin` returns; or, if it refuses, what raises the refusal once it is final. Calls of other
    partitions do not wait for that."""
    try:
        return begin()
    except (IllegalGeneration, OffsetOutOfRange) as error:
        refusal = error

    def refuse() -> T:
        partition.wait_final()
        raise refusal

    return refuse


def _settled(partition: Partition, end: int, value: T) -> T:
    """Return `value` after everything below `end` is committed."""
    partition.wait_committed(end - 1)
    return value


def stream_group(groups: Groups, name: str) -> GroupState:
    """Return the stream group. Raises GroupNotFound, GroupModeMismatch."""
    group: GroupState = groups.get(wire.check_name(name, "group"), mode="stream")
    check_mode(group)
    return group


def check_mode(group: GroupState) -> None:
    if group.config.mode != "stream":
        raise GroupModeMismatch(
            f"group {group.name!r} is a queue group: receive from it, or use another name for a stream group"
        )
