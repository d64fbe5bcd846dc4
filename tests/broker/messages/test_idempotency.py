"""Requests with the same Idempotency-Key are one message, wherever and whenever they are repeated."""

from __future__ import annotations

from types import SimpleNamespace

import gevent
import pytest
from support.domain import HandClock, running

from portalmq import wire
from portalmq.broker.messages.idempotency import check_done
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import IdempotencyKeyReused, InvalidRequest, RequestInProgress


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as fixture:
        yield fixture


def send(fixture, value: str, *, key: str | None = None, idempotency_key="k", acks="all", **more):
    record = Record(value.encode(), "text/plain", None if key is None else key.encode())
    return fixture.broker.produce("t", ProduceRequest([record], acks=acks, idempotency_key=idempotency_key, **more))


def stored(fixture) -> list[str]:
    return [each.record.value.decode() for each in fixture.broker.browser.read_all("t", None)]


def test_an_idempotency_key_gives_the_first_answer_again(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=5))
    first = send(fixture, "a")
    fixture.clock.advance(1_000)
    assert send(fixture, "a") == first
    assert len(list(fixture.broker.browser.read_all("t", None))) == 1


def test_an_idempotency_key_with_another_body_is_refused(fixture):
    send(fixture, "a")
    with pytest.raises(IdempotencyKeyReused):
        send(fixture, "b")


def test_an_idempotency_key_may_be_used_again_after_the_window(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(config={"dedup_window_ms": 1_000}))
    (first,) = send(fixture, "a")
    fixture.clock.advance(1_001)
    (second,) = send(fixture, "b")
    assert second.offset > first.offset


def test_an_idempotency_key_survives_a_restart_and_growth(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        before.broker.create_topic("t", wire.CreateTopic(partitions=3))
        first = send(before, "a")
        before.broker.alter_topic("t", wire.AlterTopic(partitions=8))
    with running(tmp_path, clock) as after:
        assert send(after, "a") == first


@pytest.mark.parametrize("acks", ["all", "leader", "none"])
def test_a_repeat_is_answered_by_its_own_acks(fixture, acks):
    (first,) = send(fixture, "a")
    (again,) = send(fixture, "a", acks=acks)
    assert again == first if acks != "none" else again.offset == -1
    assert stored(fixture) == ["a"]


def test_a_repeat_of_a_request_with_acks_none_gets_the_offset(fixture):
    (first,) = send(fixture, "a", acks="none")
    assert first.offset == -1

    def told():
        try:
            return send(fixture, "a")[0].offset
        except RequestInProgress:
            gevent.sleep(0.01)
            return None

    with gevent.Timeout(60):
        while (offset := told()) is None:
            pass
    assert offset >= 0
    assert stored(fixture) == ["a"]


def test_repeats_during_the_first_append_are_refused_as_in_progress(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=4))
    greenlets = [gevent.spawn(attempt, fixture) for _ in range(10)]
    gevent.joinall(greenlets, timeout=60, raise_error=True)
    answers = [greenlet.get() for greenlet in greenlets]
    refused = [answer for answer in answers if isinstance(answer, RequestInProgress)]
    assert refused
    assert all((each.retryable, each.outcome, each.status) == (True, "unknown", 409) for each in refused)
    assert all(each.retry_after_s for each in refused)
    assert len({answer for answer in answers if not isinstance(answer, RequestInProgress)}) == 1
    assert send(fixture, "a")[0] in answers
    assert stored(fixture) == ["a"]


def attempt(fixture):
    try:
        return send(fixture, "a")[0]
    except RequestInProgress as error:
        return error


OTHER_REQUESTS = {
    "value": {"value": "b"},
    "key": {"key": "other"},
    "no key": {"key": None},
    "delay": {"as_sent": (5, None, None, 0)},
    "time to live": {"as_sent": (None, None, 5, 0)},
    "priority": {"as_sent": (None, None, None, 5)},
    "partition": {"partition": 1},
    "another partition": {"partition": 2},
}


@pytest.mark.parametrize(
    ("partitions", "other"),
    [
        pytest.param(partitions, other, id=f"{name} of {partitions}")
        for partitions in (1, 5)
        for name, other in OTHER_REQUESTS.items()
        if other.get("partition", 0) < partitions
    ],
)
def test_another_request_under_the_same_key_is_refused_wherever_it_goes(fixture, other, partitions):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=partitions))
    sent = {"value": "a", "key": "mine"}
    first = send(fixture, **sent)
    with pytest.raises(IdempotencyKeyReused):
        send(fixture, **{**sent, **other})
    assert send(fixture, **sent) == first
    assert stored(fixture) == ["a"]


def test_content_type_and_headers_belong_to_the_request(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    how = {"acks": "all", "idempotency_key": "k"}
    fixture.broker.produce("t", ProduceRequest([Record(b"a", "text/plain")], **how))
    for other in (Record(b"a", "text/html"), Record(b"a", "text/plain", headers={"h": "1"})):
        with pytest.raises(IdempotencyKeyReused):
            fixture.broker.produce("t", ProduceRequest([other], **how))


def test_a_repeat_may_have_another_trace_and_another_order_of_headers(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    sent = [
        {"traceparent": "00-1-1-00", "a": "1", "b": "2"},
        {"b": "2", "a": "1", "traceparent": "00-1-2-00", "tracestate": "x"},
        {"a": "1", "b": "2"},
    ]
    answers = [
        fixture.broker.produce("t", ProduceRequest([Record(b"a", headers=headers)], idempotency_key="k"))
        for headers in sent
    ]
    assert answers[1] == answers[2] == answers[0]


def test_a_repeat_with_a_delay_is_the_same_request_at_a_later_time(fixture):
    def send_later():
        record = Record(b"a", deliver_at_ms=fixture.clock.wall_ms() + 500)
        as_sent = (500, None, None, 0)
        return fixture.broker.produce("t", ProduceRequest([record], idempotency_key="k", as_sent=as_sent))

    first = send_later()
    fixture.clock.advance(100)
    assert send_later() == first


@pytest.mark.parametrize("key", ["a", "b", "c", "d", None])
def test_a_keyed_message_is_found_again_after_the_topic_has_grown(fixture, key):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    first = send(fixture, "a", key=key)
    fixture.broker.alter_topic("t", wire.AlterTopic(partitions=11))
    assert send(fixture, "a", key=key) == first
    assert stored(fixture) == ["a"]


def test_a_default_time_to_live_is_not_part_of_the_request(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(config={"default_ttl_ms": 60_000}))
    first = send(fixture, "a")
    fixture.clock.advance(1_000)
    assert send(fixture, "a") == first


def test_a_key_belongs_to_one_message(fixture):
    with pytest.raises(InvalidRequest):
        fixture.broker.produce("t", ProduceRequest([Record(b"a"), Record(b"b")], idempotency_key="k"))


def test_a_thousand_keys_leave_nothing_in_memory(fixture):
    for number in range(1_000):
        send(fixture, "a", idempotency_key=f"k{number}")
    partition = fixture.broker.topics.get("t").partition(0)
    assert partition.uncommitted._ids == {}
    assert send(fixture, "a", idempotency_key="k0")[0].offset == 1


@pytest.mark.parametrize(
    ("acks", "written", "committed", "is_done"),
    [
        ("all", True, True, True),
        ("all", True, False, False),
        ("leader", True, False, True),
        ("leader", False, False, False),
        ("none", False, False, True),
    ],
)
def test_a_repeat_is_answered_once_the_first_request_meets_its_acks(acks, written, committed, is_done):
    partition = SimpleNamespace(
        number=0, high_watermark=8 if committed else 7, log=SimpleNamespace(end_offset=8 if written else 7)
    )
    if is_done:
        check_done(partition, 7, acks)
    else:
        with pytest.raises(RequestInProgress):
            check_done(partition, 7, acks)
