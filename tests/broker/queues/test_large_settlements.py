"""Settling very many receipts in one call: other greenlets run between the parts, and the call sees their changes."""

import pytest
from support.domain import records, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues import settle as settling
from portalmq.broker.queues.settle import SettleRequest
from portalmq.errors import PortalMQError

PART = settling.RECEIPTS_A_TURN
MESSAGES = 2 * PART + 100


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=1))
        started.broker.produce("t", ProduceRequest(records(*["x"] * MESSAGES)))
        yield started


def receive(fixture, messages=MESSAGES):
    request = wire.ReceiveRequest(topics=["t"], max_messages=messages, wait_ms=0)
    return [message.receipt for message in fixture.broker.receive_handler.receive("g", request, None)]


def leased(fixture):
    return fixture.broker.describe_group("g").in_flight


@pytest.fixture
def in_between(monkeypatch):
    """A list of functions; each pause calls and removes the first."""
    work = []

    def turn():
        if work:
            work.pop(0)()

    monkeypatch.setattr(settling, "give_way", turn)
    return work


@pytest.mark.parametrize("verb", ["ack", "nack", "release", "extend"])
def test_other_greenlets_run_after_each_part_of_the_receipts(fixture, in_between, verb):
    receipts = receive(fixture)[::-1]
    records_before = next_offset(fixture)
    seen = []
    in_between += [lambda: seen.append(next_offset(fixture) - records_before)] * 10
    assert settle(fixture, verb, receipts) == [True] * MESSAGES
    assert seen == [1, 2], "a record for each part"
    assert leased(fixture) == (MESSAGES if verb == "extend" else 0)


def test_acks_of_neighbours_are_one_record(fixture, in_between):
    receipts = receive(fixture)
    records_before = next_offset(fixture)
    in_between.append(lambda: pytest.fail("a pause would end the transaction that the receive's grant joins"))
    assert settle(fixture, "ack", receipts) == [True] * MESSAGES
    assert next_offset(fixture) - records_before == 1
    assert leased(fixture) == 0


@pytest.mark.parametrize("left_out", [0, 1, 600, MESSAGES - 1])
def test_acks_with_a_gap_leave_the_message_in_the_gap(fixture, left_out):
    receipts = receive(fixture)
    others = receipts[:left_out] + receipts[left_out + 1 :]
    assert settle(fixture, "ack", others) == [True] * (MESSAGES - 1)
    assert leased(fixture) == 1
    assert settle(fixture, "nack", receipts) == [index == left_out for index in range(MESSAGES)]


def test_a_repeated_ack_of_neighbours_is_right_wherever_another_call_came_between(fixture):
    receipts = receive(fixture)
    assert settle(fixture, "nack", receipts[100:200]) == [True] * 100
    fixture.clock.advance(1_000)
    again = receive(fixture, 100)
    assert len(again) == 100
    assert settle(fixture, "ack", receipts) == [not 100 <= index < 200 for index in range(MESSAGES)]
    assert settle(fixture, "ack", receipts + again) == [not 100 <= i < 200 for i in range(MESSAGES)] + [True] * 100
    assert leased(fixture) == 0


def test_an_ack_by_another_call_in_a_pause_stays(fixture, in_between):
    receipts = receive(fixture)
    in_between.append(lambda: settle(fixture, "ack", receipts[-10:]))
    assert settle(fixture, "ack", receipts) == [True] * MESSAGES
    assert leased(fixture) == 0


def test_a_nack_by_another_call_in_a_pause_is_not_repeated(fixture, in_between):
    receipts = receive(fixture)
    in_between.append(lambda: settle(fixture, "nack", receipts[-10:]))
    assert settle(fixture, "nack", receipts) == [True] * (MESSAGES - 10) + [False] * 10


def test_verdicts_are_in_the_order_of_the_receipts(fixture):
    receipts = receive(fixture)
    assert settle(fixture, "nack", receipts[:7]) == [True] * 7
    assert settle(fixture, "nack", receipts[::-1]) == [True] * (MESSAGES - 7) + [False] * 7


def test_a_receipt_that_is_given_twice_counts_twice(fixture):
    receipts = receive(fixture)
    assert settle(fixture, "nack", [receipts[0], *receipts, *receipts[:PART]]) == [True] * (MESSAGES + 1 + PART)


def test_a_group_that_is_created_again_in_a_pause_keeps_its_leases(fixture, in_between):
    receipts = receive(fixture)

    def anew():
        fixture.broker.group_admin.delete("g")
        assert len(receive(fixture)) == MESSAGES

    in_between.append(anew)
    with pytest.raises(PortalMQError) as caught:
        settle(fixture, "nack", receipts)
    assert caught.value.outcome == "unknown", "the first part was released"
    assert leased(fixture) == MESSAGES


def settle(fixture, verb, receipts):
    broker = fixture.broker
    if verb == "ack":
        return broker.settlement.settle("g", receipts)
    if verb == "extend":
        return broker.settlement.settle("g", receipts, SettleRequest("extend", 60_000))
    return broker.settlement.settle("g", receipts, SettleRequest("release" if verb == "release" else "nack", 1_000))


def next_offset(fixture):
    [partition] = [partition for topic in fixture.broker.topics for partition in topic.led()]
    return partition.replica.next_offset
