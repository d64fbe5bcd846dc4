"""The definitions of schedules in the control plane: /schedules/<name>.

A definition names its place: the partition to which its ticks go, whose leader publishes them. A change is committed
together with a check that the leadership of that partition is as the changing broker knows it. So no other leader
publishes by a definition that was replaced, and no tick belongs to two places.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from portalmq import wire
from portalmq.control_plane import state
from portalmq.control_plane.plane import Check, Create, Delete, Op, Set
from portalmq.control_plane.tree import Tree, Versioned

SCHEDULES = "/schedules"


class ScheduleSpec(msgspec.Struct, frozen=True):
    """What a user says of a schedule: `cron` or `every_ms`, and the message of each tick."""

    topic: str
    cron: str | None
    every_ms: int | None
    timezone: str
    value: bytes
    content_type: str
    key: bytes | None = None
    headers: dict[str, str] = {}
    paused: bool = False
    catch_up: bool = True


class ScheduleState(msgspec.Struct, frozen=True):
    """A schedule. `schedule_id` is the producer id of its ticks, never used again. `topic_id` and `partition` are its
    place. Ticks are later than `since_ms`; an interval counts from `anchor_ms`."""

    name: str
    schedule_id: int
    spec: ScheduleSpec
    topic_id: str
    partition: int
    anchor_ms: int
    since_ms: int


def schedule_path(name: str) -> str:
    return f"{SCHEDULES}/{name}"


def schedule_name_of(path: str) -> str | None:
    """Return the name of the schedule at this path; None for another path."""
    match path.split("/"):
        case ["", "schedules", name]:
            return name
    return None


class ScheduleStore(Tree):
    """Typed access to the definitions. Nothing is cached."""

    def all(self) -> dict[str, Versioned[ScheduleState]]:
        nodes = self.plane.get_children(SCHEDULES)
        return {
            node.path.rpartition("/")[2]: Versioned(state.decode(node.data, ScheduleState), node.version)
            for node in nodes
        }

    def count(self) -> int:
        return len(self.plane.children(SCHEDULES))

    def many(self, names: Sequence[str]) -> dict[str, Versioned[ScheduleState] | None]:
        found = self.plane.get_many([schedule_path(name) for name in names])
        return {
            name: None if node is None else Versioned(state.decode(node.data, ScheduleState), node.version)
            for name, node in zip(names, found, strict=True)
        }

    def find(self, name: str) -> Versioned[ScheduleState] | None:
        """Return the schedule; None only after a sync."""
        return self._confirmed(schedule_path(wire.check_name(name, "schedule")), ScheduleState)

    def current(self, name: str) -> Versioned[ScheduleState] | None:
        """Return the schedule, read after a sync."""
        self.confirm()
        return self._read(schedule_path(name), ScheduleState)

    def leadership(self, topic_id: str, partition: int) -> Versioned[state.PartitionState] | None:
        """Return the state of a partition, whose version guards a change; None for one that is gone."""
        return self._read(state.partition_path(topic_id, partition), state.PartitionState)

    def create(self, schedule: ScheduleState) -> None:
        """Raises NodeExists, OutcomeUnknown."""
        self.plane.commit(Create(schedule_path(schedule.name), state.encode(schedule)))

    def restore(self, schedule: ScheduleState, *, overwrites: bool) -> None:
        """Write a schedule back where it is missing, or `overwrites`. It continues after what was handled."""

        def restore() -> None:
            held = self._read(schedule_path(schedule.name), ScheduleState)
            if held is None:
                self.create(schedule)
                return
            wanted = schedule if overwrites else held.value
            if held.value.schedule_id == schedule.schedule_id:
                since_ms = max(schedule.since_ms, held.value.since_ms)
                wanted = msgspec.structs.replace(wanted, since_ms=since_ms)
            if wanted != held.value:
                self.change(held, wanted, None)

        self._retry_conflicts(f"schedule {schedule.name!r}", restore)

    def change(
        self,
        held: Versioned[ScheduleState],
        wanted: ScheduleState | None,
        guard: Versioned[state.PartitionState] | None,
    ) -> int:
        """Replace the definition, or remove it for None, if the leadership of its place is still as in `guard`. Return
        the new version. Raises Conflict, OutcomeUnknown."""
        before = held.value
        path = schedule_path(before.name)
        change: Op = Delete(path, held.version) if wanted is None else Set(path, state.encode(wanted), held.version)
        check = [] if guard is None else [Check(state.partition_path(before.topic_id, before.partition), guard.version)]
        return self.plane.commit(*check, change)[-1]

    def until_it_fits(self, name: str, attempt: Callable[[], ScheduleState | None]) -> ScheduleState | None:
        """Run `attempt` (read, decide, commit) until it meets no conflict."""
        return self._retry_conflicts(f"schedule {name!r}", attempt)
