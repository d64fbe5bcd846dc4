"""A repeat under an idempotency key is told nothing that its first copy may yet contradict."""

from __future__ import annotations

import gevent
import pytest
from support.domain import running
from support.held_writes import held_writes

from portalmq import wire
from portalmq.broker.messages.idempotency import SEARCHED_HERE_MAX
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import (
    Backpressure,
    IdempotencyKeyReused,
    NotEnoughReplicas,
    PortalMQError,
    RequestInProgress,
    StorageFull,
)


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
        for partition in range(2):
            fixture.broker.produce("t", ProduceRequest([Record(b"first")], partition=partition))
        yield fixture


def partition_of(fixture, number: int = 0):
    return fixture.broker.topics.get("t").local[number]


def send(fixture, value: str, keys: int = 1, acks: wire.Acks = "all", partition: int = 0):
    """Send a batch of so many keys, or the error that it gets."""
    batch = [Record(value.encode()) for _ in range(keys)]
    request = ProduceRequest(batch, partition=partition, acks=acks, keys=[(f"k{at}", ()) for at in range(keys)])
    return told(fixture, request)


def told(fixture, request: ProduceRequest):
    try:
        return fixture.broker.produce("t", request)
    except PortalMQError as error:
        return error


def send_single(fixture, value: str, partition: int, acks: wire.Acks = "all"):
    request = ProduceRequest([Record(value.encode())], partition=partition, acks=acks, idempotency_key="k0")
    return told(fixture, request)


SENDERS = {
    "few keys": lambda fixture, value, acks: send(fixture, value, 2, acks),
    "many keys": lambda fixture, value, acks: send(fixture, value, 2 * SEARCHED_HERE_MAX, acks),
    "a header": lambda fixture, value, acks: send_single(fixture, value, 0, acks),
    # The first message is in another partition than the second one is for.
    "two partitions": lambda fixture, value, acks: send_single(fixture, value, 1 if value == "other" else 0, acks),
}


@pytest.mark.parametrize("sender", SENDERS)
@pytest.mark.parametrize("is_refused", [True, False])
def test_only_a_committed_message_refuses_another_one_under_its_key(fixture, monkeypatch, sender, is_refused):
    send_it = SENDERS[sender]
    with held_writes(monkeypatch, partition_of(fixture)) as writes:
        send_it(fixture, "value", "none")
        other = gevent.spawn(send_it, fixture, "other", "all")
        gevent.idle()
        assert not other.ready()
        if is_refused:
            writes.refuse()
            error = other.get()
            assert isinstance(error, StorageFull)
            assert error.outcome == "not_applied"
        else:
            writes.let_through()
            assert isinstance(other.get(), IdempotencyKeyReused)
    again = send_it(fixture, "other", "all")
    assert isinstance(again, list if is_refused else IdempotencyKeyReused)


@pytest.mark.parametrize("sender", SENDERS)
def test_a_repeat_during_the_first_append_does_not_say_that_nothing_is_stored(fixture, monkeypatch, sender):
    with held_writes(monkeypatch, partition_of(fixture)) as writes:
        SENDERS[sender](fixture, "value", "none")
        error = SENDERS[sender](fixture, "value", "all")
        assert isinstance(error, RequestInProgress)
        assert (error.outcome, error.retryable) == ("unknown", True)
        writes.let_through()
    assert isinstance(SENDERS[sender](fixture, "value", "all"), list)


@pytest.mark.parametrize("refusal", [Backpressure, StorageFull, NotEnoughReplicas])
def test_a_share_that_is_stored_in_part_is_not_refused_as_if_it_were_not(fixture, monkeypatch, refusal):
    def refuse(*_arguments, **_options):
        raise refusal("not now")

    send(fixture, "value", 2)
    monkeypatch.setattr(partition_of(fixture), "submit", refuse)
    assert isinstance(send(fixture, "value", 2), list)
    partly_known = send(fixture, "value", 3)
    assert isinstance(partly_known, refusal)
    assert partly_known.outcome == "unknown"
    unknown = send_single(fixture, "another", 1)
    assert isinstance(unknown, IdempotencyKeyReused)
    assert unknown.outcome == "not_applied"
