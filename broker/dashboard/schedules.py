"""What pages show of schedules beside the public API: lists in pages, last ticks, and the next ones."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api.query import Parameters
from portalmq.broker.api.request_context import RequestContext, answer
from portalmq.broker.dashboard.data import PageQuery, page_of
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.schedules.definition import timetable_of
from portalmq.broker.schedules.timetable import Timetable, cron_line

TICKS_SHOWN = 5


class SchedulesQuery(PageQuery):
    show: Literal["all", "running", "paused"] = "all"


def schedules(context: RequestContext, query: SchedulesQuery) -> Response:
    """Return a page of schedules. `last_ms`: of the last tick, 0 before the first, None where it is not known now."""
    search, service = query.search.lower(), context.broker.schedules
    wanted = [
        each
        for each in in_short_turns(service.known())
        if (search in each.name.lower() or search in each.spec.topic.lower())
        and query.show in {"all", "paused" if each.spec.paused else "running"}
    ]
    found, shown = page_of(wanted, query)
    last = service.last_ticks(found)
    rows: list[dict[str, Any]] = [
        {
            "name": each.name,
            "topic": each.spec.topic,
            "cron": each.spec.cron,
            "every_ms": each.spec.every_ms,
            "timezone": each.spec.timezone,
            "paused": each.spec.paused,
            "next_ms": service.shown(each).next_ms,
            "last_ms": last.get(each.name),
        }
        for each in in_short_turns(found)
    ]
    return answer({**shown, "schedules": rows, "at_ms": context.broker.wall_ms()})


def schedule(context: RequestContext, schedule: str, query: Parameters) -> Response:
    """Return the last tick of a schedule, and the next ones: none while it is paused, or its topic is gone."""
    service = context.broker.schedules
    shown = service.show(wire.check_name(schedule, "schedule"))
    first, last = shown.next_ms, service.last_ticks([shown.state])
    following = [] if first is None else [first, *_ticks_after(timetable_of(shown.state), first, TICKS_SHOWN - 1)]
    return answer({"last_ms": last.get(schedule), "next_ms": following, "at_ms": context.broker.wall_ms()})


class TicksQuery(Parameters):
    cron: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    timezone: Annotated[str, msgspec.Meta(max_length=100)] = "UTC"


def ticks(context: RequestContext, query: TicksQuery) -> Response:
    """Return the next ticks of a cron line, for whoever is writing it."""
    now_ms = context.broker.wall_ms()
    return answer({"next_ms": _ticks_after(cron_line(query.cron, query.timezone), now_ms, TICKS_SHOWN)})


def _ticks_after(timetable: Timetable, after_ms: int, count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        tick_ms = timetable.next_after(found[-1] if found else after_ms)
        if tick_ms is None:
            break
        found.append(tick_ms)
    return found
