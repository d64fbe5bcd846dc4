"""Publishes the ticks of the schedules whose partitions this broker leads. DESIGN.md has the argument why each tick is
published once.

    control plane --watch--> definitions   read again when they change, and after this broker became a leader
    definitions, led here -> entries       a heap by the moment of the next tick
    due -> partition.submit(stamp: schedule id, tick)      the log knows the last tick of each schedule

`frozen` has the names whose definitions are being changed here: nothing is published for them meanwhile.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

import gevent
from gevent.event import Event

from portalmq.broker.cluster.topic import Topic
from portalmq.broker.cluster.topics import Topics
from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.messages.produce import size_of, with_default_ttl
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.writer import Pending
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.schedules.definition import tick_record, timetable_of
from portalmq.broker.schedules.timetable import Timetable, due_ticks, misses_any
from portalmq.control_plane.plane import PlaneError
from portalmq.control_plane.schedules import ScheduleState, ScheduleStore, schedule_name_of, schedule_path
from portalmq.control_plane.tree import Versioned
from portalmq.errors import NotLeader, PortalMQError, TopicNotFound, Unavailable

log = logging.getLogger(__name__)

# The longest sleep: the wall clock may jump.
LOOK_EVERY_S = 1.0
RETRY_MS = 250
READ_AGAIN_S = 0.2
# So many entries of the heap may be those of definitions that were replaced.
REPLACED_MAX = 1_000

T = TypeVar("T")
Place = tuple[str, int]
# Raises Backpressure when too many messages wait in a partition.
CheckRoom = Callable[[Topic, Partition, int, Stamp | None], None]
Published = Callable[[str, int, int], None]


class UpTime(Protocol):
    """For how long some broker was always up, and whether this broker knows that by now."""

    @property
    def is_up_time_known(self) -> bool: ...

    def up_ms(self) -> int: ...


class UpTimeUnknown(Unavailable):
    """Nobody knows yet whether some broker was up at ticks of the schedule."""

    def __init__(self) -> None:
        super().__init__(
            "the other brokers have not told yet for how long they are up, so ticks of the schedule may be missed ones",
            retry_after_s=1.0,
        )


@dataclass(slots=True, eq=False)
class _Definition:
    """A definition, and the number of the read that found it."""

    held: Versioned[ScheduleState]
    read: int

    @property
    def place(self) -> Place:
        return self.held.value.topic_id, self.held.value.partition


@dataclass(slots=True, eq=False)
class _Entry:
    """A schedule that is published here. Nothing up to `handled_ms` is left to publish. `is_refused`: so was the last
    attempt, and this was reported."""

    schedule: ScheduleState
    timetable: Timetable
    handled_ms: int
    is_refused: bool = False


@dataclass(eq=False, repr=False)
class ScheduleRunner:
    """One per broker."""

    _store: ScheduleStore
    _topics: Topics
    _clock: Clock
    _check_room: CheckRoom
    _published: Published
    _up_time: UpTime

    def __post_init__(self) -> None:
        self.frozen: set[str] = set()
        self._definitions: dict[str, _Definition] = {}
        self._by_place: dict[Place, set[str]] = {}
        self._by_topic: dict[str, set[str]] = {}
        # The partitions led here, and the first read that counts: it began after this broker became the leader.
        self._led: dict[Place, int] = {}
        self._entries: dict[str, _Entry] = {}
        self._heap: list[tuple[int, int, str, _Entry]] = []
        # Those that wait until it is known for how long some broker was always up.
        self._undecided: list[_Entry] = []
        # Schedules whose last ticks the disk refused: these are looked for in the log again.
        self._lost: set[str] = set()
        self._order = count()
        self._noted: set[str] | None = None  # None: everything
        self._reads = 0
        # What was changed here since the last read began: of these it may have found what was before.
        self._changed: set[str] = set()
        self._wake = Event()
        self._closing = False
        self._greenlet: gevent.Greenlet | None = None
        # Called with definitions, to see whether their ticks still go to the right partition.
        self.on_placed: Callable[[list[ScheduleState]], None] = lambda schedules: None
        # Called after definitions were read.
        self.on_read: Callable[[], None] = lambda: None

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._store.plane.watch(self._on_plane_event)
        self._greenlet = gevent.spawn(self._run)

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        if self._greenlet is not None:
            self._greenlet.kill()

    def on_leading(self, topic: Topic, partition: Partition) -> None:
        self._led[partition.topic_id, partition.number] = self._reads + 1
        self.on_topics_changed([topic.name])
        self._wake.set()

    def on_stepped_down(self, partition: Partition) -> None:
        self._led.pop((partition.topic_id, partition.number), None)
        for name in self._by_place.get((partition.topic_id, partition.number), ()):
            self._entries.pop(name, None)

    def on_topic_removed(self, topic: Topic) -> None:
        for number in range(topic.state.partitions):
            self._led.pop((topic.state.topic_id, number), None)

    def on_topics_changed(self, names: Iterable[str]) -> None:
        """Look for schedules whose topic has grown, or was created again."""
        found = [self._definitions[each].held.value for topic in names for each in self._by_topic.get(topic, ())]
        if found:
            self.on_placed(found)

    def _on_plane_event(self, path: str | None) -> None:
        name = schedule_name_of(path) if path is not None else None
        if path is None:
            self._noted = None
        elif name is None:
            return
        elif self._noted is not None:
            self._noted.add(name)
        self._wake.set()

    def _run(self) -> None:
        wait_s: float | None = 0.0
        while not self._closing:
            self._wake.wait(wait_s)
            self._wake.clear()
            try:
                wait_s = self._turn()
            except Exception:  # the next turn may succeed, and no other room depends on it
                log.exception("the schedules could not be looked at")
                wait_s = LOOK_EVERY_S

    def _turn(self) -> float | None:
        """Read what changed, publish what is due. Return the seconds until the next look; None when there is nothing to
        look at before something changes."""
        wait_s: float | None = None
        try:
            self.read()
        except (PlaneError, PortalMQError) as fault:
            log.info("the schedules cannot be read now: %s", fault)
            wait_s = READ_AGAIN_S
        now_ms = self._clock.wall_ms()
        due: list[_Entry] = []
        if self._undecided and self._up_time.is_up_time_known:
            due, self._undecided = self._undecided, []
        lost, self._lost = self._lost, set()
        for name in sorted(lost & self._entries.keys()):
            self._enter(name, self._definitions[name], not_before_ms=now_ms + RETRY_MS)
        while self._heap and self._heap[0][0] <= now_ms:
            _, _, name, entry = heapq.heappop(self._heap)
            if self._entries.get(name) is entry:
                due.append(entry)
        for entry in in_short_turns(due):
            self._publish_or_retry(entry)
        if self._heap:
            until_s = max(0.0, (self._heap[0][0] - self._clock.wall_ms()) / 1_000)
            wait_s = min(LOOK_EVERY_S if wait_s is None else wait_s, until_s)
        if self._undecided:
            wait_s = min(LOOK_EVERY_S if wait_s is None else wait_s, RETRY_MS / 1_000)
        return wait_s

    # --- definitions -------------------------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the definitions that changed, and those of partitions led here since they were read."""
        unsure = {
            name
            for place, names in self._by_place.items()
            for name in names
            if self._definitions[name].read < self._led.get(place, 0) and name not in self.frozen
        }
        noted, self._noted = self._noted, set()
        if noted is not None and not noted and not unsure:
            return
        self._reads += 1
        read = self._reads
        self._changed.clear()
        try:
            if unsure:
                self._store.confirm()
            if noted is None:
                found: dict[str, Versioned[ScheduleState] | None] = dict.fromkeys(self._definitions)
                found |= self._store.all()
            else:
                found = self._store.many(sorted(noted | unsure))
        except BaseException:
            self._noted = None if noted is None or self._noted is None else self._noted | noted
            raise
        for name, held in in_short_turns(list(found.items())):
            if name not in self.frozen and name not in self._changed:  # its change has it read again
                self.take(name, held, read)
        self.on_read()

    def take(self, name: str, held: Versioned[ScheduleState] | None, read: int | None = None) -> None:
        """Go by this definition from now on. `read` is None for one that this broker has written just now."""
        if read is None:
            self._changed.add(name)
        known = self._definitions.get(name)
        if known is not None and held is not None and _is_older(held, known.held):
            held = known.held
        if known is not None:
            _discard(self._by_place, known.place, name)
            _discard(self._by_topic, known.held.value.spec.topic, name)
        if held is None:
            self._definitions.pop(name, None)
            self._entries.pop(name, None)
            return
        if read is None:
            self._reads += 1
        definition = self._definitions[name] = _Definition(held, self._reads if read is None else read)
        self._by_place.setdefault(definition.place, set()).add(name)
        self._by_topic.setdefault(held.value.spec.topic, set()).add(name)
        entry = self._entries.get(name)
        if entry is None or entry.schedule != held.value or not self._is_sure(definition):
            self._enter(name, definition)
        self.on_placed([held.value])

    def known(self) -> list[ScheduleState]:
        """Return the definitions, by name, as this broker has read them."""
        return [self._definitions[name].held.value for name in sorted(self._definitions)]

    def note(self, name: str) -> None:
        """Have a definition read again."""
        self._on_plane_event(schedule_path(name))

    def forget(self, name: str) -> None:
        """Publish nothing for this schedule before its definition is read after a sync: a change may be under way."""
        self._changed.add(name)
        definition = self._definitions.get(name)
        if definition is not None:
            definition.read = -1
        self._entries.pop(name, None)
        self.note(name)

    def _is_sure(self, definition: _Definition) -> bool:
        first_read = self._led.get(definition.place)
        return first_read is not None and definition.read >= first_read

    def _enter(self, name: str, definition: _Definition, *, not_before_ms: int = 0) -> None:
        self._entries.pop(name, None)
        schedule = definition.held.value
        if schedule.spec.paused or not self._is_sure(definition):
            return
        try:
            timetable = timetable_of(schedule)
        except PortalMQError as error:
            log.error("schedule %r is not published: %s", name, error)
            return
        entry = self._entries[name] = _Entry(schedule, timetable, schedule.since_ms)
        self._put(name, entry, not_before_ms)

    def _put(self, name: str, entry: _Entry, not_before_ms: int = 0) -> None:
        due_ms = entry.timetable.next_after(self._handled_ms(entry))
        if due_ms is not None:
            heapq.heappush(self._heap, (max(due_ms, not_before_ms), next(self._order), name, entry))
        if len(self._heap) > 2 * len(self._entries) + REPLACED_MAX:
            self._heap = [each for each in self._heap if self._entries.get(each[2]) is each[3]]
            heapq.heapify(self._heap)

    def _handled_ms(self, entry: _Entry) -> int:
        """Return up to when nothing is left to publish: the log has the last tick that was published."""
        schedule = entry.schedule
        partition = self._topics.local(schedule.topic_id, schedule.partition)
        last_ms = None if partition is None else partition.replica.producers.epoch_of(schedule.schedule_id)
        return max(entry.handled_ms, last_ms or 0)

    # --- publishing --------------------------------------------------------------------------------------------------

    def _publish_or_retry(self, entry: _Entry) -> None:
        name = entry.schedule.name
        if self._entries.get(name) is not entry:
            return
        if name in self.frozen:  # the change may turn out to be none
            self._put(name, entry, self._clock.wall_ms() + RETRY_MS)
            return
        not_before_ms = 0
        try:
            self.publish(entry.schedule, entry.timetable, entry)
            entry.is_refused = False
        except UpTimeUnknown as error:
            if not self._undecided:
                log.warning("ticks of schedule %r, and perhaps of others, are late: %s", name, error)
            self._undecided.append(entry)
            return
        except TopicNotFound:
            self._entries.pop(name, None)  # its place is decided anew when there is such a topic again
            return
        except PortalMQError as error:
            if not entry.is_refused and not isinstance(error, NotLeader):
                log.warning("ticks of schedule %r are late: %s", name, error)
            entry.is_refused = True
            not_before_ms = self._clock.wall_ms() + RETRY_MS
        self._put(name, entry, not_before_ms)

    def publish(self, schedule: ScheduleState, timetable: Timetable, entry: _Entry | None = None) -> None:
        """Append the ticks that are due. Does not switch greenlets between the look at the log and the append, nor wait
        for the commit. Raises what the partition refuses them with; UpTimeUnknown."""
        topic = self._topics.get(schedule.spec.topic)
        if topic is None or topic.state.topic_id != schedule.topic_id:
            raise TopicNotFound(f"topic {schedule.spec.topic!r} was deleted")
        partition = topic.partition(schedule.partition)
        now_ms = self._clock.wall_ms()
        entry = entry or _Entry(schedule, timetable, schedule.since_ms)
        handled_ms, up_since_ms = self._handled_ms(entry), now_ms - self._up_time.up_ms()
        if not self._up_time.is_up_time_known and misses_any(timetable, handled_ms, now_ms, up_since_ms=up_since_ms):
            raise UpTimeUnknown
        due = due_ticks(timetable, handled_ms, now_ms, up_since_ms=up_since_ms, catch_up=schedule.spec.catch_up)
        for tick_ms in due.ticks:
            records = with_default_ttl(topic, [tick_record(schedule, tick_ms)], now_ms)
            size = size_of(topic, records)
            stamp = Stamp(schedule.schedule_id, tick_ms, 0)
            self._check_room(topic, partition, 1, stamp)
            last = partition.submit(tuple(records), size, stamp=stamp, acks="none")
            self._published(topic.name, 1, size)
            if tick_ms == due.ticks[-1]:  # what the disk refuses, it refuses with all that follows
                last.done.rawlink(lambda _, pending=last: self._on_done(schedule.name, pending))
        entry.handled_ms = due.upto_ms

    def _on_done(self, name: str, last: Pending) -> None:
        if last.error is not None:
            self._lost.add(name)
            self._wake.set()


def _discard(names: dict[T, set[str]], key: T, name: str) -> None:
    found = names.get(key, set())
    found.discard(name)
    if not found:
        names.pop(key, None)


def _is_older(found: Versioned[ScheduleState], known: Versioned[ScheduleState]) -> bool:
    """Whether a read is older than what is known. A schedule that was created again has another id."""
    return found.value.schedule_id == known.value.schedule_id and found.version < known.version
