"""No answer has more bytes than the broker has room for, and repeated requests bring everything."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.domain import records, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.answer_size import ANSWER_BYTES_MAX, size_of
from portalmq.broker.storage.batch import Record

MIB = 1024 * 1024
# Eighteen values of a MiB: more than an answer brings, by two.
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
    return fixture.broker.receive(group, request, None)


def values(found):
    return [each.record.value for each in found]


def in_two(fixture, group="g"):
    """What two receives bring, of which the first has what fits."""
    first, second = receive(fixture, group), receive(fixture, group)
    assert sum(size_of(each.record) for each in first) <= ANSWER_BYTES_MAX
    assert (len(first), len(second)) == (COUNT - 2, 2)
    return [*first, *second]


def test_a_receive_brings_what_fits_and_the_next_one_the_rest(fixture):
    send(fixture)
    assert values(in_two(fixture)) == VALUES


@pytest.mark.parametrize("more", [{"priority": 3}, {"key": b"k"}, {"expires_at_ms": 1 << 50}], ids=str)
def test_of_messages_that_are_not_plain_a_receive_brings_what_fits(fixture, more):
    send(fixture, **more)
    found = receive(fixture)
    assert 0 < sum(size_of(each.record) for each in found) <= ANSWER_BYTES_MAX
    assert values(found + receive(fixture)) == VALUES


def test_of_delayed_messages_a_receive_brings_what_fits(fixture):
    send(fixture, deliver_at_ms=fixture.clock.wall_ms() + 1_000)
    fixture.clock.advance(2_000)
    assert values(in_two(fixture)) == VALUES


@pytest.mark.parametrize("ordering", ["none", "key"])
def test_of_what_came_back_a_receive_brings_what_fits(fixture, ordering):
    fixture.broker.put_group("g", {"ordering": ordering, "max_deliveries": 100})
    send(fixture)
    found = in_two(fixture)
    assert fixture.broker.nack("g", [each.receipt for each in found], 0, None) == [True] * COUNT
    again = in_two(fixture)
    assert values(again) == VALUES
    assert {each.delivery_count for each in again} == {2}
    assert fixture.broker.ack("g", [each.receipt for each in again]) == [True] * COUNT
    assert fixture.broker.describe_group("g").lag == 0


def test_over_several_partitions_an_answer_is_one(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    for number in range(3):
        fixture.broker.produce("t", ProduceRequest(records(*VALUES[:7]), partition=number))
    first = receive(fixture)
    assert 8 <= len(first) <= 16
    assert len(first) + len(receive(fixture)) == 21


def test_a_message_that_is_larger_than_an_answer_is_one(fixture):
    large = Record(b"x" * (ANSWER_BYTES_MAX + 1))
    partition = fixture.broker.topics.get_or_create("t").led()[0]
    partition.submit((large, large), 2 * len(large.value)).wait()
    assert [len(receive(fixture)) for _ in range(3)] == [1, 1, 0]
    assert len(fixture.broker.browse("t", 0, **FROM_THE_BEGINNING).messages) == 1


FROM_THE_BEGINNING = {"offset": None, "position": None, "at_ms": None, "limit": 1_000, "wait_ms": 0, "peer": None}


def test_a_page_says_where_the_next_one_begins(fixture):
    send(fixture)
    page = fixture.broker.browse("t", 0, **FROM_THE_BEGINNING)
    assert len(page.messages) == COUNT - 2
    rest = fixture.broker.browse("t", 0, **FROM_THE_BEGINNING | {"offset": page.next_offset})
    assert values(page.messages + rest.messages) == VALUES
    offsets = [message.offset for message in page.messages + rest.messages]
    assert all(before < after for before, after in pairwise(offsets))
    assert rest.next_offset == rest.high_watermark


def test_a_whole_queue_is_read_whatever_its_size(fixture):
    send(fixture)
    assert values(fixture.broker.read_all("t", None)) == VALUES
