"""The indexes of a segment's lanes, and the lanes that occur in it, as bits.

Each lane is a bit of an integer. Bit 0 says that messages expire, as lane 0 needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import apsw

from portalmq.broker.core.queue.lanes import DELAYED, LANES, PRIORITY_MAX, lane_position

if TYPE_CHECKING:
    from portalmq.broker.storage.batch import Batch

DELAYED_MESSAGES = "deliver_at_ms > timestamp_ms"
PRIORITY_MESSAGES = "priority > 0 AND (deliver_at_ms IS NULL OR deliver_at_ms <= timestamp_ms)"

LANES_DDL = f"""
CREATE INDEX IF NOT EXISTS messages_by_priority ON messages (priority, offset) WHERE {PRIORITY_MESSAGES};
CREATE INDEX IF NOT EXISTS messages_by_time ON messages (priority, deliver_at_ms, offset) WHERE {DELAYED_MESSAGES};
CREATE INDEX IF NOT EXISTS messages_by_expiry ON messages (expires_at_ms) WHERE expires_at_ms IS NOT NULL;
"""
EXPIRING = 1


def lanes_of(batches: Sequence[Batch]) -> int:
    """Return the bits of the lanes that occur in these batches."""
    bits = 0
    for batch in batches:
        for record in batch.records:
            if record.priority or record.deliver_at_ms is not None:
                lane, _, _ = lane_position(0, record.priority, record.deliver_at_ms, batch.appended_at_ms)
                bits |= 1 << lane if 0 < lane < LANES else 0
            if record.expires_at_ms is not None:
                bits |= EXPIRING
    return bits


def lanes_in(connection: apsw.Connection) -> int:
    """Return the bits of the lanes that occur in a file: one index step for each priority."""
    if not _has_indexes(connection):
        return 0  # by a release without such messages
    expires = connection.execute(
        "SELECT 1 FROM messages INDEXED BY messages_by_expiry WHERE expires_at_ms IS NOT NULL LIMIT 1"
    ).get
    bits = EXPIRING if expires else 0
    for first, index, which in (
        (0, "messages_by_priority", PRIORITY_MESSAGES),
        (DELAYED, "messages_by_time", DELAYED_MESSAGES),
    ):
        priority = -1
        while True:
            found: Any = connection.execute(
                f"SELECT priority FROM messages INDEXED BY {index} WHERE {which} AND priority > ?"
                " ORDER BY priority LIMIT 1",
                (priority,),
            ).get
            if not isinstance(found, int) or not 0 <= found <= PRIORITY_MAX:
                break
            priority = found
            bits |= 1 << (first + priority)
    return bits


def _has_indexes(connection: apsw.Connection) -> bool:
    count: Any = connection.execute(
        "SELECT count(*) FROM sqlite_schema"
        " WHERE name IN ('messages_by_priority', 'messages_by_time', 'messages_by_expiry')"
    ).get
    return bool(count == 3)
