"""The tables of a segment file: public, versioned and plain. SCHEMA.md, in this directory, describes every column.

A value is TEXT when its content type is JSON or text/* and the bytes are UTF-8 without NUL, so that people and
json_extract() can read it; a key when its bytes are. NULL and 0 take no room in SQLite, so an unused column costs one
byte in the row. DESIGN.md has the reasons for an ordinary rowid table and pages of 4 KiB.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

SCHEMA_VERSION = 1
COMPRESSED_VERSION = 2  # of a file with compressed values: see compressed_values.py
PAGE_BYTES = 4096

PRESET_CONTENT_TYPES = ("application/octet-stream", "application/json", "text/plain; charset=utf-8")

SEGMENT_DDL = """
CREATE TABLE meta (
    key   TEXT PRIMARY KEY,
    value NOT NULL
) WITHOUT ROWID;

CREATE TABLE batches (
    base_offset     INTEGER PRIMARY KEY,
    count           INTEGER NOT NULL,
    messages_before INTEGER NOT NULL,
    kind            INTEGER NOT NULL,
    leader_epoch    INTEGER NOT NULL,
    producer_id     INTEGER,
    producer_epoch  INTEGER,
    sequence        INTEGER,
    appended_at_ms  INTEGER NOT NULL,
    crc             INTEGER NOT NULL
);

CREATE TABLE content_types (
    id   INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE
);

CREATE TABLE messages (
    offset        INTEGER PRIMARY KEY,
    key,
    value         NOT NULL,
    content_type  INTEGER NOT NULL REFERENCES content_types (id),
    headers       TEXT,
    timestamp_ms  INTEGER NOT NULL,
    deliver_at_ms INTEGER,
    expires_at_ms INTEGER,
    priority      INTEGER NOT NULL DEFAULT 0,
    message_id    BLOB,
    body_hash     BLOB
);

CREATE INDEX messages_by_message_id ON messages (message_id) WHERE message_id IS NOT NULL;

CREATE TABLE records (
    offset     INTEGER PRIMARY KEY,
    kind       INTEGER NOT NULL,
    group_name TEXT NOT NULL,
    body       BLOB NOT NULL
);

CREATE VIEW messages_with_type AS
SELECT m.offset, m.key, m.value, t.name AS content_type, m.headers, m.timestamp_ms, m.deliver_at_ms, m.expires_at_ms,
       m.priority, m.message_id, b.base_offset, b.leader_epoch, b.producer_id, b.producer_epoch,
       b.sequence + (m.offset - b.base_offset) AS sequence
FROM messages AS m
JOIN content_types AS t ON t.id = m.content_type
JOIN batches AS b ON b.base_offset = (SELECT max(base_offset) FROM batches WHERE base_offset <= m.offset);
"""


class LogIdentity(msgspec.Struct, frozen=True):
    """The log that a file belongs to. A topic that was deleted and created again has the same name and another id."""

    cluster_id: str
    topic: str
    topic_id: str
    partition: int

    @property
    def key(self) -> tuple[str, int]:
        return self.topic_id, self.partition

    def as_meta(self) -> dict[str, Any]:
        return msgspec.structs.asdict(self)


def is_damage(found: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether the facts of a file differ from the expected ones as by a flipped bit, and not as those of another
    log do: one has no value, or only one text differs, in one bit."""
    differing = [(found[name], value) for name, value in expected.items() if found[name] != value]
    if any(it is None for it, _ in differing):
        return True
    (it, value), *more = differing
    if more or not isinstance(it, str) or not isinstance(value, str):
        return False
    one, other = it.encode(), value.encode()
    return len(one) == len(other) and sum([(a ^ b).bit_count() for a, b in zip(one, other, strict=True)]) == 1
