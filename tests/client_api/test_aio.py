"""AsyncProducer and AsyncConsumer: they never block the loop, lose nothing on a cancellation, and otherwise act as the
synchronous classes."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
from support.scripted_broker import ScriptedBroker, hang_up, hold, lose_answer, refuse
from support.tls import TlsFront, key, pem

from portalmq import AsyncConsumer, AsyncProducer, Consumer, Producer, StaleReceipt, TopicNotFound
from portalmq.aio import SETTLERS_MAX
from portalmq.errors import Backpressure, Unavailable
from portalmq.transport.transport import Transport

WITHIN_S = 10.0
TEST_WITHIN_S = 30.0
LONGER_THAN_A_TEST_MS = 10_000 * TEST_WITHIN_S


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


def run(test: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(test, TEST_WITHIN_S))


def block_no_longer_than(producer: AsyncProducer, seconds: float) -> None:
    """Set max_block_s for later sends: the first send has more time, for the look-up of the topic."""
    producer._inner._max_block_s = seconds


async def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "that did not come"
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(AsyncProducer, Producer), (AsyncProducer.send, Producer.send), (AsyncConsumer, Consumer)],
)
def test_arguments_are_those_of_the_synchronous_one(ours: Any, theirs: Any) -> None:
    mine, wanted = inspect.signature(ours).parameters, inspect.signature(theirs).parameters
    assert list(mine) == list(wanted)
    for name, parameter in mine.items():
        assert (parameter.default, parameter.kind) == (wanted[name].default, wanted[name].kind)


def test_a_wrong_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="linger"):
        AsyncProducer(linger=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="groups"):
        AsyncConsumer("t", groups="g")  # type: ignore[call-arg]


@pytest.mark.parametrize(("ours", "theirs"), [(AsyncConsumer, Consumer), (AsyncProducer, Producer)])
def test_every_public_method_has_an_async_twin(ours: type, theirs: type) -> None:
    internal = {"has_room_for", "commit_finished"}
    wanted = {name for name in vars(theirs) if not name.startswith("_") and callable(getattr(theirs, name))} - internal
    assert wanted <= set(vars(ours))
    for name in wanted:
        mine, its = inspect.signature(getattr(ours, name)), inspect.signature(getattr(theirs, name))
        assert list(mine.parameters) == list(its.parameters), name


class TestProducing:
    def test_a_send_returns_the_position_of_the_message(self, broker: ScriptedBroker) -> None:
        async def test() -> None:
            async with AsyncProducer(broker.url) as producer:
                first = await producer.send("t", {"a": 1}, key="k", headers={"h": "v"})
                second = await producer.send("t", "text")
            assert [(each.topic, each.partition, each.offset) for each in (first, second)] == [
                ("t", 0, 0),
                ("t", 0, 1),
            ]

        run(test())
        assert broker.values("t") == [b'{"a":1}', b"text"]

    def test_a_send_that_is_waited_for_does_not_linger(self, broker: ScriptedBroker) -> None:
        async def test() -> None:
            async with AsyncProducer(broker.url, linger_ms=LONGER_THAN_A_TEST_MS) as producer:
                await producer.send("t", b"1")
                await producer.send("t", b"2")

        run(test())

    def test_sends_of_one_moment_share_a_batch_and_keep_their_order(self, broker: ScriptedBroker) -> None:
        values = [str(number).encode() for number in range(500)]

        async def test() -> None:
            async with AsyncProducer(broker.url, linger_ms=LONGER_THAN_A_TEST_MS) as producer:
                await producer.send("t", b"first")
                placed = await asyncio.gather(*(producer.send("t", value) for value in values))
                assert [each.offset for each in placed] == list(range(1, 501))

        run(test())
        assert broker.values("t") == [b"first", *values]
        assert len(broker.calls_of("POST", "/v1/topics/t/messages")) < 20

    def test_order_is_kept_through_a_full_buffer_without_blocking_the_loop(self, broker: ScriptedBroker) -> None:
        values = [str(number).encode() for number in range(200)]
        slow = threading.Event()
        broker.fill("t", [])
        broker.script("POST", "/v1/topics/t/messages", [hold(slow)])

        async def test() -> None:
            async with AsyncProducer(broker.url, buffer_messages=10) as producer:
                sends = [asyncio.create_task(producer.send("t", value)) for value in values]
                for _ in range(20):
                    await asyncio.sleep(0.005)
                assert not any(send.done() for send in sends)
                slow.set()
                await asyncio.gather(*sends)

        run(test())
        assert broker.values("t") == values

    def test_a_buffer_that_stays_full_raises_backpressure(self, broker: ScriptedBroker) -> None:
        slow = threading.Event()
        broker.fill("t", [])
        broker.script("POST", "/v1/topics/t/messages", [hold(slow)])

        async def test() -> None:
            async with AsyncProducer(broker.url, buffer_messages=1) as producer:
                first = asyncio.create_task(producer.send("t", b"1"))
                await until(lambda: broker.calls_of("POST", "/v1/topics/t/messages"))
                block_no_longer_than(producer, 0.1)
                with pytest.raises(Backpressure):
                    await producer.send("t", b"2")
                slow.set()
                await first

        run(test())

    def test_many_concurrent_waits_take_no_longer_than_one(self, broker: ScriptedBroker) -> None:
        """They wait in a queue, and each limit counts from its call."""
        never = threading.Event()
        broker.fill("t", [])
        broker.script("POST", "/v1/topics/t/messages", [hold(never)] * 100)

        async def test() -> list[Any]:
            producer = AsyncProducer(broker.url, buffer_messages=1)
            first = asyncio.create_task(producer.send("t", b"0"))
            await until(lambda: broker.calls_of("POST", "/v1/topics/t/messages"))
            block_no_longer_than(producer, 0.4)
            sends = (producer.send("t", b"x") for _ in range(100))  # 40 s in sequence
            outcomes = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), 15)
            never.set()
            await first
            await producer.close()
            return outcomes

        assert {type(outcome) for outcome in run(test())} == {Backpressure}
        assert broker.values("t") == [b"0"]

    def test_a_lost_answer_sends_nothing_twice(self, broker: ScriptedBroker) -> None:
        broker.script("POST", "/v1/topics/t/messages", [lose_answer, hang_up])

        async def test() -> None:
            async with AsyncProducer(broker.url) as producer:
                assert (await producer.send("t", b"once")).offset == 0

        run(test())
        assert broker.values("t") == [b"once"]

    def test_a_refused_commit_is_raised(self, broker: ScriptedBroker) -> None:
        broker.fill("t", [])
        broker.script("POST", "/v1/topics/t/messages", [refuse(404, "topic_not_found")])

        async def test() -> None:
            async with AsyncProducer(broker.url) as producer:
                with pytest.raises(TopicNotFound):
                    await producer.send("t", b"1")
                with pytest.raises(TypeError):
                    await producer.send("t", object())

        run(test())

    def test_a_cancelled_send_affects_no_other(self, broker: ScriptedBroker) -> None:
        slow = threading.Event()
        broker.fill("t", [])
        broker.script("POST", "/v1/topics/t/messages", [hold(slow)])

        async def test() -> None:
            async with AsyncProducer(broker.url) as producer:
                cancelled = asyncio.create_task(producer.send("t", b"1"))
                other = asyncio.create_task(producer.send("t", b"2"))
                await until(lambda: broker.calls_of("POST", "/v1/topics/t/messages"))
                cancelled.cancel()
                slow.set()
                assert (await other).offset == 1
                with pytest.raises(asyncio.CancelledError):
                    await cancelled

        run(test())
        assert broker.values("t") == [b"1", b"2"]

    def test_flush_also_waits_for_sends_that_wait_for_room(self, broker: ScriptedBroker) -> None:
        async def test() -> None:
            async with AsyncProducer(broker.url, buffer_messages=5) as producer:
                sends = [asyncio.create_task(producer.send("t", b"x")) for _ in range(50)]
                await asyncio.sleep(0)
                await producer.flush(timeout=10)
                assert len(broker.values("t")) == 50
                await asyncio.gather(*sends)

        run(test())

    def test_a_second_close_sends_what_the_cancelled_first_one_left(self, broker: ScriptedBroker) -> None:
        async def test() -> None:
            async with AsyncProducer(broker.url, linger_ms=5_000) as producer:
                sends = [asyncio.create_task(producer.send("t", b"%d" % number)) for number in range(3)]
                await asyncio.sleep(0)
                first = asyncio.create_task(producer.close())
                await asyncio.sleep(0)
                first.cancel()
                await producer.close()
                assert len(await asyncio.gather(*sends)) == 3
                await producer.close()

        run(test())
        assert broker.values("t") == [b"0", b"1", b"2"]

    def test_close_ends_in_time_even_while_others_wait_for_a_broker(self, broker: ScriptedBroker) -> None:
        never = threading.Event()
        broker.script("GET", "/v1/metadata", [hold(never)])

        async def test() -> None:
            producer = AsyncProducer(broker.url)
            sends = [asyncio.create_task(producer.send("t", b"1")) for _ in range(3)]
            await until(lambda: broker.calls_of("GET", "/v1/metadata"))
            await asyncio.wait_for(producer.close(0.2), 15)
            outcomes = await asyncio.wait_for(asyncio.gather(*sends, return_exceptions=True), 15)
            assert {isinstance(outcome, RuntimeError | Unavailable) for outcome in outcomes} == {True}

        try:
            run(test())
        finally:
            never.set()

    def test_a_closed_client_raises_an_error(self, broker: ScriptedBroker) -> None:
        async def test() -> None:
            producer = AsyncProducer(broker.url)
            await producer.close()
            with pytest.raises(RuntimeError, match="closed"):
                await producer.send("t", b"1")

        run(test())


class TestConsuming:
    def test_the_next_message_acks_the_previous_one(self, broker: ScriptedBroker) -> None:
        broker.fill("t", [b"1", b"2", b"3"])

        async def test() -> None:
            seen = []
            async with AsyncConsumer("t", group="g", bootstrap=broker.url, idle_timeout_s=0.3) as consumer:
                async for message in consumer:
                    seen.append(message.value)
            assert seen == [b"1", b"2", b"3"]

        run(test())
        assert broker.done == {("t", 0, offset) for offset in range(3)}

    def test_an_exception_in_the_body_returns_the_message(self, broker: ScriptedBroker) -> None:
        broker.fill("t", [b"1", b"2"])

        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url) as consumer:
                async for _ in consumer:
                    raise KeyError("body")

        with pytest.raises(KeyError):
            run(test())
        assert broker.done == set()
        assert broker.leased == {}

    def test_messages_of_a_cancelled_receive_go_to_the_next_receive(self, broker: ScriptedBroker) -> None:
        """They are neither lost nor acked."""

        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url) as consumer:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(consumer), 0.2)
                broker.fill("t", [b"1", b"2"])
                await until(lambda: broker.leased)
                assert (await anext(consumer)).value == b"1"
                assert broker.done == set()
                assert (await anext(consumer)).value == b"2"

        run(test())

    def test_many_cancellations_lose_and_repeat_nothing(self, broker: ScriptedBroker) -> None:
        broker.fill("t", [str(number).encode() for number in range(200)])

        async def test() -> list[bytes]:
            seen: list[bytes] = []
            async with AsyncConsumer("t", group="g", bootstrap=broker.url, max_messages=7) as consumer:
                number = 0
                while len(seen) < 200:
                    number += 1
                    try:
                        seen.append((await asyncio.wait_for(anext(consumer), (number % 5) * 0.0004)).value)
                    except TimeoutError:
                        continue
            return seen

        assert run(test()) == [str(number).encode() for number in range(200)]

    def test_a_poll_behind_a_cancelled_endless_wait_ends_in_time(self, broker: ScriptedBroker) -> None:
        broker.fill("t", [])

        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url) as consumer:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(consumer), 0.1)
                assert await asyncio.wait_for(consumer.poll(0.1), 15) == []

        run(test())

    def test_an_ack_does_not_wait_for_a_waiting_poll(self, broker: ScriptedBroker) -> None:
        broker.fill("t", [b"1", b"2", b"3"])

        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url, manual_ack=True) as consumer:
                first, second, third = await consumer.poll(5)
                waiting = asyncio.create_task(consumer.poll(30))
                await consumer.ack([first, second])
                assert len(broker.done) == 2
                await consumer.extend(third, 10)
                await consumer.nack(third, delay_s=0, reason="again")
                assert [message.delivery_count for message in await waiting] == [2]

        run(test())

    def test_a_stale_receipt_is_raised(self, broker: ScriptedBroker) -> None:
        broker.fill("t", [b"1"])

        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url, manual_ack=True) as consumer:
                [message] = await consumer.poll(5)
                broker.leased.clear()
                with pytest.raises(StaleReceipt):
                    await consumer.ack(message)

        run(test())

    def test_commit_excludes_messages_of_a_cancelled_receive(
        self, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for module in ("receiver", "prefetch"):  # a receive returns all available messages, however slow the test is
            monkeypatch.setattr(f"portalmq.consumers.{module}.AHEAD_S", LONGER_THAN_A_TEST_MS)
        broker.fill("t", [b"1"])

        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url) as consumer:
                assert (await anext(consumer)).value == b"1"
                await consumer.commit()
                assert broker.done == {("t", 0, 0)}
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(consumer), 0.1)
                broker.fill("t", [b"2", b"3"])
                await until(lambda: len(broker.leased) == 2)
                await consumer.commit()
                assert broker.done == {("t", 0, 0)}
                assert (await anext(consumer)).value == b"2"
                await consumer.commit()
                assert broker.done == {("t", 0, 0), ("t", 0, 1)}

        run(test())

    def test_commit_in_manual_mode_is_refused_as_in_the_synchronous_one(self, broker: ScriptedBroker) -> None:
        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url, manual_ack=True) as consumer:
                with pytest.raises(ValueError, match="ack the messages"):
                    await consumer.commit()

        run(test())

    def test_undelivered_messages_go_back_at_close(
        self, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.consumer.LAST_ANSWER_S", WITHIN_S)

        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url, manual_ack=True) as consumer:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(consumer.poll(30), 0.1)
                broker.fill("t", [b"1"])
                await until(lambda: broker.leased)

        run(test())
        assert (broker.leased, broker.done) == ({}, set())

    def test_close_does_not_wait_for_acks_that_get_no_answer(self, broker: ScriptedBroker) -> None:
        answered = threading.Event()
        broker.fill("t", [b"1"] * (SETTLERS_MAX + 1))
        broker.script("POST", "/v1/groups/g/ack", [hold(answered)] * (SETTLERS_MAX + 1))

        async def test() -> None:
            consumer = AsyncConsumer("t", group="g", bootstrap=broker.url, manual_ack=True)
            messages = await consumer.poll(TEST_WITHIN_S)
            acks = [asyncio.ensure_future(consumer.ack(message)) for message in messages]
            await until(lambda: len(broker.calls_of("POST", "/v1/groups/g/ack")) == SETTLERS_MAX)
            await consumer.close()
            assert not any(ack.done() for ack in acks)
            answered.set()
            await asyncio.gather(*acks)

        run(test())

    def test_close_ends_a_wait_and_may_be_called_twice(self, broker: ScriptedBroker) -> None:
        broker.fill("t", [])

        async def test() -> None:
            consumer = AsyncConsumer("t", group="g", bootstrap=broker.url)
            waiting = asyncio.create_task(anext(consumer))
            await until(lambda: broker.calls_of("POST", "/v1/groups/g/receive"))
            await consumer.close()
            with pytest.raises(StopAsyncIteration):
                await waiting
            await consumer.close()

        run(test())

    def test_the_error_of_a_cancelled_receive_is_raised_by_the_next(self, broker: ScriptedBroker) -> None:
        slow = threading.Event()
        broker.fill("t", [b"1"])
        broker.script("POST", "/v1/groups/g/receive", [refuse_after(slow)])

        async def test() -> None:
            async with AsyncConsumer("t", group="g", bootstrap=broker.url) as consumer:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(anext(consumer), 0.1)
                slow.set()
                with pytest.raises(TopicNotFound):
                    await anext(consumer)
                assert (await anext(consumer)).value == b"1"

        run(test())


class TestTls:
    """The scripted broker behind a front that speaks TLS."""

    def test_a_trusted_broker_is_used_and_a_waiting_receive_ends_at_close(self, broker: ScriptedBroker) -> None:
        with TlsFront(int(broker.url.rpartition(":")[2]), "server", asks_for_certificate=True) as front:
            url, files = f"https://localhost:{front.port}", {"tls_ca": str(pem("authority"))}
            shown = {"tls_client_cert": str(pem("client")), "tls_client_key": str(key("client"))}

            async def test() -> None:
                async with AsyncProducer(url, **files, **shown) as producer:
                    assert (await producer.send("t", b"x" * 100_000)).offset == 0
                async with AsyncConsumer("t", group="g", bootstrap=url, **files, **shown) as consumer:
                    assert (await anext(consumer)).value == b"x" * 100_000
                    waiting = asyncio.create_task(anext(consumer))
                    await until(lambda: len(broker.calls_of("POST", "/v1/groups/g/receive")) > 1)
                with pytest.raises(StopAsyncIteration):
                    await waiting

            run(test())
        assert broker.done == {("t", 0, 0)}

    def test_a_broker_of_another_authority_gets_no_request(
        self, broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.transport.reachability.FIRST_CONTACT_S", 0.0)  # one try, with the whole time
        with TlsFront(int(broker.url.rpartition(":")[2]), "untrusted") as front:

            async def test() -> None:
                url = f"https://localhost:{front.port}"
                async with AsyncProducer(url, tls_ca=str(pem("authority"))) as producer:
                    with pytest.raises(Unavailable, match="certificate verify failed") as failed:
                        await producer.send("t", b"1")
                assert failed.value.outcome == "not_applied"

            run(test())
        assert broker.calls == []


def test_a_message_s_own_calls_block_and_count(broker: ScriptedBroker) -> None:
    broker.fill("t", [b"1", b"2", b"3"])

    async def test() -> None:
        async with AsyncConsumer("t", group="g", bootstrap=broker.url) as consumer:
            first, second, third = await consumer.poll(5)
            first.ack()
            second.extend(10)
            second.nack(delay_s=3_600, reason="later")
            await asyncio.to_thread(third.ack)
        assert broker.done == {("t", 0, 0), ("t", 0, 2)}, "asking for more acks only what was not settled"

    run(test())


def test_rejected_and_released_messages_say_so_to_the_broker(broker: ScriptedBroker) -> None:
    broker.fill("t", [b"1", b"2"])

    async def test() -> None:
        async with AsyncConsumer("t", group="g", bootstrap=broker.url, manual_ack=True) as consumer:
            first, second = await consumer.poll(5)
            await consumer.reject(first, "bad")
            await consumer.release(second)

    run(test())
    rejected, released = (call.json() for call in broker.calls_of("POST", "/v1/groups/g/nack"))
    assert (rejected["dead"], rejected["reason"], released["unseen"], released["delay_ms"]) == (True, "bad", True, 0)


def test_a_transport_says_where_the_cluster_is(broker: ScriptedBroker) -> None:
    async def test() -> None:
        async with AsyncProducer(transport=Transport(broker.url)) as producer:
            await producer.send("t", b"1")
        async with AsyncConsumer("t", group="g", transport=Transport(broker.url)) as consumer:
            assert (await anext(consumer)).value == b"1"

    run(test())


def refuse_after(event: threading.Event) -> Callable[[ScriptedBroker, Any], Any]:
    def step(broker: ScriptedBroker, call: Any) -> Any:
        assert event.wait(WITHIN_S)
        return refuse(404, "topic_not_found")(broker, call)

    return step


def test_a_program_without_close_still_exits(broker: ScriptedBroker) -> None:
    broker.fill("t", [])
    program = f"""
import asyncio
from portalmq import AsyncConsumer, AsyncProducer
async def main():
    consumer = AsyncConsumer("t", group="g", bootstrap={broker.url!r})
    try:
        await asyncio.wait_for(anext(consumer), 0.1)
    except TimeoutError:
        pass
    await AsyncProducer({broker.url!r}).send("other", b"1")
asyncio.run(main())
"""
    subprocess.run([sys.executable, "-c", program], timeout=60, check=True)
