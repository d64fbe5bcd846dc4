"""Describe, pause and delete groups: every leader answers for the partitions that it leads.

A leader that does not answer leaves a gap. The gap matters only if another partition of the topic knows the group: a
group begins on all partitions of a topic.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import gevent

from portalmq import wire
from portalmq.broker.cluster.routing import PATIENCE_S, PAUSE_MAX_S
from portalmq.broker.cluster.rpc import PeerCaller
from portalmq.broker.cluster.rpc.queues import (
    END_GROUP,
    GROUPS,
    PAUSE_GROUP,
    CountGroups,
    EndedGroup,
    EndGroup,
    GroupCount,
    GroupCounts,
    PauseGroup,
)
from portalmq.broker.core.fold import PauseFold
from portalmq.broker.core.queue.records import Pause
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.queues.groups import Groups
from portalmq.control_plane.mirror import Mirror
from portalmq.control_plane.state import GroupState, PauseState
from portalmq.errors import PortalMQError, Unavailable

T = TypeVar("T")
_Where = tuple[str, int]


class GroupAdmin:
    def __init__(
        self,
        broker_id: int,
        groups: Groups,
        mirror: Mirror,
        peers: PeerCaller,
        clock: Clock,
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._broker_id = broker_id
        self._groups = groups
        self._mirror = mirror
        self._peers = peers
        self._clock = clock
        self.patience_s = patience_s

    # --- counting ----------------------------------------------------------------------------------------------------

    def describe(self, name: str, *, leave_out: bool = False) -> wire.GroupDescription:
        """Return the group's counts over all its partitions. Raises GroupNotFound; with `leave_out` False also
        Unavailable when a partition has no leader, since its lag would be missing."""
        group = self._groups.get(name)
        deadline = time.monotonic() + self.patience_s
        while True:
            answers = self._counts([name])
            counts = _once_each(answers)
            gaps = self.gaps(
                {(count.topic, count.number) for count in counts}, {where for answer in answers for where in answer.led}
            )
            if leave_out or not gaps:
                return _described(group, counts)
            self.wait_for_leaders(gaps, deadline)

    def describe_all(self) -> list[wire.GroupDescription]:
        """Return all groups; the counts leave out partitions without a leader."""
        counts = _once_each(self._counts([]))
        by_group: dict[str, list[GroupCount]] = {}
        for count in counts:
            by_group.setdefault(count.group, []).append(count)
        return [
            _described(group, by_group.get(name, []))
            for name in in_short_turns(self._groups.names())
            if (group := self._groups.find(name)) is not None
        ]

    def describe_some(self, names: list[str]) -> list[wire.GroupDescription]:
        """Return these groups, as describe_all does."""
        by_group: dict[str, list[GroupCount]] = {}
        for count in self.counts(names) if names else ():
            by_group.setdefault(count.group, []).append(count)
        groups = {name: self._groups.find(name) for name in names}
        return [_described(group, by_group.get(name, [])) for name, group in groups.items() if group is not None]

    def counts(self, names: list[str]) -> list[GroupCount]:
        """Return the counts of these groups on each partition that has a leader."""
        return _once_each(self._counts(names))

    def _counts(self, names: list[str]) -> list[GroupCounts]:
        call = CountGroups(names)
        return self.everywhere(
            lambda: self._count_here(names),
            lambda broker_id: GROUPS.ask(self._peers, broker_id, call),
        )

    def _count_here(self, names: list[str]) -> GroupCounts:
        groups = self._groups
        attached = in_short_turns(groups.attached(*names)) if names else groups.all_attached()
        counts: list[GroupCount] = []
        for each in attached:
            partition, found = each.partition, each.counts()
            delivery = partition.delivery.get(each.group)
            pause = delivery.pause if delivery is not None else PauseFold()
            counts.append(
                GroupCount(
                    each.group,
                    partition.topic,
                    partition.number,
                    found["ready"],
                    found["in_flight"],
                    found["scheduled"],
                    found["lag"],
                    found["oldest_unacked_ms"],
                    found["dead"],
                    pause,
                )
            )
        return GroupCounts(counts, self.led())

    def count(self, request: CountGroups) -> GroupCounts:
        return self._count_here(request.groups)

    # --- deletion ----------------------------------------------------------------------------------------------------

    def delete(self, name: str) -> None:
        """End the group at every leader, then delete it. It cannot be used or created again during this.

        Raises GroupNotFound; Unavailable when a partition where it may have begun has no leader, or the control plane
        does not answer. Then it stays where it has not ended, and a repeat continues from there.
        """
        try:
            with self._groups.deleting(name) as group:
                try:
                    self._end_everywhere(group)
                except PortalMQError as error:
                    error.outcome = "unknown"  # where it has ended, its acks are lost
                    raise
        except Unavailable as error:
            error.outcome = "unknown"
            raise

    def _end_everywhere(self, group: GroupState) -> None:
        call = EndGroup(group.name, group.group_id)
        self._until_complete(
            lambda: self._end_here(group.name, group.group_id),
            lambda other: END_GROUP.ask(self._peers, other, call),
        )

    def _until_complete(self, here: Callable[[], EndedGroup], there: Callable[[int], EndedGroup]) -> None:
        """Make the change at all leaders, until every partition where the group may have begun has it. Raises
        Unavailable."""
        deadline = time.monotonic() + self.patience_s
        ended: set[_Where] = set()
        while True:
            answers = self.everywhere(here, there)
            ended |= {where for answer in answers for where in answer.ended}
            gaps = self.gaps(ended, {where for answer in answers for where in answer.led})
            if not gaps:
                return
            self.wait_for_leaders(gaps, deadline)

    def _end_here(self, name: str, group_id: str) -> EndedGroup:
        led = self.led()
        return EndedGroup([(place.topic, place.number) for place in self._groups.end_here(name, group_id)], led)

    def end(self, call: EndGroup) -> EndedGroup:
        self._check_same(call.group, call.group_id)
        return self._end_here(call.group, call.group_id)

    # --- pause and resume --------------------------------------------------------------------------------------------

    def pause(self, name: str, *, paused: bool, reason: str = "", by: str = "") -> None:
        """Pause the queue group, or resume it: note it in the control plane, then in the log of each partition, so that
        no leader, nor a later one that has not read the control plane, delivers messages of a paused group.

        Raises GroupNotFound, GroupModeMismatch; Unavailable when a partition where the group may have begun has no
        leader. Then the change counts where it has arrived, and a repeat completes it.
        """
        at_ms = self._clock.wall_ms()
        group = self._groups.set_paused(name, paused=paused, at_ms=at_ms, reason=reason, by=by)
        last = group.pause
        call = PauseGroup(name, group.group_id, last.number, last.since_ms, last.paused, last.reason, last.by)
        try:
            self._until_complete(
                lambda: self._pause_here(call), lambda other: PAUSE_GROUP.ask(self._peers, other, call)
            )
        except Unavailable as error:
            error.outcome = "unknown"
            raise

    def _pause_here(self, call: PauseGroup) -> EndedGroup:
        led = self.led()
        done, missed = self._groups.pause_here(
            call.group, Pause(call.number, call.at_ms, call.paused, call.reason, call.by)
        )
        unsure = {(place.topic, place.number) for place in missed}
        return EndedGroup(
            [(place.topic, place.number) for place in done], [where for where in led if where not in unsure]
        )

    def on_pause(self, call: PauseGroup) -> EndedGroup:
        self._check_same(call.group, call.group_id)
        pause = PauseState(call.number, call.paused, call.at_ms, call.reason, call.by)
        self._groups.hear_of_pause(call.group, call.group_id, pause)
        return self._pause_here(call)

    def _check_same(self, name: str, group_id: str) -> None:
        group: GroupState | None = self._groups.find(name)
        if group is not None and group.group_id != group_id:
            raise Unavailable(f"group {name!r} was replaced by a newer one", retry_after_s=0.1)

    # --- all leaders -------------------------------------------------------------------------------------------------

    def everywhere(self, here: Callable[[], T], there: Callable[[int], T]) -> list[T]:
        """Return the answers of all brokers that answer, asked in parallel. Raises the error of this one."""
        others = [broker_id for broker_id in self._mirror.brokers if broker_id != self._broker_id]
        asked = [gevent.spawn(_unless_refused, there, broker_id) for broker_id in others]
        try:
            answers = [here()]
            answers += [answer for greenlet in asked if (answer := greenlet.get()) is not None]
        finally:
            gevent.killall(asked, block=False)
        return answers

    def led(self) -> list[_Where]:
        """Return the partitions led here, in one step: one that moved away during a count would appear as counted."""
        return [(partition.topic, partition.number) for partition in self._groups.topics.led()]

    def gaps(self, begun: Collection[_Where], led: Collection[_Where]) -> list[_Where]:
        """Return partitions where the group may have begun, and that no leader answered for."""
        gaps: list[_Where] = []
        begun_topics = {topic for topic, _ in begun}
        for topic in in_short_turns(self._groups.topics):
            places = [(topic.name, number) for number in range(topic.state.partitions)]
            missing = [place for place in places if place not in led and place not in begun]
            if missing and (topic.name in begun_topics or len(missing) == len(places)):
                gaps += missing
        return gaps

    def wait_for_leaders(self, gaps: Iterable[_Where], deadline: float) -> None:
        """Pause before the next try. Raises Unavailable when the time is over."""
        if time.monotonic() >= deadline:
            topic, number = next(iter(gaps))
            raise Unavailable(
                f"partition {number} of topic {topic!r} has no leader now: repeat in a moment",
                retry_after_s=1,
            )
        gevent.sleep(PAUSE_MAX_S)


def _unless_refused(there: Callable[[int], T], broker_id: int) -> T | None:
    try:
        return there(broker_id)
    except PortalMQError:
        return None


def _once_each(answers: Iterable[GroupCounts]) -> list[GroupCount]:
    """Return one count for each partition: two brokers may answer for it during a change of leaders."""
    counts = {(count.group, count.topic, count.number): count for answer in answers for count in answer.counts}
    return list(counts.values())


def _described(group: GroupState, counts: list[GroupCount]) -> wire.GroupDescription:
    # The log counts too where the control plane knows less, as after its content was written anew.
    known: list[PauseFold | PauseState] = [group.pause, *[count.pause for count in counts]]
    pause = max(known, key=lambda each: each.number)
    return wire.GroupDescription(
        group=group.name,
        mode=group.config.mode,
        members=[],
        ready=sum([count.ready for count in counts]),
        in_flight=sum([count.in_flight for count in counts]),
        scheduled=sum([count.scheduled for count in counts]),
        dead=sum([count.dead for count in counts]),
        lag=sum([count.lag for count in counts]),
        oldest_unacked_ms=max([count.oldest_unacked_ms for count in counts], default=0),
        config=group.config,
        paused=wire.Paused(pause.since_ms, pause.reason, pause.by) if pause.paused else None,
    )
