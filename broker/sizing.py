"""How many messages of a topic a queue group has not finished, counted by the leaders.

A group that has not begun on a partition would count nothing there, although all of it waits. So it begins with the
look: whoever asks how long a queue is has a queue in mind, and not a consumer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from portalmq.broker.calls import Place, Result, result_of
from portalmq.broker.forwarding import Leaders, Outcomes, place_of
from portalmq.broker.groups import Groups
from portalmq.broker.peers import Peers
from portalmq.broker.topics import Topic
from portalmq.control_plane.state import GroupState
from portalmq.errors import InvalidRequest, PortalMQError

TIMEOUT_S = 5.0


class SizeOf(msgspec.Struct, array_like=True):
    """Of these partitions of one topic."""

    group: str
    group_id: str
    topic: str
    topic_id: str
    numbers: list[int]


class QueueSize(msgspec.Struct, array_like=True, frozen=True):
    """Messages that are not done: `size` is the sum of the first three. Dead ones the group has given up."""

    ready: int
    in_flight: int
    scheduled: int
    dead: int = 0
    oldest_unacked_ms: int = 0

    @property
    def size(self) -> int:
        return self.ready + self.in_flight + self.scheduled


_Sizes = list[Result[QueueSize]]
_decode = msgspec.msgpack.Decoder(SizeOf).decode
_encode = msgspec.msgpack.Encoder().encode


@dataclass(slots=True)
class _Sizing:
    groups: Groups
    group: GroupState
    peers: Peers | None = None

    def here(self, places: Sequence[Place]) -> Outcomes[QueueSize]:
        outcomes: Outcomes[QueueSize] = {}
        for place in places:
            try:
                if self.group.config.start == "earliest":
                    self.groups.begin_here(self.group, place, "earliest")
                counts = self.groups.at(self.group, place).counts()
            except PortalMQError as error:
                outcomes[place] = error
            else:
                outcomes[place] = QueueSize(**{name: counts[name] for name in QueueSize.__struct_fields__})
        return outcomes

    def there(self, broker_id: int, places: Sequence[Place]) -> Outcomes[QueueSize]:
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


class Sizing:
    """`known` finds a topic by its name, and waits for one that was made a moment ago."""

    def __init__(self, groups: Groups, known: Callable[[str], Topic], leaders: Leaders, peers: Peers) -> None:
        self._groups = groups
        self._topic = known
        self._leaders = leaders
        self._peers = peers

    def size(self, name: str, topic_name: str) -> QueueSize:
        """Over all partitions. Raises TopicNotFound, GroupModeMismatch; Unavailable when a leader cannot be asked: a
        part would be taken for the whole."""
        topic = self._topic(topic_name)
        group = self._groups.ensure(name)
        self._groups.begin(group, topic)
        places = [place_of(topic.state, number) for number in range(topic.state.partitions)]
        outcomes = self._leaders.run(places, _Sizing(self._groups, group, self._peers), repeatable=True)
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

    def serve(self, body: bytes) -> bytes:
        call = _decode(body)
        group = self._groups.known(call.group)
        if group.group_id != call.group_id:
            raise InvalidRequest(f"this was asked of an earlier group {call.group!r}")
        places = [Place(call.topic, call.topic_id, number) for number in call.numbers]
        outcomes = self._leaders.run(places, _Sizing(self._groups, group), forward=False)
        return _encode([result_of(outcomes[place]) for place in places])
