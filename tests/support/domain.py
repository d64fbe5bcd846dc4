"""A broker's domain without HTTP or processes: real logs in a temporary directory, and a clock that a test sets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from support.disk_paces import SlowDisk
from support.replicas import eventually

from portalmq.broker.broker import Broker
from portalmq.broker.messages.metrics import Metrics
from portalmq.broker.partition.disk_pace import DiskPace
from portalmq.broker.partition.yielding import give_way
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.storage.batch import Record
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState


class HandClock:
    """Both clocks of a broker; they move when a test moves them."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.lease_ms = now_ms
        self.day_ms = now_ms
        self.agreed_ms: int | None = None

    def now_ms(self) -> int:
        return self.lease_ms

    def wall_ms(self) -> int:
        return self.day_ms

    machine_ms = wall_ms

    def advance(self, ms: int) -> None:
        self.lease_ms += ms
        self.day_ms += ms


class FakeDisk:
    """A disk that is full when a test says so."""

    def __init__(self) -> None:
        self.is_full = False
        self.released = False

    def full(self, now_ms: int) -> bool:
        return self.is_full

    def free_bytes(self) -> int:
        return 0 if self.is_full else 1 << 30

    def release(self) -> bool:
        self.released = True
        return True


class FakePeer:
    """A client that goes away when a test says so."""

    def __init__(self) -> None:
        self.has_gone = False
        self._on_gone: list[Callable[[], None]] = []

    def gone(self) -> bool:
        return self.has_gone

    def watch(self, on_gone: Callable[[], None]) -> Callable[[], None]:
        self._on_gone.append(on_gone)
        return lambda: self._on_gone.remove(on_gone)

    def leave(self) -> None:
        self.has_gone = True
        for call in tuple(self._on_gone):
            call()


class Fixture:
    """A broker with its clock, disk and faults."""

    def __init__(self, data_dir: Path, clock: HandClock, incarnation: int, disk_pace: DiskPace | None = None) -> None:
        self.clock = clock
        self.disk = FakeDisk()
        self.faults: list[BaseException] = []
        self.plane = Standalone(data_dir / "control", give_way=give_way)
        self.plane.start()
        self.broker = Broker(
            BrokerConfig(data_dir=data_dir, zookeeper="none", port=5000),
            Catalog(self.plane),
            broker_id=1,
            me=BrokerState(url="http://localhost:5000", incarnation=incarnation, store_uuid="store"),
            disk=self.disk,  # type: ignore[arg-type]
            metrics=Metrics("test"),
            on_fatal=self.faults.append,
            clock=clock,  # type: ignore[arg-type]
        )
        self.broker.disk_pace = disk_pace or SlowDisk()
        self.broker.start()

    def close(self) -> None:
        self.broker.close()
        self.plane.close()


_incarnations = iter(range(1, 1_000_000))


@contextmanager
def running(
    data_dir: Path, clock: HandClock | None = None, disk_pace: Callable[[], DiskPace] = SlowDisk
) -> Iterator[Fixture]:
    """Yield a started broker on `data_dir`, closed at the end. Call it again on the same directory for a restart."""
    fixture = Fixture(data_dir, clock or HandClock(), next(_incarnations), disk_pace())
    try:
        yield fixture
    finally:
        fixture.close()


def own_turns(fixture: Fixture) -> None:
    """End the greenlet that publishes schedules, so that `schedule_turn` alone does."""
    fixture.broker.schedule_runner.close()


def schedule_turn(fixture: Fixture) -> None:
    """Publish what is due, once this broker serves its partitions: a tick that it cannot publish before is skipped when
    the next one is due."""
    topics, runner = fixture.broker.topics, fixture.broker.schedule_runner
    assert topics.wait_settled(60)
    eventually(lambda: all((each.topic_id, each.number) in runner._led for each in topics.partitions() if each.serves))
    runner._turn()


def records(*values: bytes | str, **more: object) -> list[Record]:
    encoded = [value.encode() if isinstance(value, str) else value for value in values]
    return [Record(value, **more) for value in encoded]  # type: ignore[arg-type]
