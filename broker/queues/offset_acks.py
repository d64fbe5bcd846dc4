"""Messages that are done by their places, for callers who were given no receipt.

A receipt proves that its message was handed out to whoever shows it. Older protocols know a message by an id alone: who
names it may end it. Where they know who consumes, the id of a receive's attempt begins with the consumer's name; the
group's fold keeps it with the lease, so that any leader can tell whose a message is. Where an id is a text, it says of
which topic of the name it is: offsets begin anew in a topic that is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, repeat

import msgspec

from portalmq.broker.cluster.peers import Peers
from portalmq.broker.cluster.routing import LeaderRouter, place_of
from portalmq.broker.cluster.rpc import Outcomes, Result, TopicPartition, result_of
from portalmq.broker.cluster.rpc.queues import Finish, FinishShare
from portalmq.broker.cluster.topics import Topic
from portalmq.broker.core.queue.receipts import mark_in, topic_mark
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.settle import Verdict
from portalmq.control_plane.state import GroupState, TopicState
from portalmq.errors import GroupModeMismatch, InvalidRequest, PortalMQError, Unavailable

FINISH_TIMEOUT_S = 15.0

_decode_finish = msgspec.msgpack.Decoder(Finish).decode
_encode = msgspec.msgpack.Encoder().encode
_Results = list[Result[list[bool]]]


@dataclass(slots=True)
class _CompletionWork:
    """The work of one call: offsets by partition."""

    groups: Groups
    group: GroupState
    shares: dict[TopicPartition, list[int]]
    holder: str | None
    peers: Peers | None = None

    def here(self, places: Sequence[TopicPartition]) -> Outcomes[list[bool]]:
        begun: dict[TopicPartition, tuple[list[bool], Callable[[], None]]] = {}
        outcomes: Outcomes[list[bool]] = {}
        for place in places:
            try:
                if self.group.config.start == "earliest":
                    self.groups.begin_here(self.group, place, "earliest")
                begun[place] = self.groups.at(self.group, place).finish(self.shares[place], self.holder)
            except PortalMQError as error:
                outcomes[place] = error
        for place, (verdicts, wait) in begun.items():
            try:
                wait()
            except PortalMQError as error:
                outcomes[place] = error
            else:
                outcomes[place] = verdicts
        return outcomes

    def there(self, broker_id: int, places: Sequence[TopicPartition]) -> Outcomes[list[bool]]:
        assert self.peers is not None
        shares = [FinishShare(*place, self.shares[place]) for place in places]
        call = Finish(self.group.name, self.group.group_id, shares, self.holder)
        results = self.peers.call(broker_id, "finish", call, _Results, timeout_s=FINISH_TIMEOUT_S)
        return {place: result.outcome() for place, result in zip(places, results, strict=True)}


class OffsetAcks:
    """`known` finds a topic by its name, and waits for one that was made a moment ago; `stands` is what the control
    plane says of a name."""

    def __init__(
        self,
        groups: Groups,
        known: Callable[[str], Topic],
        stands: Callable[[str], TopicState | None],
        leaders: LeaderRouter,
        peers: Peers,
    ) -> None:
        self._groups = groups
        self._topic = known
        self._stands = stands
        self._leaders = leaders
        self._peers = peers

    def mark(self, topic_name: str) -> str:
        """What tells the topic from an earlier one of its name. Raises TopicNotFound."""
        return topic_mark(self._topic(topic_name).state.topic_id)

    def mark_in(self, receipt: str) -> str:
        """The same of the topic that a received message is of."""
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
        """Whether each message, (partition, offset), is done for the group now; False for a place where none was to be
        done, and for one that is not the holder's: that was handed out by a receive whose attempt_id is not
        `<holder>:<anything>`; nor is one whose mark, where it has one, is of an earlier topic of the name. Repeating it
        is fine. An error stands for what is not known; it is raised when nothing is. Raises TopicNotFound,
        PartitionNotFound."""
        topic = self._topic(topic_name)
        if any(marks):
            of_it = self._are_of(topic, marks)
            own = iter(self._finish(topic, name, list(compress(places, of_it)), holder, forward))
            return [next(own) if good else False for good in of_it]
        return self._finish(topic, name, places, holder, forward)

    def _are_of(self, topic: Topic, marks: Sequence[str]) -> list[bool]:
        """Whose mark is the topic's, or nothing. Raises Unavailable when this broker has not heard of the newest one of
        the name: its marks would be taken for old ones."""
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
        work = _CompletionWork(self._groups, group, shares, holder, self._peers)
        outcomes = self._leaders.run(list(shares), work, forward=forward, repeatable=True)
        errors = [outcome for outcome in outcomes.values() if isinstance(outcome, PortalMQError)]
        if errors and len(errors) == len(outcomes):
            raise next((error for error in errors if error.outcome == "unknown"), errors[0])
        left: dict[TopicPartition, Iterator[Verdict]] = {
            place: repeat(outcome) if isinstance(outcome, PortalMQError) else iter(outcome)
            for place, outcome in outcomes.items()
        }
        return [next(left[place_of(topic.state, number)]) for number, _ in places]

    def serve(self, body: bytes) -> bytes:
        call = _decode_finish(body)
        group = self._groups.get(call.group, mode="queue", group_id=call.group_id)
        if group.group_id != call.group_id:
            raise InvalidRequest(f"this was asked of an earlier group {call.group!r}")
        if group.config.mode != "queue":
            raise GroupModeMismatch(f"group {call.group!r} works in stream mode: it commits offsets")
        shares = {TopicPartition(share.topic, share.topic_id, share.number): share.offsets for share in call.shares}
        work = _CompletionWork(self._groups, group, shares, call.holder)
        outcomes = self._leaders.run(list(shares), work, forward=False)
        return _encode([result_of(outcomes[place]) for place in shares])
