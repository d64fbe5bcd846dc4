"""A schedule's definition as rules: its timetable, the partition that its ticks go to, the message of a tick, and what
a change makes of it."""

from __future__ import annotations

import zlib

import msgspec

from portalmq.broker.cluster.rpc.schedules import ScheduleAction
from portalmq.broker.schedules.timetable import Interval, Timetable, cron_line, moment_text
from portalmq.broker.storage.batch import Record
from portalmq.contract.schedules import HEADER_SCHEDULE, HEADER_TICK, ScheduleRequest
from portalmq.control_plane.schedules import ScheduleSpec, ScheduleState


def spec_of(wanted: ScheduleRequest, message: Record) -> ScheduleSpec:
    """Return what a request says; `message` is made of its value, key and headers."""
    return ScheduleSpec(
        wanted.topic,
        wanted.cron,
        wanted.every_ms,
        wanted.timezone,
        message.value,
        message.content_type,
        message.key,
        message.headers or {},
        wanted.paused,
        wanted.catch_up,
    )


def timetable_of(schedule: ScheduleState) -> Timetable:
    """Raises InvalidRequest for a zone that this machine does not know."""
    if schedule.spec.every_ms is not None:
        return Interval(schedule.anchor_ms, schedule.spec.every_ms)
    return cron_line(schedule.spec.cron or "", schedule.spec.timezone)


def number_for(name: str, key: bytes | None, partitions: int) -> int:
    """Return the partition of a schedule's ticks: that of their key, as for all messages; else one by its name."""
    return zlib.crc32(name.encode() if key is None else key) % partitions


def tick_record(schedule: ScheduleState, tick_ms: int) -> Record:
    """Return the message of a tick."""
    spec = schedule.spec
    headers = {**spec.headers, HEADER_SCHEDULE: schedule.name, HEADER_TICK: moment_text(tick_ms)}
    return Record(spec.value, spec.content_type, spec.key, headers)


def changed(
    schedule: ScheduleState, action: ScheduleAction, spec: ScheduleSpec | None, *, boundary_ms: int
) -> ScheduleState | None:
    """Return the schedule after a change at `boundary_ms`: ticks up to then belong to the one before. None: deleted. A
    change that changes nothing returns the schedule itself. Its place is decided elsewhere."""
    if action == "delete":
        return None
    if action == "put":
        assert spec is not None
        wanted = spec
    elif action == "place":
        wanted = schedule.spec
    else:
        wanted = msgspec.structs.replace(schedule.spec, paused=action == "pause")
    if wanted == schedule.spec and action != "place":
        return schedule
    # An interval begins anew only when it is another one.
    anchor_ms = schedule.anchor_ms if wanted.every_ms == schedule.spec.every_ms else boundary_ms
    return msgspec.structs.replace(
        schedule, spec=wanted, anchor_ms=anchor_ms, since_ms=max(schedule.since_ms, boundary_ms)
    )
