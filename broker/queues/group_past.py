"""Groups as they were: counts and unfinished messages at a moment of the past.

Every leader tells it for its partitions, from their logs (partition/past.py). The partitions are those on which the
group has begun by now. The moment is one of the messages' clock; leases and back-offs are taken to end by it too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from portalmq import wire
from portalmq.broker.cluster.routing import LocalWork, one_by_one, place_of
from portalmq.broker.cluster.rpc import PeerCaller, TopicPartition, error_of, refusal
from portalmq.broker.cluster.rpc.queues import (
    GROUP_AT,
    UNFINISHED_AT,
    CountGroupAt,
    GroupCountsAt,
    ListUnfinishedAt,
    UnfinishedRows,
)
from portalmq.broker.core.fold import PauseFold
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.partition.clock import TOLERANCE_MS, Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.past import FOLD_WITHIN_S, Moment, PastGroups, PastView
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.queues.group_admin import GroupAdmin
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.partition_counts import NOTHING, tallied
from portalmq.broker.queues.unfinished import PendingMessage, list_unfinished
from portalmq.contract.history import PastCount, PastGroup
from portalmq.control_plane.state import PauseState
from portalmq.errors import InvalidRequest, PortalMQError

_COUNTS = ("ready", "in_flight", "scheduled", "dead", "lag")


class GroupPast:
    """Tells the past of groups, over all leaders."""

    def __init__(self, admin: GroupAdmin, groups: Groups, peers: PeerCaller, clock: Clock) -> None:
        self._admin = admin
        self._groups = groups
        self._peers = peers
        self._clock = clock
        self._past = PastGroups()

    # --- counts ------------------------------------------------------------------------------------------------------

    def describe(self, name: str, at_ms: int) -> PastGroup:
        """Return the group as it was. Raises GroupNotFound for one that does not exist now, OffsetOutOfRange where a
        log no longer reaches back; Unavailable where a partition has no leader, or takes longer to read."""
        group = self._groups.get(name)
        call = CountGroupAt(name, self._moment_ms(at_ms))
        deadline = time.monotonic() + self._admin.patience_s
        while True:
            answers = self._admin.everywhere(
                lambda: self.count(call),
                lambda broker_id: GROUP_AT.ask(self._peers, broker_id, call),
            )
            for answer in answers:
                if answer.refused is not None:
                    raise error_of(answer.refused)
            counts = {(each.topic, each.partition): each for answer in answers for each in answer.counts}
            gaps = self._admin.gaps(counts, {where for answer in answers for where in answer.led})
            if not gaps:
                past = _summed(name, call.at_ms, group.config.mode, [counts[where] for where in sorted(counts)])
                if group.pause.number and group.pause.since_ms <= call.at_ms:  # the last change was before that time
                    past.paused = _paused(group.pause)
                return past
            self._admin.wait_for_leaders(gaps, deadline)

    def count(self, call: CountGroupAt) -> GroupCountsAt:
        """Count on the partitions that are led here."""
        until = time.monotonic() + FOLD_WITHIN_S
        counts: list[PastCount] = []
        led = self._admin.led()
        for topic, number in in_short_turns(led):
            partition = known.local.get(number) if (known := self._groups.topics.get(topic)) is not None else None
            if partition is None or not (call.group in partition.delivery or call.group in partition.streams):
                continue
            try:
                counts.append(self._count_at(partition, call, until))
            except PortalMQError as error:
                return GroupCountsAt([], led, refusal(error))
        return GroupCountsAt(counts, led)

    def _count_at(self, partition: Partition, call: CountGroupAt, until: float) -> PastCount:
        view = self._past.view(partition, call.group, call.at_ms, until=until)
        return counts_of(view, partition, call.group, call.at_ms)

    # --- messages ----------------------------------------------------------------------------------------------------

    def messages(
        self, name: str, topic_name: str, at_ms: int, *, after: tuple[int, int] | None = None, forward: bool = True
    ) -> Iterator[PendingMessage]:
        """Yield the messages that the group had not finished, as UnfinishedMessages.messages does. Raises also
        OffsetOutOfRange where a log no longer reaches back."""
        topic = self._groups.topics.known(topic_name)
        self._groups.find_queue(name)
        at_ms = self._moment_ms(at_ms)
        first, behind = after or (0, -1)
        topic.place(first)
        for number in in_short_turns(range(first, topic.state.partitions)):
            offset: int | None = behind + 1 if number == first else 0
            while offset is not None:
                request = ListUnfinishedAt(name, *place_of(topic.state, number), offset, 1_000, at_ms)
                local = self.local_list(request)
                found = self._groups.leaders.call_one(UNFINISHED_AT, request, local, forward=forward, repeatable=True)
                for at, timestamp_ms, record, state, deliveries, available_at_ms in found.rows:
                    stored = StoredMessage(topic_name, number, at, timestamp_ms, record)
                    yield PendingMessage(stored, state, deliveries, available_at_ms or None)
                offset = found.next_offset

    def local_list(self, request: ListUnfinishedAt) -> LocalWork[UnfinishedRows]:
        def listed(place: TopicPartition) -> UnfinishedRows:
            view = self._past.view(self._groups.partition(place), request.group, request.at_ms)
            moment = Moment(request.at_ms)
            return list_unfinished(lambda: view, request.group, request.offset, request.limit, moment)

        return one_by_one(listed)

    def _moment_ms(self, at_ms: int) -> int:
        """Return the moment; the present for one that is ahead by less than clocks may differ. Raises
        InvalidRequest."""
        now_ms = self._clock.wall_ms()
        if at_ms > now_ms + TOLERANCE_MS:
            raise InvalidRequest(f"`at` is {at_ms - now_ms} ms ahead of the broker's time: name a time of the past")
        return min(at_ms, now_ms)


def counts_of(view: PastView, partition: Partition, group: str, at_ms: int) -> PastCount:
    """Return the counts of a group on a partition as it was; zeros where it had not begun."""
    stream, delivery = view.groups.streams.get(group), view.groups.delivery.get(group)
    if delivery is not None:
        count = _count(view, partition, "queue", tallied(view, delivery, Moment(at_ms)))
        count.paused = _paused(delivery.pause)
        return count
    if stream is None:
        return _count(view, partition, "", NOTHING)
    log, end = view.log, view.high_watermark
    committed = min(max(stream.committed, log.log_start_offset), end)
    lag = log.messages_before(end) - log.messages_before(committed)
    first = next(view.reader.pieces(committed, end, 1), None) if lag else None
    age_ms = at_ms - first.batch.appended_at_ms if first is not None else 0
    counts = {**NOTHING, "ready": lag, "lag": lag, "oldest_unacked_ms": age_ms}
    return _count(view, partition, "stream", counts)


def _paused(pause: PauseFold | PauseState) -> wire.Paused | None:
    return wire.Paused(pause.since_ms, pause.reason, pause.by) if pause.paused else None


def _count(view: PastView, partition: Partition, mode: str, counts: dict[str, int]) -> PastCount:
    return PastCount(
        partition.topic,
        partition.number,
        view.high_watermark,
        mode,
        counts["ready"],
        counts["in_flight"],
        counts["scheduled"],
        counts["dead"],
        counts["lag"],
        counts["oldest_unacked_ms"],
    )


def _summed(group: str, at_ms: int, mode: str, counts: list[PastCount]) -> PastGroup:
    mode = next((each.mode for each in counts if each.mode), mode)
    sums = {name: sum([getattr(each, name) for each in counts]) for name in _COUNTS}
    oldest_ms = max([each.oldest_unacked_ms for each in counts], default=0)
    paused = next((each.paused for each in counts if each.paused is not None), None)
    return PastGroup(group, at_ms, mode, **sums, oldest_unacked_ms=oldest_ms, partitions=counts, paused=paused)
