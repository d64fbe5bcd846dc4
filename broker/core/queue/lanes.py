"""The lanes of a partition: the order in which messages are delivered for the first time.

    lane 0         plain messages                                   by offset
    lane 1 to 31   messages with that priority                      by offset
    lane 32 + p    messages of priority p that are due later than they were appended
                                                                    by (deliver_at_ms, offset)

A group has a cursor in each lane. Everything before it is finished, except the spans that were delivered. So a million
delayed messages cost a group one number. That works because a lane only grows behind every cursor: a delayed message is
due after the time of its batch, the times of batches never fall along the log, and a cursor never passes the time of
the record that moved it.
"""

from __future__ import annotations

PRIORITY_MAX = 31
DELAYED = 32
LANES = 2 * DELAYED


def lane_position(offset: int, priority: int, deliver_at_ms: int | None, appended_at_ms: int) -> tuple[int, int, int]:
    """Return the position of a message: (lane, due_ms, offset)."""
    if deliver_at_ms is not None and deliver_at_ms > appended_at_ms:
        return DELAYED + priority, deliver_at_ms, offset
    return priority, 0, offset


def priority_of(lane: int) -> int:
    return lane % DELAYED
