"""Acks by partition and offset, for protocols without receipts.

A receipt proves that its message was delivered to the caller. Some protocols identify a message by an id alone: any
client that names it may ack it. Where such a protocol knows its consumers, the attempt id of a receive begins with the
consumer's name. The group's fold keeps it with the lease, so every leader knows the holder of a message. Ids that are
texts contain a mark of the topic: in a topic that was deleted and created again, offsets start again at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, repeat

from portalmq.broker.cluster.routing import LocalWork, place_of, together
from portalmq.broker.cluster.rpc import TopicPartition, raise_if_all_failed
from portalmq.broker.cluster.rpc.queues import FINISH, Finish, FinishShare
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.core.queue.receipts import mark_in, topic_mark
from portalmq.broker.queues.group_registry import check_queue
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.settle import Verdict
from portalmq.control_plane.state import GroupState, TopicState
from portalmq.errors import PortalMQError, Unavailable


class OffsetAcks:
    """Acks by offset. `stands` reads a topic from the control plane."""

    def __init__(self, groups: Groups, stands: Callable[[str], TopicState | None]) -> None:
        self._groups = groups
        self._stands = stands

    def mark(self, topic_name: str) -> str:
        """Return a mark that differs from that of an earlier topic of the name. Raises TopicNotFound."""
        return topic_mark(self._groups.topics.known(topic_name).state.topic_id)

    def mark_in(self, receipt: str) -> str:
        """Return the mark of a received message's topic."""
        return mark_in(receipt)

    def finish(
        self,
        name: str,
        topic_name: str,
        places: Sequence[tuple[int, int]],
        *,
        marks: Sequence[str] = (),
        holder: str | None = None,
        forward: bool = True,
    ) -> list[Verdict]:
        """Ack messages by (partition, offset); return True for each that is done now. False for an offset without a
        message to ack; for one that the holder does not hold, that is, one leased by a receive whose attempt_id is not
        `<holder>:<anything>`; and for one with the mark of an earlier topic of the name. A repeat is safe. An entry is
        an error when its outcome is not known; the error is raised when that holds for all. Raises TopicNotFound,
        PartitionNotFound."""
        topic = self._groups.topics.known(topic_name)
        if any(marks):
            of_it = self._are_of(topic, marks)
            own = iter(self._finish(topic, name, list(compress(places, of_it)), holder, forward))
            return [next(own) if good else False for good in of_it]
        return self._finish(topic, name, places, holder, forward)

    def _are_of(self, topic: Topic, marks: Sequence[str]) -> list[bool]:
        """Return True for each mark that is the topic's or empty. Raises Unavailable when this broker does not know the
        newest topic of the name: its marks would look like old ones."""
        mark = topic_mark(topic.state.topic_id)
        of_it = [each in {"", mark} for each in marks]
        if not all(of_it):
            newest = self._stands(topic.name)
            if newest is not None and newest.topic_id != topic.state.topic_id:
                raise Unavailable(f"this broker does not know the newest topic {topic.name!r} yet", retry_after_s=0.1)
        return of_it

    def _finish(
        self, topic: Topic, name: str, places: Sequence[tuple[int, int]], holder: str | None, forward: bool
    ) -> list[Verdict]:
        if not places:
            return []
        group = self._groups.ensure(name)
        shares: dict[TopicPartition, list[int]] = {}
        for number, offset in places:
            shares.setdefault(topic.place(number), []).append(offset)
        self._groups.begin(group, topic, forward=forward)
        asked = [FinishShare(*place, offsets) for place, offsets in shares.items()]
        request = Finish(name, group.group_id, asked, holder)
        outcomes = self._groups.leaders.call(
            FINISH, request, self._local_finish(group, shares, holder), forward=forward, repeatable=True
        )
        raise_if_all_failed(outcomes.values())
        left: dict[TopicPartition, Iterator[Verdict]] = {
            place: repeat(outcome) if isinstance(outcome, PortalMQError) else iter(outcome)
            for place, outcome in outcomes.items()
        }
        return [next(left[place_of(topic.state, number)]) for number, _ in places]

    def local_finish(self, request: Finish) -> LocalWork[list[bool]]:
        group = check_queue(self._groups.get_by_id(request.group, request.group_id, mode="queue"))
        shares = {place: share.offsets for place, share in request.by_place().items()}
        return self._local_finish(group, shares, request.holder)

    def _local_finish(
        self, group: GroupState, shares: Mapping[TopicPartition, list[int]], holder: str | None
    ) -> LocalWork[list[bool]]:
        def begin(place: TopicPartition) -> Callable[[], list[bool]]:
            self._groups.partition(place).wait_allotted(shares[place])
            self._groups.check_same(group)
            if group.config.start == "earliest":
                self._groups.begin_here(group, place, "earliest")
            verdicts, wait = self._groups.at(group, place).finish(shares[place], holder)

            def finish() -> list[bool]:
                wait()
                return verdicts

            return finish

        return together(begin)
