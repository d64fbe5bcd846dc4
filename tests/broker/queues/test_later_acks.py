"""Receives that are answered before their acks are committed, and which answer tells of each ack."""

from __future__ import annotations

from pathlib import Path

import gevent
import pytest
from support.domain import Fixture, records, running
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.core.queue.records import Ack
from portalmq.broker.core.replica.events import SessionLost, Tick
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition import writer
from portalmq.broker.partition.refusals import leadership_changing
from portalmq.broker.queues import later_acks
from portalmq.broker.queues.later_acks import (
    ACKS_MAX,
    ALL_ACKS_MAX,
    CONSUMERS_MAX,
    KEPT_S,
    RECEIVES_MAX,
    Acked,
    LaterAcks,
    PendingAck,
)
from portalmq.broker.queues.settle import BegunAcks
from portalmq.broker.storage.errors import DiskFull
from portalmq.errors import Backpressure, PortalMQError

AN_HOUR_S = 3_600.0
LEASE_MS = 30_000


@pytest.fixture
def fixture(tmp_path: Path):
    with running(tmp_path) as it:
        yield it


class Consumer:
    """Receives one message at a time, and acks it with the next receive."""

    def __init__(self, fixture: Fixture, *, later: bool = True, name: str = "c") -> None:
        self._handler = fixture.broker.receive_handler
        self._name = name
        self._later = later
        self._attempts = 0
        self.receipts: list[str] = []

    def next(self, max_messages: int = 1) -> tuple[list[str], Acked | None]:
        self._attempts += 1
        request = wire.ReceiveRequest(
            ["t"], max_messages, consumer=self._name, attempt_id=f"c-{self._attempts}", ack=self.receipts
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


def test_maintenance_forgets_what_nobody_asks_about(fixture, monkeypatch):
    send(fixture, "a", "b")
    consumer = Consumer(fixture)
    consumer.next()
    consumer.next()
    with monkeypatch.context() as patch:
        patch.setattr(later_acks, "KEPT_S", -1.0)
        fixture.broker.maintenance.sweep()
    assert consumer.next() == ([], ([True], [], [])), "c-2 is not told"


def refuse_once(monkeypatch: pytest.MonkeyPatch, owner: object, method: str, error: Exception, *kinds: type) -> None:
    """Let the next call with an argument of these kinds, or else with any, raise."""
    original, left = getattr(owner, method), [error]

    def refusing(*args, **more):
        if left and (not kinds or any(isinstance(each, kinds) for each in args)):
            raise left.pop()
        return original(*args, **more)

    monkeypatch.setattr(owner, method, refusing)


@pytest.mark.parametrize("error", [leadership_changing(), Backpressure("too many records", retry_after_s=0.1)])
def test_an_ack_that_could_not_be_appended_is_tried_again_before_the_answer(fixture, monkeypatch, error):
    send(fixture, "a", "b")
    consumer = Consumer(fixture)
    consumer.next()
    refuse_once(monkeypatch, fixture.broker.topics.get("t").partition(0), "append_group_record", error, Ack)
    assert consumer.next() == (["b"], ([True], [], []))
    assert fixture.broker.describe_group("g").in_flight == 1


def test_a_consumer_without_a_name_waits_for_its_acks(fixture):
    """Others without a name would be told of them."""
    send(fixture, "a", "b")
    consumer = Consumer(fixture, name="")
    consumer.next()
    assert consumer.next() == (["b"], ([True], [], []))


def begun_again(fixture: Fixture, receipts: list[str]) -> BegunAcks:
    return fixture.broker.settlement.begin_acks("g", receipts, forward=True, is_soft=True)


def test_a_repeated_ack_is_not_told_after_the_disk_refused_its_record(fixture, monkeypatch):
    """Other records get the offsets of those that the disk refused."""
    send(fixture, "a", "b")
    consumer = Consumer(fixture)
    consumer.next()
    partition = fixture.broker.topics.get("t").partition(0)
    partition._writer.wait_idle()
    monkeypatch.setattr(writer, "SOFT_LINGER_S", AN_HOUR_S)
    refuse_once(monkeypatch, partition.log, "append", DiskFull("no room"))
    receipts = consumer.receipts
    first, again = begun_again(fixture, receipts), begun_again(fixture, receipts)
    partition.hurry()
    eventually(lambda: partition.replica.next_offset == partition.log.end_offset and partition._writer.is_idle)
    send(fixture, "c", "d")
    assert not first.is_committed()
    assert not again.is_committed()
    assert again.finish() == [True], "it acks again"
    assert fixture.broker.describe_group("g").in_flight == 0


def test_a_repeated_ack_is_not_told_after_the_leadership_ended(fixture, monkeypatch):
    send(fixture, "a", "b")
    consumer = Consumer(fixture)
    consumer.next()
    partition = fixture.broker.topics.get("t").partition(0)
    partition._writer.wait_idle()
    monkeypatch.setattr(writer, "SOFT_LINGER_S", AN_HOUR_S)
    receipts = consumer.receipts
    first, again = begun_again(fixture, receipts), begun_again(fixture, receipts)
    partition.step(SessionLost())
    partition.hurry()
    eventually(lambda: partition.serves)
    send(fixture, "c", "d")
    assert not first.is_committed()
    assert not again.is_committed()


def test_an_ack_is_not_told_while_an_earlier_leader_may_deliver_its_message(fixture, monkeypatch):
    send(fixture, "a")
    consumer = Consumer(fixture)
    consumer.next()
    partition = fixture.broker.topics.get("t").partition(0)
    with monkeypatch.context() as patch:
        patch.setattr(PartitionReplica, "may_settle", lambda replica, now_ms: False)
        first, again = begun_again(fixture, consumer.receipts), begun_again(fixture, consumer.receipts)
        partition.hurry()
        eventually(lambda: partition.replica.high_watermark == partition.replica.next_offset)
        assert not first.is_committed()
        assert not again.is_committed()
    partition.step(Tick())
    assert first.is_committed()
    assert again.is_committed()


# --- the list of what is untold ---------------------------------------------------------------------------------------


class Disk:
    """Acks, the numbers of those that are committed, and the order of what was asked of it."""

    def __init__(self) -> None:
        self.committed: set[int] = set()
        self.asked: list[str] = []

    def pending(self, number: int, *receipts: str, at_s: float = 0.0, is_appended: bool = True) -> PendingAck:
        def finish() -> list[bool | PortalMQError]:
            if number not in self.committed:
                self.asked.append(f"wait {number}")
            return [True] * len(receipts)

        def hurry() -> None:
            self.asked.append(f"hurry {number}")

        begun = BegunAcks(is_appended, lambda: number in self.committed, hurry, finish)
        return PendingAck(f"a{number}", list(receipts), begun, at_s)


@pytest.mark.parametrize(("receipts", "most"), [(1, RECEIVES_MAX), (ACKS_MAX // 4, 4)])
def test_what_is_untold_is_bounded_and_more_is_waited_for(receipts, most):
    disk, acks = Disk(), LaterAcks()
    asked = ["r"] * receipts
    assert [acks.later(("g", "c"), disk.pending(number, *asked)).verdicts for number in range(most)] == [None] * most
    assert disk.asked == [f"hurry {number}" for number in range(most // 2, most)]
    disk.asked.clear()
    assert acks.later(("g", "c"), disk.pending(most, *asked)) == ([True] * receipts, [], [])
    assert disk.asked == [*[f"hurry {number}" for number in range(most)], f"wait {most}"]
    disk.committed.update(range(most))
    told = acks.later(("g", "c"), disk.pending(most + 1, *asked))
    assert told == (None, [f"a{number}" for number in range(most)], [])


def test_no_answer_waits_for_the_acks_of_an_earlier_receive():
    disk, acks = Disk(), LaterAcks()
    for number in range(3):
        acks.later(("g", "c"), disk.pending(number, "r"))
    disk.committed.update([0, 2])
    assert acks.now(("g", "c"), disk.pending(3, "r")) == ([True], ["a0", "a2"], [])
    assert [each for each in disk.asked if each.startswith("wait")] == ["wait 3"]
    disk.committed.add(1)
    assert acks.later(("g", "c"), disk.pending(4, "r")).attempts == ["a1"]


def test_what_could_not_be_appended_is_not_put_off():
    disk, acks = Disk(), LaterAcks()
    assert acks.later(("g", "c"), disk.pending(0, "r", is_appended=False)) == ([True], [], [])
    assert disk.asked == ["wait 0"]


def test_more_acks_at_once_than_are_kept_are_not_put_off():
    acks = LaterAcks()
    assert acks.later(("g", "c"), Disk().pending(0, *["r"] * (ACKS_MAX + 1))).verdicts is not None


def test_a_committed_ack_is_told_at_once():
    disk, acks = Disk(), LaterAcks()
    acks.later(("g", "c"), disk.pending(0, "r"))
    disk.committed.add(0)
    assert acks.later(("g", "c"), disk.pending(1, "r")) == (None, ["a0"], [])
    assert disk.asked == []


def attempts_of(acks: LaterAcks, consumer: str) -> list[str]:
    told = Acked(None, [], [])
    acks.tell(("g", consumer), told)
    return told.attempts


def test_consumers_are_told_of_their_own_acks_and_few_are_kept():
    disk, acks = Disk(), LaterAcks()
    for number in range(CONSUMERS_MAX + 1):
        acks.later(("g", f"c{number}"), disk.pending(number, "r"))
        disk.committed.add(number)
    assert attempts_of(acks, "c0") == [], "it is forgotten"
    assert attempts_of(acks, "c1") == ["a1"]


def test_the_acks_of_all_consumers_are_bounded():
    disk, acks = Disk(), LaterAcks()
    consumers = ALL_ACKS_MAX // ACKS_MAX + 2
    for number in range(consumers):
        acks.later(("g", f"c{number}"), disk.pending(number, *["r"] * ACKS_MAX))
        disk.committed.add(number)
    kept = [number for number in range(consumers) if attempts_of(acks, f"c{number}")]
    assert kept == list(range(2, consumers))
    for number in range(consumers):  # what is told makes room
        acks.later(("g", f"c{number}"), disk.pending(consumers + number, "r"))
    disk.committed.update(range(consumers, 2 * consumers))
    assert all(attempts_of(acks, f"c{number}") for number in range(consumers))


@pytest.mark.parametrize("gone", [1, 3])
def test_consumers_that_do_not_return_are_forgotten(gone):
    disk, acks = Disk(), LaterAcks()
    for number in range(gone):
        acks.later(("g", f"gone{number}"), disk.pending(number, "r"))
    acks.later(("g", "c"), disk.pending(gone, "r", at_s=KEPT_S + 1))
    disk.committed.update(range(gone + 1))
    assert [attempts_of(acks, f"gone{number}") for number in range(gone)] == [[]] * gone
    assert attempts_of(acks, "c") == [f"a{gone}"]


def test_old_acks_are_forgotten_without_another_receive_and_make_room():
    disk, acks = Disk(), LaterAcks()
    for number in range(RECEIVES_MAX):
        acks.later(("g", "c"), disk.pending(number, "r", at_s=float(number == RECEIVES_MAX - 1)))
    acks.sweep(KEPT_S + 0.5)
    disk.committed.update(range(RECEIVES_MAX))
    assert attempts_of(acks, "c") == [f"a{RECEIVES_MAX - 1}"]


def test_old_acks_of_a_consumer_that_asks_on_make_room():
    disk, acks = Disk(), LaterAcks()
    for number in range(RECEIVES_MAX):
        acks.later(("g", "c"), disk.pending(number, "r"))
    assert acks.later(("g", "c"), disk.pending(RECEIVES_MAX, "r", at_s=KEPT_S + 1)).verdicts is None
    disk.committed.update(range(RECEIVES_MAX + 1))
    assert attempts_of(acks, "c") == [f"a{RECEIVES_MAX}"]
