"""A consumer of a queue group: when messages are acked, and what happens to unacked ones."""

from __future__ import annotations

import collections
import gc
import itertools
import math
import signal
import threading
import time
from collections.abc import Callable

import msgspec
import pytest
from support.blocking_leases import Leases
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, hold, lose_answer, refuse

from portalmq import Consumer, Forbidden, GroupModeMismatch, LeaseLost, Message, StaleReceipt, Unavailable, wire
from portalmq.consumers.prefetch import FIRST_MESSAGES, Prefetch

RECEIVE = "/v1/groups/g/receive"
ACK = "/v1/groups/g/ack"
NACK = "/v1/groups/g/nack"
EXTEND = "/v1/groups/g/extend"
AN_HOUR_S = 3_600.0
WITHIN_S = 20.0


def consumer(broker: ScriptedBroker, **options: object) -> Consumer:
    return Consumer("t", group="g", bootstrap=broker.url, **{"idle_timeout_s": 0, **options})  # type: ignore[arg-type]


def receipts(broker: ScriptedBroker, path: str) -> list[list[str]]:
    return [call.json()["receipts"] for call in broker.calls_of("POST", path)]


def until(what: Callable[[], bool]) -> None:
    """Wait, bounded, for a thread of the client."""
    deadline = time.monotonic() + WITHIN_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def riding(broker: ScriptedBroker) -> list[list[str]]:
    """Return the acks that came with a receive."""
    return [acks for call in broker.calls_of("POST", RECEIVE) if (acks := call.json().get("ack"))]


def test_an_iteration_delivers_and_acks_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.consumers.lease.ACK_DELAY_S_MAX", AN_HOUR_S)
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3"])
        with consumer(broker) as messages:
            assert [message.value for message in messages] == [b"1", b"2", b"3"]
            assert riding(broker) == [["t.0.0.1", "t.0.1.1", "t.0.2.1"]], "one ack with the next receive"
        assert receipts(broker, NACK) == []


def test_a_message_has_all_fields_as_sent() -> None:
    with ScriptedBroker() as broker:
        broker.topics["t"] = [[wire.PackMessage(value=b'{"a":1}', content_type=wire.JSON)]]
        with consumer(broker) as messages:
            message = next(messages)
            assert isinstance(message, Message)
            assert (message.id, message.json(), message.delivery_count) == ("0-0", {"a": 1}, 1)


def test_an_exception_in_the_body_returns_the_message_and_the_waiting_ones() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3", b"4"])

        def handle(message: Message) -> None:
            if message.value == b"2":
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError), consumer(broker) as messages:
            collections.deque(map(handle, messages))
        assert receipts(broker, ACK) == [["t.0.0.1"]]
        assert receipts(broker, NACK) == [["t.0.1.1"], ["t.0.2.1", "t.0.3.1"]]
        handed, waiting = (call.json() for call in broker.calls_of("POST", NACK))
        assert "delay_ms" not in handed, "the failed message gets the group's back-off"
        assert waiting["delay_ms"] == 0, "a message that was never handled is free at once"
        assert waiting["unseen"] is True, "it counts as never delivered"
        assert "unseen" not in handed
        with consumer(broker) as messages:
            assert [(message.value, message.delivery_count) for message in messages] == [
                (b"2", 2),
                (b"3", 2),
                (b"4", 2),
            ]


def test_a_consumer_without_close_returns_its_messages_when_garbage_collected() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])

        def handle() -> None:
            for _ in consumer(broker):
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            handle()
        gc.collect()
        broker.wait_for(lambda: sorted(itertools.chain(*receipts(broker, NACK))) == ["t.0.0.1", "t.0.1.1"])


def test_a_message_is_acked_soon_after_the_next_is_requested() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        with consumer(broker) as messages:
            next(messages)
            next(messages)
            # The program makes no further call: the consumer's keeper sends the ack.
            broker.wait_for(lambda: ("t", 0, 0) in broker.done)
            assert receipts(broker, ACK) == [["t.0.0.1"]]


def test_an_ack_is_sent_with_the_next_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.consumers.lease.ACK_DELAY_S_MAX", AN_HOUR_S)
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3"])
        with consumer(broker, max_messages=1, idle_timeout_s=10) as messages:
            assert [next(messages).value for _ in range(3)] == [b"1", b"2", b"3"]
            assert riding(broker) == [["t.0.0.1"], ["t.0.1.1"]]
        assert receipts(broker, ACK) == []
        assert receipts(broker, NACK) == [["t.0.2.1"]]


def test_acks_of_a_failed_receive_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.consumers.lease.ACK_DELAY_S_MAX", AN_HOUR_S)  # by the end, and not also by the keeper
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        with consumer(broker) as messages:
            next(messages)
            broker.script("POST", RECEIVE, [refuse(403, "forbidden")])
            with pytest.raises(Forbidden):
                next(messages)
        assert riding(broker) == [["t.0.0.1"]]
        assert receipts(broker, ACK) == [["t.0.0.1"]]
        assert broker.done == {("t", 0, 0)}


def test_closing_during_a_receive_that_carries_acks_sends_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "portalmq.consumers.lease.ACK_DELAY_S_MAX", AN_HOUR_S
    )  # or the keeper may send them before the receive
    released = threading.Event()
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        messages = consumer(broker, idle_timeout_s=None)
        next(messages)
        broker.script("POST", RECEIVE, [hold(released)])
        waiting = threading.Thread(target=lambda: list(messages))
        waiting.start()
        broker.wait_for(lambda: bool(riding(broker)))
        messages.close()
        waiting.join(10)
        released.set()
        assert receipts(broker, ACK) == [["t.0.0.1"]]
        assert broker.done == {("t", 0, 0)}


def test_an_idle_timeout_ends_the_iteration_and_a_new_one_continues() -> None:
    with ScriptedBroker() as broker, consumer(broker, idle_timeout_s=0.05) as messages:
        assert list(messages) == []
        broker.fill("t", [b"late"])
        assert [message.value for message in messages] == [b"late"]


def test_closing_ends_an_iteration_that_waits_in_another_thread() -> None:
    released = threading.Event()
    with ScriptedBroker() as broker:
        broker.script("POST", RECEIVE, [hold(released)])
        messages = consumer(broker, idle_timeout_s=None)
        ended = threading.Event()

        def iterate() -> None:
            assert list(messages) == []
            ended.set()

        thread = threading.Thread(target=iterate)
        thread.start()
        broker.wait_for(lambda: len(broker.calls_of("POST", RECEIVE)) == 1)
        messages.close()
        assert ended.wait(10)
        thread.join()
        released.set()


def test_messages_leased_during_close_are_returned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.consumer.LAST_ANSWER_S", WITHIN_S)
    leased, closing = threading.Event(), threading.Event()

    def answer_late(broker: ScriptedBroker, call: Call) -> Reply:
        reply = broker.work(call)
        leased.set()
        assert closing.wait(WITHIN_S)
        return reply

    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        broker.script("POST", RECEIVE, [answer_late])
        messages = consumer(broker, idle_timeout_s=None, manual_ack=True)
        polled: list[list[Message]] = []
        polling = threading.Thread(target=lambda: polled.append(messages.poll(30)))
        polling.start()
        assert leased.wait(WITHIN_S)
        ends = threading.Thread(target=messages.close)
        ends.start()
        until(messages._closed.is_set)
        closing.set()
        ends.join(WITHIN_S)
        polling.join(WITHIN_S)
        assert polled == [[]]
        assert receipts(broker, NACK) == [["t.0.0.1", "t.0.1.1"]]
        assert (broker.leased, broker.done) == ({}, set())


def test_a_signal_that_closes_during_a_receive_loses_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.consumer.LAST_ANSWER_S", WITHIN_S)
    closed = threading.Event()
    with ScriptedBroker() as broker:
        messages = consumer(broker, idle_timeout_s=None)

        def close(number: int, frame: object) -> None:
            messages.close()
            closed.set()

        def lease_and_signal(broker: ScriptedBroker, call: Call) -> Reply:
            reply = broker.work(call)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert closed.wait(10)
            return reply

        broker.fill("t", [b"1"])
        broker.script("POST", RECEIVE, [lease_and_signal])
        before = signal.signal(signal.SIGUSR1, close)
        try:
            assert list(messages) == []
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert receipts(broker, NACK) == [["t.0.0.1"]]
        assert (broker.leased, broker.done) == ({}, set())


def test_a_signal_that_closes_before_the_first_receive_does_not_wait_for_its_own_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("portalmq.consumer.LAST_ANSWER_S", WITHIN_S)
    closed = threading.Event()
    took_s: list[float] = []
    with ScriptedBroker() as broker:
        messages = consumer(broker, idle_timeout_s=None)

        def close(number: int, frame: object) -> None:
            began = time.monotonic()
            messages.close()
            took_s.append(time.monotonic() - began)
            closed.set()

        def signal_and_answer(broker: ScriptedBroker, call: Call) -> Reply:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            assert closed.wait(10)
            return broker.work(call)

        broker.script("GET", "/v1/metadata", [signal_and_answer])
        before = signal.signal(signal.SIGUSR1, close)
        try:
            assert list(messages) == []
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert broker.calls_of("POST", RECEIVE) == []
    assert took_s[0] < WITHIN_S


def test_a_receive_sends_its_parameters() -> None:
    with ScriptedBroker() as broker:
        with consumer(broker, max_messages=7, visibility_timeout_s=2) as messages:
            messages.poll(0)
            messages.poll(0)
        first, second = (call.json() for call in broker.calls_of("POST", RECEIVE))
        assert (first["topics"], first["max_messages"], first["visibility_timeout_ms"]) == (["t"], 7, 2000)
        assert first["consumer"] == second["consumer"]
        assert first["attempt_id"] != second["attempt_id"]


def test_start_latest_is_set_once_before_the_first_receive() -> None:
    with ScriptedBroker() as broker, consumer(broker, start="latest") as messages:
        messages.poll(0)
        messages.poll(0)
        assert [(call.method, call.path) for call in broker.calls if call.path != "/v1/metadata"] == [
            ("PUT", "/v1/groups/g"),
            ("POST", RECEIVE),
            ("POST", RECEIVE),
        ]
        assert broker.calls[0].json() == {"start": "latest"}


@pytest.mark.parametrize(
    "options",
    [{"mode": "log"}, {"delivery": "twice"}, {"start": "middle"}, {"max_messages": 0}, {"member_id": "a"}],
)
def test_invalid_options_are_refused_with_a_sentence(options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r".+"):
        Consumer("t", **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="topic"):
        Consumer()
    with pytest.raises(TypeError, match="the name of a topic is text"):
        Consumer(["t"])  # type: ignore[arg-type]


# --- poll ------------------------------------------------------------------------------------------------------------


def test_poll_returns_at_most_max_messages_and_keeps_the_rest() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3"])
        with consumer(broker) as messages:
            assert [message.value for message in messages.poll(1, 2)] == [b"1", b"2"]
            assert [message.value for message in messages.poll(1, 2)] == [b"3"]
            assert messages.poll(0) == []
        assert len(broker.done) == 3, "each poll acks the previous one"


def test_poll_waits_no_longer_than_its_timeout() -> None:
    with ScriptedBroker() as broker, consumer(broker) as messages:
        assert messages.poll(0.05) == []


# --- settling by hand ------------------------------------------------------------------------------------------------


def test_with_manual_ack_only_explicit_acks_are_sent() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3"])
        with consumer(broker, manual_ack=True) as messages:
            first, second, third = messages
            assert receipts(broker, ACK) == []
            messages.ack([first, second])
            third.nack(delay_s=1.5, reason="no time")
        assert receipts(broker, ACK) == [["t.0.0.1", "t.0.1.1"]]
        assert broker.calls_of("POST", NACK)[0].json() == {
            "receipts": ["t.0.2.1"],
            "delay_ms": 1500,
            "reason": "no time",
        }


def test_with_manual_ack_messages_in_hand_keep_their_leases_after_close() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        with consumer(broker, manual_ack=True) as messages:
            message = next(messages)
        assert receipts(broker, NACK) == [["t.0.1.1"]], "only the message that was never delivered"
        message.ack()
        assert broker.done == {("t", 0, 0)}


def test_a_message_that_the_body_settles_itself_is_not_acked_again() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        with consumer(broker) as messages:
            next(messages).nack(reason="not now")
            next(messages).ack()
            assert messages.poll(0)[0].delivery_count == 2
        assert receipts(broker, ACK) == [["t.0.1.1"]]


def test_extend_extends_the_lease() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        with consumer(broker) as messages:
            message = next(messages)
            message.extend(60)
            message.extend()
        asked = [call.json()["visibility_timeout_ms"] for call in broker.calls_of("POST", EXTEND)]
        assert asked == [60_000, 30_000]


def test_a_stale_receipt_is_raised_with_what_was_done() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        with consumer(broker, manual_ack=True) as messages:
            first, second = messages
            del broker.leased["t.0.0.1"]
            with pytest.raises(StaleReceipt) as caught:
                messages.ack([first, second])
            assert [result["status"] for result in caught.value.extra["results"]] == ["stale_receipt", "ok"]


def test_a_stale_receipt_while_iterating_is_logged_and_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        with consumer(broker, max_messages=1) as messages:
            next(messages)
            del broker.leased["t.0.0.1"]
            broker.leased["t.0.0.2"] = ("t", 0, 0)  # now leased to another consumer
            assert next(messages).value == b"2"
        assert "1 messages were handled longer than their lease" in caplog.text


def test_a_message_without_a_lease_cannot_be_settled() -> None:
    browsed = Message("t", 0, 0, None, b"", {}, wire.BYTES, 0)
    with pytest.raises(RuntimeError, match="browsed"):
        browsed.ack()
    with ScriptedBroker() as broker, consumer(broker) as messages, pytest.raises(ValueError, match="browsed"):
        messages.ack(browsed)


# --- failures --------------------------------------------------------------------------------------------------------


def test_a_lost_answer_to_a_receive_loses_no_message() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2"])
        broker.script("POST", RECEIVE, [lose_answer, hang_up, refuse(503, "unavailable")])
        with consumer(broker) as messages:
            assert [(message.value, message.delivery_count) for message in messages] == [(b"1", 1), (b"2", 1)]
        attempts = [call.json()["attempt_id"] for call in broker.calls_of("POST", RECEIVE)]
        assert len(set(attempts[:4])) == 1


def test_a_lost_answer_to_an_ack_is_no_error() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        with consumer(broker) as messages:
            next(messages)
            broker.script("POST", RECEIVE, [lose_answer])
            assert list(messages) == []
        assert broker.done == {("t", 0, 0)}


@pytest.mark.parametrize(
    ("code", "status", "kind"), [("forbidden", 403, Forbidden), ("group_mode_mismatch", 409, GroupModeMismatch)]
)
def test_a_permanent_error_ends_the_iteration(code: str, status: int, kind: type[Exception]) -> None:
    with ScriptedBroker() as broker, consumer(broker) as messages:
        broker.script("POST", RECEIVE, [refuse(status, code)])
        with pytest.raises(kind):
            next(messages)


def test_a_permanent_refusal_of_the_keepers_ack_is_raised_in_the_loop() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"x"] * 3)
        broker.script("POST", ACK, [refuse(403, "forbidden")])
        with consumer(broker) as messages:
            next(messages)
            next(messages)  # the third message waits here, so no receive carries the ack
            until(lambda: messages._leases._failure is not None)
            with pytest.raises(Forbidden):
                next(messages)


# --- leases of waiting messages --------------------------------------------------------------------------------------


class Broker:
    """A transport for Leases that records requests."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.fail = fail

    def call(self, request: object, timeout_s: float | None = None) -> None:

        verb = request.path.rsplit("/", 1)[1]  # type: ignore[attr-defined]
        self.sent.append((verb, msgspec.json.decode(request.body)["receipts"]))  # type: ignore[attr-defined]
        if self.fail is not None:
            raise self.fail


def leases(broker: Broker, clock: Callable[[], float], max_handling_s: float = 0.0) -> Leases:
    held = Leases(broker, "g", 30.0, clock, max_handling_s)
    held._keeper = threading.current_thread()
    held._calls.group_leases = True
    held.hold([wire.PackMessageOut(0, offset, b"", 0, receipt=f"r{offset}") for offset in range(3)])
    return held


def test_a_message_whose_lease_has_expired_is_not_delivered() -> None:
    now = [0.0]
    held = leases(Broker(), lambda: now[0])
    assert held.take()
    now[0] = 30.0
    assert not held.take()


def test_waiting_leases_are_extended_while_a_message_is_handled() -> None:
    now = [0.0]
    broker = Broker()
    held = leases(broker, lambda: now[0])
    held.take()
    now[0] = 16.0
    held._keep_waiting(now[0])
    assert broker.sent == [("extend", ["r1", "r2"])]
    now[0] = 45.0
    assert held.take()


def test_messages_behind_a_stuck_one_are_returned_to_the_group() -> None:
    now = [0.0]
    broker = Broker()
    held = leases(broker, lambda: now[0])
    held.take()
    now[0] = 31.0
    held._keep_waiting(now[0])
    assert broker.sent == [("nack", ["r1", "r2"])]
    assert not held.take()


def test_a_message_whose_lease_was_lost_while_waiting_is_not_delivered() -> None:
    now = [0.0]
    results = [{"receipt": "r1", "status": "stale_receipt"}, {"receipt": "r2", "status": "ok"}]
    held = leases(Broker(StaleReceipt("stale", results=results)), lambda: now[0])
    held.take()
    held._keep_waiting(20.0)
    [message] = held.take()
    assert message is not None
    assert message.receipt == "r2"


def test_leases_in_hand_are_renewed_until_max_handling(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    broker = Broker()
    held = leases(broker, lambda: now[0], max_handling_s=100.0)
    held.take()
    for now[0] in (15.0, 45.0, 75.0):
        held._keep_waiting(now[0])
    assert broker.sent == [("extend", ["r1", "r2", "r0"])] * 3
    assert caplog.messages == []
    now[0] = 90.0
    held._keep_waiting(now[0])
    assert "handled for 90 s" in caplog.messages[0], "the last time"
    now[0] = 101.0
    held._keep_waiting(now[0])
    assert broker.sent[-1] == ("nack", ["r1", "r2"]), "the waiting messages are free for others"


def test_a_lease_that_the_user_extended_is_not_shortened() -> None:
    broker = Broker()
    held = leases(broker, lambda: 0.0, max_handling_s=100.0)
    held.take()
    held.settle("extend", ["r0"], {"visibility_timeout_ms": 3_600_000})
    held._keep_waiting(15.0)
    assert broker.sent[-1] == ("extend", ["r1", "r2"])


def test_a_lease_that_is_lost_in_hand_is_logged_and_raised(caplog: pytest.LogCaptureFixture) -> None:
    results = [{"receipt": "r0", "status": "stale_receipt"}, {"receipt": "r1", "status": "ok"}]
    broker = Broker(StaleReceipt("stale", results=results))
    held = leases(broker, lambda: 0.0, max_handling_s=100.0)
    held.take()
    held.take()
    held._keep_waiting(15.0)
    assert "1 messages were handled longer than their lease" in caplog.messages[0]
    with pytest.raises(LeaseLost, match="max_handling_s"):
        held.finish_handed()
    assert held.take_acks("a") == ["r1"], "the other is acked"
    held.finish_handed()


def test_a_lease_that_expired_before_the_next_message_is_checked() -> None:
    now = [0.0]
    broker = Broker()
    held = leases(broker, lambda: now[0])
    held.take()
    now[0] = 31.0
    held.finish_handed()
    assert (broker.sent, held.take_acks("a")) == ([("extend", ["r0"])], ["r0"]), "no other consumer had it"
    held.receive_failed()
    held._acks._gathered = []
    held._waiting_until = 60.0
    held.take()
    now[0] = 61.0
    broker.fail = StaleReceipt("stale")
    with pytest.raises(LeaseLost):
        held.finish_handed()
    assert held.take_acks("a") == []


def test_a_message_that_was_acked_before_it_was_handed_out_is_not_lost() -> None:
    now = [0.0]
    held = leases(Broker(StaleReceipt("stale")), lambda: now[0], max_handling_s=100.0)
    held._calls.group_leases = False
    held.take()
    held._keep_waiting(15.0)
    now[0] = 100.0
    held.finish_handed()
    assert held.take()


def test_messages_behind_a_slow_one_are_returned_to_the_group() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1", b"2", b"3"])
        with consumer(broker) as busy, consumer(broker, max_messages=1, idle_timeout_s=None) as idle:
            busy._leases._calls.group_leases = True
            busy._leases._hold_back_s = AN_HOUR_S
            assert next(busy).value == b"1"
            with busy._leases._lock:
                busy._leases._hold_back_s = 0.0
                busy._leases._wake_keeper(-math.inf)
            assert (next(idle).value, next(idle).value) == (b"2", b"3")
        assert all(call.json()["unseen"] for call in broker.calls_of("POST", NACK)[:1])


def test_messages_acked_at_delivery_are_not_returned() -> None:
    broker = Broker()
    held = leases(broker, lambda: 0.0)
    held._calls.group_leases = False
    held.take()
    held._release_waiting()
    assert (broker.sent, bool(held.take())) == ([], True)


def test_two_workers_share_a_hundred_jobs() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"job"] * 100)
        with consumer(broker) as one, consumer(broker) as other:
            first, second = next(one), next(other)
            assert (first.offset, second.offset) == (0, FIRST_MESSAGES), "the first leaves most of them to the other"


@pytest.mark.parametrize(
    ("each_s", "wanted"),
    [(0.0, 100), (0.001, 100), (0.05, 20), (0.5, 2), (7.0, 1)],
)
def test_a_consumer_fetches_what_it_handles_in_a_second(each_s: float, wanted: int) -> None:
    now = [0.0]
    prefetch = Prefetch(100, lambda: now[0])
    assert prefetch.wanted() == FIRST_MESSAGES
    prefetch.received(8)
    now[0] += 8 * each_s
    assert prefetch.wanted() == wanted
    prefetch.received(0)
    now[0] += 1000
    assert prefetch.wanted() == wanted, "an empty receive does not change the measured handling time"


def test_no_more_is_fetched_than_the_user_allows() -> None:
    assert Prefetch(3, lambda: 0.0).wanted() == 3


def test_release_does_not_fail_without_a_broker() -> None:
    broker = Broker(Unavailable("gone"))
    held = leases(broker, lambda: 0.0)
    held.take()
    held.finish_handed()
    held.release()
    held.release()
    assert [verb for verb, _ in broker.sent] == ["ack", "nack"]


def test_a_release_right_after_an_answer_returns_its_messages() -> None:
    """The closing thread waits for the lock, and gets it as soon as it is free."""
    broker = Broker()
    held = Leases(broker, "g", 30.0, lambda: 0.0)
    held._keeper = threading.current_thread()
    held.begin_receive()
    held.take_acks("a")
    lock = held._lock

    class ReleasedAtOnce:
        def __enter__(self) -> None:
            lock.acquire()

        def __exit__(self, *fault: object) -> None:
            lock.release()
            held._lock = lock
            held.release()

    held._lock = ReleasedAtOnce()  # type: ignore[assignment]
    held.hold([wire.PackMessageOut(0, 0, b"", 0, receipt="r0")])
    assert not held.take()
    assert broker.sent == [("nack", ["r0"])]


def test_the_keeper_thread_ends_with_the_consumer() -> None:
    with ScriptedBroker() as broker:
        broker.fill("t", [b"1"])
        with consumer(broker) as messages:
            next(messages)
            keeper = messages._leases._keeper
            assert keeper is not None
        keeper.join(10)
        assert not keeper.is_alive()
