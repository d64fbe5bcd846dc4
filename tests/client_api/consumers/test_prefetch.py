"""The receive that is under way while messages are handled: its acks, its leases, and who gets its messages."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from support.blocking_leases import Leases
from support.forked import in_child
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, hold, lose_answer

from portalmq import Consumer, PortalMQError, Unavailable, wire
from portalmq.consumers import acks
from portalmq.consumers.lease import UNREAD_S_MAX
from portalmq.consumers.prefetch import PASSED_OVER_MAX, Ahead, Prefetch
from portalmq.transport.request import Request

AN_HOUR_S = 3_600.0
RECEIVE, ACK, NACK = "/v1/groups/g/receive", "/v1/groups/g/ack", "/v1/groups/g/nack"


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedBroker]:
    """A broker with nine messages. No handling is slow, and the keeper of the leases has nothing to do."""
    monkeypatch.setattr("portalmq.consumers.receiver.AHEAD_S", AN_HOUR_S)
    for name in ("lease.ACK_DELAY_S_MAX", "lease.UNREAD_S_MAX", "acks.UNTOLD_S_MAX"):
        monkeypatch.setattr(f"portalmq.consumers.{name}", AN_HOUR_S)
    with ScriptedBroker() as broker:
        broker.shows_groups = True
        broker.fill("t", [b"%d" % number for number in range(1, 10)])
        yield broker


def consumer_of(broker: ScriptedBroker, **options: object) -> Consumer:
    return Consumer("t", group="g", bootstrap=broker.url, max_messages=1, visibility_timeout_s=40_000, **options)


def value_of(consumer: Consumer) -> bytes:
    [message] = consumer.poll(60)
    return message.value


def received(broker: ScriptedBroker) -> list[wire.ReceiveRequest]:
    return [msgspec.json.decode(call.body, type=wire.ReceiveRequest) for call in broker.calls_of("POST", RECEIVE)]


def run_ahead(broker: ScriptedBroker, consumer: Consumer) -> None:
    """Take two messages, so that the third is under way; the first receive has no figures to go by."""
    assert [value_of(consumer) for _ in range(2)] == [b"1", b"2"]
    broker.wait_for(lambda: len(broker.leased) == 2)


def settled(broker: ScriptedBroker, path: str) -> list[tuple[list[str], bool]]:
    calls = [call.json() for call in broker.calls_of("POST", path)]
    return [(call["receipts"], call.get("unseen", False)) for call in calls]


def test_the_next_messages_are_fetched_while_these_are_handled(broker: ScriptedBroker) -> None:
    with consumer_of(broker) as consumer:
        run_ahead(broker, consumer)
        first, second, third = received(broker)
        assert (first.ack, second.ack, third.ack) == ([], ["t.0.0.1"], [])
        assert min(first.wait_ms, second.wait_ms) > third.wait_ms == 0
        assert [value_of(consumer) for _ in range(3)] == [b"3", b"4", b"5"]
        broker.wait_for(lambda: len(received(broker)) == 6)
        assert [each.ack for each in received(broker)[3:]] == [["t.0.1.1"], ["t.0.2.1"], ["t.0.3.1"]]
        assert len({each.attempt_id for each in received(broker)}) == 6


def test_one_consumer_gets_messages_in_their_order_whatever_is_lost(broker: ScriptedBroker) -> None:
    broker.script("POST", RECEIVE, [ScriptedBroker.work] * 2 + [lose_answer, hang_up] * 4)  # type: ignore[list-item]
    with consumer_of(broker) as consumer:
        assert [value_of(consumer) for _ in range(9)] == [b"%d" % number for number in range(1, 10)]
    assert len(broker.done) == 8, "the last one is in hand"


def test_at_most_one_batch_is_ahead(broker: ScriptedBroker) -> None:
    with consumer_of(broker) as consumer:
        run_ahead(broker, consumer)
        for _ in range(5):
            value_of(consumer)
            assert len(broker.leased) <= 3, "in hand, ahead, and one whose ack is under way"


@pytest.mark.parametrize("options", [{"prefetch": False}, {"manual_ack": True}, {}])
def test_not_every_consumer_fetches_ahead(broker: ScriptedBroker, options: dict[str, bool]) -> None:
    config = wire.GroupConfig() if options else wire.GroupConfig(delivery="at_most_once")
    shown = msgspec.json.encode(wire.GroupDescription("g", "queue", [], 0, 0, 0, 0, 0, 0, config))
    broker.script("GET", "/v1/groups/g", [lambda broker, call: Reply(body=shown)])
    with consumer_of(broker, **options) as consumer:
        assert [value_of(consumer) for _ in range(4)] == [b"1", b"2", b"3", b"4"]
        assert len(received(broker)) == 4


def test_closing_gives_back_what_was_not_handed_out(broker: ScriptedBroker) -> None:
    with consumer_of(broker) as consumer:
        run_ahead(broker, consumer)
    assert settled(broker, NACK) == [(["t.0.1.1"], False), (["t.0.2.1"], True)]
    assert broker.leased == {}


def test_closing_waits_for_the_answer(broker: ScriptedBroker) -> None:
    answer = threading.Event()
    broker.script("POST", RECEIVE, [ScriptedBroker.work, ScriptedBroker.work, hold(answer)])
    consumer = consumer_of(broker)
    assert [value_of(consumer) for _ in range(2)] == [b"1", b"2"]
    broker.wait_for(lambda: len(received(broker)) == 3)
    threading.Timer(0.05, answer.set).start()
    consumer.close()
    assert broker.leased == {}


def test_an_exception_in_the_loop_gives_back_all(broker: ScriptedBroker) -> None:
    def loop() -> None:
        for message in consumer_of(broker):
            if message.value == b"3":
                raise RuntimeError("the body fails")

    with pytest.raises(RuntimeError):
        loop()
    gc.collect()
    broker.wait_for(lambda: not broker.leased)
    assert len(broker.done) == 2
    assert settled(broker, NACK) == [(["t.0.2.1"], False), (["t.0.3.1"], True)]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_the_child_of_a_fork_leaves_the_answer_to_the_parent(broker: ScriptedBroker) -> None:
    with consumer_of(broker) as consumer:
        run_ahead(broker, consumer)
        assert in_child(lambda: value_of(consumer).decode()) == "4"
        assert value_of(consumer) == b"3"
    assert set(broker.leased.values()) == {("t", 0, 3)}, "the child has ended without closing"


@pytest.mark.parametrize("lost", [lose_answer, hang_up])
def test_a_lost_answer_is_asked_for_again(broker: ScriptedBroker, lost: Callable[..., object]) -> None:
    broker.script("POST", RECEIVE, [ScriptedBroker.work] * 3 + [lost])  # type: ignore[list-item]
    with consumer_of(broker) as consumer:
        assert [value_of(consumer) for _ in range(5)] == [b"1", b"2", b"3", b"4", b"5"]
        consumer.commit()
        lost_one, again = received(broker)[3:5]
        assert (lost_one.attempt_id, lost_one.ack) == (again.attempt_id, ["t.0.1.1"])
        assert again.ack == [], "a receive waits for no acks that had no answer"
    assert [broker.deliveries["t", 0, offset] for offset in range(5)] == [1] * 5
    assert {offset for _, _, offset in broker.done} == set(range(5))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
def test_a_process_that_dies_leaves_its_messages_to_expire(broker: ScriptedBroker) -> None:
    alive: list[Consumer] = []

    def die() -> None:
        alive.append(consumer_of(broker))
        assert [value_of(alive[0]) for _ in range(2)] == [b"1", b"2"]

    in_child(die)
    broker.wait_for(lambda: len(broker.leased) == 2)
    assert (settled(broker, ACK), settled(broker, NACK), broker.done) == ([], [], {("t", 0, 0)})


def test_commit_includes_the_acks_under_way(broker: ScriptedBroker) -> None:
    broker.script("POST", RECEIVE, [ScriptedBroker.work] * 3 + [hang_up])
    with consumer_of(broker) as consumer:
        assert [value_of(consumer) for _ in range(3)] == [b"1", b"2", b"3"]
        consumer.commit()
        assert {offset for _, _, offset in broker.done} == {0, 1, 2}
        assert value_of(consumer) == b"4"


def test_an_empty_answer_says_nothing_of_messages_that_came_since(broker: ScriptedBroker) -> None:
    del broker.topics["t"][0][2:]
    with consumer_of(broker) as consumer:
        assert [value_of(consumer) for _ in range(2)] == [b"1", b"2"]
        broker.wait_for(lambda: len(broker.attempts) == 3)
        broker.fill("t", [b"later"])
        [message] = consumer.poll(0.0)
        assert message.value == b"later"


def test_consumers_share_what_there_is(broker: ScriptedBroker) -> None:
    with consumer_of(broker) as one, consumer_of(broker) as other:
        got = [(value_of(one), value_of(other)) for _ in range(4)]
        assert len({value for pair in got for value in pair}) == 8


class Way:
    """A transport for Leases, and the answer to a receive that ran ahead."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.now = 0.0
        self.fail = fail
        self.during: Callable[[], object] = lambda: None
        self.held = Leases(self, "g", 30.0, lambda: self.now, 300.0)
        self.held._keeper = threading.current_thread()
        self.held._calls.group_leases = True

    def call(self, request: Request, timeout_s: float | None = None) -> None:
        self.sent.append((request.path.rsplit("/", 1)[1], msgspec.json.decode(request.body)["receipts"]))

    def rest(self) -> None:
        pass

    def read(self, within_s: float | None) -> wire.PackReceived:
        self.during()
        if self.fail is not None:
            raise self.fail
        return wire.PackReceived([wire.PackMessageOut(0, 1, b"", 0, receipt="r1")])

    def run_ahead(self) -> Leases:
        """One message is in hand, and the ack of the one before travels with the receive for the next."""
        self.held.hold([wire.PackMessageOut(0, 9, b"", 0, receipt="r9")])
        self.held.take()
        self.held.finish_handed()
        self.held.begin_receive()
        self.held.take_acks("a2")
        self.held.run_ahead(Ahead(self.read, self.now))
        self.held.hold([wire.PackMessageOut(0, 0, b"", 0, receipt="r0")])
        self.held.take()
        return self.held


def test_the_keeper_reads_an_answer_that_nobody_reads_and_renews_its_leases() -> None:
    way = Way()
    held = way.run_ahead()
    way.now = held._read_ahead_at()
    assert way.now == UNREAD_S_MAX
    held.read_ahead(1.0)
    assert held._read_ahead_at() > way.now, "it is read once"
    held._keep_waiting(15.0)
    assert way.sent == [("extend", ["r1", "r0"])]
    assert not held.begin_receive(), "there is a message"
    assert [message.receipt for message in held.take()] == ["r1"]


def test_messages_ahead_of_a_slow_one_go_back_unseen() -> None:
    way = Way()
    held = way.run_ahead()
    held.read_ahead(1.0)
    held._release_waiting()
    assert way.sent == [("nack", ["r1"])]


def test_leases_count_from_the_request() -> None:
    way = Way()
    held = way.run_ahead()
    way.now = 30.0
    held.finish_handed()
    held.read_ahead(1.0)
    assert held.take() == []


@pytest.mark.parametrize("fail", [Unavailable("gone"), KeyboardInterrupt()])
def test_acks_of_a_lost_answer_are_sent_apart(fail: Exception) -> None:
    way = Way(fail)
    held = way.run_ahead()
    if isinstance(fail, PortalMQError):
        held.read_ahead(1.0)
    else:
        with pytest.raises(KeyboardInterrupt):
            held.read_ahead(1.0)
    assert held.begin_receive()
    assert held.take_acks("a3") == []
    held.flush()
    assert way.sent == [("ack", ["r9"])]


def test_a_consumer_that_closes_while_the_answer_is_read_gives_its_messages_back() -> None:
    way = Way()
    held = way.run_ahead()
    way.during = held.release
    held.read_ahead(1.0)
    assert way.sent == [("ack", ["r9"]), ("nack", ["r0"]), ("nack", ["r1"])]
    assert held.take() == []


def test_the_consumer_waits_for_another_thread_that_reads_the_answer() -> None:
    way = Way()
    held = way.run_ahead()
    is_read, reading = threading.Event(), threading.Event()
    way.during = lambda: (reading.set(), is_read.wait(60))
    keeper = threading.Thread(target=held.read_ahead, args=(60.0,))
    keeper.start()
    assert reading.wait(60)
    began: list[bool] = []
    consumer = threading.Thread(target=lambda: began.append(held.begin_receive()))
    consumer.start()
    is_read.set()
    consumer.join(60)
    keeper.join(60)
    assert began == [False]
    assert [message.receipt for message in held.take()] == ["r1"]


def test_a_slow_handler_fetches_nothing_ahead() -> None:
    now = [0.0]
    prefetch = Prefetch(100, lambda: now[0])
    prefetch.received(10)
    assert not prefetch.runs_ahead(1.0), "nothing is known yet"
    for took_s, runs in ((0.5, True), (2.0, False), (0.9, True)):
        now[0] += took_s
        prefetch.wanted()
        prefetch.received(10)
        assert prefetch.runs_ahead(1.0) is runs


def test_after_empty_answers_fewer_receives_run_ahead() -> None:
    prefetch = Prefetch(1, lambda: 0.0)
    passed_over = []
    for _ in range(9):
        passed_over.append(0)
        while not (prefetch.received(1), prefetch.wanted(), prefetch.received(1), prefetch.runs_ahead(1.0))[-1]:
            passed_over[-1] += 1
        prefetch.came_ahead(0)
    assert passed_over == [0, 1, 2, 4, 8, 16, 32, PASSED_OVER_MAX, PASSED_OVER_MAX]
    prefetch.came_ahead(1)
    prefetch.received(1)
    assert prefetch.runs_ahead(1.0)


def later(broker: ScriptedBroker, call: Call, *acked: str) -> Reply:
    """The messages come before their acks are committed."""
    reply = broker.work(call)
    received = msgspec.msgpack.decode(reply.body, type=wire.PackReceived)
    received.acks_later, received.acked_attempts = True, list(acked)
    return Reply(body=msgspec.msgpack.encode(received), content_type=wire.BATCH_MSGPACK)


def test_only_a_receive_that_runs_ahead_lets_its_acks_come_later(broker: ScriptedBroker) -> None:
    with consumer_of(broker) as consumer:
        run_ahead(broker, consumer)
        prefer = [call.headers.get("prefer") for call in broker.calls_of("POST", RECEIVE)]
        assert prefer == [None, None, wire.ACKS_LATER]


def test_commit_sends_again_what_no_answer_has_told(broker: ScriptedBroker) -> None:
    def tell(broker: ScriptedBroker, call: Call) -> Reply:
        return later(broker, call, received(broker)[3].attempt_id or "")

    broker.script("POST", RECEIVE, [ScriptedBroker.work] * 3 + [later, later, tell])  # type: ignore[list-item]
    with consumer_of(broker) as consumer:
        assert [value_of(consumer) for _ in range(5)] == [b"1", b"2", b"3", b"4", b"5"]
        consumer.commit()
        assert settled(broker, ACK) == [(["t.0.2.1", "t.0.3.1", "t.0.4.1"], False)]
        consumer.commit()
        assert len(settled(broker, ACK)) == 1


def test_untold_acks_are_sent_again_after_a_failure_and_after_a_while() -> None:
    way = Way()
    held = way.run_ahead()
    held.take_ahead()
    held.arrived(wire.PackReceived([], acks_later=True))
    assert held._acks.due_at(AN_HOUR_S) == acks.UNTOLD_S_MAX
    held.send_acks_apart()
    assert held._acks.due_at(AN_HOUR_S) == AN_HOUR_S
    held.flush()
    assert way.sent == [("ack", ["r9"])]


def test_acks_of_an_attempt_that_is_named_are_done() -> None:
    way = Way()
    held = way.run_ahead()
    held.take_ahead()
    held.arrived(wire.PackReceived([], acks_later=True))
    held.arrived(wire.PackReceived([], acked_attempts=["another", "a2"]))
    held.release()
    assert way.sent == [("nack", ["r0"])]
