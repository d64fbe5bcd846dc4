"""The bodies of the HTTP contract that concern schedules: recurring messages."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import quote

import msgspec

from portalmq.contract.numbers import Name

EVERY_MS_MIN = 1_000
EVERY_MS_MAX = 366 * 24 * 3_600 * 1_000
# The value, the key and the headers together: definitions are in the control plane, which is small.
SCHEDULE_BYTES_MAX = 16 * 1024
SCHEDULES_MAX = 10_000
# The ids of schedules, as producers, begin here; those of all other producers are lower.
SCHEDULE_IDS_FROM = 1 << 52

# Headers of each message: the schedule's name, and the planned moment (RFC 3339).
HEADER_SCHEDULE = "portalmq-schedule"
HEADER_TICK = "portalmq-tick"

EveryMs = Annotated[int, msgspec.Meta(ge=EVERY_MS_MIN, le=EVERY_MS_MAX)]


class ScheduleRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    """A schedule: `cron` or `every_ms`, and the message of each tick. `timezone` is that of the cron line. `catch_up`:
    of the ticks missed while no broker was up, the last is published at the next start."""

    topic: Name
    cron: Annotated[str, msgspec.Meta(min_length=1, max_length=255)] | None = None
    every_ms: EveryMs | None = None
    timezone: Annotated[str, msgspec.Meta(max_length=100)] = "UTC"
    value: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | None = None
    key: str | None = None
    key_base64: str | None = None
    headers: dict[str, str] | None = None
    content_type: str | None = None
    paused: bool = False
    catch_up: bool = True


class ScheduleDescription(msgspec.Struct, omit_defaults=True, kw_only=True):
    """A schedule, with the partition that its messages go to. `next_tick` (RFC 3339) is None while it is paused, or its
    topic is gone. A value that is neither JSON nor text is in `value_base64`."""

    name: str
    topic: str
    partition: int
    cron: str | None = None
    every_ms: int | None = None
    timezone: str
    value: msgspec.Raw | str | msgspec.UnsetType = msgspec.UNSET
    value_base64: str | None = None
    content_type: str
    key: str | None
    key_base64: str | None = None
    headers: dict[str, str]
    paused: bool
    catch_up: bool
    next_tick: str | None


def schedule_path(name: str, verb: str = "") -> str:
    return f"/v1/schedules/{quote(name, safe='')}" + (f"/{verb}" if verb else "")
