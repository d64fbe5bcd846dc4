"""Long work on the event loop yields, and a measurement shows where it does not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import gevent
import msgspec
import pytest
from support.domain import Fixture, records, running
from support.stretches import Stretches

from portalmq import stream_wire, wire
from portalmq.broker.core.fold import DeadFold, GroupFold, SpanFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.long_poll import ReceiveOptions, Waiter, _park, receive
from portalmq.broker.partition.yielding import TURN_S, TimeSlice, give_way, in_short_turns, in_turns
from portalmq.broker.queues.partition_counts import SPANS_A_TURN, tallied
from portalmq.control_plane.mirror import Changes
from portalmq.errors import Unavailable

STEPS = 40
PARTITIONS = 6
NAMES = ("a", "b", "c", "d")


def work() -> None:
    sum(number * number for number in range(20_000))


def test_greenlets_waiting_for_a_timer_or_a_socket_run_at_each_pause():
    turns = []
    gevent.spawn_later(1e-6, turns.append, "timer")
    give_way()
    give_way()
    assert turns == ["timer"]


def test_items_come_in_order_with_a_pause_after_each_few(monkeypatch):
    done, pauses = [], []
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: pauses.append(len(done)))
    for item in in_turns(range(7), 3):
        done.append(item)
    assert (done, pauses) == ([0, 1, 2, 3, 4, 5, 6], [3, 6])


def test_a_turn_by_the_clock_ends_when_its_time_is_over(monkeypatch):
    done, pauses = [], []
    seconds = [0.0]
    monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: seconds[0])
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: pauses.append(len(done)))
    for cost in in_short_turns([0.4, 0.4, 0.4, 3.0, 0.0, 2.0]):
        seconds[0] += cost * TURN_S
        done.append(cost)
    assert (done, pauses) == ([0.4, 0.4, 0.4, 3.0, 0.0, 2.0], [3, 4])


def test_loops_may_share_one_turn(monkeypatch):
    done, pauses = [], []
    seconds = [0.0]
    monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: seconds[0])
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: pauses.append(len(done)))
    turn = TimeSlice()
    for _ in range(3):
        for cost in turn.paced([0.4, 0.4]):
            seconds[0] += cost * TURN_S
            done.append(cost)
    assert pauses == [3]


def test_a_stretch_ends_where_the_loop_polls_its_sockets():
    with Stretches() as whole:
        for _ in range(STEPS):
            work()
    longest = []
    for _ in range(5):  # some machines count their own pauses as processor time
        with Stretches() as cut:
            for _ in in_turns(range(STEPS), 1):
                work()
        assert cut.count > STEPS / 2
        longest.append(cut.longest.ms)
    assert min(longest) < whole.longest.ms / 2


def test_work_is_measured_in_processor_time_without_sleep():
    with Stretches() as stretches:
        for _ in range(STEPS):
            work()
        worked = stretches.count
        gevent.sleep(0.05)
    assert (worked, stretches.count >= 2) == (0, True)
    assert stretches.longest.ms > 0


def test_other_greenlets_run_while_a_groups_messages_are_counted(tmp_path, monkeypatch):
    """Also with very many single leases. After a pause the count does not use the partition, which may be closed."""
    pauses = []
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: pauses.append(None))
    with running(tmp_path) as fixture:
        fixture.broker.produce("t", ProduceRequest(records("a")))
        (partition,) = fixture.broker.topics.known("t").led()
        now_ms = fixture.clock.now_ms()
        spans = [
            SpanFold(offset, offset + 1, 1, 0, offset % 4 == 0, now_ms, now_ms + offset % 4)
            for offset in range(0, 5 * SPANS_A_TURN, 2)
        ]
        dead = [DeadFold(offset, offset + 1, 1, 0, "") for offset in range(1, 3 * SPANS_A_TURN, 2)]
        delivery = GroupDelivery(GroupFold("g", 0, 5 * SPANS_A_TURN, spans, dead=dead))
        pauses.clear()
        counts = tallied(partition, delivery, fixture.clock)
    half = 5 * SPANS_A_TURN // 4
    assert (counts["ready"], counts["in_flight"], counts["scheduled"]) == (half, 0, half)
    assert (counts["lag"], counts["dead"]) == (2 * half, len(dead))
    assert len(pauses) == 3


def received(fixture: Fixture, group: str = "g", *, wait_ms: int = 0) -> list[str]:
    request = wire.ReceiveRequest(topics=["t"], max_messages=100, wait_ms=wait_ms)
    return [message.receipt for message in fixture.broker.receive_handler.receive(group, request, None)]


def fetched(fixture: Fixture) -> None:
    places = [stream_wire.PartitionOffset("t", number, 0) for number in range(PARTITIONS)]
    fixture.broker.reader_fetch.fetch(stream_wire.FetchRequest(places), None)


def redriven(fixture: Fixture) -> None:
    fixture.broker.dead_letters.redrive("g", "t", ids=None, where=None, rate_per_s=None, dry_run=True)


CALLS: dict[str, Callable[[Fixture], object]] = {
    "produce": lambda fixture: fixture.broker.produce(
        "t", ProduceRequest(records(*["a"] * PARTITIONS), list(range(PARTITIONS)), acks="none")
    ),
    "produce under a key": lambda fixture: fixture.broker.produce(
        "t", ProduceRequest(records("a"), idempotency_key="k")
    ),
    "receive": received,
    "ack": lambda fixture: fixture.broker.settlement.settle("g", fixture.receipts),
    "fetch": fetched,
    "describe the topic": lambda fixture: fixture.broker.describe_topic("t"),
    "hear of the topic anew": lambda fixture: fixture.broker.topics._sync_topic(
        "t", msgspec.structs.replace(fixture.broker.topics.known("t").state, replication_factor=2)
    ),
    "park": lambda fixture: _park(fixture.sources, Waiter(["t"])),
    "read all": lambda fixture: list(fixture.broker.browser.read_all("t", None)),
    "list what is scheduled": lambda fixture: fixture.broker.scheduled_messages.page("t", limit=10),
    "list what is unfinished": lambda fixture: list(fixture.broker.unfinished.messages("g", "t")),
    "count what is unfinished": lambda fixture: fixture.broker.queue_sizes.look("g", "t"),
    "look for dead letters": redriven,
    "tell offsets": lambda fixture: fixture.broker.stream_partitions.positions(
        "s", [fixture.broker.topics.known("t").place(number) for number in range(PARTITIONS)]
    ),
    "health": lambda fixture: fixture.broker.health(),
    "save the folds": lambda fixture: fixture.broker.maintenance.save_state(),
    "retain": lambda fixture: fixture.broker.maintenance.retain(),
    "sweep": lambda fixture: fixture.broker.groups.sweep(),
    "end a group": lambda fixture: fixture.broker.group_admin.delete("g"),
}


@pytest.fixture
def spread(tmp_path):
    """A topic with a message in each of several partitions, all leased by a group."""
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=PARTITIONS))
        fixture.broker.produce("t", ProduceRequest(records(*["a"] * PARTITIONS), list(range(PARTITIONS))))
        fixture.receipts = received(fixture)
        group = fixture.broker.groups.get("g")
        fixture.sources = fixture.broker.receive_handler._plan(group, ["t"], forward=False)
        yield fixture


@pytest.fixture
def pauses(monkeypatch):
    """The pauses of the test's own greenlet, with a clock that ends a turn at each reading."""
    seen: list[object] = []
    me = gevent.getcurrent()
    seconds = count()

    def let_go() -> Callable[[], int]:
        monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: next(seconds))
        monkeypatch.setattr(
            "portalmq.broker.partition.yielding.give_way",
            lambda: seen.append(None) if gevent.getcurrent() is me else None,
        )
        return lambda: len(seen)

    return let_go


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_other_greenlets_run_between_the_partitions_of_a_call(spread, pauses, call):
    paused = pauses()
    call(spread)
    assert paused() >= PARTITIONS - (2 if call is CALLS["produce under a key"] else 1)


LISTS: dict[str, Callable[[Fixture], object]] = {
    "topics": lambda fixture: fixture.broker.list_topics(),
    "metadata": lambda fixture: fixture.broker.overview.metadata(None),
    "groups": lambda fixture: fixture.broker.list_groups(),
    "locks": lambda fixture: fixture.broker.locks.list_all(),
    "a group": lambda fixture: fixture.broker.group_admin.describe("a"),
    "the topic of a receipt": lambda fixture: fixture.broker.groups.by_tag(b"no topic"),
    "locks, swept": lambda fixture: fixture.broker.locks._sweep(),
    "locks, read anew": lambda fixture: (fixture.broker.locks.note(None), fixture.broker.locks._read_noted()),
    "topics, heard of anew": lambda fixture: fixture.broker.topics.sync(Changes(everything=True)),
    "groups, heard of anew": lambda fixture: fixture.broker.groups.sync(Changes(groups=set(NAMES))),
}


@pytest.mark.parametrize("call", LISTS.values(), ids=LISTS)
def test_other_greenlets_run_between_the_items_of_a_long_list(tmp_path, monkeypatch, pauses, call):
    monkeypatch.setattr("portalmq.broker.cluster.locks.LOCKS_A_READ", 1)
    with running(tmp_path) as fixture:
        for name in NAMES:
            fixture.broker.create_topic(name, wire.CreateTopic(partitions=1))
            fixture.broker.put_group(name, {"mode": "stream"})
            fixture.broker.locks.acquire(name, wire.LockRequest(owner="me"), None)
        fixture.broker.locks._sweep_at_ms = 0
        paused = pauses()
        call(fixture)
        assert paused() >= len(NAMES) - 1


@pytest.fixture
def meanwhile(monkeypatch):
    """Run a function once, in a pause between two items."""

    def arrange(do: Callable[[], object]) -> None:
        me, seconds, todo = gevent.getcurrent(), count(), [do]
        monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: next(seconds))
        monkeypatch.setattr(
            "portalmq.broker.partition.yielding.give_way",
            lambda: todo.pop()() if todo and gevent.getcurrent() is me else None,
        )

    return arrange


def test_other_greenlets_run_while_a_receive_skips_expired_messages_of_a_lane(tmp_path, monkeypatch):
    monkeypatch.setattr("portalmq.broker.queues.ready_messages.LANE_ROWS_MAX", 3)
    pauses = []
    monkeypatch.setattr("portalmq.broker.queues.group_receiver.give_way", lambda: pauses.append(None))
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
        fixture.broker.put_group("g", {"start": "earliest"})
        due_ms = fixture.clock.wall_ms() + 1_000
        gone = records(*map(str, range(10)), deliver_at_ms=due_ms, expires_at_ms=due_ms + 1_000)
        fixture.broker.produce("t", ProduceRequest([*gone, *records("last", deliver_at_ms=due_ms + 1)]))
        assert received(fixture) == []
        fixture.clock.advance(10_000)
        pauses.clear()
        assert len(received(fixture)) == 1
        assert len(pauses) >= 3


def test_a_message_that_arrives_while_a_consumer_parks_wakes_it(spread, meanwhile):
    waiter = Waiter(["t"])
    meanwhile(lambda: spread.broker.produce("t", ProduceRequest(records("b"), [0])))
    first = next(source for source in spread.sources if source.partition.number == 0)
    _park([first, *(source for source in spread.sources if source is not first)], waiter)
    assert waiter.woken
    assert first.has_messages()


def test_a_consumer_that_ends_while_it_parks_leaves_no_waiter(spread, monkeypatch):
    def waiting() -> list[object]:
        return [waiter for source in spread.sources for waiter in source._wakeup._waiters]

    def end() -> None:
        if waiting() and gevent.getcurrent() is consumer:
            raise gevent.GreenletExit

    seconds, long_polls = count(), spread.broker.groups.long_polls
    monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: next(seconds))
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", end)
    options = ReceiveOptions(1, 1_000, "", None)
    consumer = gevent.spawn(receive, lambda: spread.sources, ["t"], options, 60.0, None, long_polls)
    assert isinstance(consumer.get(), gevent.GreenletExit)
    assert (waiting(), list(long_polls.waiters)) == ([], [])


def test_receipts_settle_nothing_of_a_group_recreated_between_two_partitions(spread, monkeypatch):
    """The new group signs receipts with the same numbers."""
    turned = False

    def meanwhile() -> None:
        nonlocal turned
        if not turned:
            turned = True
            spread.broker.group_admin.delete("g")
            assert len(received(spread)) == PARTITIONS

    monkeypatch.setattr("portalmq.broker.cluster.routing.OWN_PATIENCE_S", 0.0)
    seconds = count()
    monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: next(seconds))
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", meanwhile)
    with pytest.raises(Unavailable, match="just deleted"):
        spread.broker.settlement.settle("g", spread.receipts, forward=False)
    assert turned
    assert spread.broker.describe_group("g").in_flight == PARTITIONS
