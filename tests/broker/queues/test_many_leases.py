"""Very many leases of a group that end at once are processed a few at a time, whatever happens between."""

from __future__ import annotations

import itertools

import pytest
from support.domain import Fixture, records, running

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.errors import GroupNotFound


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as it:
        yield it


@pytest.fixture
def few_at_once(monkeypatch):
    """Lower the limits of one turn. Each pause records the number of dead messages."""
    monkeypatch.setattr("portalmq.broker.core.queue.spans.RETURNED_AT_ONCE", 3)
    monkeypatch.setattr("portalmq.broker.queues.group_receiver.DEAD_A_RECORD", 2)

    def watch(fixture: Fixture, meanwhile=lambda: None) -> list[int]:
        pauses: list[int] = []

        def give_way() -> None:
            pauses.append(fixture.broker.describe_group("g").dead)
            meanwhile()

        monkeypatch.setattr("portalmq.broker.queues.group_receiver.give_way", give_way)
        return pauses

    return watch


def received(fixture: Fixture, max_messages: int = 100) -> list[str]:
    messages = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=max_messages), None)
    return [message.record.value.decode() for message in messages]


def leased_one_by_one(fixture: Fixture, count: int, **config) -> None:
    fixture.broker.put_group("g", config)
    fixture.broker.produce("t", ProduceRequest(records(*map(str, range(count)))))
    for _ in range(count):
        received(fixture, 1)
    fixture.clock.advance(30_001)


def test_many_leases_that_end_at_once_are_processed_with_pauses(fixture, few_at_once):
    leased_one_by_one(fixture, 10)
    pauses = few_at_once(fixture)
    assert received(fixture) == [str(number) for number in range(10)], "the messages are delivered in order"
    assert len(pauses) == 3


def test_many_messages_are_given_up_in_records_with_pauses(fixture, few_at_once):
    leased_one_by_one(fixture, 10, max_deliveries=1)
    pauses = few_at_once(fixture)
    assert received(fixture) == []
    assert fixture.broker.describe_group("g").dead == 10
    assert all(after - before <= 2 for before, after in itertools.pairwise([0, *pauses]))


def test_nothing_is_received_of_a_group_that_ends_while_its_dead_are_given_up(fixture, few_at_once):
    leased_one_by_one(fixture, 10, max_deliveries=1)
    few_at_once(fixture, meanwhile=lambda: fixture.broker.group_admin.delete("g"))
    assert received(fixture) == []
    with pytest.raises(GroupNotFound):
        fixture.broker.describe_group("g")
