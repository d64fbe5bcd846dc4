"""What a group has ready in a topic is moved to another one: each message once, at a rate, and nothing else."""

from __future__ import annotations

import gevent
import pytest
from support.domain import running
from support.outputs import receive, send, settled, stored_in, there

from portalmq import wire
from portalmq.broker.queues import moves, ready_messages
from portalmq.broker.queues.settle import SettleRequest
from portalmq.errors import GroupNotFound, InvalidRequest, StaleReceipt, TopicNotFound, Unavailable

HOUR_MS = 3_600_000


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as started:
        started.broker.create_topic("in", wire.CreateTopic(partitions=2))
        started.broker.groups.put("g", {})
        yield started


def move(fixture, group="g", **how) -> tuple[int, int]:
    done = fixture.broker.group_moves.move(group, wire.MoveRequest("in", "out", **how))
    settled(fixture)
    return done.matched, done.moved


def texts(messages) -> list[str]:
    return sorted(message.record.value.decode() for message in messages)


def test_each_message_is_moved_once_and_done_for_the_group(fixture):
    send(fixture, "a", "b", key=b"k", headers={"x": "1"}, priority=5)
    send(fixture, "c", partition=1)
    assert move(fixture) == (3, 3)
    assert sorted(there(fixture)) == ["a", "b", "c"]
    first = next(stored for stored in stored_in(fixture, "out") if stored.record.value == b"a")
    assert (first.record.key, first.record.priority, first.record.deliver_at_ms) == (b"k", 5, None)
    assert first.record.headers == {"x": "1", "portalmq-copy-of": "in/0-1"}
    assert move(fixture) == (0, 0)
    assert receive(fixture) == []
    assert texts(receive(fixture, group="other")) == ["a", "b", "c"], "other groups still have them"
    assert fixture.broker.describe_group("g").lag == 0


def test_only_what_is_ready_moves(fixture):
    now_ms = fixture.clock.wall_ms()
    send(fixture, "leased")
    (leased,) = receive(fixture)
    send(fixture, "backed off")
    backed = [message.receipt for message in receive(fixture)]
    fixture.broker.settlement.settle("g", backed, SettleRequest("nack", HOUR_MS))
    send(fixture, "later", deliver_at_ms=now_ms + HOUR_MS)
    send(fixture, "ready")
    assert move(fixture) == (1, 1)
    assert there(fixture) == ["ready"]
    assert fixture.broker.settlement.settle("g", [leased.receipt]) == [True]


def test_a_limit_and_a_dry_run(fixture):
    send(fixture, *"abcde")
    assert move(fixture, dry_run=True) == (5, 0)
    assert "out" not in [topic.name for topic in fixture.broker.list_topics()]
    assert move(fixture, limit=2) == (5, 2)
    assert there(fixture) == ["a", "b"]
    assert move(fixture, limit=4) == (3, 3)


def test_a_rate_becomes_the_times_of_the_copies(fixture):
    send(fixture, *"abc", expires_at_ms=fixture.clock.wall_ms() + 700)
    assert move(fixture, rate_per_s=2) == (3, 3)
    now_ms = fixture.clock.wall_ms()
    times = [(copy.record.deliver_at_ms, copy.record.expires_at_ms) for copy in stored_in(fixture, "out")]
    assert times == [(None, now_ms + 700), (now_ms + 500, now_ms + 1_200), (now_ms + 1_000, now_ms + 1_700)]


def test_a_paused_group_moves_and_its_consumers_get_nothing(fixture):
    send(fixture, *"ab")
    receive(fixture, 1)
    fixture.broker.group_admin.pause("g", paused=True)
    assert move(fixture) == (1, 1)
    assert receive(fixture) == []
    assert there(fixture) == ["b"]


def test_keys_in_order_move_in_order(fixture):
    fixture.broker.groups.put("ordered", {"ordering": "key"})
    send(fixture, *"abc", key=b"k")
    assert move(fixture, group="ordered") == (3, 3)
    assert there(fixture) == ["a", "b", "c"]


def test_a_paused_group_moves_what_follows_messages_that_are_passed_over(fixture, monkeypatch):
    monkeypatch.setattr(ready_messages, "LOOK_MAX", 2)
    send(fixture, *"12345", expires_at_ms=fixture.clock.wall_ms() + 1)
    send(fixture, "a")
    fixture.clock.advance(1_000)
    fixture.broker.group_admin.pause("g", paused=True)
    assert move(fixture)[1] == 1
    assert there(fixture) == ["a"]


@pytest.mark.parametrize("error", [Unavailable("no leader"), OSError("the disk"), gevent.GreenletExit()])
def test_what_cannot_be_committed_is_given_back(fixture, monkeypatch, error):
    send(fixture, *"ab")

    def refuse(*arguments, **named):
        raise error

    monkeypatch.setattr(fixture.broker.group_commits, "commit_receipts", refuse)
    with pytest.raises(type(error)):
        move(fixture)
    assert sorted((message.record.value, message.delivery_count) for message in receive(fixture)) == [
        (b"a", 1),
        (b"b", 1),
    ]


def test_what_the_target_refuses_stays_ready_and_the_rest_moves(fixture):
    config = {"max_message_bytes": 1_024, "cleanup": "compact"}
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=1, config=config))
    send(fixture, "a", "x" * 2_000, "b", key=b"k")
    send(fixture, "no key")
    send(fixture, "c", partition=1, key=b"k")
    done = fixture.broker.group_moves.move("g", wire.MoveRequest("in", "out", limit=4))
    settled(fixture)
    assert (done.matched, done.moved, done.refused) == (5, 3, 2)
    assert done.refusal in {
        "message 0-2 has 2000 bytes, topic 'out' takes 1024 (max_message_bytes)",
        (
            "message 0-4 has no key, and topic 'out' keeps the last message of each key (cleanup is compact): give"
            " every message a key"
        ),
    }
    assert sorted(there(fixture)) == ["a", "b", "c"]
    events = fixture.broker.message_traces.trace("in", 0, 2).events
    assert [(each.event, each.consumer, each.delivery_count, each.reason) for each in events] == [
        ("appended", None, None, None),
        ("delivered", "portalmq-move", 0, None),
        ("nacked", None, None, "not moved"),
    ]
    left = receive(fixture)
    assert [(each.offset, each.delivery_count) for each in left] == [(2, 1), (4, 1)]


def test_a_move_that_moves_nothing_says_why(fixture):
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=1, config={"max_message_bytes": 1_024}))
    send(fixture, "x" * 2_000)
    done = fixture.broker.group_moves.move("g", wire.MoveRequest("in", "out"))
    assert (done.matched, done.moved, done.refused) == (1, 0, 1)
    assert done.refusal == "message 0-1 has 2000 bytes, topic 'out' takes 1024 (max_message_bytes)"


@pytest.mark.parametrize("ordering", ["none", "key"])
@pytest.mark.parametrize("delivered", [0, 1, 2])
def test_a_crash_of_a_move_uses_up_no_delivery(fixture, monkeypatch, ordering, delivered):
    settings = {"max_deliveries": delivered + 1, "retry_backoff_ms": [0], "ordering": ordering}
    fixture.broker.groups.put("h", settings)
    send(fixture, "a", key=b"k")
    stale = []
    for _ in range(delivered):
        (message,) = receive(fixture, group="h")
        stale.append(message.receipt)
        fixture.broker.settlement.settle("h", [message.receipt], SettleRequest("nack", 0))
    held = {}

    def crash(name, receipts, *arguments, **named):
        held.setdefault(receipts[0], None)
        raise Unavailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(fixture.broker.group_commits, "commit_receipts", crash)
        patched.setattr(fixture.broker.group_moves, "_give_back", lambda *arguments: None)
        for _ in range(3):
            with pytest.raises(Unavailable):
                move(fixture, group="h")
            fixture.clock.advance(moves.LEASE_MS + 1)
            fixture.broker.groups.attached("h")[0]._on_timer()
    assert len(held) == 3, "each lease has its own number"
    with pytest.raises(StaleReceipt):
        fixture.broker.group_commits.commit_receipts("h", list(held)[:1], [], forward=True)
    (message,) = receive(fixture, group="h")
    assert (message.delivery_count, message.receipt in held) == (delivered + 1, False)
    for receipt in held:
        assert fixture.broker.settlement.settle("h", [receipt]) == [False]
    assert fixture.broker.settlement.settle("h", [message.receipt]) == [True]


def test_a_move_after_one_that_crashed_and_one_that_failed_moves(fixture, monkeypatch):
    fixture.broker.groups.put("g", {"max_deliveries": 1})
    send(fixture, *"ab")

    def fail(*arguments, **named):
        raise Unavailable("gone")

    with monkeypatch.context() as patched:
        patched.setattr(fixture.broker.group_commits, "commit_receipts", fail)
        with pytest.raises(Unavailable):
            move(fixture)
        patched.setattr(fixture.broker.group_moves, "_give_back", lambda *arguments: None)
        with pytest.raises(Unavailable):
            move(fixture)
    fixture.clock.advance(moves.LEASE_MS + 1)
    assert move(fixture) == (2, 2)
    assert sorted(there(fixture)) == ["a", "b"]


def test_a_wrong_move_changes_nothing(fixture):
    send(fixture, "a")
    fixture.broker.groups.put("once", {"delivery": "at_most_once"})
    with pytest.raises(InvalidRequest, match="at_most_once"):
        move(fixture, group="once")
    with pytest.raises(InvalidRequest, match="itself"):
        fixture.broker.group_moves.move("g", wire.MoveRequest("in", "in"))
    with pytest.raises(TopicNotFound):
        fixture.broker.group_moves.move("g", wire.MoveRequest("missing", "out"))
    with pytest.raises(GroupNotFound):  # a misspelt group would have all messages ready
        move(fixture, group="misspelt")
    for rate in (1e-300, 1e-15):
        with pytest.raises(InvalidRequest, match="longer than 30 days"):
            move(fixture, rate_per_s=rate)
    assert texts(receive(fixture, group="once")) == ["a"]
