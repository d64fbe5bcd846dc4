"""The size of answers is bounded, and repeated requests return everything."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.domain import records, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.answer_size import ANSWER_BYTES_MAX, size_of
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage.batch import Record

MIB = 1024 * 1024
# Values of one MiB each: two more than fit into an answer.
COUNT = ANSWER_BYTES_MAX // MIB + 2
VALUES = [bytes([number]) * MIB for number in range(COUNT)]


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as started:
        yield started


def send(fixture, **more):
    for start in range(0, COUNT, 6):
        fixture.broker.produce("t", ProduceRequest(records(*VALUES[start : start + 6], **more)))


def receive(fixture, group="g", count=10_000):
    request = wire.ReceiveRequest(topics=["t"], max_messages=count, wait_ms=0)
    return fixture.broker.receive_handler.receive(group, request, None)


def values(found):
    return [each.record.value for each in found]


def in_two(fixture, group="g"):
    """Receive all messages in two requests; the first answer is as large as the limit allows."""
    first, second = receive(fixture, group), receive(fixture, group)
    assert sum(size_of(each.record) for each in first) <= ANSWER_BYTES_MAX
    assert (len(first), len(second)) == (COUNT - 2, 2)
    return [*first, *second]


def test_a_receive_returns_what_fits_and_the_next_one_the_rest(fixture):
    send(fixture)
    assert values(in_two(fixture)) == VALUES


@pytest.mark.parametrize("more", [{"priority": 3}, {"key": b"k"}, {"expires_at_ms": 1 << 50}], ids=str)
def test_a_receive_of_messages_with_attributes_returns_what_fits(fixture, more):
    send(fixture, **more)
    found = receive(fixture)
    assert 0 < sum(size_of(each.record) for each in found) <= ANSWER_BYTES_MAX
    assert values(found + receive(fixture)) == VALUES


def test_a_receive_of_delayed_messages_returns_what_fits(fixture):
    send(fixture, deliver_at_ms=fixture.clock.wall_ms() + 1_000)
    fixture.clock.advance(2_000)
    assert values(in_two(fixture)) == VALUES


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_a_receive_of_nacked_messages_returns_what_fits(fixture, ordering):
    fixture.broker.put_group("g", {"ordering": ordering, "max_deliveries": 100})
    send(fixture)
    found = in_two(fixture)
    assert (
        fixture.broker.settlement.settle("g", [each.receipt for each in found], SettleRequest("nack", 0))
        == [True] * COUNT
    )
    again = in_two(fixture)
    assert values(again) == VALUES
    assert {each.delivery_count for each in again} == {2}
    assert fixture.broker.settlement.settle("g", [each.receipt for each in again]) == [True] * COUNT
    assert fixture.broker.describe_group("g").lag == 0


def test_the_limit_applies_to_all_partitions_of_an_answer_together(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    for number in range(3):
        fixture.broker.produce("t", ProduceRequest(records(*VALUES[:7]), partition=number))
    first = receive(fixture)
    assert 8 <= len(first) <= 16
    assert len(first) + len(receive(fixture)) == 21


def test_a_message_larger_than_the_limit_is_an_answer_by_itself(fixture):
    large = Record(b"x" * (ANSWER_BYTES_MAX + 1))
    partition = fixture.broker.topics.get_or_create("t").led()[0]
    partition.submit((large, large), 2 * len(large.value)).wait()
    assert [len(receive(fixture)) for _ in range(3)] == [1, 1, 0]
    assert len(fixture.broker.browser.browse("t", 0, **FROM_THE_BEGINNING).messages) == 1


FROM_THE_BEGINNING = {"offset": None, "position": None, "at_ms": None, "limit": 1_000, "wait_ms": 0, "peer": None}


def test_a_page_has_the_offset_of_the_next_one(fixture):
    send(fixture)
    page = fixture.broker.browser.browse("t", 0, **FROM_THE_BEGINNING)
    assert len(page.messages) == COUNT - 2
    rest = fixture.broker.browser.browse("t", 0, **FROM_THE_BEGINNING | {"offset": page.next_offset})
    assert values(page.messages + rest.messages) == VALUES
    offsets = [message.offset for message in page.messages + rest.messages]
    assert all(before < after for before, after in pairwise(offsets))
    assert rest.next_offset == rest.high_watermark


def test_a_whole_queue_is_read_whatever_its_size(fixture):
    send(fixture)
    assert values(fixture.broker.browser.read_all("t", None)) == VALUES
