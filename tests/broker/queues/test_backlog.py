"""A topic accepts no more than `max_backlog_messages` that its slowest queue group has not acked."""

from __future__ import annotations

import pytest
from support.domain import HandClock, records, running

from portalmq import wire
from portalmq.broker.core.queue.records import Ack
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.readable import ReadablePartition
from portalmq.broker.queues.backlog import COUNT_EVERY_MS, COUNT_FULL_EVERY_MS, Backlog
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.errors import DiskFull
from portalmq.errors import Backpressure, Fenced, MessageTooLarge, OutOfOrderSequence, StorageFull, Unavailable


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        yield fixture


def limit(fixture, messages: int | None, *, partitions: int = 1) -> None:
    request = wire.CreateTopic(partitions=partitions, config={"max_backlog_messages": messages})
    fixture.broker.create_topic("t", request)


def send(fixture, count: int, *, partition: int = 0, **more):
    fixture.clock.advance(COUNT_FULL_EVERY_MS)
    return fixture.broker.produce_range(
        "t", ProduceRequest(records(*["x"] * count), partition=partition, producer=more.get("producer"))
    )


def receive(fixture, count: int, group: str = "g"):
    request = wire.ReceiveRequest(["t"], max_messages=max(1, count), wait_ms=0)
    return fixture.broker.receive_handler.receive(group, request, None)


def ack(fixture, messages, group: str = "g") -> None:
    assert all(fixture.broker.settlement.settle(group, [each.receipt for each in messages]))
    fixture.clock.advance(COUNT_EVERY_MS)


def is_full(fixture, count: int = 1, **more) -> bool:
    try:
        send(fixture, count, **more)
    except Backpressure:
        return True
    return False


def test_a_refusal_has_outcome_not_applied_and_a_retry_time(fixture):
    limit(fixture, 1)
    begin(fixture)
    send(fixture, 1)
    with pytest.raises(Backpressure, match=r"1 messages wait .* and 1 may") as refused:
        send(fixture, 1)
    error = refused.value
    assert (error.outcome, error.retryable, error.status) == ("not_applied", True, 429)
    assert error.retry_after_s


def begin(fixture, group: str = "g") -> None:
    send(fixture, 1)
    ack(fixture, receive(fixture, 1, group), group)


def test_without_a_group_there_is_no_limit(fixture):
    limit(fixture, 3)
    send(fixture, 10)


def test_a_group_that_begins_counts_at_once(fixture):
    limit(fixture, 3)
    send(fixture, 5)
    receive(fixture, 1)
    assert is_full(fixture)


def test_over_the_limit_is_refused_until_messages_are_acked(fixture):
    limit(fixture, 5)
    begin(fixture)
    send(fixture, 5)
    assert is_full(fixture)
    handed = receive(fixture, 2)
    assert is_full(fixture), "a leased message is not acked"
    ack(fixture, handed)
    send(fixture, 2)
    assert is_full(fixture)
    assert len(list(fixture.broker.browser.read_all("t", None))) == 8


def test_a_batch_is_appended_whole_or_not_at_all(fixture):
    limit(fixture, 5)
    begin(fixture)
    send(fixture, 3)
    assert is_full(fixture, 3)
    assert len(list(fixture.broker.browser.read_all("t", None))) == 4
    send(fixture, 2)


def test_a_batch_above_the_limit_must_be_split(fixture):
    limit(fixture, 5)
    begin(fixture)
    with pytest.raises(MessageTooLarge, match="split"):
        send(fixture, 6)


def test_the_slowest_group_counts(fixture):
    limit(fixture, 5)
    begin(fixture, "fast")
    begin(fixture, "slow")  # one of the two messages is before its start
    send(fixture, 3)
    ack(fixture, receive(fixture, 10, "fast"), "fast")
    assert not is_full(fixture)
    assert is_full(fixture)


def test_scheduled_messages_count_and_cancelled_ones_do_not(fixture):
    limit(fixture, 2)
    begin(fixture)
    due_ms = fixture.clock.wall_ms() + 60_000
    sent = fixture.broker.produce("t", ProduceRequest([Record(b"x", deliver_at_ms=due_ms)] * 2))
    assert is_full(fixture)
    fixture.broker.scheduled_messages.cancel("t", 0, sent[0].offset)
    fixture.clock.advance(COUNT_EVERY_MS)
    assert not is_full(fixture)


def test_each_partition_has_its_share(fixture):
    limit(fixture, 5, partitions=2)
    send(fixture, 1, partition=0)
    send(fixture, 1, partition=1)
    ack(fixture, receive(fixture, 10))
    send(fixture, 3, partition=0)
    assert is_full(fixture, partition=0)
    send(fixture, 3, partition=1)


def test_a_repeat_gets_its_first_answer_without_room(fixture):
    limit(fixture, 2)
    begin(fixture)
    identity = fixture.broker.new_producer(None)
    stamp = wire.ProducerStamp(identity.id, identity.epoch, 0)
    first = send(fixture, 2, producer=stamp)
    assert is_full(fixture)
    assert send(fixture, 2, producer=stamp) == first
    keyed = {"acks": "all", "idempotency_key": "k"}
    ack(fixture, receive(fixture, 2))
    answer = fixture.broker.produce("t", ProduceRequest(records("y", "z")[:1], **keyed))
    send(fixture, 1)
    assert is_full(fixture)
    assert fixture.broker.produce("t", ProduceRequest(records("y"), **keyed)) == answer


@pytest.mark.parametrize("refusal", [Fenced, OutOfOrderSequence])
def test_a_full_topic_refuses_no_stamp_for_good_while_its_leader_may_be_deposed(fixture, monkeypatch, refusal):
    limit(fixture, 2)
    begin(fixture)
    identity = fixture.broker.new_producer(None)
    send(fixture, 2, producer=wire.ProducerStamp(identity.id, identity.epoch + 1, 0))
    epoch = identity.epoch if refusal is Fenced else identity.epoch + 1
    refused = wire.ProducerStamp(identity.id, epoch, 5)
    with monkeypatch.context() as patch:
        patch.setattr(fixture.broker.leaders, "_patience_s", 0.0)  # a refusal is not retried
        patch.setattr(ReadablePartition, "wait_led", lambda partition: partition._wait_vouched(lambda: False, 0))
        with pytest.raises(Unavailable, match="do not vouch"):
            send(fixture, 1, producer=refused)
    with pytest.raises(refusal):
        send(fixture, 1, producer=refused)


def test_copies_and_outputs_are_not_limited_and_count_for_later_messages(fixture):
    limit(fixture, 2)
    begin(fixture)
    send(fixture, 1)
    producing, topic = fixture.broker.produce_handler, fixture.broker.topics.get("t")
    copies = {0: [Record(b"copy", message_id=bytes([number]) * 16) for number in range(3)]}
    producing.copies(topic, copies)
    producing.copies(topic, copies)
    assert len(list(fixture.broker.browser.read_all("t", None))) == 5
    assert is_full(fixture)
    ack(fixture, receive(fixture, 3))
    assert not is_full(fixture)
    assert is_full(fixture)


def test_a_limit_may_be_raised_and_lifted(fixture):
    limit(fixture, 2)
    begin(fixture)
    send(fixture, 2)
    assert is_full(fixture)
    fixture.broker.alter_topic("t", wire.AlterTopic(config={"max_backlog_messages": 4}))
    send(fixture, 2)
    assert is_full(fixture)
    fixture.broker.alter_topic("t", wire.AlterTopic(config={"max_backlog_messages": None}))
    send(fixture, 100)


def test_a_batch_over_several_partitions_names_the_full_ones(fixture):
    limit(fixture, 2, partitions=2)
    send(fixture, 1, partition=0)
    send(fixture, 1, partition=1)
    ack(fixture, receive(fixture, 10))
    send(fixture, 1, partition=0)
    fixture.clock.advance(COUNT_FULL_EVERY_MS)
    results = fixture.broker.produce("t", ProduceRequest(records("x", "y"), [0, 1]))
    assert isinstance(results[0], Backpressure)
    assert results[1].partition == 1


def test_a_purge_makes_room(fixture):
    limit(fixture, 2)
    begin(fixture)
    send(fixture, 2)
    fixture.broker.browser.purge("t", partition=None, before_offset=None)
    fixture.clock.advance(COUNT_EVERY_MS)
    send(fixture, 2)


# --- the cost of counting ---


class Counts:
    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self.made = 0

    def __call__(self, partition) -> int:
        self.made += 1
        return self.waiting


class Counting:
    """A backlog with fake counts, on a real partition that a group reads."""

    def __init__(self, fixture, share: int, waiting: int) -> None:
        limit(fixture, share)
        begin(fixture)
        self.topic = fixture.broker.topics.get("t")
        self.partition = self.topic.partition(0)
        self.clock = HandClock()
        self.counts = Counts(waiting)
        self.backlog = Backlog(self.clock, self.counts)

    def move_a_group(self) -> None:
        self.partition.append_group_record("g", Ack((), self.clock.now_ms())).wait()

    def is_full(self, messages: int = 1) -> bool:
        try:
            self.backlog.check(self.topic, self.partition, messages, None)
        except Backpressure:
            return True
        return False


def test_while_there_is_room_a_count_is_made_once_a_second_and_only_when_a_group_has_moved(fixture):
    counting = Counting(fixture, 1_000, 0)
    assert not any(counting.is_full(10) for _ in range(100))
    counting.clock.advance(COUNT_EVERY_MS)
    assert not counting.is_full()
    assert counting.counts.made == 1, "the group has not moved"
    counting.move_a_group()
    assert not counting.is_full()
    assert counting.counts.made == 2
    counting.move_a_group()
    counting.clock.advance(COUNT_EVERY_MS - 1)
    assert not counting.is_full()
    assert counting.counts.made == 2, "the second is not over"


def test_when_there_is_no_room_a_count_is_made_each_50_ms_and_only_when_a_group_has_moved(fixture):
    counting = Counting(fixture, 1_000, 1_000)
    assert all(counting.is_full() for _ in range(100))
    counting.clock.advance(COUNT_FULL_EVERY_MS)
    assert counting.is_full()
    assert counting.counts.made == 1, "the group has not moved"
    counting.move_a_group()
    assert counting.is_full()
    counting.move_a_group()
    counting.counts.waiting = 0
    assert counting.is_full(), "the pause is not over"
    counting.clock.advance(COUNT_FULL_EVERY_MS)
    assert not counting.is_full()
    assert counting.counts.made == 3


def test_a_slow_count_is_made_seldom(fixture, monkeypatch):
    counting = Counting(fixture, 10, 10)
    seconds = iter(range(100))
    monkeypatch.setattr("portalmq.broker.queues.backlog.perf_counter", lambda: next(seconds))
    for passed_ms, made in ((0, 1), (19_999, 1), (1, 2)):
        counting.clock.advance(passed_ms)
        counting.move_a_group()
        assert counting.is_full()
        assert counting.counts.made == made


def test_messages_that_the_disk_refuses_use_no_room(fixture, monkeypatch):
    limit(fixture, 3)
    begin(fixture)
    log = fixture.broker.topics.get("t").partition(0).log
    send(fixture, 1)
    with monkeypatch.context() as patched:
        patched.setattr(log, "append", full_disk)
        with pytest.raises(StorageFull):
            send(fixture, 2)
    send(fixture, 2)
    assert is_full(fixture)


def full_disk(batches):
    raise DiskFull("no room")
