"""A broker's domain under random work and crashes: a seed is a run, and a crash keeps the state of the disk at that
moment.

Acknowledged messages are stored once, in the order of each partition. A message that a group acked is never delivered
again; one that it did not ack is delivered, however often the broker crashes. A failing seed is replayed by its number.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.domain import Fixture, HandClock, records

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.settle import SettleRequest
from portalmq.errors import PortalMQError

SEEDS = 40
STEPS = 60
LEASE_MS = 10_000
TOPIC = "t"
PARTITIONS = 2


class Run:
    """One seed: a broker, its clients' knowledge of it, and random steps."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.directory = directory
        self.clock = HandClock()
        self.lives = 0
        self.fixture = Fixture(self._home(), self.clock, 1)
        self.fixture.broker.create_topic(TOPIC, wire.CreateTopic(partitions=PARTITIONS, config=self._config()))
        self.sequence = [0] * PARTITIONS
        self.sent: list[list[str]] = [[] for _ in range(PARTITIONS)]
        self.purged: set[str] = set()
        self.held: dict[str, str] = {}  # value -> the newest receipt for it
        self.leased_until: dict[str, int] = {}  # of leases that no crash can have lost
        self.acked: set[str] = set()

    def _config(self) -> dict[str, object]:
        return {"segment_bytes": 1024 * 1024, "retention_ms": None}

    def _home(self) -> Path:
        return self.directory / str(self.lives)

    def step(self) -> None:
        work = self.random.choices(
            [
                self.produce,
                self.receive,
                self.ack,
                self.nack,
                self.extend,
                self.wait,
                self.retention,
                self.purge,
                self.crash,
            ],
            weights=[6, 6, 6, 2, 1, 2, 2, 0.3, 1.5],
        )[0]
        work()

    def produce(self) -> None:
        partition = self.random.randrange(PARTITIONS)
        first = self.sequence[partition]
        count = self.random.randint(1, 8)
        values = [f"{partition}:{first + n}" + "x" * self.random.choice([0, 0, 60_000]) for n in range(count)]
        stamp = wire.ProducerStamp(7, 0, first)
        results = None
        for _ in range(self.random.choice([1, 1, 2])):  # a retry after a lost answer
            answer = self.fixture.broker.produce(
                TOPIC, ProduceRequest(records(*values), partition=partition, producer=stamp)
            )
            assert results in (None, answer), "a repeat is answered with the first offsets"
            results = answer
        self.sequence[partition] += count
        self.sent[partition] += values

    def receive(self) -> None:
        request = wire.ReceiveRequest([TOPIC], max_messages=self.random.randint(1, 12), visibility_timeout_ms=LEASE_MS)
        for message in self.fixture.broker.receive_handler.receive("g", request, None):
            value = message.record.value.decode()
            assert value not in self.acked, "an acked message is never delivered again"
            assert value not in self.purged
            assert self.leased_until.get(value, 0) <= self.clock.lease_ms, "one live lease at a time"
            self.held[value] = message.receipt
            self.leased_until[value] = message.lease_expires_at_ms

    def _some_held(self) -> list[str]:
        return self.random.sample(sorted(self.held), min(len(self.held), self.random.randint(0, 6)))

    def ack(self) -> None:
        values = self._some_held()
        if not values:
            return
        verdicts = self.fixture.broker.settlement.settle("g", [self.held[value] for value in values])
        assert all(verdicts), "the newest receipt of a message always counts"
        self.acked.update(values)
        for value in values:
            del self.held[value]

    def nack(self) -> None:
        for value in self._some_held():
            delay_ms = self.random.choice([0, 3_000])
            if self.fixture.broker.settlement.settle("g", [self.held[value]], SettleRequest("nack", delay_ms)) == [
                True
            ]:
                del self.held[value]
                self.leased_until.pop(value, None)

    def extend(self) -> None:
        for value in self._some_held():
            if self.fixture.broker.settlement.settle(
                "g", [self.held[value]], SettleRequest("extend", LEASE_MS * 2)
            ) == [True]:
                self.leased_until[value] = self.clock.lease_ms + LEASE_MS * 2

    def wait(self) -> None:
        self.clock.advance(self.random.choice([100, 3_000, LEASE_MS]))

    def retention(self) -> None:
        self.fixture.broker.maintenance.save_state()
        self.fixture.broker.maintenance.retain()

    def purge(self) -> None:
        self.fixture.broker.browser.purge(TOPIC, partition=None, before_offset=None)
        self.purged.update(value for values in self.sent for value in values)
        self.held.clear()

    def crash(self) -> None:
        """Continue from a copy of the files as they are now, without anything that was not fsynced."""
        before = self._home()
        self.lives += 1
        with self._at_one_moment():
            shutil.copytree(before, self._home())
        old = self.fixture
        self.clock.day_ms += self.random.choice([0, 0, 3_600_000, -3_600_000])
        self.fixture = Fixture(self._home(), self.clock, self.lives + 1)
        old.close()
        shutil.rmtree(before)
        self.leased_until.clear()

    @contextmanager
    def _at_one_moment(self) -> Iterator[None]:
        """Stop the broker's native threads during a copy: otherwise files of different times would be mixed, which no
        kill does."""
        with ExitStack() as held:
            for partition in self.fixture.broker.topics.get(TOPIC).local.values():
                for turn in (partition.state_file._turn, partition.log._sealing, partition.log._writing):
                    held.enter_context(turn)
            yield

    def finish(self) -> None:
        """Everything that was sent is stored, and everything that was not acked is still delivered."""
        there = [[] for _ in range(PARTITIONS)]
        for stored in self.fixture.broker.browser.read_all(TOPIC, None):
            there[stored.partition].append(stored.record.value.decode())
        for sent, found in zip(self.sent, there, strict=True):
            assert found == [value for value in sent if value not in self.purged]
        self.receive()  # the group exists now
        for _ in range(1_000):
            if self.fixture.broker.describe_group("g").lag == 0:
                break
            self.clock.advance(LEASE_MS * 2)
            self.receive()
            for value in list(self.held):
                self._ack_at_the_end(value)
        left = self.fixture.broker.describe_group("g")
        assert (left.lag, left.in_flight, left.ready) == (0, 0, 0)
        everything = {value for values in self.sent for value in values}
        assert self.acked | self.purged == everything

    def _ack_at_the_end(self, value: str) -> None:
        try:
            assert self.fixture.broker.settlement.settle("g", [self.held[value]]) == [True]
        except PortalMQError as error:
            raise AssertionError(f"the ack of {value[:20]} was refused: {error}") from error
        self.acked.add(value)
        del self.held[value]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_nothing_is_lost_or_repeated_whatever_happens(tmp_path: Path, seed: int) -> None:
    run = Run(tmp_path, seed)
    try:
        for _ in range(STEPS):
            run.step()
        run.finish()
    finally:
        run.fixture.close()
