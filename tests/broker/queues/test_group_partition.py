"""Queue groups over a real log: leases, receipts, restarts."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import gevent
import pytest
from support.domain import Fixture, HandClock, records, running
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.receipts import nth_text
from portalmq.broker.core.queue.records import Grant
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.readable import VOUCHED_WITHIN_MS
from portalmq.broker.queues.group_partition import ReceiptSpan
from portalmq.broker.queues.settle import SettleRequest
from portalmq.errors import GroupNotFound, InvalidRequest, Unavailable

LEASE_MS = 30_000


@pytest.fixture
def fixture(tmp_path: Path):
    with running(tmp_path) as it:
        yield it


def send(fixture: Fixture, *values: str, topic: str = "t", **more) -> None:
    fixture.broker.produce(topic, ProduceRequest(records(*values), **more))


def receive(fixture: Fixture, *topics: str, group: str = "g", peer=None, **more):
    return fixture.broker.receive_handler.receive(group, wire.ReceiveRequest(list(topics) or ["t"], **more), peer)


def texts(messages) -> list[str]:
    return [message.record.value.decode() for message in messages]


def test_messages_come_in_order_and_only_once_while_leased(fixture):
    send(fixture, "a", "b", "c")
    assert texts(receive(fixture, max_messages=2)) == ["a", "b"]
    assert texts(receive(fixture, max_messages=2)) == ["c"]
    assert receive(fixture) == []


def test_an_acked_message_is_not_delivered_again(fixture):
    send(fixture, "a", "b")
    first, second = receive(fixture)
    assert fixture.broker.settlement.settle("g", [first.receipt]) == [True]
    fixture.clock.advance(LEASE_MS + 1)
    (again,) = receive(fixture)
    assert (again.offset, again.delivery_count) == (second.offset, 2)


def test_a_nacked_message_returns_at_once_or_after_its_delay(fixture):
    send(fixture, "a", "b")
    first, second = receive(fixture)
    assert fixture.broker.settlement.settle("g", [first.receipt], SettleRequest("nack", None, "no")) == [True]
    assert fixture.broker.settlement.settle("g", [second.receipt], SettleRequest("nack", 5_000)) == [True]
    assert texts(receive(fixture)) == ["a"]
    fixture.clock.advance(5_000)
    assert texts(receive(fixture)) == ["b"]


def test_the_groups_back_off_grows_with_the_deliveries(fixture):
    fixture.broker.put_group("g", {"retry_backoff_ms": [100, 1_000]})
    send(fixture, "a")
    for wait_ms in (100, 1_000, 1_000):
        (message,) = receive(fixture)
        fixture.broker.settlement.settle("g", [message.receipt], SettleRequest("nack"))
        fixture.clock.advance(wait_ms - 1)
        assert receive(fixture) == []
        fixture.clock.advance(1)


def test_an_extended_lease_holds_longer(fixture):
    send(fixture, "a")
    (message,) = receive(fixture, visibility_timeout_ms=1_000)
    assert fixture.broker.settlement.settle("g", [message.receipt], SettleRequest("extend", 10_000)) == [True]
    fixture.clock.advance(5_000)
    assert receive(fixture) == []
    fixture.clock.advance(5_000)
    assert texts(receive(fixture)) == ["a"]


def test_a_receipt_is_stale_once_another_consumer_has_the_message(fixture):
    send(fixture, "a")
    (first,) = receive(fixture)
    fixture.clock.advance(LEASE_MS)
    (second,) = receive(fixture)
    assert fixture.broker.settlement.settle("g", [first.receipt]) == [False]
    assert fixture.broker.settlement.settle("g", [first.receipt], SettleRequest("extend")) == [False]
    assert fixture.broker.settlement.settle("g", [first.receipt], SettleRequest("nack")) == [False]
    assert fixture.broker.settlement.settle("g", [second.receipt]) == [True]
    assert fixture.broker.settlement.settle("g", [first.receipt]) == [True], "an acked message stays acked"


def test_receipts_are_checked_before_any_is_used(fixture):
    send(fixture, "a")
    (message,) = receive(fixture)
    with pytest.raises(InvalidRequest):
        fixture.broker.settlement.settle("g", [message.receipt, "nonsense"])
    fixture.clock.advance(LEASE_MS)
    assert texts(receive(fixture)) == ["a"]


def test_a_receipt_of_another_group_is_refused(fixture):
    send(fixture, "a")
    (message,) = receive(fixture)
    receive(fixture, group="other")
    with pytest.raises(InvalidRequest):
        fixture.broker.settlement.settle("other", [message.receipt])
    with pytest.raises(GroupNotFound):
        fixture.broker.settlement.settle("unknown", [message.receipt])


def test_groups_do_not_disturb_each_other(fixture):
    send(fixture, "a")
    assert texts(receive(fixture, group="one")) == ["a"]
    assert texts(receive(fixture, group="two")) == ["a"]


def test_max_messages_holds_over_partitions_and_all_are_served(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    for number in range(3):
        send(fixture, *[f"{number}-{n}" for n in range(4)], partition=number)
    first = receive(fixture, max_messages=5)
    assert len(first) == 5
    rest = [message for _ in range(2) for message in receive(fixture, max_messages=5)]
    assert len(set(texts([*first, *rest]))) == 12


def test_a_group_that_starts_at_the_latest_skips_earlier_messages(fixture):
    send(fixture, "old")
    fixture.broker.put_group("g", {"start": "latest"})
    assert receive(fixture) == []
    send(fixture, "new")
    assert texts(receive(fixture)) == ["new"]


def test_partitions_added_later_are_read_from_their_beginning(fixture):
    fixture.broker.put_group("g", {"start": "latest"})
    receive(fixture)
    fixture.broker.alter_topic("t", wire.AlterTopic(partitions=2))
    send(fixture, "early", partition=1)
    assert texts(receive(fixture)) == ["early"]


def test_a_repeated_attempt_gets_the_same_messages_and_receipts(fixture):
    send(fixture, "a", "b", "c")
    first = receive(fixture, max_messages=2, attempt_id="x")
    assert receive(fixture, max_messages=2, attempt_id="x") == first
    assert texts(receive(fixture, max_messages=2, attempt_id="y")) == ["c"]


def test_a_message_whose_consumers_failed_twice_is_delivered_alone(fixture):
    send(fixture, *"abcd")
    for _ in range(2):
        assert len(receive(fixture)) == 4
        fixture.clock.advance(LEASE_MS)
    assert texts(receive(fixture)) == ["a"]
    assert texts(receive(fixture)) == ["b"]


def test_the_description_counts_messages(fixture):
    send(fixture, *"abcdef")
    fixture.clock.advance(1_000)
    messages = receive(fixture, max_messages=3)
    fixture.broker.settlement.settle("g", [messages[0].receipt])
    fixture.broker.settlement.settle("g", [messages[1].receipt], SettleRequest("nack", 60_000))
    described = fixture.broker.describe_group("g")
    assert (described.ready, described.in_flight, described.scheduled, described.lag) == (3, 1, 1, 5)
    assert described.oldest_unacked_ms == 1_000


def test_a_deleted_group_begins_again(fixture):
    send(fixture, "a")
    (message,) = receive(fixture)
    fixture.broker.settlement.settle("g", [message.receipt])
    fixture.broker.group_admin.delete("g")
    with pytest.raises(GroupNotFound):
        fixture.broker.describe_group("g")
    assert texts(receive(fixture)) == ["a"]


def test_an_ack_with_a_receive_counts_before_the_answer(fixture):
    send(fixture, *"abcd")
    first = receive(fixture, max_messages=2)
    request = wire.ReceiveRequest(["t"], max_messages=2, ack=[message.receipt for message in first])
    second, acked = fixture.broker.receive_handler.ack_and_receive("g", request, None)
    assert (texts(second), acked.verdicts) == (["c", "d"], [True, True])
    assert fixture.broker.describe_group("g").lag == 2


def test_a_stale_ack_with_a_receive_is_reported(fixture):
    send(fixture, "a")
    (stale,) = receive(fixture)
    fixture.clock.advance(LEASE_MS)
    receive(fixture)
    request = wire.ReceiveRequest(["t"], ack=[stale.receipt])
    assert fixture.broker.receive_handler.ack_and_receive("g", request, None) == ([], ([False], [], []))


def test_an_invalid_ack_with_a_receive_refuses_both(fixture):
    send(fixture, "a", "b")
    (first,) = receive(fixture, max_messages=1)
    with pytest.raises(InvalidRequest):
        fixture.broker.receive_handler.ack_and_receive(
            "g", wire.ReceiveRequest(["t"], ack=[first.receipt, "nonsense"]), None
        )
    assert fixture.broker.describe_group("g").in_flight == 1


def test_acks_count_even_when_a_wait_is_refused(fixture):
    send(fixture, "a")
    (message,) = receive(fixture)
    fixture.broker.groups.long_polls.parked_max = 0
    request = wire.ReceiveRequest(["t"], wait_ms=1_000, ack=[message.receipt])
    assert fixture.broker.receive_handler.ack_and_receive("g", request, None) == ([], ([True], [], []))


# --- restarts --------------------------------------------------------------------------------------------------------


def test_leases_acks_and_counts_survive_a_restart(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        send(before, "a", "b", "c")
        first, second, _ = receive(before)
        before.broker.settlement.settle("g", [first.receipt])
    with running(tmp_path, clock) as after:
        assert receive(after) == [], "the leases still run"
        assert after.broker.settlement.settle("g", [second.receipt]) == [True], (
            "a receipt of the previous epoch is valid"
        )
        clock.advance(LEASE_MS)
        (again,) = receive(after)
        assert (again.record.value, again.delivery_count) == (b"c", 2)


def test_a_clock_set_back_by_an_hour_during_a_restart_does_not_prolong_leases(tmp_path):
    with running(tmp_path, HandClock()) as before:
        send(before, "a")
        receive(before)
    clock = HandClock()
    clock.advance(-3_600_000)
    with running(tmp_path, clock) as after:
        clock.advance(LEASE_MS)
        assert texts(receive(after)) == ["a"]


def test_a_clock_set_back_by_an_hour_does_not_set_timestamps_back(fixture):
    send(fixture, "a")
    fixture.clock.day_ms -= 3_600_000
    send(fixture, "b")
    first, second = receive(fixture)
    assert second.timestamp_ms >= first.timestamp_ms


def test_control_records_do_not_count_as_ready_after_a_kill_loses_a_grant(fixture):
    """Otherwise control records between the messages would count as ready and wait for delivery for ever."""
    send(fixture, "a")
    (first,) = receive(fixture)
    partition = fixture.broker.topics.get("t").partition(0)
    assert fixture.broker.settlement.settle("g", [first.receipt]) == [True]
    before = partition.delivery["g"].snapshot()
    send(fixture, "left out", "b")
    _, second = receive(fixture)
    partition.delivery["g"] = GroupDelivery(before)  # as after a kill -9 before the grant is on disk
    assert fixture.broker.settlement.settle("g", [second.receipt]) == [True]
    assert fixture.broker.describe_group("g").ready == 1
    (again,) = receive(fixture)
    assert again.record.value == b"left out"
    assert fixture.broker.settlement.settle("g", [again.receipt]) == [True]
    assert fixture.broker.describe_group("g").lag == 0


def test_a_receipt_is_invalid_in_a_group_that_was_created_again(fixture):
    send(fixture, "a")
    (old,) = receive(fixture)
    fixture.broker.group_admin.delete("g")
    fixture.broker.put_group("g", {})
    with pytest.raises(InvalidRequest):
        fixture.broker.settlement.settle("g", [old.receipt])
    (new,) = receive(fixture)
    assert (new.offset, new.delivery_count) == (old.offset, 1)
    with pytest.raises(InvalidRequest):
        fixture.broker.settlement.settle("g", [old.receipt])
    assert fixture.broker.settlement.settle("g", [new.receipt]) == [True]


def test_a_receipt_is_invalid_in_a_topic_that_was_created_again(fixture):
    send(fixture, "a")
    (old,) = receive(fixture)
    fixture.broker.delete_topic("t")
    for _ in range(2):
        with pytest.raises(InvalidRequest):
            fixture.broker.settlement.settle("g", [old.receipt])
        send(fixture, "b")
    (new, _) = receive(fixture)
    assert fixture.broker.settlement.settle("g", [new.receipt]) == [True]


def test_a_receipt_outlives_a_restart_and_a_change_of_its_groups_settings(tmp_path):
    with running(tmp_path) as fixture:
        send(fixture, "a")
        (message,) = receive(fixture)
        fixture.broker.put_group("g", {"max_deliveries": 9})
    with running(tmp_path) as fixture:
        assert fixture.broker.settlement.settle("g", [message.receipt]) == [True]


def test_a_second_concurrent_deletion_of_a_group_is_unavailable(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=4))
    send(fixture, "a")
    receive(fixture)
    both = [gevent.spawn(fixture.broker.group_admin.delete, "g") for _ in range(2)]
    gevent.joinall(both)
    assert [type(one.exception) for one in both] == [type(None), Unavailable], "the first may still fail"
    with pytest.raises(GroupNotFound):
        fixture.broker.group_admin.delete("g")


def test_a_group_and_its_topic_may_be_deleted_at_once(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=4))
    receive(fixture)
    both = [gevent.spawn(fixture.broker.group_admin.delete, "g"), gevent.spawn(fixture.broker.delete_topic, "t")]
    gevent.joinall(both, raise_error=True)
    assert fixture.broker.list_groups() == []
    assert fixture.broker.list_topics() == []


def test_a_group_in_deletion_is_not_created_again_on_some_partitions(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=4))
    send(fixture, "a")
    receive(fixture)
    deleting = gevent.spawn(fixture.broker.group_admin.delete, "g")
    gevent.sleep(0)  # the append of its first record is under way
    uses = (receive, lambda it: it.broker.put_group("g", {}), lambda it: it.broker.describe_group("g"))
    for use in uses:
        with pytest.raises(Unavailable):
            use(fixture)
    deleting.get()
    assert texts(receive(fixture)) == ["a"]


@pytest.mark.parametrize("delete", ["group", "topic"])
def test_a_first_receive_that_meets_a_deletion_leaves_nothing_behind(fixture, delete):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=4))
    first = gevent.spawn(receive, fixture, attempt_id="a")
    gevent.sleep(0)  # the group's first records are on their way to four partitions
    if delete == "group":
        fixture.broker.group_admin.delete("g")
    else:
        fixture.broker.delete_topic("t")
    first.join()
    assert isinstance(first.exception, Unavailable) or first.value == []
    send(fixture, "new")
    assert texts(receive(fixture)) == ["new"]
    assert fixture.broker.describe_group("g").in_flight == 1


def older_receipt(fixture: Fixture, message, epochs_ago: int = 1) -> str:
    """Return the receipt that an earlier leader gave for the same delivery of a message."""
    group = fixture.broker.groups.get("g")
    topic = fixture.broker.topics.get("t")
    signer = fixture.broker.groups.receipt_signer(group, topic.state.topic_id)
    epoch = topic.partition(message.partition).replica.leader_epoch
    return signer.head(message.partition, message.offset, 1, message.delivery_count, epoch - epochs_ago) + nth_text(0)


def test_a_receipt_of_an_earlier_leader_is_valid_until_the_next_lease(tmp_path):
    """A delivery does not wait for its grant, so a new leader may give a message the same delivery number again."""
    with running(tmp_path) as before:
        send(before, "a", "b")
    with running(tmp_path) as fixture:
        first, second = receive(fixture)
        assert fixture.broker.settlement.settle("g", [older_receipt(fixture, first)]) == [False]
        assert fixture.broker.settlement.settle("g", [older_receipt(fixture, first)], SettleRequest("nack")) == [False]
        assert fixture.broker.settlement.settle("g", [older_receipt(fixture, first)], SettleRequest("extend")) == [
            False
        ]
        assert fixture.broker.settlement.settle("g", [first.receipt]) == [True]
        fixture.clock.advance(LEASE_MS + 1)
        assert fixture.broker.settlement.settle("g", [older_receipt(fixture, second)]) == [False], (
            "a refused receipt stays refused"
        )
        assert [message.delivery_count for message in receive(fixture)] == [2]


def test_an_older_receipt_takes_no_lease_away_after_a_second_election(tmp_path):
    """The current lease may be one that the previous leader gave."""
    clock = HandClock()
    with running(tmp_path, clock) as before:
        send(before, "a")
        (message,) = receive(before)
        partition = before.broker.topics.get("t").partition(0)
        eventually(lambda: partition.high_watermark == partition.replica.next_offset)  # its grant is on disk
    with running(tmp_path, clock) as after:
        older = older_receipt(after, message, epochs_ago=2)
        assert after.broker.settlement.settle("g", [older], SettleRequest("nack")) == [False]
        assert after.broker.settlement.settle("g", [older], SettleRequest("extend")) == [False]
        assert after.broker.settlement.settle("g", [older]) == [False]
        assert receive(after) == [], "its lease runs"
        assert after.broker.settlement.settle("g", [message.receipt], SettleRequest("extend")) == [True]


def test_a_receipt_of_an_earlier_leader_may_be_extended_and_acked_while_its_lease_is_known(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        send(before, "a")
        (message,) = receive(before)
        partition = before.broker.topics.get("t").partition(0)
        eventually(lambda: partition.high_watermark == partition.replica.next_offset)  # its grant is on disk
    with running(tmp_path, clock) as after:
        assert after.broker.settlement.settle("g", [message.receipt], SettleRequest("extend", 60_000)) == [True]
        assert after.broker.settlement.settle("g", [message.receipt]) == [True]
        assert receive(after) == []


def test_deleted_groups_are_not_remembered_for_ever(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.queues.group_registry.REMEMBERED_MAX", 5)
    monkeypatch.setattr("portalmq.broker.queues.groups.BEGUN_MAX", 5)
    monkeypatch.setattr("portalmq.broker.queues.receive.TURNS_MAX", 5)
    monkeypatch.setattr("portalmq.broker.queues.group_registry.OWN_WRITE_S", 0.3)
    send(fixture, "a")
    for number in range(20):
        fixture.broker.put_group(f"g{number}", {"start": "latest"})
        fixture.broker.receive_handler.receive(f"g{number}", wire.ReceiveRequest(["t"]), None)
        fixture.broker.group_admin.delete(f"g{number}")
    newest_until = max(until for _, _, until in fixture.broker.groups._own.values())
    eventually(lambda: time.monotonic() > newest_until)
    fixture.broker.put_group("last", {})
    assert len(fixture.broker.groups._own) <= 5
    assert len(fixture.broker.groups._begun) <= 5
    assert len(fixture.broker.receive_handler._turn) <= 5


@pytest.mark.parametrize("is_by_name", [True, False])
def test_a_group_that_another_broker_deleted_can_be_created_again_at_once(fixture, is_by_name):
    """The control plane decides: it is ahead of this broker's copy."""
    groups = fixture.broker.groups
    send(fixture, "a")
    receive(fixture)
    old = groups.get("g")
    groups.end_here("g", old.group_id)
    with pytest.raises(Unavailable):
        fixture.broker.put_group("g", {})
    with pytest.raises(Unavailable):
        receive(fixture)
    fixture.broker._catalog.delete_group("g")
    groups._remember("g", old)
    if is_by_name:
        assert fixture.broker.put_group("g", {})
    assert texts(receive(fixture)) == ["a"]
    assert groups.get("g").group_id != old.group_id


@pytest.mark.parametrize("comes", [True, False])
def test_a_wait_continues_when_its_topic_is_deleted_and_created_again(fixture, comes):
    send(fixture, "old")
    assert texts(receive(fixture)) == ["old"]
    waiting = gevent.spawn(receive, fixture, wait_ms=60_000 if comes else 1_500)
    gevent.sleep(0.1)
    fixture.broker.delete_topic("t")
    gevent.sleep(0.1)
    fixture.broker.create_topic("t", wire.CreateTopic())
    if comes:
        send(fixture, "new")
    assert texts(waiting.get(timeout=50)) == (["new"] if comes else [])


# --- followers that do not vouch -------------------------------------------------------------------------------------


@pytest.fixture
def waits(fixture, monkeypatch):
    """Send a message to each of twelve partitions, let waits for followers advance the clock, and record them in ms."""
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=12))
    for number in range(12):
        send(fixture, "x", partition=number)
    assert receive(fixture, group="g", max_messages=1), "the group has begun"
    monkeypatch.setattr(fixture.broker.receive_handler, "_patience_s", 0.0)  # a refusal is not retried
    waits: list[int] = []

    def pass_by(seconds: float) -> None:
        if seconds:
            waits.append(round(seconds * 1_000))
            fixture.clock.advance(waits[-1])

    monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=pass_by))
    return waits


def test_a_receive_waits_once_for_followers_however_many_partitions_they_follow(fixture, waits, monkeypatch):
    monkeypatch.setattr(PartitionReplica, "may_deliver", lambda replica, now_ms: False)
    with pytest.raises(Unavailable, match="do not vouch"):
        receive(fixture)
    assert sum(waits) == VOUCHED_WITHIN_MS


def test_a_receive_with_messages_in_hand_waits_for_no_followers(fixture, waits, monkeypatch):
    asked: list[PartitionReplica] = []

    def first_alone(replica: PartitionReplica, now_ms: int) -> bool:
        asked.append(replica)
        return replica is asked[0]

    monkeypatch.setattr(PartitionReplica, "may_deliver", first_alone)
    assert texts(receive(fixture)) == ["x"]
    assert len({id(replica) for replica in asked}) > 1, "the others were asked too"
    assert not waits


def test_a_group_that_ends_during_a_wait_for_followers_delivers_nothing(fixture, waits, monkeypatch):
    """A new group of its name delivers nothing to that receive either: it would refuse the receipts."""
    monkeypatch.setattr(PartitionReplica, "may_deliver", lambda replica, now_ms: bool(waits))

    def end(seconds: float) -> None:
        if not waits:
            waits.append(1)
            fixture.broker.group_admin.delete("g")
            fixture.broker.put_group("g", {})
            topic = fixture.broker.topics.known("t")
            fixture.broker.groups.begin(fixture.broker.groups.get("g"), topic, forward=True)

    monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=end))
    with pytest.raises(Unavailable, match="ended"):
        receive(fixture)
    monkeypatch.setattr("portalmq.broker.partition.readable.gevent", SimpleNamespace(sleep=lambda seconds: None))
    received = receive(fixture)
    assert fixture.broker.settlement.settle("g", [message.receipt for message in received]) == [True] * len(received)


def test_a_waiter_that_was_woken_in_vain_is_woken_again(fixture, monkeypatch):
    """A grant is also refused when the read has taken longer than the followers' vouching lasts."""
    send(fixture, "x")
    partition = fixture.broker.topics.known("t").local[0]
    real, refusals = partition.append_group_record, [1, 2]

    def refused(group: str, record: object, **more: object) -> object:
        if isinstance(record, Grant) and refusals:
            refusals.pop()
            raise Unavailable("its followers do not vouch")
        return real(group, record, **more)

    monkeypatch.setattr(partition, "append_group_record", refused)
    waiting = gevent.spawn(receive, fixture, wait_ms=60_000)
    assert texts(waiting.get(timeout=50)) == ["x"]


@pytest.mark.parametrize("verb", ["ack", "nack", "release", "extend"])
def test_a_deposed_leader_judges_no_receipt_of_its_successor(fixture, verb):
    """Its log lacks the lease, and may lack the message: neither tells that the message is finished."""
    send(fixture, "a")
    receive(fixture)
    group, partition = fixture.broker.groups.get_queue("g"), fixture.broker.topics.get("t").local[0]
    (at,) = fixture.broker.groups.attached("g")
    epoch, end = partition.replica.leader_epoch, partition.replica.next_offset
    more = {"ack": (), "nack": (0, None, group.config), "release": (0, None), "extend": (LEASE_MS,)}[verb]
    for offset in (end - 2, end + 100):
        with pytest.raises(Unavailable) as refusal:
            getattr(at, verb)([ReceiptSpan(1, epoch + 1, [0], [offset])], *more)
        assert refusal.value.outcome == "not_applied"
    assert partition.replica.next_offset == end
