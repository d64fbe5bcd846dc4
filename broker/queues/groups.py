"""All queue groups: start positions, receipts, and the partitions of each group that this broker leads.

The log of each partition holds a group's leases and acks. This broker serves a group on the partitions that it leads,
and forwards calls for other partitions to their leaders.

A group begins on a topic with its first receive: on all existing partitions, at its `start`; partitions that are added
later are read from their beginning. For a group that starts at the earliest each leader does this alone. For other
groups the order matters: the group begins on partition 0 last. So a group that is known there has begun on all
partitions that existed then, and the others were added since.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from portalmq import wire
from portalmq.broker.cluster.capacity import Capacity
from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, one_by_one
from portalmq.broker.cluster.rpc import TopicPartition, values_of
from portalmq.broker.cluster.rpc.queues import KNOWN, START, BeginGroup, LookAt
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.core.queue.receipts import ReceiptSigner, topic_tag
from portalmq.broker.core.queue.records import Pause
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.long_poll import LongPolls
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.writer import Pending
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.queues.group_partition import GroupPartition
from portalmq.broker.queues.group_registry import GroupRegistry
from portalmq.broker.storage.errors import DAMAGE, Shortage
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.mirror import Changes, Mirror
from portalmq.control_plane.state import GroupState
from portalmq.errors import InvalidRequest, KeyOrder, PortalMQError, Unavailable

UNKNOWN_S = 5.0
UNKNOWN_MAX = 1_000
# The most groups and topics that are remembered to have begun.
BEGUN_MAX = 10_000


class Groups(GroupRegistry):
    """The groups of the registry on the partitions led here. See receive.py, settle.py, and group_admin.py for counts
    and deletion.

    Invariant: `attached` holds a group exactly on partitions that this broker leads and where it has begun.
    """

    def __init__(
        self,
        catalog: Catalog,
        mirror: Mirror,
        topics: Topics,
        metadata_cache: MetadataCache,
        leaders: LeaderRouter,
        clock: Clock,
        metrics: Metrics,
        capacity: Capacity,
        *,
        receipt_key: bytes,
        parked_receives_max: int,
    ) -> None:
        super().__init__(catalog, mirror, capacity)
        self.topics = topics
        self.leaders = leaders
        self.long_polls = LongPolls(parked_receives_max)
        self._metadata_cache = metadata_cache
        self._clock = clock
        self._metrics = metrics
        self._key = receipt_key
        self._attached: dict[tuple[str, str, int], GroupPartition] = {}
        self._signers: dict[tuple[str, str, str], ReceiptSigner] = {}
        self._tags: dict[bytes, Topic] = {}
        # Tags that the control plane does not know: until when it is not asked again.
        self._unknown_tags: dict[bytes, float] = {}
        self._begun: set[tuple[str, str, int]] = set()
        self._leads: dict[tuple[str, int], tuple[int | None, int]] = {}

    # --- the end of a group ------------------------------------------------------------------------------------------

    def end_here(self, name: str, group_id: str) -> list[TopicPartition]:
        """End the group durably on all partitions led here; return those on which it had begun. The group cannot be
        used or begin again during this. Raises the error of a partition: the group stays where it has not ended."""
        self.note_ending(group_id)
        begun = [each for each in self.topics.led() if name in each.delivery or name in each.streams]
        ends: list[Pending | None] = []
        for partition in in_short_turns(begun):
            ends.append(partition.end_group(name))
            attached = self._attached.get((name, partition.topic_id, partition.number))
            if attached is not None:  # no waiter wakes up on an ended group
                attached.end_waits()
        keys = [key for key in self._attached if key[0] == name]
        for key in keys:
            self._attached[key].end_waits()
        for end in ends:
            if end is not None:
                end.wait()
        for key in keys:
            self._detach(key)
        return [_place(partition) for partition in begun]

    def pause_here(self, name: str, change: Pause) -> tuple[list[TopicPartition], list[TopicPartition]]:
        """Write a pause or a resume on all partitions led here where the group has begun. Return where it is durable,
        and where it may not be, since leadership moves."""
        waits: list[tuple[TopicPartition, Callable[[], None]]] = []
        done: list[TopicPartition] = []
        missed: list[TopicPartition] = []
        for partition in in_short_turns([each for each in self.topics.led() if name in each.delivery]):
            place = _place(partition)
            delivery = partition.delivery.get(name)
            try:
                if delivery is not None and delivery.pause.number < change.number:
                    waits.append((place, partition.append_group_record(name, change).wait))
                else:  # a repeat: the first call's record may not be committed yet
                    waits.append((place, partial(partition.wait_settled, partition.replica.next_offset - 1)))
            except PortalMQError:
                missed.append(place)
        for place, wait in waits:
            try:
                wait()
                done.append(place)
            except PortalMQError:
                missed.append(place)
        self._notify(name)
        return done, missed

    def _notify(self, name: str) -> None:
        for key, attached in tuple(self._attached.items()):
            if key[0] == name:
                attached.notify()

    @contextmanager
    def deleting(self, name: str) -> Iterator[GroupState]:
        with super().deleting(name) as group:
            yield group
        self._drop(name)

    # --- partitions --------------------------------------------------------------------------------------------------

    def partition(self, place: TopicPartition) -> Partition:
        """Return a partition that is led here. Raises NotLeader, Unavailable."""
        return self._metadata_cache.partition(place)

    def attached(self, *names: str) -> list[GroupPartition]:
        """Return these groups on the partitions led here where they have begun."""
        groups = {name: group for name in names if (group := self.find(name)) is not None}
        gone = set(names) - groups.keys()
        return [each for key, each in self._attached.items() if key[0] in gone] + [
            self.attach(groups[name], partition, partition.topic_id)
            for partition in self.topics.led()
            for name in partition.delivery
            if name in groups
        ]

    def all_attached(self) -> Iterator[GroupPartition]:
        """Yield every group on every partition led here where it has begun, with pauses for other greenlets. A group
        that ends during this may be missing or stale."""
        begun = [(partition, name) for partition in self.topics.led() for name in partition.delivery]
        for partition, name in in_short_turns(begun):
            group = self.find(name) if partition.serves and name in partition.delivery else None
            if group is not None and name not in self._deleting:
                yield self.attach(group, partition, partition.topic_id)

    def at(self, group: GroupState, place: TopicPartition) -> GroupPartition:
        """Return the group on a partition that is led here. Raises InvalidRequest when it has not begun there."""
        partition = self.partition(place)
        if group.name not in partition.delivery:
            partition.wait_final()
            self.check_same(group)
        if group.name not in partition.delivery:
            raise InvalidRequest(f"group {group.name!r} has ended on partition {place.number} of topic {place.topic!r}")
        return self.attach(group, partition, place.topic_id)

    def on_leading(self, topic: Topic, partition: Partition) -> None:
        """Serve the groups that the log of a newly led partition knows."""
        for name in tuple(partition.delivery):
            group = self.find(name)
            if group is not None:
                self.attach(group, partition, topic.state.topic_id)
        self.long_polls.move({topic.name})

    def on_stepped_down(self, topic: Topic, partition: Partition) -> None:
        """Detach the groups of a partition that this broker leads no more; their waiters look for the new leader."""
        for key in [key for key in self._attached if key[1:] == (topic.state.topic_id, partition.number)]:
            self._detach(key)

    def forget_topic(self, topic: Topic) -> None:
        """Detach the groups of a deleted topic, and end their waits."""
        topic_id = topic.state.topic_id
        for key in [key for key in self._attached if key[1] == topic_id]:
            self._attached[key].end_waits()
            self._detach(key)
        self._signers = {key: signer for key, signer in self._signers.items() if key[2] != topic_id}
        self._begun = {begun for begun in self._begun if begun[1] != topic_id}
        self._tags.pop(topic.tag, None)

    def sync(self, changes: Changes) -> None:
        """React to changes in the mirror: forget deleted groups, move waiters to new leaders."""
        for name in in_short_turns(tuple(changes.groups)):
            self._drop(name)
            self._notify(name)  # it may be resumed
        moved = set(changes.topics)
        for key in in_short_turns(tuple(changes.partitions)):
            held, topic = self._mirror.partitions.get(key), self._mirror.topic_by_id(key[0])
            leads = (held.value.leader, held.value.leader_epoch) if held is not None else None
            if topic is not None and leads != self._leads.get(key):
                moved.add(topic.name)
            if leads is None:
                self._leads.pop(key, None)
            else:
                self._leads[key] = leads
        if moved:
            self.long_polls.move(moved)

    def _drop(self, name: str) -> None:
        """Forget a group that was deleted, or replaced by another one of the name."""
        group = self.find(name)
        kept = group.group_id if group else None
        for key in [key for key, each in self._attached.items() if key[0] == name and each.group_id != kept]:
            self._attached[key].end_waits()
            self._detach(key)
        self._signers = {key: signer for key, signer in self._signers.items() if key[0] != name or key[1] == kept}

    def attach(self, group: GroupState, partition: Partition, topic_id: str) -> GroupPartition:
        """Return the group on a partition that is led here; attach it if it is not."""
        key = (group.name, topic_id, partition.number)
        attached = self._attached.get(key)
        if attached is not None and (attached.partition is not partition or attached.group_id != group.group_id):
            self._detach(key)
            attached = None
        if attached is None:
            signer = self.receipt_signer(group, topic_id)
            now = partial(self._now, group)
            partitions = partial(self._partitions_of, partition.topic)
            attached = GroupPartition(partition, group, signer, self._clock, self._metrics, now, partitions)
            self._attached[key] = attached
        return attached

    def _partitions_of(self, name: str) -> int:
        topic = self.topics.get(name)
        return 1 if topic is None else topic.state.partitions

    def _detach(self, key: tuple[str, str, int]) -> None:
        attached = self._attached.pop(key, None)
        if attached is not None:  # the group and its topic may be deleted at the same time
            attached.detach()

    # --- receipts ----------------------------------------------------------------------------------------------------

    def receipt_signer(self, group: GroupState, topic_id: str) -> ReceiptSigner:
        key = (group.name, group.group_id, topic_id)
        signer = self._signers.get(key)
        if signer is None:
            signer = self._signers[key] = ReceiptSigner(self._key, topic_id, group.name, group.group_id)
        return signer

    def by_tag(self, tag: bytes) -> Topic | None:
        """Return the topic of a receipt, None for a deleted one. Raises Unavailable for one not in the mirror yet."""
        topic = self._tags.get(tag)
        if topic is None or not self.topics.holds(topic):
            self._tags = {topic.tag: topic for topic in self.topics}
            topic = self._tags.get(tag)
        if topic is None and self._unknown_tags.get(tag, 0.0) < time.monotonic():
            self._catalog.confirm()
            if any(topic_tag(topic_id) == tag for topic_id in in_short_turns(self._catalog.topic_ids())):
                raise Unavailable("this broker does not know the topic of a receipt yet", retry_after_s=0.1)
            self._unknown_tags = {} if len(self._unknown_tags) >= UNKNOWN_MAX else self._unknown_tags
            self._unknown_tags[tag] = time.monotonic() + UNKNOWN_S
        return topic

    def sweep(self) -> None:
        """Remove messages that expired unread from the counts of all groups."""
        for key, attached in in_short_turns(tuple(self._attached.items())):
            if self._attached.get(key) is attached:
                try:
                    attached.sweep()
                except DAMAGE as fault:
                    attached.partition.report_damage(str(fault))
                except (PortalMQError, Shortage):  # another broker may lead it now; else the next sweep repeats it
                    continue

    def _now(self, group: GroupState) -> GroupState:
        """Return the group with its current settings; `group` when it is deleted."""
        now = self.find(group.name)
        return now if now is not None and now.group_id == group.group_id else group

    # --- beginning ---------------------------------------------------------------------------------------------------

    def begin(self, group: GroupState, topic: Topic, *, forward: bool = True) -> None:
        """Let the group begin on all partitions of the topic, unless each leader does that alone. Raises Unavailable
        when a leader cannot be asked."""
        state = topic.state
        mark = (group.group_id, state.topic_id, state.partitions)
        if group.config.start == "earliest" or mark in self._begun or not forward:
            return
        asked = LookAt(group.name, state.name, state.topic_id, [0])
        has_begun = self.leaders.call_one(KNOWN, asked, self.local_known(asked), repeatable=True)
        start = "earliest" if has_begun else group.config.start
        for numbers in (list(range(1, state.partitions)), [0]):
            request = BeginGroup(group.name, group.group_id, state.name, state.topic_id, numbers, start)
            values_of(self.leaders.call(START, request, self._local_start(group, start), repeatable=True))
        if len(self._begun) >= BEGUN_MAX:
            self._begun.clear()  # the next calls ask the leaders again
        self._begun.add(mark)

    def unbegun(self, group: GroupState, topics: Sequence[str]) -> None:
        """Forget where the group has begun: a leader does not know it, as after an unclean election."""
        self._begun = {mark for mark in self._begun if mark[0] != group.group_id}
        self.long_polls.move(topics)

    def begin_here(self, group: GroupState, place: TopicPartition, start: wire.GroupStart) -> bool:
        """Let the group begin on a partition led here, durably; return False when it had begun already, or another
        call lets it begin: that is waited for. A start that is lost would let it begin elsewhere."""
        has_begun = group.name in self.partition(place).delivery
        self.start_here(group, place, start).wait_begun()
        return not has_begun

    def start_here(self, group: GroupState, place: TopicPartition, start: wire.GroupStart) -> GroupPartition:
        """Return the group on a partition led here, after the append of its start if it has not begun there: whoever
        hands messages out waits until that is committed."""
        partition = self.partition(place)
        self.check_same(group)
        attached = self.attach(group, partition, place.topic_id)
        if group.name not in partition.delivery:
            attached.start_at(start)
        return attached

    def check_growth(self, topic: Topic, partitions: int | None) -> None:
        """Raise KeyOrder when partitions would be added to a topic that a group reads in the order of keys: messages of
        a key that wait in the old partition and messages in the new one would be delivered concurrently. Also raises
        the error of a leader that cannot be asked."""
        state = topic.state
        if partitions is None or partitions <= state.partitions:
            return
        for name, group in sorted(self._mirror.groups.items()):
            if group.config.ordering != "key":
                continue
            request = LookAt(name, state.name, state.topic_id, list(range(state.partitions)))
            outcomes = self.leaders.call(KNOWN, request, self.local_known(request), repeatable=True)
            if True in outcomes.values():
                raise KeyOrder(
                    f"group {name!r} reads topic {topic.name!r} in the order of keys: with more partitions a key moves"
                    f" to another one while its older messages wait in the old one. Let the group finish first, or use"
                    f" ?force=true"
                )
            for error in outcomes.values():
                if isinstance(error, PortalMQError):
                    error.outcome = "not_applied"  # nothing has changed yet
                    raise error

    def local_known(self, request: LookAt) -> LocalWork[bool]:
        def known(place: TopicPartition) -> bool:
            partition = self.partition(place)
            attached = self._attached.get((request.group, partition.topic_id, partition.number))
            # Its start may not be committed yet, and be refused by the disk. What came after it is not waited for.
            if attached is not None and request.group in partition.delivery:
                attached.wait_begun()
            return request.group in partition.delivery

        return one_by_one(known)

    def local_start(self, request: BeginGroup) -> LocalWork[bool]:
        return self._local_start(self.get_same(request.group, request.group_id), request.start)

    def _local_start(self, group: GroupState, start: wire.GroupStart) -> LocalWork[bool]:
        return one_by_one(lambda place: self.begin_here(group, place, start))


def _place(partition: Partition) -> TopicPartition:
    return TopicPartition(partition.topic, partition.topic_id, partition.number)
