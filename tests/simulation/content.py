"""The content of a batch as groups see it: the properties of its messages, or a record that changes a group's state.

Payloads are left out, as everywhere in the simulation: `Batch.uid` represents them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from portalmq.broker.core.queue.lanes import lane_position
from portalmq.broker.core.queue.records import (
    Cancel,
    GroupEnd,
    GroupRecord,
    LanePosition,
    Output,
    Reschedule,
    StreamRecord,
)


class Mail(NamedTuple):
    """A message as a group sees it. `key` 0 is none."""

    priority: int = 0
    deliver_at_ms: int | None = None
    expires_at_ms: int | None = None
    key: int = 0

    def spot(self, offset: int, appended_at_ms: int) -> LanePosition:
        return lane_position(offset, self.priority, self.deliver_at_ms, appended_at_ms)

    def has_expired(self, wall_ms: int) -> bool:
        return self.expires_at_ms is not None and self.expires_at_ms <= wall_ms


PLAIN = Mail()


class Control(NamedTuple):
    """A record of a group (or of all: Cancel, Reschedule), and when its leader decided so, by both of its clocks."""

    group: str
    record: GroupRecord | StreamRecord | GroupEnd | Cancel | Reschedule
    now_ms: int
    wall_ms: int
    high_watermark: int

    def __str__(self) -> str:
        """Return the fields that differ from their defaults, on one line."""
        fields = msgspec.structs.fields(self.record)
        said = [(each.name, getattr(self.record, each.name)) for each in fields if each.name not in _UNTOLD]
        shown = " ".join(f"{name}={_short(value)}" for name, value in said if value not in ((), "", None, -1))
        return f"{self.group} {type(self.record).__name__} {shown}".strip()


_UNTOLD = {"at_ms", "granted_at_ms", "reason", "commit_id"}


def _short(value: object) -> str:
    if isinstance(value, tuple):
        return "[" + " ".join(_short(each) for each in value) + "]"
    return str(value.record) if isinstance(value, Output) else str(value)
