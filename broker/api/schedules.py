"""Schedules: recurring messages. List, put, show, pause, resume, delete."""

from __future__ import annotations

import base64

import msgspec
from flask import Response

from portalmq import wire
from portalmq.broker.api.answers import ScheduleList
from portalmq.broker.api.outgoing import embedded_json
from portalmq.broker.api.query import Parameters
from portalmq.broker.api.record_fields import record_of_json
from portalmq.broker.api.request_context import RequestContext, answer, no_content
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.schedules.definition import spec_of
from portalmq.broker.schedules.service import ShownSchedule
from portalmq.broker.schedules.timetable import moment_text
from portalmq.broker.storage.batch import Record
from portalmq.contract.schedules import ScheduleDescription, ScheduleRequest


def list_all(context: RequestContext) -> Response:
    """List the schedules."""
    return answer(ScheduleList([_description(each) for each in in_short_turns(context.broker.schedules.list_all())]))


def put(context: RequestContext, schedule: str, query: Parameters) -> Response:
    """Create a schedule, or replace its definition: then ticks up to now are those of the old one, later ones those of
    the new one. A definition that is the same changes nothing."""
    wire.check_name(schedule, "schedule")
    wanted = wire.decode_json(context.body(), ScheduleRequest)
    shown, created = context.broker.schedules.put(schedule, spec_of(wanted, _record_of(wanted)))
    return answer(_description(shown), 201 if created else 200)


def show(context: RequestContext, schedule: str) -> Response:
    """Describe a schedule."""
    return answer(_description(context.broker.schedules.show(wire.check_name(schedule, "schedule"))))


def delete(context: RequestContext, schedule: str) -> Response:
    """Delete a schedule. Nothing is published for it after the answer."""
    context.broker.schedules.delete(wire.check_name(schedule, "schedule"))
    return no_content()


def pause(context: RequestContext, schedule: str, query: Parameters) -> Response:
    """Pause a schedule. The ticks until it is resumed are not published, then neither."""
    context.broker.schedules.pause(wire.check_name(schedule, "schedule"), paused=True)
    return no_content()


def resume(context: RequestContext, schedule: str, query: Parameters) -> Response:
    """Resume a schedule."""
    context.broker.schedules.pause(wire.check_name(schedule, "schedule"), paused=False)
    return no_content()


def _record_of(wanted: ScheduleRequest) -> Record:
    message = wire.JsonMessage(
        value=wanted.value,
        value_base64=wanted.value_base64,
        key=wanted.key,
        key_base64=wanted.key_base64,
        headers=wanted.headers,
        content_type=wanted.content_type,
    )
    return record_of_json(message, "the schedule", 0)


def _description(shown: ShownSchedule) -> ScheduleDescription:
    schedule, spec = shown.state, shown.state.spec
    description = ScheduleDescription(
        name=schedule.name,
        topic=spec.topic,
        partition=schedule.partition,
        cron=spec.cron,
        every_ms=spec.every_ms,
        timezone=spec.timezone,
        content_type=spec.content_type,
        key=None,
        headers=spec.headers,
        paused=spec.paused,
        catch_up=spec.catch_up,
        next_tick=None if shown.next_ms is None else moment_text(shown.next_ms),
    )
    if spec.key is not None:
        try:
            description.key = spec.key.decode("utf-8")
        except UnicodeDecodeError:
            description.key_base64 = base64.b64encode(spec.key).decode("ascii")
    try:
        text = spec.value.decode("utf-8")
    except UnicodeDecodeError:
        description.value_base64 = base64.b64encode(spec.value).decode("ascii")
        return description
    embedded = embedded_json(spec.value) if wire.is_json_type(spec.content_type) else msgspec.UNSET
    description.value = text if embedded is msgspec.UNSET else embedded
    return description
