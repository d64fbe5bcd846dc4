"""A broker's data directory to read from, written by the broker's own code and closed: what Spark's tests read.

    with written(tmp_path / "data") as data:          a broker in this process; its clock is set by hand
        data.topic("t", partitions=4)
        data.put("t", b"a", b"b", partition=1)
        data.later(1_000)
        data.roll("t")                                sealed up to here, a new segment begins
    data.path                                         whole once the block has ended

Read it only after the block: two SQLite libraries in one process do not see each other's locks. A directory in use is
what `support.broker_process.BrokerProcess` makes.
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
        """One batch. The offsets."""
        rows = [record if isinstance(record, Record) else Record(record) for record in records]
        return [each.offset for each in self.fixture.broker.produce(topic, ProduceRequest(rows, partition=partition))]

    def later(self, ms: int) -> None:
        self.fixture.clock.advance(ms)

    def partition(self, topic: str, number: int = 0) -> Partition:
        return next(each for each in self.fixture.broker.topics if each.name == topic).partition(number)

    def roll(self, topic: str, number: int = 0) -> None:
        """The active segment is full: what stands in it is sealed."""
        partition = self.partition(topic, number)
        partition.log.roll()
        partition.log.seal(partition.high_watermark)

    def directory(self, topic: str, number: int = 0) -> Path:
        """Where a partition's files are."""
        (found,) = self.path.glob(f"partitions/{topic}@*/{number}")
        return found


@contextmanager
def written(path: Path, clock: HandClock | None = None) -> Iterator[DataDirectory]:
    """Open it again on the same path to go on."""
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
    """Another process has the file alone, as one that settles it after a crash; it gives it back as it was."""
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
