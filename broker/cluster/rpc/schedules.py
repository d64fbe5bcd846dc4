"""Calls about schedules, to the leader of the partition that their ticks go to."""

from __future__ import annotations

from typing import Literal

import msgspec

from portalmq.broker.cluster.rpc import ForOne, ForPlacedShares, OneResultCall, PartitionCall, Placed
from portalmq.control_plane.schedules import ScheduleSpec, ScheduleState

ScheduleAction = Literal["put", "pause", "resume", "delete", "place"]


class ChangeSchedule(ForOne, Placed):
    """Change a schedule whose ticks go to this partition. `spec` is that of a put."""

    name: str
    action: ScheduleAction
    spec: ScheduleSpec | None = None


class ChangedSchedule(msgspec.Struct, array_like=True):
    """The schedule after the change; None for one that is gone. `elsewhere`: its ticks go to another partition, nothing
    was changed."""

    state: ScheduleState | None
    elsewhere: bool = False


# Instead of a last tick that is in the leader's log, and may be lost yet.
NOT_COMMITTED = -1


class LastTicksShare(Placed):
    """The ids of schedules whose ticks go to this partition."""

    ids: list[int]


class LastTicks(ForPlacedShares, msgspec.Struct, array_like=True):
    """Ask for the last tick of each of these schedules: 0 without one."""

    shares: list[LastTicksShare]


CHANGE_SCHEDULE = OneResultCall("change_schedule", ChangeSchedule, ChangedSchedule, timeout_s=20.0)
LAST_TICKS = PartitionCall("last_ticks", LastTicks, list[int], timeout_s=1.0)
