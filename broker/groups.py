"""All queue groups of this broker: their settings, their partitions, and the fan-out of receive and settle.

A group's settings stand in the control plane; what it has received and acked stands in the log of each partition. A
group begins on a topic with its first receive: on all partitions there are, at its `start`; partitions that are added
later are read from their beginning.
"""

from __future__ import annotations

from collections.abc import Callable

from portalmq import wire
from portalmq.broker.clock import Clock
from portalmq.broker.core.receipts import HEAD_LENGTH, Lease, ReceiptBook, offset_of, tag_of
from portalmq.broker.delivery import Delivered, GroupPartition, ParkingLot, Peer, ReceiveOptions, Shown, receive
from portalmq.broker.partition import Partition
from portalmq.broker.topics import Topic, Topics
from portalmq.broker.writer import Pending
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.state import GroupState
from portalmq.errors import Backpressure, GroupNotFound, InvalidRequest, Unavailable

Settle = Callable[[GroupPartition, list[Shown]], tuple[list[bool], Callable[[], None]]]


class Groups:
    def __init__(
        self, catalog: Catalog, topics: Topics, clock: Clock, receipt_key: bytes, parked_receives_max: int
    ) -> None:
        self._catalog = catalog
        self._topics = topics
        self._clock = clock
        self._key = receipt_key
        self._states: dict[str, GroupState] = {}
        self._ending: set[str] = set()
        self._attached: dict[tuple[str, str, int], GroupPartition] = {}
        self._books: dict[tuple[str, str], ReceiptBook] = {}
        self._turn: dict[str, int] = {}
        self.lot = ParkingLot(parked_receives_max)
        self.on_acked: Callable[[str, str, int], None] = lambda topic, group, messages: None

    def open_all(self) -> None:
        """Learn the settings of all groups, and take up those that the partitions' logs know."""
        self._states = self._catalog.groups()
        for topic in self._topics:
            for partition in topic.partitions:
                for group in tuple(partition.delivery):
                    if group in self._states:
                        self._attach(topic, partition, group)

    # --- settings ----------------------------------------------------------------------------------------------------

    def put(self, name: str, patch: dict[str, object]) -> bool:
        """Create the group or change its settings; True when it is new."""
        for setting, only in (("mode", "queue"), ("delivery", "at_least_once"), ("ordering", "none")):
            if patch.get(setting, only) != only:
                raise InvalidRequest(f"{setting} {patch[setting]!r} is not supported by this release, {only!r} is")
        self._check_stays(name)
        self._states[name], created = self._catalog.put_group(name, patch)
        return created

    def config(self, name: str) -> wire.GroupConfig:
        """Raises GroupNotFound."""
        state = self._states.get(name)
        if state is None or name in self._ending:
            wire.check_name(name, "group")
            raise GroupNotFound(f"there is no group {name!r}: its first receive creates it")
        return state.config

    def delete(self, name: str) -> None:
        """Forget the group. While that goes on, nobody may use it or make it anew."""
        self.config(name)
        self._ending.add(name)
        try:
            groups = self.on_partitions(name)
            ends = [group.partition.end_group(name) for group in groups]
            for group in groups:
                group.end_waits()
            for end in ends:
                if end is not None:
                    end.wait()  # a disk without room refuses: then the group stays, where it has not ended
            self._catalog.delete_group(name)
            del self._states[name]
            self._turn.pop(name, None)
            for key in [key for key in self._attached if key[0] == name]:
                self._detach(key)
            for book_key in [key for key in self._books if key[0] == name]:
                del self._books[book_key]
        finally:
            self._ending.discard(name)

    def _check_stays(self, name: str) -> None:
        """Raises Unavailable for a group that is just being deleted."""
        if name in self._ending:
            raise Unavailable(f"group {name!r} is being deleted: repeat, to make it anew", retry_after_s=0.1)

    def names(self) -> list[str]:
        return sorted(self._states.keys() - self._ending)

    # --- partitions --------------------------------------------------------------------------------------------------

    def _attach(self, topic: Topic, partition: Partition, group: str) -> GroupPartition:
        book_key = (group, topic.state.topic_id)
        book = self._books.get(book_key)
        if book is None:
            group_id = self._states[group].group_id
            book = self._books[book_key] = ReceiptBook(self._key, topic.state.topic_id, group, group_id)
        attached = GroupPartition(partition, group, book, self._clock)
        self._attached[group, topic.name, partition.number] = attached
        return attached

    def _detach(self, key: tuple[str, str, int]) -> None:
        attached = self._attached.pop(key, None)
        if attached is not None:  # the group and its topic may be deleted at the same time
            attached.detach()

    def end_waits(self, topic: Topic) -> None:
        """Who sleeps on the partitions there were would not hear of a message in a new one: let them ask again."""
        for key, attached in self._attached.items():
            if key[1] == topic.name:
                attached.end_waits()

    def forget_topic(self, topic: Topic) -> None:
        for key in [key for key in self._attached if key[1] == topic.name]:
            self._detach(key)
        for book_key in [key for key in self._books if key[1] == topic.state.topic_id]:
            del self._books[book_key]

    def _on_topic(self, group: str, topic: Topic, state: GroupState) -> list[GroupPartition]:
        """The group on every partition of a topic; it begins there if it has not yet.

        Raises Unavailable when the group or the topic is deleted while that goes on.
        """
        known = any(group in partition.delivery for partition in topic.partitions)
        self._check_same(state)
        if not self._topics.holds(topic):
            raise Unavailable(f"topic {topic.name!r} was deleted meanwhile: repeat the request", retry_after_s=0.1)
        attached: list[GroupPartition] = []
        starts: list[Pending] = []
        for partition in topic.partitions:
            there = self._attached.get((group, topic.name, partition.number)) or self._attach(topic, partition, group)
            if group not in partition.delivery:
                starts.append(there.start_at("earliest" if known else state.config.start))
            attached.append(there)
        for start in starts:
            start.wait()
        return attached

    def on_partitions(self, group: str) -> list[GroupPartition]:
        return [attached for key, attached in self._attached.items() if key[0] == group]

    # --- receive and settle ------------------------------------------------------------------------------------------

    def receive(self, name: str, request: wire.ReceiveRequest, peer: Peer | None) -> list[Delivered]:
        groups, options = self._prepared(name, request)
        return receive(groups, options, request.wait_ms / 1000, peer, self.lot)

    def ack_and_receive(
        self, name: str, request: wire.ReceiveRequest, peer: Peer | None
    ) -> tuple[list[Delivered], list[bool]]:
        """Ack `request.ack`, then receive: both records go to the disk together. Returns the receipts' verdicts too.

        Once the acks are on their way nothing raises that would call them not applied: with no room to wait in, the
        receive is simply empty.
        """
        groups, options = self._prepared(name, request)
        verdicts, wait = self._begin_ack(name, request.ack)
        messages = receive(groups, options, 0, peer, self.lot)
        wait()
        if not messages and request.wait_ms:
            try:
                messages = receive(groups, options, request.wait_ms / 1000, peer, self.lot)
            except Backpressure:
                messages = []
        return messages, verdicts

    def _prepared(self, name: str, request: wire.ReceiveRequest) -> tuple[list[GroupPartition], ReceiveOptions]:
        """The group on all partitions of the request's topics, beginning with another one each time."""
        state = self._ensure(name)
        groups = [
            group
            for topic in dict.fromkeys(request.topics)
            for group in self._on_topic(name, self._topics.get_or_create(topic), state)
        ]
        self._check_same(state)
        turn = self._turn[name] = (self._turn.get(name, -1) + 1) % len(groups)
        options = ReceiveOptions(
            request.max_messages,
            request.visibility_timeout_ms or state.config.visibility_timeout_ms,
            request.consumer,
            request.attempt_id,
        )
        return groups[turn:] + groups[:turn], options

    def _ensure(self, name: str) -> GroupState:
        self._check_stays(name)
        state = self._states.get(name)
        if state is None:
            wire.check_name(name, "group")
            state = self._states[name] = self._catalog.ensure_group(name)
        return state

    def _check_same(self, state: GroupState) -> None:
        """Raises Unavailable when the group was deleted since `state` was read."""
        now = self._states.get(state.name)
        if now is None or now.group_id != state.group_id or state.name in self._ending:
            raise Unavailable(f"group {state.name!r} was deleted meanwhile: repeat, to make it anew", retry_after_s=0.1)

    def ack(self, name: str, receipts: list[str]) -> list[bool]:
        verdicts, wait = self._begin_ack(name, receipts)
        wait()
        return verdicts

    def _begin_ack(self, name: str, receipts: list[str]) -> tuple[list[bool], Callable[[], None]]:
        acked: dict[str, int] = {}

        def settle(group: GroupPartition, own: list[Shown]) -> tuple[list[bool], Callable[[], None]]:
            verdicts, wait = group.ack(own)
            acked[group.partition.topic] = acked.get(group.partition.topic, 0) + sum(verdicts)
            return verdicts, wait

        verdicts, wait = self._begin(name, receipts, settle)

        def committed() -> None:
            wait()
            for topic, messages in acked.items():
                self.on_acked(topic, name, messages)

        return verdicts, committed

    def nack(self, name: str, receipts: list[str], delay_ms: int | None, reason: str | None) -> list[bool]:
        config = self.config(name)
        return self._settle(name, receipts, lambda group, own: group.nack(own, delay_ms, reason, config))

    def extend(self, name: str, receipts: list[str], visibility_timeout_ms: int | None) -> list[bool]:
        timeout_ms = visibility_timeout_ms or self.config(name).visibility_timeout_ms
        return self._settle(name, receipts, lambda group, own: (group.extend(own, timeout_ms), lambda: None))

    def _settle(self, name: str, texts: list[str], settle: Settle) -> list[bool]:
        verdicts, wait = self._begin(name, texts, settle)
        wait()
        return verdicts

    def _begin(self, name: str, texts: list[str], settle: Settle) -> tuple[list[bool], Callable[[], None]]:
        """Check all receipts before any is used, and settle them by partition; what comes back waits for the disk."""
        self.config(name)
        verdicts = [False] * len(texts)
        waits: list[Callable[[], None]] = []
        for attached, shown in self._checked(name, texts).items():
            good, wait = settle(attached, shown)
            waits.append(wait)
            indexes = [index for each in shown for index in each.indexes]
            for index, verdict in zip(indexes, good, strict=True):
                verdicts[index] = verdict
        return verdicts, lambda: _wait_for_all(waits)

    def _checked(self, name: str, texts: list[str]) -> dict[GroupPartition, list[Shown]]:
        """The receipts by partition, and there by lease. Raises InvalidRequest when one of them is not ours."""
        by_head: dict[str, tuple[Lease, Shown]] = {}
        by_partition: dict[GroupPartition, list[Shown]] = {}
        for index, text in enumerate(texts):
            head = text[:HEAD_LENGTH]
            found = by_head.get(head)
            if found is None:
                topic, book = self._book_of(name, tag_of(head), index)
                lease = book.check(head)
                attached = self._attached.get((name, topic.name, lease.partition))
                if attached is None or name not in attached.partition.delivery:
                    raise InvalidRequest(f"receipt {index} is of a partition where group {name!r} has ended")
                found = by_head[head] = (lease, Shown(lease.delivery, [], []))
                by_partition.setdefault(attached, []).append(found[1])
            lease, shown = found
            shown.indexes.append(index)
            shown.offsets.append(offset_of(text, lease))
        return by_partition

    def _book_of(self, name: str, tag: bytes, index: int) -> tuple[Topic, ReceiptBook]:
        topic = next((topic for topic in self._topics if topic.tag == tag), None)
        book = self._books.get((name, topic.state.topic_id)) if topic else None
        if topic is None or book is None:
            raise InvalidRequest(f"receipt {index} belongs to no topic that group {name!r} has received from")
        return topic, book


def _wait_for_all(waits: list[Callable[[], None]]) -> None:
    for wait in waits:
        wait()
