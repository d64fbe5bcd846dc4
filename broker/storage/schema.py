"""The tables of a segment file: public, versioned and plain. SCHEMA.md, beside this file, tells it to users.

    meta           what the file is: cluster_id, topic, topic_id, partition, schema_version, base_offset,
                   messages_before (messages of the partition below base_offset), timestamp_before_ms (append time of
                   the last batch below base_offset), log_start_offset (in the newest file: where the log begins)
    batches        one row a batch, the unit of atomic append, replication and checksum
      base_offset      first offset of the batch
      count            how many offsets it takes (its messages; 1 for a control record)
      messages_before  messages that were ever appended below base_offset
      kind             0 messages, else a control record (batch.Kind)
      leader_epoch     the epoch of the leader that appended it
      producer_id, producer_epoch, sequence    NULL without an idempotent producer; the first message's sequence
      appended_at_ms   Unix time in ms, never falling along the log
      crc              CRC-32 of the whole batch (batch.checksum)
    content_types  id, name: the content types in this file; 0, 1 and 2 are the same in every file
    messages       one row a message
      offset           its place in the partition: rising, with gaps where control records stand
      key, value       TEXT when text (below), else BLOB; never re-encoded: the bytes are the sender's
      content_type     -> content_types.id
      headers          JSON object of strings, NULL without headers
      timestamp_ms     appended_at_ms of its batch
      deliver_at_ms    not to be delivered before; NULL: at once
      expires_at_ms    not to be delivered after; NULL: never
      priority         higher first; 0 by default
      message_id       16 bytes, the identity for deduplication; NULL without
      body_hash        hash of what was sent under message_id, to tell a repeat from another message
    holes          batches that have lost messages to compaction (see holes.py): base_offset, removed, removed_before
    records        the control records: offset, kind, group_name (empty without a group), body (MessagePack)
    messages_with_type   view: messages with the content type's name and their batch's columns

A value stands as TEXT when its content type is JSON or text/* and the bytes are UTF-8 without NUL, so that eyes and
json_extract() can read it; a key when its bytes are. NULL and 0 take no room in SQLite, so what a message does not use
costs one byte in the row.

The table is an ordinary rowid table: WITHOUT ROWID wrote 1.6 times the WAL, and larger pages than 4 KiB make small
commits write more.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEMA_VERSION = 1
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


@dataclass(frozen=True, slots=True)
class LogIdentity:
    """Which log a file belongs to. A topic that was deleted and made again has the same name and another id."""

    cluster_id: str
    topic: str
    topic_id: str
    partition: int

    def as_meta(self) -> dict[str, str | int]:
        return {
            "cluster_id": self.cluster_id,
            "topic": self.topic,
            "topic_id": self.topic_id,
            "partition": self.partition,
        }
