"""What a run leaves behind, for the checker: the acts of the clients and every replica's log."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
from chaos.history import Act, identity_of

Partition = tuple[str, int]
Place = tuple[str, int, int]


@dataclass(frozen=True)
class Workload:
    """What the clients do: a queue group's topics, a stream group's, and what is made of messages.

    `outputs` maps an input topic to that of its outputs, `dead_letters` a topic to its dead-letter topic and the group
    that gives messages up."""

    partitions: dict[str, int]
    queue_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stream_groups: dict[str, tuple[str, ...]] = field(default_factory=dict)
    outputs: dict[str, str] = field(default_factory=dict)
    dead_letters: dict[str, tuple[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stored:
    """A message in a log. `source` is the original's place, in a dead letter."""

    value: str
    source: Place | None = None


@dataclass(frozen=True)
class ControlRecord:
    offset: int
    leader_epoch: int
    kind: int
    group: str
    body: list[Any]


@dataclass
class Log:
    """The committed part of a replica. `rows` are its tables row by row, to be compared with those of others."""

    high_watermark: int = 0
    messages: dict[int, Stored] = field(default_factory=dict)
    records: list[ControlRecord] = field(default_factory=list)
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    def below(self, end: int) -> list[tuple[Any, ...]]:
        return [row for row in self.rows if row[1] < end]


@dataclass
class Evidence:
    """`clock_moved_at` is when a clock was moved first: from then on nothing is early or late."""

    workload: Workload
    acts: list[Act]
    logs: dict[Partition, dict[int, Log]]
    clock_moved_at: float = float("inf")

    @cached_property
    def by_kind(self) -> dict[str, list[Act]]:
        found = defaultdict(list)
        for act in self.acts:
            found[act.kind].append(act)
        return found

    @cached_property
    def truth(self) -> dict[Partition, Log]:
        """Of each partition, the replica that has the most."""
        return {
            place: max(replicas.values(), key=lambda log: log.high_watermark) for place, replicas in self.logs.items()
        }

    def of(self, kind: str) -> list[Act]:
        return self.by_kind.get(kind, [])

    def deliveries(self) -> Iterator[tuple[Act, Place, str]]:
        """Every message that a receive or a poll of a group returned."""
        for kind in ("receive", "poll"):
            for act in self.of(kind):
                for topic, partition, offset, value, *_ in act.got.get("messages", ()):
                    yield act, (topic, partition, offset), value

    def reads(self) -> Iterator[tuple[Place, str]]:
        for act in self.of("read"):
            for offset, value in act.got.get("messages", ()):
                yield (act.asked["topic"], act.asked["partition"], offset), value

    def stored(self, topic: str | None = None) -> Iterator[tuple[Place, Stored]]:
        for (name, partition), log in self.truth.items():
            if topic in (None, name):
                for offset, message in log.messages.items():
                    yield (name, partition, offset), message


# --- reading the files -----------------------------------------------------------------------------------------------


def read_logs(workload: Workload, data_dirs: dict[int, Path]) -> dict[Partition, dict[int, Log]]:
    """Read the files of brokers that do not run."""
    topics = dict(workload.partitions)
    logs: dict[Partition, dict[int, Log]] = {}
    for topic, count in topics.items():
        for partition in range(count):
            replicas = logs.setdefault((topic, partition), {})
            for broker_id, data_dir in data_dirs.items():
                for folder in data_dir.glob(f"partitions/{topic}@*/{partition}"):
                    replicas[broker_id] = read_log(folder)
    return logs


def read_log(folder: Path) -> Log:
    log = Log()
    try:
        with _opened(folder / "state.sqlite") as state:
            found = state.execute("SELECT value FROM meta WHERE key = 'high_watermark'").fetchone()
            log.high_watermark = int(found[0]) if found else 0
    except sqlite3.Error as error:
        log.damage.append(f"state.sqlite: {error}")
    for file in sorted(folder.glob("0*.sqlite")):
        try:
            with _opened(file) as segment:
                _read_segment(segment, log)
        except sqlite3.Error as error:
            log.damage.append(f"{file.name}: {error}")
    return log


def _opened(file: Path) -> closing[sqlite3.Connection]:
    connection = sqlite3.connect(f"file:{file}?mode=ro", uri=True)
    connection.text_factory = bytes
    return closing(connection)


def _read_segment(segment: sqlite3.Connection, log: Log) -> None:
    end = log.high_watermark
    epochs = {}
    for row in segment.execute(
        "SELECT base_offset, count, messages_before, kind, leader_epoch, producer_id, producer_epoch, sequence,"
        " appended_at_ms, crc FROM batches WHERE base_offset < ? ORDER BY base_offset",
        (end,),
    ):
        epochs[row[0]] = row[4]
        log.rows.append(("batch", *row))
    for row in segment.execute(
        "SELECT offset, CAST(key AS BLOB), CAST(value AS BLOB), headers, timestamp_ms, deliver_at_ms, expires_at_ms,"
        " priority, message_id FROM messages WHERE offset < ? ORDER BY offset",
        (end,),
    ):
        log.rows.append(("message", *row))
        log.messages[row[0]] = Stored(identity_of((row[2] or b"").decode("utf-8", "replace")), _source_in(row[3]))
    for row in segment.execute(
        "SELECT offset, kind, group_name, body FROM records WHERE offset < ? ORDER BY offset", (end,)
    ):
        log.rows.append(("record", *row))
        body = msgspec.msgpack.decode(row[3]) if row[1] >= 10 and row[3] else []
        log.records.append(ControlRecord(row[0], epochs.get(row[0], -1), row[1], row[2].decode(), body))
    log.damage += [found.decode() for (found,) in segment.execute("PRAGMA integrity_check(3)") if found != b"ok"]


def _source_in(headers: bytes | None) -> Place | None:
    named = json.loads(headers) if headers else {}
    if "portalmq-source-offset" not in named:
        return None
    return (
        named["portalmq-source-topic"],
        int(named["portalmq-source-partition"]),
        int(named["portalmq-source-offset"]),
    )
