"""A broker's data directory for Spark's tests, written by the broker's own code and closed.

    with written(tmp_path / "data") as data:          a broker in this process; its clock is set by hand
        data.topic("t", partitions=4)
        data.put("t", b"a", b"b", partition=1)
        data.later(1_000)
        data.roll("t")                                seals the segment, a new one begins
    data.path                                         complete once the block has ended

Read it only after the block: two SQLite libraries in one process do not see each other's locks. For a directory in use
take `support.broker_process.BrokerProcess`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.domain import Fixture, HandClock, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.partition import Partition
from portalmq.broker.storage.batch import Record

# 2023-11-14 22:00:00 UTC: a full hour, so that minutes are easy to count.
START_MS = 1_699_999_200_000


class DataDirectory:
    def __init__(self, path: Path, fixture: Fixture) -> None:
        self.path = path
        self.fixture = fixture

    def topic(self, name: str, partitions: int = 1, **config: Any) -> None:
        self.fixture.broker.create_topic(name, wire.CreateTopic(partitions=partitions, config=config))

    def put(self, topic: str, *records: Record | bytes, partition: int = 0) -> list[int]:
        """Append one batch. Return the offsets."""
        rows = [record if isinstance(record, Record) else Record(record) for record in records]
        return [each.offset for each in self.fixture.broker.produce(topic, ProduceRequest(rows, partition=partition))]

    def later(self, ms: int) -> None:
        self.fixture.clock.advance(ms)

    def partition(self, topic: str, number: int = 0) -> Partition:
        return next(each for each in self.fixture.broker.topics if each.name == topic).partition(number)

    def roll(self, topic: str, number: int = 0) -> None:
        """Seal the active segment, as when it is full."""
        partition = self.partition(topic, number)
        partition.log.roll()
        partition.log.seal(partition.high_watermark)

    def directory(self, topic: str, number: int = 0) -> Path:
        """The directory of a partition's files."""
        (found,) = self.path.glob(f"partitions/{topic}@*/{number}")
        return found


@contextmanager
def written(path: Path, clock: HandClock | None = None) -> Iterator[DataDirectory]:
    """Write a data directory. A second call on the same path continues it."""
    with running(path, clock or HandClock(START_MS)) as fixture:
        yield DataDirectory(path, fixture)


def numbered(count: int, start: int = 0, size: int = 0) -> Sequence[bytes]:
    return [b"%d" % number + b"." * max(0, size - len(str(number))) for number in range(start, start + count)]


_LOCKS = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("PRAGMA locking_mode = exclusive")
connection.execute("BEGIN EXCLUSIVE")
connection.execute("CREATE TABLE mine (x)")
print("locked", flush=True)
sys.stdin.readline()
"""


@contextmanager
def locked_by_another(path: Path) -> Iterator[None]:
    """Another process holds an exclusive lock on the file, as a recovery after a crash does, and changes nothing."""
    command = [sys.executable, "-c", _LOCKS, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as owner:
        assert owner.stdin is not None
        assert owner.stdout is not None
        try:
            assert owner.stdout.readline() == b"locked\n"
            Path(f"{path}-wal").touch()
            yield
        finally:
            owner.stdin.close()
