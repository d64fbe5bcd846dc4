"""How many messages of a topic a queue group has not finished, counted by the leaders.

A group that has not begun on a partition would count nothing there, although all of it waits. So it begins with the
look: whoever asks how long a queue is has a queue in mind, and not a consumer. (`look` is for those who mean the group,
and change nothing: what has not begun has everything before it.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from portalmq.broker.cluster.peers import Peers
from portalmq.broker.cluster.routing import LeaderRouter, place_of
from portalmq.broker.cluster.rpc import Outcomes, Result, TopicPartition, result_of
from portalmq.broker.cluster.rpc.queues import LookAt, QueueSize, SizeOf
from portalmq.broker.cluster.topics import Topic
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.partition_counts import tallied, untouched
from portalmq.control_plane.state import GroupState
from portalmq.errors import GroupModeMismatch, InvalidRequest, PortalMQError

TIMEOUT_S = 5.0


_Sizes = list[Result[QueueSize]]
_decode = msgspec.msgpack.Decoder(SizeOf).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Sizing:
    groups: Groups
    group: GroupState
    peers: Peers | None = None

    def here(self, places: Sequence[TopicPartition]) -> Outcomes[QueueSize]:
        outcomes: Outcomes[QueueSize] = {}
        for place in in_short_turns(places):
            try:
                if self.group.config.start == "earliest":
                    self.groups.begin_here(self.group, place, "earliest")
                counts = self.groups.at(self.group, place).counts()
            except PortalMQError as error:
                outcomes[place] = error
            else:
                outcomes[place] = QueueSize(**{name: counts[name] for name in QueueSize.__struct_fields__})
        return outcomes

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> Outcomes[QueueSize]:
        assert self.peers is not None
        call = SizeOf(
            self.group.name,
            self.group.group_id,
            places[0].topic,
            places[0].topic_id,
            [place.number for place in places],
        )
        results = self.peers.call(broker_id, "sizes", call, _Sizes, timeout_s=TIMEOUT_S)
        return {place: result.outcome() for place, result in zip(places, results, strict=True)}


@dataclass(slots=True)
class _CountScan:
    queue_sizes: QueueSizes
    group: str

    def here(self, places: Sequence[TopicPartition]) -> Outcomes[QueueSize]:
        outcomes: Outcomes[QueueSize] = {}
        for place in in_short_turns(places):
            try:
                outcomes[place] = self.queue_sizes.look_here(self.group, place)
            except PortalMQError as error:
                outcomes[place] = error
        return outcomes

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> Outcomes[QueueSize]:
        call = LookAt(self.group, places[0].topic, places[0].topic_id, [place.number for place in places])
        results = self.queue_sizes.peers.call(broker_id, "look", call, _Sizes, timeout_s=TIMEOUT_S)
        return {place: result.outcome() for place, result in zip(places, results, strict=True)}


class QueueSizes:
    """`known` finds a topic by its name, and waits for one that was made a moment ago."""

    def __init__(
        self, groups: Groups, known: Callable[[str], Topic], leaders: LeaderRouter, peers: Peers, clock: Clock
    ) -> None:
        self.peers = peers
        self._groups = groups
        self._topic = known
        self._leaders = leaders
        self._clock = clock

    def size(self, name: str, topic_name: str) -> QueueSize:
        """Over all partitions. Raises TopicNotFound, GroupModeMismatch; Unavailable when a leader cannot be asked: a
        part would be taken for the whole."""
        topic = self._topic(topic_name)
        group = self._groups.ensure(name)
        self._groups.begin(group, topic)
        places = [place_of(topic.state, number) for number in range(topic.state.partitions)]
        outcomes = self._leaders.run(places, _Sizing(self._groups, group, self.peers), repeatable=True)
        return _sum(outcomes)

    def look(self, name: str, topic_name: str, *, forward: bool = True) -> QueueSize:
        """The same, and neither the group nor its place on a partition is made by it."""
        topic = self._topic(topic_name)
        group = self._groups.find_of(name, "queue")
        if group is not None and group.config.mode != "queue":
            raise GroupModeMismatch(f"group {name!r} works in stream mode: its lag is all from its offset on")
        places = [place_of(topic.state, number) for number in range(topic.state.partitions)]
        return _sum(self._leaders.run(places, _CountScan(self, name), forward=forward, repeatable=True))

    def look_here(self, name: str, place: TopicPartition) -> QueueSize:
        """On a partition that is led here."""
        partition = self._groups.partition(place)
        delivery = partition.delivery.get(name) or untouched(partition, name)
        counts = tallied(partition, delivery, self._clock)
        return QueueSize(**{field: counts[field] for field in QueueSize.__struct_fields__})

    def serve_look(self, body: bytes) -> bytes:
        call = msgspec.msgpack.decode(body, type=LookAt)
        places = [TopicPartition(call.topic, call.topic_id, number) for number in call.numbers]
        outcomes = self._leaders.run(places, _CountScan(self, call.group), forward=False)
        return _encode([result_of(outcomes[place]) for place in places])

    def serve(self, body: bytes) -> bytes:
        call = _decode(body)
        group = self._groups.get(call.group, group_id=call.group_id)
        if group.group_id != call.group_id:
            raise InvalidRequest(f"this was asked of an earlier group {call.group!r}")
        places = [TopicPartition(call.topic, call.topic_id, number) for number in call.numbers]
        outcomes = self._leaders.run(places, _Sizing(self._groups, group), forward=False)
        return _encode([result_of(outcomes[place]) for place in places])


def _sum(outcomes: Outcomes[QueueSize]) -> QueueSize:
    sizes: list[QueueSize] = []
    for outcome in outcomes.values():
        if isinstance(outcome, PortalMQError):
            raise outcome
        sizes.append(outcome)
    return QueueSize(
        sum([size.ready for size in sizes]),
        sum([size.in_flight for size in sizes]),
        sum([size.scheduled for size in sizes]),
        sum([size.dead for size in sizes]),
        max([size.oldest_unacked_ms for size in sizes], default=0),
    )
