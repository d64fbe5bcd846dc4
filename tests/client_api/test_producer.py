"""`send()`: order, exactly once, batching, bounds, and futures that cost nothing until they are read."""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import threading
import zlib
from concurrent.futures import Future
from datetime import UTC, datetime
from itertools import chain, repeat

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cluster import wait_until
from support.scripted_broker import ScriptedBroker, hang_up, hold, lose_answer, refuse

from portalmq import (
    Backpressure,
    Fenced,
    Forbidden,
    InvalidRequest,
    MessageTooLarge,
    NotEnoughReplicas,
    PartitionNotFound,
    Producer,
    RecordMetadata,
    Unavailable,
    wire,
)
from portalmq.network.http_answer import HttpAnswer
from portalmq.transport.request import Request
from portalmq.transport.retries import DeadlinePassed

PRODUCE = "/v1/topics/t/messages"
LONG = 60_000


def test_a_send_returns_the_position_of_the_message() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        assert producer.send("t", b"one").result(10) == RecordMetadata("t", 0, 0, 1_700_000_000_000)
        assert producer.send("t", b"two").result(10).offset == 1


@pytest.mark.parametrize(
    ("value", "payload", "content_type"),
    [
        (b"\x00\xff", b"\x00\xff", None),
        (bytearray(b"raw"), b"raw", None),
        ("grün", "grün".encode(), wire.TEXT),
        ({"celsius": 21.5}, b'{"celsius":21.5}', wire.JSON),
        ([1, None], b"[1,null]", wire.JSON),
        (None, b"null", wire.JSON),
    ],
)
def test_bytes_text_and_json_are_sent_with_their_type(value: object, payload: bytes, content_type: str | None) -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        producer.send("t", value).result(10)
        message = broker.topics["t"][0][0]
        assert (message.value, message.content_type) == (payload, content_type)


def test_all_fields_of_a_message_are_sent() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        at = datetime(2030, 1, 1, tzinfo=UTC)
        producer.send("t", b"", key="k", headers={"a": "b"}, delay_s=1.5, ttl_s=2, priority=3).result(10)
        producer.send("t", b"", key=b"\xff", deliver_at=at, content_type="image/png").result(10)
        first, second = broker.topics["t"][0]
        assert (first.key, first.headers, first.delay_ms, first.ttl_ms, first.priority) == (
            "k",
            {"a": "b"},
            1500,
            2000,
            3,
        )
        assert (second.key, second.deliver_at_ms, second.content_type) == (
            b"\xff",
            round(at.timestamp() * 1000),
            "image/png",
        )


def test_a_value_that_is_not_json_is_refused_at_the_call() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        with pytest.raises(TypeError):
            producer.send("t", object())
        for value in (float("nan"), {"x": [1.0, {"y": float("-inf")}]}, (None, float("inf"))):
            with pytest.raises(TypeError, match="which JSON cannot encode"):
                producer.send("t", value)
        with pytest.raises(TypeError, match="a key is text or bytes"):
            producer.send("t", b"", key=5)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="headers are text"):
            producer.send("t", b"", headers={"n": 1})  # type: ignore[dict-item]
        with pytest.raises(ValueError, match="time zone"):
            producer.send("t", b"", deliver_at=datetime(2030, 1, 1))
        producer.send("t", {"x": [None, "null", 1.5, {}]}).result(10)
        with pytest.raises(InvalidRequest):
            producer.send("no/topic", b"")
        with pytest.raises(MessageTooLarge):
            producer.send("t", b"x" * 9_000_000)
        with pytest.raises(PartitionNotFound):
            producer.send("t", b"", partition=7)


@pytest.mark.parametrize(
    "options",
    [{"compression": "gzip"}, {"acks": "most"}, {"batch_messages": 0}, {"idempotent": False, "producer_name": "p"}],
)
def test_invalid_options_are_refused_with_a_sentence(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Producer(**options)  # type: ignore[arg-type]


# --- batches ---------------------------------------------------------------------------------------------------------


def test_messages_sent_together_share_a_batch() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG, batch_messages=10) as producer:
        futures = [producer.send("t", b"%d" % number) for number in range(9)]
        assert broker.calls_of("POST", PRODUCE) == []
        futures.append(producer.send("t", b"9"))
        broker.wait_for(lambda: broker.values("t") == [b"%d" % number for number in range(10)])
        assert [future.result(10).offset for future in futures] == list(range(10))
        assert len(broker.calls_of("POST", PRODUCE)) == 1


def test_messages_sent_during_a_request_share_the_next_one() -> None:
    released = threading.Event()
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG, batch_messages=10) as producer:
        broker.script("POST", PRODUCE, [hold(released)])
        futures = [producer.send("t", b"%d" % number) for number in range(10)]
        broker.wait_for(lambda: len(broker.calls_of("POST", PRODUCE)) == 1)
        futures += [producer.send("t", b"%d" % number) for number in range(10, 45)]
        released.set()
        concurrent.futures.wait(futures, timeout=10)
        assert [len(call.batch().messages) for call in broker.calls_of("POST", PRODUCE)] == [10, 35]
        assert [future.result().offset for future in futures] == list(range(45))


def test_a_batch_is_bounded_in_bytes() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG, batch_bytes=1000) as producer:
        for _ in range(6):
            producer.send("t", b"x" * 400)
        producer.send("t", b"x" * 5000)
        producer.flush(10)
        sizes = [len(call.batch().messages) for call in broker.calls_of("POST", PRODUCE)]
        assert sizes == [2, 2, 2, 1]


def test_a_batch_is_sent_after_its_linger() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=20) as producer:
        producer.send("t", b"one")
        broker.wait_for(lambda: "t" in broker.topics and broker.values("t") == [b"one"])


def test_reading_a_result_does_not_wait_for_the_linger(monkeypatch: pytest.MonkeyPatch) -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG) as producer:
        assert producer.send("t", b"one").result(20).offset == 0
        assert producer.send("t", b"two").exception(20) is None
        monkeypatch.setattr("portalmq.producer.SEND_SELF_TIMEOUT_S_MIN", LONG)
        assert producer.send("t", b"three").result(20).offset == 2, (
            "the time is too short for the waiting thread to send the batch itself"
        )


def test_without_linger_every_message_is_sent_at_once() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=0) as producer:
        done, _ = concurrent.futures.wait([producer.send("t", b"one")], timeout=10)
        assert len(done) == 1


def test_the_request_is_the_one_of_the_contract() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, acks="leader", token="secret") as producer:
        producer.send("t", b"one").result(10)
        (call,) = broker.calls_of("POST", PRODUCE)
        assert call.query == {"partition": "0", "acks": "leader"}
        assert call.headers["content-type"] == wire.BATCH_MSGPACK
        assert call.headers["prefer"] == "return=minimal"
        assert call.headers["authorization"] == "Bearer secret"


def test_without_acks_the_position_is_unknown() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, acks="none") as producer:
        assert producer.send("t", b"one").result(10) == RecordMetadata("t", -1, -1, 0)
        assert broker.values("t") == [b"one"]


# --- partitions ------------------------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    keys=st.lists(st.text(max_size=20) | st.binary(max_size=20), min_size=1, max_size=30), partitions=st.integers(1, 7)
)
def test_a_key_goes_to_the_partition_of_its_crc32(keys: list[str | bytes], partitions: int) -> None:
    with ScriptedBroker(partitions) as broker, Producer(broker.url) as producer:
        futures = [producer.send("t", b"", key=key) for key in keys]
        producer.flush(10)
        for key, future in zip(keys, futures, strict=True):
            octets = key.encode() if isinstance(key, str) else key
            assert future.result(10).partition == zlib.crc32(octets) % partitions


def test_messages_without_a_key_are_spread_batch_by_batch() -> None:
    with ScriptedBroker(3) as broker, Producer(broker.url, linger_ms=LONG, batch_messages=5) as producer:
        for number in range(30):
            producer.send("t", b"%d" % number)
        producer.flush(10)
        assert [len(log) for log in broker.topics["t"]] == [10, 10, 10]
        for log in broker.topics["t"]:
            first, second = (int(message.value) for message in (log[0], log[5]))
            assert [int(message.value) for message in log] == [*range(first, first + 5), *range(second, second + 5)]


def test_a_named_partition_that_was_added_is_found() -> None:
    with ScriptedBroker(1) as broker, Producer(broker.url) as producer:
        producer.send("t", b"").result(10)
        broker.topics["t"].append([])
        assert producer.send("t", b"", partition=1).result(10).partition == 1


# --- retries ---------------------------------------------------------------------------------------------------------


def test_a_lost_answer_does_not_send_a_message_twice() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        producer.send("t", b"zero").result(10)
        broker.script("POST", PRODUCE, [lose_answer, lose_answer, hang_up])
        assert producer.send("t", b"one").result(10).offset == 1
        assert producer.send("t", b"two").result(10).offset == 2
        assert broker.values("t") == [b"zero", b"one", b"two"]


def test_order_holds_whatever_is_retried() -> None:
    trouble = [
        refuse(503, "unavailable"), lose_answer, hang_up, refuse(503, "not_enough_replicas"),
        refuse(429, "backpressure", retry_after="0.01"), lose_answer, refuse(421, "not_leader"), hang_up,
    ]  # fmt: skip
    sent = [b"%d" % number for number in range(200)]
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=1, batch_messages=20) as producer:
        broker.script("POST", PRODUCE, trouble)
        futures = [producer.send("t", value) for value in sent]
        producer.flush(20)
        assert broker.values("t") == sent
        assert [future.result().offset for future in futures] == list(range(200))


def test_each_thread_keeps_its_own_order() -> None:
    with ScriptedBroker(2) as broker, Producer(broker.url, linger_ms=1, batch_messages=7) as producer:
        broker.script("POST", PRODUCE, [lose_answer, hang_up, lose_answer])

        def send_all(name: str) -> None:
            for number in range(100):
                future = producer.send("t", f"{name}{number:03}", key=name)
                if number % 10 == 0:
                    future.result(10)

        threads = [threading.Thread(target=send_all, args=(name,)) for name in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        producer.flush(10)
        stored = [message.value.decode() for log in broker.topics["t"] for message in log]
        for name in "abcd":
            assert [value for value in stored if value[0] == name] == [f"{name}{number:03}" for number in range(100)]


def test_a_producer_without_idempotence_does_not_repeat_an_unknown_outcome() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, idempotent=False) as producer:
        producer.send("t", b"zero").result(10)
        broker.script("POST", PRODUCE, [lose_answer])
        with pytest.raises(Unavailable) as caught:
            producer.send("t", b"one").result(10)
        assert caught.value.outcome == "unknown"
        broker.script("POST", PRODUCE, [refuse(503, "unavailable")])
        assert producer.send("t", b"two").result(10).offset == 2, "a refusal applied nothing"
        assert broker.values("t") == [b"zero", b"one", b"two"]


def test_a_send_that_is_not_delivered_in_time_fails_with_the_last_error() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, delivery_timeout_s=70) as producer:
        broker.script("POST", PRODUCE, [refuse(503, "not_enough_replicas")] * 1_000)
        late = producer.send("t", b"one")
        assert late._batch.deadline == late._batch.born + 70
        broker.wait_for(lambda: len(broker.calls_of("POST", PRODUCE)) >= 2)
        late._batch.deadline = 0.0
        with pytest.raises(NotEnoughReplicas, match=r"not delivered within 70 s; the last try: scripted") as caught:
            late.result(20)
        assert caught.value.outcome == "not_applied"


def test_a_send_that_ends_between_two_tries_fails_with_the_last_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = chain([NotEnoughReplicas("too few")], repeat(DeadlinePassed("the time for this call is over")))

    with ScriptedBroker() as broker:
        producer = Producer(broker.url, idempotent=False, delivery_timeout_s=1)
        as_it_is = producer._transport.attempt

        def attempt(request: Request, deadline: float, **how: bool) -> HttpAnswer:
            if PRODUCE not in request.path:
                return as_it_is(request, deadline, **how)
            raise next(tries)

        monkeypatch.setattr(producer._transport, "attempt", attempt)
        with pytest.raises(NotEnoughReplicas, match=r"not delivered within 1 s; the last try: too few"):
            producer.send("t", b"one", partition=0).result(10)
        producer.close()


def test_after_an_unknown_outcome_the_producer_continues_under_a_new_identity() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        producer.send("t", b"zero").result(10)
        broker.script("POST", PRODUCE, [lose_answer, *[refuse(503, "unavailable")] * 1_000])
        sent = producer.send("t", b"one")
        broker.wait_for(lambda: len(broker.calls_of("POST", PRODUCE)) >= 3)
        sent._batch.deadline = 0.0
        late = sent.exception(20)
        assert isinstance(late, Unavailable)
        assert late.outcome == "unknown"
        broker.script("POST", PRODUCE, [])
        broker._scripts.clear()
        assert producer.send("t", b"two").result(10).offset == 2
        stamps = [call.batch().producer for call in broker.calls_of("POST", PRODUCE)]
        assert stamps[-1] is not None
        assert stamps[0] is not None
        assert stamps[-1].id != stamps[0].id
        assert stamps[-1].sequence == 0


def test_a_refused_batch_leaves_no_gap_in_the_sequence() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        broker.script("POST", PRODUCE, [refuse(403, "forbidden")])
        with pytest.raises(Forbidden):
            producer.send("t", b"one").result(10)
        assert producer.send("t", b"two").result(10).offset == 0
        assert len(broker.calls_of("POST", "/v1/producers")) == 1


def test_a_broker_that_has_forgotten_the_producer_is_served_under_a_new_identity() -> None:
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        producer.send("t", b"one").result(10)
        broker.stamps.clear()
        assert producer.send("t", b"two").result(10).offset == 1
        assert len(broker.calls_of("POST", "/v1/producers")) == 2


def test_a_fenced_producer_stays_fenced() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, producer_name="p") as producer:
        broker.script("POST", PRODUCE, [refuse(409, "fenced")] * 2)
        for _ in range(2):
            with pytest.raises(Fenced):
                producer.send("t", b"one").result(10)
        (asked,) = broker.calls_of("POST", "/v1/producers")
        assert asked.json()["name"] == "p"


def test_one_bad_message_does_not_fail_the_others() -> None:
    def refuse_the_bad(broker: ScriptedBroker, call):  # type: ignore[no-untyped-def]
        if any(message.value == b"bad" for message in call.batch().messages):
            raise MessageTooLarge("too large")
        return broker.work(call)

    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG) as producer:
        broker.script("POST", PRODUCE, [refuse_the_bad] * 100)
        futures = [producer.send("t", b"bad" if number == 5 else b"%d" % number) for number in range(12)]
        producer.flush(10)
        assert isinstance(futures[5].exception(), MessageTooLarge)
        good = [future for number, future in enumerate(futures) if number != 5]
        assert [future.result().offset for future in good] == list(range(11))
        assert broker.values("t") == [b"%d" % number for number in range(12) if number != 5]


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_full_buffer_makes_send_wait_and_then_fail() -> None:
    released = threading.Event()
    with ScriptedBroker() as broker, Producer(broker.url, buffer_messages=5) as producer:
        producer.send("t", b"first")
        producer.flush(10)  # a result may arrive before the buffer has room
        producer._max_block_s = 0.1
        broker.script("POST", PRODUCE, [hold(released)])
        for _ in range(5):
            producer.send("t", b"more")
        with pytest.raises(Backpressure, match="stayed full"):
            producer.send("t", b"too much")
        released.set()
        producer.flush(10)
        assert producer.send("t", b"again").result(10).offset == 6


def test_a_send_continues_as_soon_as_a_full_buffer_has_room() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG, buffer_bytes=2000) as producer:
        for _ in range(200):
            producer.send("t", b"x" * 100)
        producer.flush(10)
        assert len(broker.values("t")) == 200


def test_no_broker_at_all_raises_after_max_block() -> None:
    producer = Producer("http://127.0.0.1:1", max_block_s=0.1)
    with pytest.raises(Unavailable, match=r"no broker answers at http://127.0.0.1:1"):
        producer.send("t", b"one")
    producer.close()


def test_a_look_up_that_ends_between_two_tries_raises_the_last_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries = chain([Unavailable("nobody there")], repeat(DeadlinePassed("the time for this call is over")))

    async def attempt(request: Request, deadline: float, **how: bool) -> HttpAnswer:
        raise next(tries)

    producer = Producer("http://127.0.0.1:1")
    monkeypatch.setattr(producer._transport.calls, "attempt", attempt)
    with pytest.raises(Unavailable, match="nobody there"):
        producer.send("t", b"one")
    producer.close()


def test_flush_raises_when_its_time_is_over() -> None:
    released = threading.Event()
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        broker.script("POST", PRODUCE, [hold(released)])
        producer.send("t", b"one")
        with pytest.raises(TimeoutError):
            producer.flush(0.05)
        released.set()


def test_close_sends_the_remaining_messages_and_can_be_called_twice() -> None:
    with ScriptedBroker() as broker:
        producer = Producer(broker.url, linger_ms=LONG)
        future = producer.send("t", b"one")
        producer.close()
        producer.close()
        assert broker.values("t") == [b"one"]
        assert future.result(0).offset == 0
        with pytest.raises(RuntimeError, match="closed"):
            producer.send("t", b"two")


def test_close_with_a_broker_gone_fails_the_futures_and_returns() -> None:
    with ScriptedBroker() as broker:
        producer = Producer(broker.url)
        producer.send("t", b"one").result(10)
        broker.script("POST", PRODUCE, [refuse(503, "unavailable")] * 1000)
        future = producer.send("t", b"two")
        producer.close(timeout=0.1)
        assert isinstance(future.exception(10), Unavailable)


def test_a_program_without_close_still_sends() -> None:
    import subprocess
    import sys

    with ScriptedBroker() as broker:
        program = f"from portalmq import Producer; Producer({broker.url!r}, linger_ms=60000).send('t', b'one')"
        # The producer is referenced by its sender thread, and closed when the interpreter ends.
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        assert broker.values("t") == [b"one"]


# --- futures ---------------------------------------------------------------------------------------------------------


def test_a_future_that_is_never_queried_has_no_state() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=1) as producer:
        future = producer.send("t", b"one")
        assert isinstance(future, Future)
        assert set(vars(future)) == {"_batch", "_index"}
        producer.flush(10)
        assert future.done()
        assert future.result(0).offset == 0
        assert set(vars(future)) == {"_batch", "_index"}


def test_callbacks_run_whether_added_before_or_after_the_outcome() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=1) as producer:
        seen: list[int] = []
        future = producer.send("t", b"one")
        future.add_done_callback(lambda done: seen.append(done.result().offset))
        producer.flush(10)
        future.add_done_callback(lambda done: seen.append(done.result().offset))
        assert seen == [0, 0]


def test_a_callback_may_send() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=1) as producer:
        sent: list[Future[RecordMetadata]] = []
        first = producer.send("t", b"one")
        first.add_done_callback(lambda _: sent.append(producer.send("t", b"two")))
        first.result(10)
        broker.wait_for(lambda: broker.values("t") == [b"one", b"two"])


def test_wait_as_completed_and_asyncio_understand_the_futures() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=1) as producer:
        futures = [producer.send("t", b"%d" % number) for number in range(5)]
        assert len(concurrent.futures.wait(futures, timeout=10).done) == 5
        assert {future.result().offset for future in concurrent.futures.as_completed(futures, timeout=10)} == set(
            range(5)
        )

        async def send() -> RecordMetadata:
            return await asyncio.wrap_future(producer.send("t", b"from asyncio"))

        assert asyncio.run(send()).offset == 5


def test_a_future_cannot_be_cancelled() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG) as producer:
        future = producer.send("t", b"one")
        assert not future.cancel()
        assert future.running()
        assert future.result(10).offset == 0


def test_every_result_of_a_failed_batch_raises_an_exception_of_its_own() -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG) as producer:
        broker.script("POST", PRODUCE, [refuse(403, "forbidden")])
        futures = [producer.send("t", b"one"), producer.send("t", b"two")]
        producer.flush(10)
        first, second = (future.exception(0) for future in futures)
        assert isinstance(first, Forbidden)
        assert isinstance(second, Forbidden)
        assert first is not second


def test_a_failure_is_logged_if_its_future_was_never_read(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG) as producer:
        broker.script("POST", PRODUCE, [refuse(403, "forbidden")] * 2)
        future = producer.send("t", b"one")
        producer.flush(10)
        assert isinstance(future.exception(), Forbidden)
        del future
        gc.collect()
        assert caplog.text == ""
        producer.send("t", b"two")
        producer.close()
        wait_until(
            lambda: "1 messages to t/0 failed, and their futures were never read: scripted forbidden" in caplog.text,
            "it is told",
        )


def test_a_result_with_too_short_a_time_raises_timeout_and_the_message_still_arrives() -> None:
    released = threading.Event()
    with ScriptedBroker() as broker, Producer(broker.url) as producer:
        broker.script("POST", PRODUCE, [hold(released)])
        future = producer.send("t", b"one")
        with pytest.raises(TimeoutError):
            future.result(0.05)
        released.set()
        assert future.result(10).offset == 0


def test_a_waiting_thread_hands_its_batch_over_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.producer.SEND_SELF_TIMEOUT_S_MIN", 0)
    released = threading.Event()
    with ScriptedBroker() as broker, Producer(broker.url, linger_ms=LONG) as producer:
        producer.send("t", b"zero").result(10)
        broker.script("POST", PRODUCE, [hold(released)])
        future = producer.send("t", b"one")
        with pytest.raises(TimeoutError):
            future.result(0.05)
        assert future.result(20).offset == 1, "a sender has taken over"
        released.set()
        broker.wait_for(lambda: len(broker.calls_of("POST", PRODUCE)) == 3)
        assert broker.values("t") == [b"zero", b"one"]


def test_a_partition_that_hangs_does_not_delay_the_others() -> None:
    released = threading.Event()
    with ScriptedBroker(3) as broker, Producer(broker.url, linger_ms=1) as producer:
        producer.send("t", b"", partition=0).result(10)
        broker.script("POST", PRODUCE, [hold(released), hold(released)])
        stuck = [producer.send("t", b"stuck", partition=partition) for partition in (0, 1)]
        broker.wait_for(lambda: len(broker.calls_of("POST", PRODUCE)) == 3)
        done, _ = concurrent.futures.wait([producer.send("t", b"free", partition=2)], timeout=10)
        assert len(done) == 1
        released.set()
        concurrent.futures.wait(stuck, timeout=10)


def test_a_plain_message_encodes_as_a_message_of_the_contract() -> None:
    from portalmq.producers.outgoing import PlainMessage

    cheap = msgspec.msgpack.encode({"messages": [PlainMessage(b"x")]})
    assert wire.decode_msgpack(cheap, wire.PackBatch).messages == [wire.PackMessage(value=b"x")]


def test_closing_ends_a_send_that_still_looks_for_a_broker() -> None:
    with ScriptedBroker() as broker:
        broker.script("GET", "/v1/metadata", [hang_up] * 1000)
        producer = Producer(broker.url, max_block_s=30)
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            sending = threads.submit(producer.send, "t", b"1")
            broker.wait_for(lambda: bool(broker.calls_of("GET", "/v1/metadata")))
            producer.close()
            with pytest.raises(Unavailable):
                sending.result(20)
