"""The guarantees of a queue group beyond lease and ack: when, in which order and how often a message is delivered, and
when it is given up."""

from __future__ import annotations

from itertools import pairwise

import gevent
import pytest
from support.disk_paces import FastDisk, SlowDisk
from support.domain import HandClock, records, running

from portalmq import wire
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.selection import KEYS_PER_STEP
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues.group_receiver import FOUND_MAX
from portalmq.broker.queues.settle import SettleRequest
from portalmq.errors import GroupModeMismatch, InvalidRequest

LEASE_MS = 30_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS


@pytest.fixture(params=[SlowDisk, FastDisk])
def fixture(request, tmp_path):
    with running(tmp_path, disk_pace=request.param) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=1))
        yield started


def send(fixture, *values, **more):
    return fixture.broker.produce("t", ProduceRequest(records(*values, **more)))


def receive(fixture, max_messages=100, *, wait_ms=0, **more):
    request = wire.ReceiveRequest(topics=["t"], max_messages=max_messages, wait_ms=wait_ms, **more)
    return fixture.broker.receive_handler.receive("g", request, None)


def texts(messages):
    return [message.record.value.decode() for message in messages]


def ack(fixture, messages):
    verdicts = fixture.broker.settlement.settle("g", [message.receipt for message in messages])
    assert verdicts == [True] * len(messages)


def nack(fixture, messages, delay_ms=0, reason=None):
    assert fixture.broker.settlement.settle(
        "g", [message.receipt for message in messages], SettleRequest("nack", delay_ms, reason)
    ) == [True] * len(messages)


def partition_of(fixture):
    return next(iter(fixture.broker.topics.get("t").led()))


# --- priorities -----------------------------------------------------------------------------------------------------


def test_a_higher_priority_is_delivered_first_in_order_within_one(fixture):
    send(fixture, "a", "b")
    send(fixture, "p5a", "p5b", priority=5)
    send(fixture, "p31", priority=31)
    send(fixture, "c")
    assert texts(receive(fixture, 4)) == ["p31", "p5a", "p5b", "a"]
    assert texts(receive(fixture)) == ["b", "c"]
    assert fixture.broker.describe_group("g").in_flight == 6


def test_a_receive_from_lanes_is_limited_to_one_turn(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.queues.group_receiver.FOUND_MAX", 2)
    send(fixture, "a", "b", "c")
    assert texts(receive(fixture)) == ["a", "b", "c"], "plain messages are found in whole batches"
    send(fixture, "d", "e")
    send(fixture, "p1a", "p1b", "p1c", priority=1)
    assert [texts(receive(fixture)) for _ in range(4)] == [["p1a", "p1b"], ["p1c", "d"], ["e"], []]


def test_returned_messages_precede_new_ones_of_their_priority(fixture):
    send(fixture, "a", "b")
    send(fixture, "p1", priority=1)
    nack(fixture, receive(fixture))
    send(fixture, "p1 fresh", priority=1)
    send(fixture, "c")
    assert texts(receive(fixture)) == ["p1", "p1 fresh", "a", "b", "c"]


def test_an_urgent_message_wakes_a_waiter(fixture):
    receive(fixture)
    waiting = gevent.spawn(receive, fixture, wait_ms=60_000)
    gevent.sleep(0.01)
    send(fixture, "now", priority=9)
    assert texts(waiting.get(timeout=50)) == ["now"]


# --- due times ------------------------------------------------------------------------------------------------------


def test_a_delayed_message_is_delivered_when_it_is_due_and_not_before(fixture):
    now = fixture.clock.wall_ms()
    send(fixture, "later", deliver_at_ms=now + 5_000)
    send(fixture, "sooner", deliver_at_ms=now + 3_000)
    send(fixture, "at once")
    assert texts(receive(fixture)) == ["at once"]
    fixture.clock.advance(2_999)
    assert receive(fixture) == []
    fixture.clock.advance(1)
    assert texts(receive(fixture)) == ["sooner"]
    fixture.clock.advance(HOUR_MS)
    assert "later" in texts(receive(fixture))


def test_a_sleeper_is_woken_when_a_delayed_message_is_due(fixture):
    receive(fixture)
    waiting = gevent.spawn(receive, fixture, wait_ms=60_000)
    gevent.sleep(0.01)
    send(fixture, "x", deliver_at_ms=fixture.clock.wall_ms() + 40)
    fixture.clock.advance(40)  # the timer was set before this advance
    assert texts(waiting.get(timeout=50)) == ["x"]


def test_a_jump_of_the_wall_clock_is_noticed_within_a_second(fixture):
    receive(fixture)
    send(fixture, "x", deliver_at_ms=fixture.clock.wall_ms() + HOUR_MS)
    waiting = gevent.spawn(receive, fixture, wait_ms=60_000)
    gevent.sleep(0.01)
    fixture.clock.day_ms += HOUR_MS
    turns = 0
    while not waiting.ready():
        gevent.sleep(0.01)  # a pause of the process counts as one turn, however long it is
        turns += 1
    assert texts(waiting.get()) == ["x"]
    assert turns <= 200


def test_scheduled_and_leased_messages_survive_a_restart(tmp_path):
    with running(tmp_path) as first:
        first.broker.create_topic("t", wire.CreateTopic(partitions=1))
        now = first.clock.wall_ms()
        for delay_ms in (1_000, 2_000, 3_000):
            send(first, f"d{delay_ms}", deliver_at_ms=now + delay_ms)
        send(first, "p7", priority=7)
        first.clock.advance(1_000)
        got = receive(first)
        assert texts(got) == ["p7", "d1000"]
        ack(first, got)
        clock = first.clock
    with running(tmp_path, clock) as second:
        assert receive(second) == []
        clock.advance(1_000)
        assert texts(receive(second)) == ["d2000"]
        clock.advance(1_000)
        assert texts(receive(second, 1)) == ["d3000"]


def test_scheduled_messages_cost_a_group_one_number(fixture):
    now = fixture.clock.wall_ms()
    for chunk in range(20):
        send(fixture, *[b"x"] * 1_000, deliver_at_ms=now + HOUR_MS + chunk)
    send(fixture, "plain")
    plain = receive(fixture)
    assert texts(plain) == ["plain"]
    group = partition_of(fixture).delivery["g"].snapshot()
    assert len(group.spans) == 1
    assert len(group.cursors) <= 1
    described = fixture.broker.describe_group("g")
    assert (described.scheduled, described.in_flight, described.lag) == (20_000, 1, 20_001)
    fixture.broker.settlement.settle("g", [plain[0].receipt], SettleRequest("extend", 2 * HOUR_MS))
    fixture.clock.advance(HOUR_MS + 4)
    assert sum(len(receive(fixture, 10_000)) for _ in range(5_000 // FOUND_MAX)) == 5_000
    assert receive(fixture) == []


def test_a_group_that_starts_at_the_latest_skips_messages_scheduled_before(fixture):
    now = fixture.clock.wall_ms()
    send(fixture, "old", deliver_at_ms=now + 1_000)
    fixture.broker.put_group("g", {"start": "latest"})
    assert receive(fixture) == []
    send(fixture, "new", deliver_at_ms=now + 1_000)
    fixture.clock.advance(1_000)
    assert texts(receive(fixture)) == ["new"]


def test_a_group_may_start_at_a_time(fixture):
    send(fixture, "old")
    fixture.clock.advance(1_000)
    at_ms = fixture.clock.wall_ms()
    send(fixture, "new")
    fixture.broker.put_group("g", {"start": {"at": at_ms}})
    assert texts(receive(fixture)) == ["new"]


def test_the_oldest_message_is_as_old_as_it_could_be_delivered(fixture):
    now = fixture.clock.wall_ms()
    receive(fixture)
    send(fixture, *[b"x"] * 1_500, deliver_at_ms=now + HOUR_MS)
    send(fixture, "plain")
    fixture.clock.advance(5_000)
    assert fixture.broker.describe_group("g").oldest_unacked_ms == 5_000
    ack(fixture, receive(fixture))
    assert fixture.broker.describe_group("g").oldest_unacked_ms == 0, "nothing else could have been delivered"
    fixture.clock.advance(HOUR_MS)
    assert fixture.broker.describe_group("g").oldest_unacked_ms == 5_000
    receive(fixture, 10)
    assert fixture.broker.describe_group("g").oldest_unacked_ms == 5_000


def test_scattered_due_messages_are_read_one_by_one_from_checked_batches(fixture):
    now = fixture.clock.wall_ms()
    receive(fixture)
    batch = [
        each for number in range(500) for each in records(f"m{number}", deliver_at_ms=now + 1_000 + (number * 37) % 500)
    ]
    fixture.broker.produce("t", ProduceRequest(batch))
    partition = partition_of(fixture)
    got = []
    for _ in range(50):
        fixture.clock.advance(50)
        fixture.broker.cache.drop(partition._cache_key)
        got += texts(receive(fixture))
    assert got == [f"m{number}" for number in sorted(range(500), key=lambda number: ((number * 37) % 500, number))]
    assert len(partition.reader._checked) == 1


# --- expiry ---------------------------------------------------------------------------------------------------------


def test_an_expired_message_is_not_delivered(fixture):
    now = fixture.clock.wall_ms()
    send(fixture, "short", expires_at_ms=now + 1_000)
    send(fixture, "long")
    fixture.clock.advance(1_000)
    assert texts(receive(fixture)) == ["long"]
    assert fixture.broker.describe_group("g").lag == 1


def test_a_message_that_expires_while_leased_is_not_delivered_again(fixture):
    send(fixture, "a", "b", expires_at_ms=fixture.clock.wall_ms() + 1_000)
    send(fixture, "c")
    nack(fixture, receive(fixture))
    fixture.clock.advance(1_000)
    assert texts(receive(fixture)) == ["c"]
    assert fixture.broker.describe_group("g").lag == 1


def test_messages_that_expired_unread_are_swept(fixture):
    receive(fixture)
    send(fixture, *"abc", expires_at_ms=fixture.clock.wall_ms() + 1_000)
    assert fixture.broker.describe_group("g").lag == 3
    fixture.clock.advance(1_000)
    fixture.broker.groups.sweep()
    assert fixture.broker.describe_group("g").lag == 0


# --- being given up -------------------------------------------------------------------------------------------------


def test_a_message_that_is_nacked_often_enough_is_given_up_and_its_receipt_is_stale(fixture):
    fixture.broker.put_group("g", {"max_deliveries": 2, "dead_letter_topic": ""})
    send(fixture, "a", "b")
    first = receive(fixture, 1)
    nack(fixture, first)
    second = receive(fixture, 1)
    assert [message.delivery_count for message in second] == [2]
    nack(fixture, second, reason="no such customer")
    described = fixture.broker.describe_group("g")
    assert (described.dead, described.lag) == (1, 1)
    assert fixture.broker.settlement.settle("g", [second[0].receipt]) == [False]
    assert texts(receive(fixture)) == ["b"]
    (dead,) = partition_of(fixture).delivery["g"].dead
    assert (dead.deliveries, dead.reason) == (2, "no such customer")
    assert b'portalmq_messages_dead_total{group="g",topic="t"} 1.0' in fixture.broker.metrics.exposition()


def test_unseen_messages_return_as_if_they_were_not_delivered(fixture):
    send(fixture, "a", "b", "c")
    fixture.broker.put_group("g", {"max_deliveries": 2})
    receipts = set()
    for _ in range(5):
        got = receive(fixture)
        assert [(text, message.delivery_count) for text, message in zip(texts(got), got, strict=True)] == [
            ("a", 1),
            ("b", 1),
            ("c", 1),
        ]
        receipts.update(message.receipt for message in got)
        assert (
            fixture.broker.settlement.settle("g", [message.receipt for message in got], SettleRequest("release", 0))
            == [True] * 3
        )
    assert len(receipts) == 15, "no receipt comes twice"
    current = receive(fixture)
    assert fixture.broker.settlement.settle("g", [min(receipts - {message.receipt for message in current})]) == [False]
    ack(fixture, current)
    assert fixture.broker.describe_group("g").dead == 0


def test_the_end_of_the_last_lease_gives_the_message_up_without_a_receive(fixture):
    fixture.broker.put_group("g", {"max_deliveries": 1, "dead_letter_topic": ""})
    send(fixture, "a")
    receive(fixture, visibility_timeout_ms=50)
    fixture.clock.advance(60)
    with gevent.Timeout(60):
        while fixture.broker.describe_group("g").dead != 1:
            gevent.sleep(0.02)


def test_a_poison_message_does_not_give_up_its_batch_mates(fixture):
    fixture.broker.put_group("g", {"max_deliveries": 4, "dead_letter_topic": ""})
    send(fixture, *"abpcd")
    acked = []
    for _ in range(40):
        messages = receive(fixture)
        if "p" in texts(messages):  # its consumer stops with all its leases
            fixture.clock.advance(LEASE_MS)
            continue
        ack(fixture, messages)
        acked += texts(messages)
    assert sorted(acked) == list("abcd")
    assert fixture.broker.describe_group("g").dead == 1


def test_back_offs_follow_the_deliveries_of_each_message(fixture):
    fixture.broker.put_group("g", {"retry_backoff_ms": [100, 1_000]})
    send(fixture, "a")
    nack(fixture, receive(fixture), delay_ms=None)
    fixture.clock.advance(100)
    send(fixture, "b")
    both = receive(fixture)
    assert [message.delivery_count for message in both] == [2, 1]
    nack(fixture, both, delay_ms=None)
    fixture.clock.advance(100)
    assert texts(receive(fixture)) == ["b"]
    fixture.clock.advance(900)
    assert texts(receive(fixture)) == ["a"]


# --- delivery modes -------------------------------------------------------------------------------------------------


def test_at_most_once_is_acked_before_delivery(fixture):
    fixture.broker.put_group("g", {"delivery": "at_most_once"})
    send(fixture, "a", "b")
    got = receive(fixture, attempt_id="x")
    assert texts(got) == ["a", "b"]
    assert fixture.broker.describe_group("g").lag == 0
    ack(fixture, got)
    assert receive(fixture, attempt_id="x") == [], "a repeat gets none of the first attempt's messages"
    fixture.clock.advance(LEASE_MS)
    assert receive(fixture) == []


# --- order by key ---------------------------------------------------------------------------------------------------


def send_keyed(fixture, *pairs):
    for key, value in pairs:
        send(fixture, value, key=key.encode())


def test_one_message_of_a_key_is_leased_and_keys_are_concurrent(fixture):
    fixture.broker.put_group("g", {"ordering": "key"})
    send_keyed(fixture, ("k", "k1"), ("k", "k2"), ("l", "l1"), ("k", "k3"))
    send(fixture, "free")
    first = receive(fixture)
    assert texts(first) == ["k1", "l1", "free"]
    assert receive(fixture) == []
    assert fixture.broker.describe_group("g").ready == 2
    ack(fixture, first[:1])
    assert texts(receive(fixture)) == ["k2"]


def test_a_nacked_message_precedes_the_later_ones_of_its_key(fixture):
    fixture.broker.put_group("g", {"ordering": "key"})
    send_keyed(fixture, ("k", "k1"), ("k", "k2"))
    nack(fixture, receive(fixture), delay_ms=1_000)
    assert receive(fixture) == []
    fixture.clock.advance(1_000)
    again = receive(fixture)
    assert texts(again) == ["k1"]
    ack(fixture, again)
    assert texts(receive(fixture)) == ["k2"]


def test_the_ack_of_a_message_wakes_the_waiter_for_the_next_of_its_key(fixture):
    fixture.broker.put_group("g", {"ordering": "key"})
    send_keyed(fixture, ("k", "k1"), ("k", "k2"))
    first = receive(fixture)
    waiting = gevent.spawn(receive, fixture, wait_ms=60_000)
    gevent.sleep(0.01)
    ack(fixture, first)
    assert texts(waiting.get(timeout=50)) == ["k2"]


def test_a_dead_message_makes_way_for_the_next_of_its_key(fixture):
    fixture.broker.put_group("g", {"ordering": "key", "max_deliveries": 1, "dead_letter_topic": ""})
    send_keyed(fixture, ("k", "k1"), ("k", "k2"))
    nack(fixture, receive(fixture))
    assert texts(receive(fixture)) == ["k2"]


def test_order_by_key_continues_after_a_restart(tmp_path):
    with running(tmp_path) as first:
        first.broker.create_topic("t", wire.CreateTopic(partitions=1))
        first.broker.put_group("g", {"ordering": "key"})
        send_keyed(first, ("k", "k1"), ("k", "k2"), ("l", "l1"))
        got = receive(first)
        assert texts(got) == ["k1", "l1"]
        ack(first, got[1:])
        clock = first.clock
    with running(tmp_path, clock) as second:
        send_keyed(second, ("k", "k3"))
        assert receive(second) == []
        ack(second, got[:1])
        assert texts(receive(second)) == ["k2"]


def test_order_by_key_ignores_priority(fixture):
    fixture.broker.put_group("g", {"ordering": "key"})
    send(fixture, "a", key=b"k")
    send(fixture, "b", key=b"k", priority=9)
    send(fixture, "c", key=b"l", priority=9)
    got = receive(fixture)
    assert texts(got) == ["a", "c"]
    ack(fixture, got)
    assert texts(receive(fixture)) == ["b"]
    group = partition_of(fixture).delivery["g"]
    assert fixture.broker.describe_group("g").lag == 1
    assert group.cursors[9] == (0, group.next), "lane 9 does not hold back retention of what lane 0 has passed"


def test_a_topic_of_urgent_messages_alone_is_not_kept_for_lane_0(fixture):
    partition = partition_of(fixture)
    for number in range(3):
        send(fixture, f"urgent {number}", priority=1)
        partition.log.roll()
    ack(fixture, receive(fixture))
    assert receive(fixture) == []
    fixture.broker.groups.sweep()
    assert partition.delivery["g"].next == partition.readable_end
    before = partition.replica.next_offset
    fixture.broker.groups.sweep()
    assert partition.replica.next_offset == before, "no record is left to append"
    partition.retention.retain(None, 1, 10 * HOUR_MS)
    assert partition.log.log_start_offset > 0


# --- a disk that refuses ---------------------------------------------------------------------------------------------


def test_a_grant_that_the_disk_refused_hides_nothing(fixture):
    """The cursor goes back with the fold, and messages after it are found again."""
    receive(fixture)
    send(fixture, "a", "b")
    send(fixture, "later", deliver_at_ms=fixture.clock.wall_ms() + HOUR_MS)
    partition = partition_of(fixture)
    before = partition.delivery["g"].snapshot()
    assert texts(receive(fixture)) == ["a", "b"]
    assert receive(fixture) == [], "the scheduled message is not due"
    partition.delivery["g"] = GroupDelivery(before)
    assert texts(receive(fixture)) == ["a", "b"]


def test_messages_held_by_a_grant_that_the_disk_refused_are_delivered(fixture):
    fixture.broker.put_group("g", {"ordering": "key"})
    receive(fixture)
    send_keyed(fixture, ("k", "k1"), ("k", "k2"))
    first = receive(fixture, 1)
    partition = partition_of(fixture)
    before = partition.delivery["g"].snapshot()
    assert receive(fixture) == [], "k2 is held"
    partition.delivery["g"] = GroupDelivery(before)
    ack(fixture, first)
    assert texts(receive(fixture)) == ["k2"]


def test_a_message_whose_ack_ahead_the_disk_refused_is_delivered_again(fixture):
    receive(fixture)
    send(fixture, "a")
    partition = partition_of(fixture)
    before = partition.delivery["g"].snapshot()
    (a,) = receive(fixture)
    partition.delivery["g"] = GroupDelivery(before)  # the grant is lost
    ack(fixture, [a])
    assert partition.delivery["g"].is_ahead(a.offset)
    assert receive(fixture) == []
    partition.delivery["g"] = GroupDelivery(before)  # and so is the ack
    assert texts(receive(fixture)) == ["a"]


# --- settings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patch", "says"),
    [
        ({"mode": "stream", "ordering": "key"}, "stream group always reads a partition in order"),
        ({"dead_letter_topic": "{topic}"}, "the topic itself"),
        ({"dead_letter_topic": "a/b"}, "dead_letter_topic"),
        ({"dead_letter_topic": "__x"}, "internal"),
        ({"start": {"offset": 3}}, "start"),
        ({"start": {}}, "start"),
        ({"max_deliveries": 0}, "max_deliveries"),
        ({"retry_backoff_ms": [-1]}, "retry_backoff_ms"),
        ({"delivery": "twice"}, "delivery"),
    ],
)
def test_invalid_settings_are_refused_with_a_reason(fixture, patch, says):
    with pytest.raises(InvalidRequest) as refused:
        fixture.broker.put_group("h", patch)
    assert says in str(refused.value)


def test_ordering_and_mode_cannot_change(fixture):
    fixture.broker.put_group("g", {"ordering": "key"})
    with pytest.raises(InvalidRequest, match="keeps its ordering"):
        fixture.broker.put_group("g", {"ordering": "none"})
    with pytest.raises(GroupModeMismatch):
        fixture.broker.put_group("g", {"mode": "stream", "ordering": "none"})


def test_queue_calls_on_a_stream_group_are_refused(fixture):
    fixture.broker.put_group("g", {"mode": "stream"})
    for call in (
        lambda: receive(fixture),
        lambda: fixture.broker.settlement.settle("g", ["x"]),
        lambda: fixture.broker.settlement.settle("g", ["x"], SettleRequest("nack", 0, "")),
    ):
        with pytest.raises(GroupModeMismatch):
            call()


# --- retention ------------------------------------------------------------------------------------------------------


def test_retention_keeps_scheduled_messages_and_those_of_lanes(fixture):
    partition = partition_of(fixture)
    now = fixture.clock.wall_ms()
    receive(fixture)
    send(fixture, "scheduled", deliver_at_ms=now + HOUR_MS)
    send(fixture, "urgent", priority=3)
    partition.log.roll()
    for number in range(3):
        send(fixture, f"plain {number}")
        partition.log.roll()
    send(fixture, "last")
    partition.retention.retain(None, 1, 10 * HOUR_MS)
    assert partition.log.log_start_offset == 0
    got = receive(fixture)
    assert texts(got)[0] == "urgent"
    ack(fixture, got)
    partition.retention.retain(None, 1, 10 * HOUR_MS)
    assert partition.log.log_start_offset == 0, "it is still scheduled"
    fixture.clock.advance(HOUR_MS)
    ack(fixture, receive(fixture))
    partition.retention.retain(None, 1, 10 * HOUR_MS)
    assert partition.log.log_start_offset > 0
    assert DELAYED in partition.delivery["g"].cursors


def test_a_follower_drops_nothing_by_itself(fixture):
    partition = partition_of(fixture)
    for number in range(3):
        send(fixture, f"{number}")
        partition.log.roll()
    partition.serves = False
    fixture.clock.advance(30 * DAY_MS)
    partition.retention.retain(1, 1, 1)
    assert (partition.log.log_start_offset, len(partition.log.sealed_segments)) == (0, 3)
    partition.serves = True
    partition.retention.retain(1, 1, 1)
    assert partition.log.log_start_offset > 0


def test_a_wrong_wall_clock_removes_no_messages_of_an_active_group(fixture):
    """Messages that are old by the wrong clock stay, although it stamps every later message."""
    fixture.broker.put_group("g", {"max_deliveries": 1_000})
    partition = partition_of(fixture)
    receive(fixture, 1)
    for number in range(3):
        send(fixture, f"{number}")
        partition.log.roll()
    fixture.clock.day_ms += 8 * DAY_MS
    for _ in range(3):
        send(fixture, "stamped by the wrong clock")
        partition.log.roll()
        for _ in range(24):
            partition.retention.retain(HOUR_MS, None, 7 * DAY_MS)
            fixture.clock.advance(HOUR_MS // 2)
            receive(fixture, 1)
    assert partition.log.log_start_offset == 0


def test_a_wrong_wall_clock_removes_only_unneeded_messages_and_after_hours(fixture):
    partition = partition_of(fixture)
    send(fixture, "unread")
    partition.log.roll()
    partition.retention.retain(7 * DAY_MS, None, 7 * DAY_MS)
    fixture.clock.day_ms += 8 * DAY_MS
    send(fixture, "stamped by the wrong clock")
    partition.log.roll()
    for _ in range(6):
        fixture.clock.advance(HOUR_MS)
        partition.retention.retain(7 * DAY_MS, None, 7 * DAY_MS)
        assert partition.log.log_start_offset == 0
    for _ in range(3):
        fixture.clock.advance(HOUR_MS)
        partition.retention.retain(7 * DAY_MS, None, 7 * DAY_MS)
    assert partition.log.log_start_offset > 0


def test_after_a_restart_the_keys_of_a_backlog_are_read_in_steps_and_acks_between_them_count(tmp_path, monkeypatch):
    """Other greenlets run after each step, however many messages wait. An ack during a pause frees the next message of
    its key once the ack is committed."""
    pauses: list[None] = []
    monkeypatch.setattr("portalmq.broker.queues.group_receiver.give_way", lambda: pauses.append(None))
    clock = HandClock()
    with running(tmp_path, clock) as before:
        before.broker.put_group("g", {"ordering": "key"})
        values = [f"{number}" for number in range(3 * KEYS_PER_STEP)]
        before.broker.produce("t", ProduceRequest(records(*values, key=b"k")))
        (first,) = receive(before)
    with running(tmp_path, clock) as after:

        def ack_once() -> None:
            pauses.append(None)
            if len(pauses) == 2:
                assert after.broker.settlement.settle("g", [first.receipt]) == [True]

        monkeypatch.setattr("portalmq.broker.queues.group_receiver.give_way", ack_once)
        pauses.clear()
        assert [message.record.value for message in receive(after)] == [b"1"]
        assert len(pauses) == 2


def test_a_message_behind_many_of_one_held_key_is_found_in_several_steps(fixture, monkeypatch):
    """One pass over all held messages would block the other greenlets."""
    held = []
    monkeypatch.setattr(
        "portalmq.broker.queues.group_receiver.give_way", lambda: held.append(partition_of(fixture).delivery["g"].held)
    )
    fixture.broker.put_group("g", {"ordering": "key"})
    send(fixture, *[b"x"] * 5_000, key=b"k")
    send(fixture, b"y", key=b"l")
    assert texts(receive(fixture)) == ["x"]
    held.append(partition_of(fixture).delivery["g"].held)
    assert texts(receive(fixture)) == ["y"]
    looks = [more - less for less, more in pairwise(held)]
    assert len(looks) == 4
    assert max(looks) <= 1_000


def test_a_former_leader_drops_the_key_order_and_builds_it_again_later(fixture):
    """A follower never asks for the next message of a key, so finished messages would pile up in it."""
    fixture.broker.put_group("g", {"ordering": "key"})
    send(fixture, b"a", b"b", key=b"k")
    (first,) = receive(fixture)
    partition = partition_of(fixture)
    assert partition.delivery["g"].keys is not None
    fixture.broker.groups.on_stepped_down(fixture.broker.topics.get("t"), partition)
    assert partition.delivery["g"].keys is None
    assert receive(fixture) == []
    fixture.broker.settlement.settle("g", [first.receipt])
    assert texts(receive(fixture)) == ["b"]
