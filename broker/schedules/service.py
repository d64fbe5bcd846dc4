"""Schedules, as users change and see them. A change is made by the leader of the partition that the ticks go to, since
it alone publishes them; any broker makes it while that partition has no leader, or is gone.

    put, pause, resume, delete --> the leader of the place:  nothing is published for the name meanwhile
                                                             ticks due until now are published, and committed
                                                             one commit: the definition, if the leadership is the same
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Self

import gevent
import msgspec

from portalmq import wire
from portalmq.broker.cluster.metadata_cache import MetadataCache
from portalmq.broker.cluster.routing import LeaderRouter, LocalWork, one_by_one
from portalmq.broker.cluster.rpc import TopicPartition
from portalmq.broker.cluster.rpc.schedules import (
    CHANGE_SCHEDULE,
    LAST_TICKS,
    NOT_COMMITTED,
    ChangedSchedule,
    ChangeSchedule,
    LastTicks,
    LastTicksShare,
    ScheduleAction,
)
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.messages.produce import size_of
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.schedules.definition import changed, number_for, tick_record, timetable_of
from portalmq.broker.schedules.runner import ScheduleRunner, UpTimeUnknown
from portalmq.broker.schedules.timetable import cron_line
from portalmq.contract.schedules import SCHEDULE_BYTES_MAX, SCHEDULE_IDS_FROM, SCHEDULES_MAX
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.plane import Conflict, OutcomeUnknown
from portalmq.control_plane.schedules import ScheduleSpec, ScheduleState, ScheduleStore
from portalmq.control_plane.state import PartitionState
from portalmq.control_plane.tree import Versioned
from portalmq.errors import InvalidRequest, NotLeader, PortalMQError, ScheduleNotFound, TopicNotFound, Unavailable

log = logging.getLogger(__name__)

ATTEMPTS = 8
# A change that waits for another one of the same schedule.
BUSY_RETRY_S = 0.1


@dataclass(frozen=True, slots=True)
class ShownSchedule:
    """A schedule, and its next tick: None while it is paused or its topic is gone."""

    state: ScheduleState
    next_ms: int | None


@dataclass(eq=False, repr=False)
class ScheduleService:
    """The calls about schedules."""

    _broker_id: int
    _store: ScheduleStore
    _catalog: Catalog
    _topics: Topics
    _metadata_cache: MetadataCache
    _leaders: LeaderRouter
    _runner: ScheduleRunner
    _clock: Clock

    def __post_init__(self) -> None:
        self._runner.on_placed = self._on_placed

    # --- reading -----------------------------------------------------------------------------------------------------

    def show(self, name: str) -> ShownSchedule:
        """Raises ScheduleNotFound."""
        return self.shown(self._found(name).value)

    def list_all(self) -> list[ShownSchedule]:
        return [self.shown(held.value) for _, held in in_short_turns(sorted(self._store.all().items()))]

    def known(self) -> list[ScheduleState]:
        """Return all schedules by name, without asking the control plane: a change may be known a moment later."""
        return self._runner.known()

    def last_ticks(self, schedules: list[ScheduleState]) -> dict[str, int]:
        """Return the last tick of each schedule by its name, as the log of its leader has it: 0 without one. What is
        not known now is left out: the leader does not answer, or the tick is not committed yet."""
        by_place: dict[TopicPartition, list[ScheduleState]] = {}
        for each in schedules:
            place = TopicPartition(each.spec.topic, each.topic_id, each.partition)
            by_place.setdefault(place, []).append(each)
        request = LastTicks(
            [LastTicksShare(*place, [each.schedule_id for each in those]) for place, those in by_place.items()]
        )
        outcomes = self._leaders.call(LAST_TICKS, request, self.local_last_ticks(request), patience_s=0.0)
        return {
            each.name: tick_ms
            for place, ticks in outcomes.items()
            if not isinstance(ticks, PortalMQError)
            for each, tick_ms in zip(by_place[place], ticks, strict=True)
            if tick_ms != NOT_COMMITTED
        }

    def local_last_ticks(self, request: LastTicks) -> LocalWork[list[int]]:
        shares = request.by_place()

        def last_ticks(place: TopicPartition) -> list[int]:
            partition = self._metadata_cache.partition(place)
            return [_last_tick(partition, schedule_id) for schedule_id in shares[place].ids]

        return one_by_one(last_ticks)

    def _found(self, name: str) -> Versioned[ScheduleState]:
        held = self._store.find(name)
        if held is None:
            raise ScheduleNotFound(f"there is no schedule {name!r}")
        return held

    def shown(self, schedule: ScheduleState) -> ShownSchedule:
        topic = self._topics.get(schedule.spec.topic)
        if schedule.spec.paused or topic is None:
            return ShownSchedule(schedule, None)
        try:
            after_ms = max(self._clock.wall_ms(), schedule.since_ms)
            return ShownSchedule(schedule, timetable_of(schedule).next_after(after_ms))
        except InvalidRequest:  # a zone that only other brokers know
            return ShownSchedule(schedule, None)

    # --- changes -----------------------------------------------------------------------------------------------------

    def put(self, name: str, spec: ScheduleSpec) -> tuple[ShownSchedule, bool]:
        """Create the schedule, or replace its definition. Return it, and True when this call created it. A definition
        that is the same changes nothing. Raises InvalidRequest, TopicNotFound, MessageTooLarge."""
        wire.check_name(name, "schedule")
        self._check(name, spec)
        with _StaysUnknown() as tries:
            for _ in range(ATTEMPTS):
                if self._store.find(name) is None:
                    created = self._create(name, spec)
                    if created is not None:
                        return self.shown(created), True
                    continue
                try:
                    found = self._change(name, "put", spec)
                except ScheduleNotFound as gone:  # deleted meanwhile
                    tries.failed(gone)
                    continue
                assert found is not None
                return self.shown(found), False
            raise _busy(name)

    def pause(self, name: str, *, paused: bool) -> ShownSchedule:
        """Raises ScheduleNotFound."""
        found = self._change(name, "pause" if paused else "resume")
        assert found is not None
        return self.shown(found)

    def delete(self, name: str) -> None:
        """Raises ScheduleNotFound."""
        self._change(name, "delete")

    def _check(self, name: str, spec: ScheduleSpec) -> None:
        if (spec.cron is None) == (spec.every_ms is None):
            raise InvalidRequest("a schedule has cron or every_ms: give one of them")
        cron_line(spec.cron or "* * * * *", spec.timezone)
        headers = "".join([text for header in spec.headers.items() for text in header])
        size = len(spec.value) + len(spec.key or b"") + len(headers.encode())
        if size > SCHEDULE_BYTES_MAX:
            raise InvalidRequest(
                f"value, key and headers of a schedule have {size} bytes, and may have {SCHEDULE_BYTES_MAX}: keep what"
                " is larger elsewhere, and let the message name it"
            )
        topic = self._topics.get_or_create(wire.check_name(spec.topic, "topic"))
        size_of(topic, [tick_record(ScheduleState(name, 0, spec, "", 0, 0, 0), 0)])

    def _create(self, name: str, spec: ScheduleSpec) -> ScheduleState | None:
        if self._store.count() >= SCHEDULES_MAX:
            raise InvalidRequest(f"there are {SCHEDULES_MAX} schedules already: delete some")
        topic = self._topics.get_or_create(spec.topic)
        now_ms = self._clock.wall_ms()
        created = ScheduleState(
            name,
            SCHEDULE_IDS_FROM + self._catalog.next_producer(None).id,
            spec,
            topic.state.topic_id,
            number_for(name, spec.key, topic.state.partitions),
            now_ms,
            now_ms,
        )
        try:
            self._store.create(created)
        except Conflict:
            return None
        except OutcomeUnknown:
            held = self._store.current(name)
            if held is None or held.value != created:
                raise
        self._runner.note(name)
        return created

    def _change(self, name: str, action: ScheduleAction, spec: ScheduleSpec | None = None) -> ScheduleState | None:
        with _StaysUnknown() as tries:
            for _ in range(ATTEMPTS):
                schedule = self._found(name).value
                request = ChangeSchedule(schedule.spec.topic, schedule.topic_id, schedule.partition, name, action, spec)
                try:
                    done = self._leaders.call_one(CHANGE_SCHEDULE, request, self.local_change(request), repeatable=True)
                except (TopicNotFound, Unavailable) as error:
                    tries.failed(error)
                    guard = self._without_leader(schedule)
                    if guard is None:
                        raise
                    done = self._change_here(request, guard[0], None)
                if not done.elsewhere:
                    return done.state
            raise _busy(name)

    def _without_leader(self, schedule: ScheduleState) -> tuple[Versioned[PartitionState] | None] | None:
        """Return the guard of a change for which there is no leader; None when there is one."""
        self._store.confirm()
        leadership = self._store.leadership(schedule.topic_id, schedule.partition)
        return (leadership,) if leadership is None or leadership.value.leader is None else None

    # --- at the leader -----------------------------------------------------------------------------------------------

    def local_change(self, request: ChangeSchedule) -> LocalWork[ChangedSchedule]:
        def change(place: TopicPartition) -> ChangedSchedule:
            partition = self._metadata_cache.partition(place)
            leading = partition.replica.in_sync
            self._store.confirm()
            guard = self._store.leadership(place.topic_id, place.number)
            if guard is None or leading is None:
                raise Unavailable("the partition of the schedule is going", retry_after_s=BUSY_RETRY_S)
            if (guard.value.leader, guard.value.leader_epoch) != (self._broker_id, leading.state.leader_epoch):
                raise NotLeader("another broker leads the partition of the schedule", leader=guard.value.leader)
            return self._change_here(request, guard, partition)

        return one_by_one(change)

    def _change_here(
        self, request: ChangeSchedule, guard: Versioned[PartitionState] | None, partition: Partition | None
    ) -> ChangedSchedule:
        """Change the schedule, if its place is that of the request and its leadership is as in `guard`."""
        name, runner = request.name, self._runner
        if name in runner.frozen:
            raise Unavailable(f"schedule {name!r} is being changed", retry_after_s=BUSY_RETRY_S)
        runner.frozen.add(name)
        is_known = False
        try:
            held = self._store.current(name)
            if held is None:
                if request.action == "delete":
                    return ChangedSchedule(None)  # a repeat, most likely
                raise ScheduleNotFound(f"there is no schedule {name!r}")
            schedule = held.value
            if (schedule.topic_id, schedule.partition) != (request.topic_id, request.number):
                is_known = True
                return ChangedSchedule(None, elsewhere=True)
            if request.action == "place" and self._placed(schedule) == schedule:
                is_known = True
                return ChangedSchedule(schedule)
            boundary_ms = self._clock.wall_ms()
            if partition is not None:
                boundary_ms = max(boundary_ms, self._publish_until_now(schedule, partition))
            wanted = changed(schedule, request.action, request.spec, boundary_ms=boundary_ms)
            wanted = wanted and self._placed(wanted)
            if wanted != schedule:
                version = self._store.change(held, wanted, guard)
                runner.take(name, Versioned(wanted, version) if wanted is not None else None)
            is_known = True
            return ChangedSchedule(wanted)
        except Conflict:
            raise Unavailable("the leadership is changing, or the schedule is", retry_after_s=BUSY_RETRY_S) from None
        finally:
            runner.frozen.discard(name)
            if not is_known:
                runner.forget(name)
            runner.note(name)  # what was noted meanwhile was left to this change

    def _publish_until_now(self, schedule: ScheduleState, partition: Partition) -> int:
        """Publish the ticks that are due by the definition that ends now, and return when they are committed: no later
        leader can miss them then. Return the last tick. Ticks that the partition refuses are given up. Raises
        UpTimeUnknown."""
        if not schedule.spec.paused:
            try:
                self._runner.publish(schedule, timetable_of(schedule))
            except UpTimeUnknown:
                raise
            except PortalMQError as error:
                log.warning("late ticks of schedule %r are given up, since it is changed: %s", schedule.name, error)
        producers = partition.replica.producers
        offset = producers.last_offset_of(schedule.schedule_id)
        if offset is not None:
            partition.wait_committed(offset)
        return producers.epoch_of(schedule.schedule_id) or 0

    def _placed(self, schedule: ScheduleState) -> ScheduleState:
        """Return the schedule with the place that its topic and key ask for."""
        topic = self._topics.get(schedule.spec.topic)
        if topic is None:
            return schedule  # deleted: it waits for one that is created again
        number = number_for(schedule.name, schedule.spec.key, topic.state.partitions)
        if topic.state.topic_id == schedule.topic_id and schedule.spec.key is None:
            number = schedule.partition  # growth moves only what has a key
        return msgspec.structs.replace(schedule, topic_id=topic.state.topic_id, partition=number)

    # --- topics that grow, or are created again ----------------------------------------------------------------------

    def _on_placed(self, schedules: list[ScheduleState]) -> None:
        """Have the place decided anew where it is another one now. The leader of the new place asks for that."""
        moved = []
        for each in schedules:
            placed = self._placed(each)
            if placed != each and self._is_led_here(placed):
                moved.append(each)
        if moved:
            gevent.spawn(self._place_again, moved)

    def _is_led_here(self, schedule: ScheduleState) -> bool:
        try:
            return self._leaders.led_here(TopicPartition(schedule.spec.topic, schedule.topic_id, schedule.partition))
        except PortalMQError:
            return False

    def _place_again(self, schedules: list[ScheduleState]) -> None:
        for schedule in schedules:
            try:
                self._change(schedule.name, "place")
            except ScheduleNotFound:
                continue
            except PortalMQError as error:
                log.warning("schedule %r cannot be moved yet: %s", schedule.name, error)


class _StaysUnknown:
    """The tries of one change. Once one of them ended unknown, so does the change, whatever refuses it later."""

    def __init__(self) -> None:
        self._is_unknown = False

    def failed(self, error: PortalMQError) -> None:
        """Note how a try ended."""
        self._is_unknown = self._is_unknown or error.outcome == "unknown"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, fault: BaseException | None, trace: object) -> None:
        if self._is_unknown and isinstance(fault, PortalMQError):
            fault.outcome = "unknown"


def _busy(name: str) -> Unavailable:
    return Unavailable(f"schedule {name!r} is being changed by others: try again", retry_after_s=BUSY_RETRY_S)


def _last_tick(partition: Partition, schedule_id: int) -> int:
    producers = partition.replica.producers
    offset = producers.last_offset_of(schedule_id)
    if offset is not None and offset >= partition.high_watermark:
        return NOT_COMMITTED
    return producers.epoch_of(schedule_id) or 0
