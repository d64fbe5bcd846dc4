"""The calls of Admin about schedules: recurring messages."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import msgspec

from portalmq import wire
from portalmq.contract.schedules import ScheduleDescription, schedule_path
from portalmq.transport.request import Request, json_request
from portalmq.transport.transport import Transport


class Schedule(ScheduleDescription, kw_only=True):
    """A schedule as it was received: `value` is decoded JSON, or text; bytes are in `value_base64`."""

    value: Any = None


class _ScheduleList(msgspec.Struct):
    schedules: list[Schedule]


wire.prepare(_ScheduleList)


class ScheduleCalls:
    """The part of Admin that is about schedules."""

    _transport: Transport

    def create_schedule(
        self,
        name: str,
        topic: str,
        value: Any,
        *,
        cron: str | None = None,
        every: timedelta | None = None,
        timezone: str = "UTC",
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        content_type: str | None = None,
        paused: bool = False,
        catch_up: bool = True,
    ) -> Schedule:
        """Publish `value` (bytes, str, or JSON-able) to the topic at each moment of the cron line, in this time zone,
        or each `every`. Replaces a schedule of this name; the same definition changes nothing. Raises InvalidRequest
        for a cron line or a zone that is not valid.

        `catch_up`: of the moments missed while no broker was up, the last is published at the next start."""
        body: dict[str, Any] = {"topic": topic, "timezone": timezone, "paused": paused, "catch_up": catch_up}
        if isinstance(value, bytes):
            body["value_base64"] = base64.b64encode(value).decode("ascii")
        else:
            body["value"] = value
            if isinstance(value, str) and content_type is None:
                content_type = wire.TEXT
        given = {"cron": cron, "key": key, "content_type": content_type, "headers": dict(headers or {}) or None}
        body |= {field: each for field, each in given.items() if each is not None}
        if every is not None:
            body["every_ms"] = every // timedelta(milliseconds=1)
        return self._transport.send_json("PUT", _path(name), body, Schedule)

    def schedules(self) -> list[Schedule]:
        """Return all schedules."""
        return self._transport.get("/v1/schedules", _ScheduleList).schedules

    def schedule(self, name: str) -> Schedule:
        """Return a schedule, with its next tick. Raises ScheduleNotFound."""
        return self._transport.get(_path(name), Schedule)

    def pause_schedule(self, name: str) -> None:
        """Pause a schedule: the moments until it is resumed pass without a message. Raises ScheduleNotFound."""
        self._transport.call(json_request("POST", _path(name, "pause"), {}, repeatable=True))

    def resume_schedule(self, name: str) -> None:
        """Resume a schedule. Raises ScheduleNotFound."""
        self._transport.call(json_request("POST", _path(name, "resume"), {}, repeatable=True))

    def delete_schedule(self, name: str) -> None:
        """Delete a schedule: nothing is published for it after this call. Raises ScheduleNotFound."""
        self._transport.call(Request("DELETE", _path(name), repeatable=True))


def _path(name: str, verb: str = "") -> str:
    return schedule_path(wire.check_name(name, "schedule"), verb)
