"""Receives that are answered before their acks are committed, and which answer tells of each ack."""

from __future__ import annotations

from pathlib import Path

import gevent
import pytest
from support.domain import Fixture, records, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition import writer
from portalmq.broker.queues.later_acks import (
    ACKS_MAX,
    CONSUMERS_MAX,
    KEPT_S,
    RECEIVES_MAX,
    Acked,
    LaterAcks,
    PendingAck,
)
from portalmq.broker.queues.settle import BegunAcks
from portalmq.errors import PortalMQError, Unavailable

AN_HOUR_S = 3_600.0
LEASE_MS = 30_000


@pytest.fixture
def fixture(tmp_path: Path):
    with running(tmp_path) as it:
        yield it


class Consumer:
    """Receives one message at a time, and acks it with the next receive."""

    def __init__(self, fixture: Fixture, *, later: bool = True) -> None:
        self._handler = fixture.broker.receive_handler
        self._later = later
        self._attempts = 0
        self.receipts: list[str] = []

    def next(self, max_messages: int = 1) -> tuple[list[str], Acked | None]:
        self._attempts += 1
        request = wire.ReceiveRequest(
            ["t"], max_messages, consumer="c", attempt_id=f"c-{self._attempts}", ack=self.receipts
        )
        if not self.receipts:
            messages, acked = self._handler.receive("g", request, None, is_first=True), None
        else:
            messages, acked = self._handler.ack_and_receive(
                "g", request, None, is_first=True, may_ack_later=self._later
            )
        self.receipts = [message.receipt for message in messages]
        return [message.record.value.decode() for message in messages], acked


def send(fixture: Fixture, *values: str) -> None:
    fixture.broker.produce("t", ProduceRequest(records(*values)))


def log_end(fixture: Fixture) -> int:
    return fixture.broker.topics.get("t").partition(0).replica.durable_end


def test_full_answers_do_not_wait_for_the_disk_and_the_next_one_tells_of_their_acks(fixture, monkeypatch):
    monkeypatch.setattr(writer, "SOFT_LINGER_S", AN_HOUR_S)
    send(fixture, "a", "b", "c")
    consumer = Consumer(fixture)
    consumer.next()
    before = log_end(fixture)
    assert consumer.next() == (["b"], (None, [], []))
    assert consumer.next() == (["c"], (None, [], []))
    assert log_end(fixture) == before
    assert fixture.broker.describe_group("g").lag == 1, "the acks count at once"
    assert consumer.next() == ([], ([True], ["c-2", "c-3"], []))
    partition = fixture.broker.topics.get("t").partition(0)
    assert partition.replica.durable_end == partition.replica.next_offset


def test_a_repeated_ack_does_not_wait_for_grants_that_gather(fixture, monkeypatch):
    send(fixture, "a", "b")
    consumer = Consumer(fixture, later=False)
    consumer.next()
    acked = consumer.receipts
    consumer.next()
    monkeypatch.setattr(writer, "SOFT_LINGER_S", AN_HOUR_S)
    consumer.receipts = []
    consumer.next()
    with gevent.Timeout(20):
        assert fixture.broker.settlement.settle("g", acked) == [True]


def test_a_consumer_that_does_not_ask_for_it_is_answered_after_the_commit(fixture):
    send(fixture, "a", "b")
    consumer = Consumer(fixture, later=False)
    consumer.next()
    assert consumer.next() == (["b"], ([True], [], []))


def test_in_order_by_key_no_ack_is_put_off(fixture):
    fixture.broker.put_group("g", {"ordering": "key"})
    send(fixture, "a", "b")
    consumer = Consumer(fixture)
    consumer.next()
    assert consumer.next() == (["b"], ([True], [], []))


def test_a_stale_receipt_is_told_with_its_attempt(fixture):
    send(fixture, "a", "b")
    consumer = Consumer(fixture)
    consumer.next()
    fixture.clock.advance(LEASE_MS)
    other = Consumer(fixture)
    assert other.next(2)[0] == ["a", "b"]
    (stale,) = consumer.receipts
    send(fixture, "c")
    assert consumer.next() == (["c"], (None, [], []))
    assert consumer.next() == ([], ([True], ["c-2"], [stale]))


def test_acks_that_nobody_asks_for_reach_the_disk(fixture):
    send(fixture, "a", "b")
    consumer = Consumer(fixture)
    consumer.next()
    consumer.next()
    partition = fixture.broker.topics.get("t").partition(0)
    with gevent.Timeout(60):
        partition.wait_settled(partition.replica.next_offset - 1)


# --- the list of what is untold ---------------------------------------------------------------------------------------


class Disk:
    """Acks whose commit fails, or not; and the order of what was asked of it."""

    def __init__(self, *fail: int) -> None:
        self._fail = fail
        self.committed: set[int] = set()
        self.asked: list[str] = []

    def pending(self, number: int, *receipts: str, at_s: float = 0.0) -> PendingAck:
        def finish() -> list[bool | PortalMQError]:
            self.asked.append(f"wait {number}")
            if number in self._fail:
                raise Unavailable("gone")
            return [True] * len(receipts)

        begun = BegunAcks(lambda: number in self.committed, lambda: self.asked.append(f"hurry {number}"), finish)
        return PendingAck(f"a{number}", list(receipts), begun, at_s)


@pytest.mark.parametrize(("receipts", "most"), [(1, RECEIVES_MAX), (ACKS_MAX // 4, 4)])
def test_what_is_untold_is_bounded(receipts, most):
    disk, acks = Disk(), LaterAcks()
    told = [acks.later(("g", "c"), disk.pending(number, *["r"] * receipts)).attempts for number in range(most + 3)]
    assert told == [[]] * most + [["a0"], ["a1"], ["a2"]]
    hurried = [each for each in disk.asked if each.startswith("hurry")]
    assert hurried == [f"hurry {number}" for number in range(most // 2, most + 3)]


def test_a_failed_commit_is_not_told():
    disk, acks = Disk(1), LaterAcks()
    for number in range(3):
        acks.later(("g", "c"), disk.pending(number, "r"))
    assert acks.now(("g", "c"), disk.pending(3, "r")) == ([True], ["a0", "a2"], [])


def test_a_committed_ack_is_told_at_once():
    disk, acks = Disk(), LaterAcks()
    acks.later(("g", "c"), disk.pending(0, "r"))
    disk.committed.add(0)
    assert acks.later(("g", "c"), disk.pending(1, "r")) == (None, ["a0"], [])
    assert disk.asked == ["wait 0"]


def test_consumers_are_told_of_their_own_acks_and_few_are_kept():
    disk, acks = Disk(), LaterAcks()
    for number in range(CONSUMERS_MAX + 1):
        acks.later(("g", f"c{number}"), disk.pending(number, "r"))
    assert acks.now(("g", "c0"), disk.pending(-1, "r")).attempts == [], "it is forgotten"
    assert acks.now(("g", "c1"), disk.pending(-1, "r")).attempts == ["a1"]


def test_a_consumer_that_does_not_return_is_forgotten():
    disk, acks = Disk(), LaterAcks()
    acks.later(("g", "gone"), disk.pending(0, "r"))
    acks.later(("g", "c"), disk.pending(1, "r", at_s=KEPT_S + 1))
    assert acks.now(("g", "gone"), disk.pending(2, "r")).attempts == []
