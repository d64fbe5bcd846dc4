"""Dead letters are copied once with their provenance, listed, redriven and dropped."""

from __future__ import annotations

from itertools import count

import gevent
import msgspec
import pytest
from support.domain import running
from support.outputs import (
    commit,
    give_up,
    outputs,
    partition_of,
    receive,
    send,
    settled,
    stored_in,
    there,
)
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.cluster.routing import outcome_of
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.records import Drop
from portalmq.broker.messages import matching
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues import dead_letters, outbox
from portalmq.broker.queues.delivery_batch import NAMES_MAX, dead_letter_topic
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import (
    GroupModeMismatch,
    GroupNotFound,
    InvalidRequest,
    NotLeader,
    StorageFull,
    TopicNotFound,
    Unavailable,
)
from portalmq.wire import GroupConfig


@pytest.fixture
def fixture(tmp_path, monkeypatch):
    monkeypatch.setattr(matching, "MATCH_WITHIN_S", 3_600.0)
    with running(tmp_path) as it:
        yield it


def listed(fixture, *, limit: int = 100, after: str | None = None):
    return fixture.broker.dead_letters.page("g", "in", limit=limit, after=after)


def ids(found) -> list[str]:
    return [f"{stored.partition}-{stored.offset}" for stored in found.messages]


def redrive(fixture, *, ids=None, where=None, rate_per_s=None, dry_run=False):
    return fixture.broker.dead_letters.redrive("g", "in", ids=ids, where=where, rate_per_s=rate_per_s, dry_run=dry_run)


def settle(fixture, messages, way: SettleRequest) -> list[bool]:
    return fixture.broker.settlement.settle("g", [message.receipt for message in messages], way)


def drop(fixture, ids=None) -> int:
    return fixture.broker.dead_letters.drop("g", "in", ids=ids)


def dead(fixture, *values: str, **more) -> list[str]:
    """Send messages, give them up, and return their ids."""
    send(fixture, *values, **more)
    messages = receive(fixture, len(values))
    give_up(fixture, messages)
    return [f"{message.partition}-{message.offset}" for message in messages]


# --- copies ----------------------------------------------------------------------------------------------------------


def test_a_copy_holds_the_message_and_its_origin(fixture):
    record = Record(b'{"a":1}', wire.JSON, b"key", {"trace": "x"}, None, None, 3)
    fixture.broker.produce("in", ProduceRequest([record]))
    (message,) = receive(fixture)
    give_up(fixture, [message], reason="poison")
    settled(fixture)
    (copy,) = stored_in(fixture, "in.dlq")
    assert (copy.record.value, copy.record.content_type, copy.record.key) == (b'{"a":1}', wire.JSON, b"key")
    assert copy.record.headers == {
        "trace": "x",
        "portalmq-source-topic": "in",
        "portalmq-source-partition": "0",
        "portalmq-source-offset": str(message.offset),
        "portalmq-group": "g",
        "portalmq-delivery-count": "1",
        "portalmq-dead-reason": "poison",
        "portalmq-dead-at-ms": str(fixture.clock.now_ms()),
    }


def test_a_reason_of_several_lines_becomes_a_header_of_one(fixture):
    """A consumer often gives a stack trace as the reason, and a header may hold no line breaks."""
    send(fixture, "a")
    settle(fixture, receive(fixture), SettleRequest("nack", 0, "Traceback:\n  File\r\n\tValueError\0"))
    fixture.broker.groups.put("g", {"max_deliveries": 2})
    settle(fixture, receive(fixture), SettleRequest("nack", None, "Traceback:\n  File\r\n\tValueError\0"))
    settled(fixture)
    (copy,) = stored_in(fixture, "in.dlq")
    (letter,) = listed(fixture).messages
    assert copy.record.headers["portalmq-dead-reason"] == "Traceback:   File \tValueError "
    assert letter.record.headers == copy.record.headers


def test_the_dead_letter_topic_is_created_even_where_first_use_creates_no_topics(fixture):
    fixture.broker.create_topic("in", wire.CreateTopic(partitions=3, config={"max_message_bytes": 2_000_000}))
    fixture.broker.topics._auto_create = False
    dead(fixture, "x" * 1_500_000)
    settled(fixture)
    state = fixture.broker.topics.get("in.dlq").state
    assert (state.partitions, state.config.max_message_bytes) == (1, 2_000_000)
    assert len(there(fixture, "in.dlq")) == 1


@pytest.mark.parametrize(
    ("pattern", "topic", "found"),
    [
        ("{topic}.dlq", "in", "in.dlq"),
        ("errors", "in", "errors"),
        ("errors", "errors", ""),
        ("{topic}.dlq", "t" * NAMES_MAX, "t" * (NAMES_MAX - 4) + ".dlq"),
        ("{topic}.dlq", "t" * (NAMES_MAX - 4) + ".dlq", ""),
        ("{topic}.{topic}", "t" * NAMES_MAX, "t" * 94 + "." + "t" * 94),
        ("", "in", ""),
    ],
)
def test_the_name_of_the_dead_letter_topic(pattern, topic, found):
    assert dead_letter_topic(GroupConfig(dead_letter_topic=pattern), topic) == found
    assert len(found) <= NAMES_MAX


def test_copies_are_made_once_over_restarts(tmp_path):
    with running(tmp_path) as before:
        send(before, *"abc")
        messages = receive(before)
        before.broker.outboxes.of(partition_of(before))._done = lambda finished: gevent.sleep(3_600)
        give_up(before, messages)
        eventually(lambda: there(before, "in.dlq") == ["a"])  # and the broker stops before it records that
        clock = before.clock
    with running(tmp_path, clock) as after:
        settled(after)
        assert there(after, "in.dlq") == ["a", "b", "c"]


def test_a_group_without_a_dead_letter_topic_has_no_copies(fixture):
    send(fixture, "a")
    give_up(fixture, receive(fixture), topic="")
    assert fixture.broker.outboxes.open == 0
    assert len(listed(fixture).messages) == 1


def test_a_dead_letter_for_an_invalid_topic_name_is_not_copied(fixture):
    send(fixture, "a", "b")
    first, second = receive(fixture)
    give_up(fixture, [first], topic="x" * 191)
    give_up(fixture, [second])
    settled(fixture)
    assert there(fixture, "in.dlq") == ["b"]


def test_dead_letters_and_commits_share_one_outbox(fixture):
    send(fixture, "a", "b")
    first, second = receive(fixture)
    give_up(fixture, [first])
    commit(fixture, [second], outputs("B"))
    settled(fixture)
    assert (there(fixture, "in.dlq"), there(fixture)) == (["a"], ["B"])


def test_many_dead_messages_of_one_record_are_copied_in_shipments(fixture, monkeypatch):
    monkeypatch.setattr(outbox, "OUTPUT_BATCH_MESSAGES_MAX", 7)
    dead(fixture, *(str(n) for n in range(50)))
    settled(fixture)
    assert there(fixture, "in.dlq") == [str(n) for n in range(50)]


# --- listing ---------------------------------------------------------------------------------------------------------


def test_a_list_shows_the_message_of_the_source_with_its_provenance(fixture):
    (name,) = dead(fixture, "boom")
    (stored,) = listed(fixture).messages
    assert (f"{stored.partition}-{stored.offset}", stored.topic, stored.record.value) == (name, "in", b"boom")
    assert stored.record.headers["portalmq-group"] == "g"
    assert stored.record.headers["portalmq-delivery-count"] == "1"


def test_a_list_is_paged_over_all_partitions(fixture):
    fixture.broker.create_topic("in", wire.CreateTopic(partitions=3))
    known = []
    for number in range(3):
        send(fixture, *(f"{number}.{n}" for n in range(5)), partition=number)
    messages = receive(fixture, 100)
    give_up(fixture, messages)
    known = [f"{m.partition}-{m.offset}" for m in sorted(messages, key=lambda m: (m.partition, m.offset))]
    assert len(known) == 15
    for limit in (1, 4, 5, 7, 15, 100):
        found, after = [], None
        while True:
            page = listed(fixture, limit=limit, after=after)
            assert len(page.messages) <= limit
            found += ids(page)
            after = page.next_after
            if after is None:
                break
        assert found == known, limit


def test_a_page_is_bounded_in_bytes(fixture, monkeypatch):
    monkeypatch.setattr(dead_letters, "PAGE_BYTES_MAX", 1_000)
    known = dead(fixture, *("x" * 400 for _ in range(8)))
    page = listed(fixture)
    assert len(page.messages) == 3
    assert page.next_after == known[2]
    assert ids(listed(fixture, after=page.next_after)) == known[3:6]


def test_purged_messages_are_not_listed(fixture):
    known = dead(fixture, *"abc")
    settled(fixture)
    fixture.broker.browser.purge("in", partition=0, before_offset=int(known[1].split("-")[1]))
    assert ids(listed(fixture)) == known[1:]


def test_a_group_that_has_not_begun_on_a_topic_has_an_empty_list(fixture):
    fixture.broker.create_topic("in", wire.CreateTopic())
    fixture.broker.groups.ensure("g")
    assert listed(fixture).messages == []
    with pytest.raises(TopicNotFound):
        fixture.broker.dead_letters.page("g", "nowhere", limit=1, after=None)
    with pytest.raises(GroupNotFound):
        fixture.broker.dead_letters.page("nobody", "in", limit=1, after=None)


@pytest.mark.parametrize("after", ["", "x", "1", "0-", "-1", "0-x", "0-1-2", "٣-1", "0-" + "9" * 30])
def test_an_invalid_id_is_refused(fixture, after):
    dead(fixture, "a")
    with pytest.raises(InvalidRequest, match="not a message id"):
        listed(fixture, after=after)


def test_stream_groups_have_no_dead_letters(fixture):
    send(fixture, "a")
    fixture.broker.put_group("g", {"mode": "stream"})
    with pytest.raises(GroupModeMismatch):
        listed(fixture)


# --- redriving -------------------------------------------------------------------------------------------------------


def test_redriven_messages_are_delivered_again_and_count_from_zero(fixture):
    known = dead(fixture, *"abc")
    assert redrive(fixture, ids=known[:2]) == (2, 2)
    again = receive(fixture)
    assert [(message.record.value, message.delivery_count) for message in again] == [(b"a", 1), (b"b", 1)]
    assert ids(listed(fixture)) == known[2:]
    assert redrive(fixture, ids=known[:2]) == (0, 0), "they are no longer dead"
    assert redrive(fixture) == (1, 1), "without ids, all are redriven"


def test_receipts_from_before_a_redrive_are_stale(tmp_path):
    """A redrive resets the count of deliveries but not the numbers of leases: earlier receipts stay stale."""
    with running(tmp_path) as before:
        before.broker.groups.put("g", {"max_deliveries": 1})
        send(before, "a", "b")
        earlier = receive(before, 2)
        settle(before, earlier[:1], SettleRequest("nack"))
        settle(before, earlier[1:], SettleRequest("nack"))
        assert redrive(before) == (2, 2)
        later = receive(before, 2)
        assert [message.delivery_count for message in later] == [1, 1]
        clock = before.clock
        for way in (SettleRequest("ack"), SettleRequest("nack"), SettleRequest("extend", 1_000)):
            assert settle(before, earlier, way) == [False, False]
    with running(tmp_path, clock) as after:
        for way in (SettleRequest("ack"), SettleRequest("nack"), SettleRequest("extend", 1_000)):
            assert settle(after, earlier, way) == [False, False]
        # A nack counts the deliveries since the redrive.
        after.broker.groups.put("g", {"max_deliveries": 2})
        assert settle(after, later[:1], SettleRequest("nack")) == [True]
        (again,) = receive(after, 2)
        assert (again.offset, again.delivery_count) == (later[0].offset, 2)
        assert settle(after, [again, later[1]], SettleRequest("ack")) == [True, True]


def test_a_redrive_wakes_a_consumer_that_sleeps(fixture):
    dead(fixture, "a")
    request = wire.ReceiveRequest(["in"], wait_ms=60_000)
    sleeper = gevent.spawn(fixture.broker.receive_handler.receive, "g", request, None)
    eventually(lambda: fixture.broker.health()["parked_receives"])
    redrive(fixture)
    assert [message.record.value for message in sleeper.get(timeout=50)] == [b"a"]


def test_a_dry_run_only_counts(fixture):
    known = dead(fixture, *"abc")
    assert redrive(fixture, dry_run=True) == (3, 0)
    assert redrive(fixture, ids=[known[0], "0-999"], dry_run=True) == (1, 0)
    assert ids(listed(fixture)) == known
    assert receive(fixture) == []


def test_a_predicate_selects_the_messages_to_redrive(fixture):
    for number in range(10):
        record = Record(msgspec.json.encode({"sensor": number % 2}), wire.JSON, b"k%d" % number, {"n": str(number)})
        fixture.broker.produce("in", ProduceRequest([record]))
    messages = receive(fixture, 10)
    give_up(fixture, messages[:5], reason="a timeout")
    give_up(fixture, messages[5:], reason="max_deliveries")
    assert redrive(fixture, where={"value.sensor": {"eq": 1}}, dry_run=True) == (5, 0)
    assert redrive(fixture, where={"reason": {"contains": "timeout"}}, dry_run=True) == (5, 0)
    assert redrive(fixture, where={"headers.n": {"eq": "7"}}, dry_run=True) == (1, 0)
    assert redrive(fixture, where={"key": {"eq": "k7"}}, dry_run=True) == (1, 0)
    assert redrive(fixture, where={"delivery_count": {"gt": 1}}, dry_run=True) == (0, 0)
    assert redrive(fixture, where={"value.sensor": {"eq": 1}, "reason": {"contains": "timeout"}}) == (2, 2)
    assert [message.offset for message in receive(fixture)] == [messages[1].offset, messages[3].offset]


@pytest.mark.parametrize("where", [{}, [], "x", {"value.a": {"regex": ".*"}}, {"sql": {"eq": "1; DROP TABLE"}}])
def test_a_malformed_predicate_redrives_nothing(fixture, where):
    known = dead(fixture, "a")
    with pytest.raises(InvalidRequest, match="where"):
        redrive(fixture, where=where)
    assert ids(listed(fixture)) == known


def test_a_predicate_that_takes_too_long_redrives_nothing(fixture, monkeypatch):
    monkeypatch.setattr(matching, "MATCH_WITHIN_S", -1.0)
    known = dead(fixture, *"abc")
    with pytest.raises(Unavailable, match="nothing was redriven") as slow:
        redrive(fixture, where={"value": {"exists": True}})
    assert not slow.value.retryable
    assert ids(listed(fixture)) == known


def test_a_rate_is_kept_by_the_log_over_restarts(tmp_path):
    with running(tmp_path) as before:
        known = dead(before, *"abcd")
        settled(before)
        assert redrive(before, rate_per_s=0.5) == (4, 4)
        assert len(known) == 4
        assert len(receive(before)) == 1
        clock = before.clock
    with running(tmp_path, clock) as after:
        assert receive(after) == []
        for _ in range(3):
            clock.advance(2_000)
            assert len(receive(after)) == 1
        assert receive(after) == []


def test_a_rate_is_shared_out_over_the_partitions(fixture):
    fixture.broker.create_topic("in", wire.CreateTopic(partitions=2))
    send(fixture, *"abcdefgh", partition=0)
    send(fixture, *"xy", partition=1)
    give_up(fixture, receive(fixture, 10))
    redrive(fixture, rate_per_s=10)
    came = []
    for _ in range(12):
        came.append(len(receive(fixture, 10)))
        fixture.clock.advance(100)
    assert sum(came) == 10
    assert max(came) <= 2, came
    assert sum(came[:5]) <= 7, came


def test_a_rate_that_would_take_for_ever_is_refused(fixture):
    dead(fixture, *"abc")
    with pytest.raises(InvalidRequest, match="raise rate_per_s"):
        redrive(fixture, rate_per_s=0.0000001)


def test_a_redrive_leaves_the_group_room_for_new_messages(fixture, monkeypatch):
    monkeypatch.setattr(dead_letters, "REDRIVEN_MAX", 2)
    dead(fixture, *"abc")
    assert redrive(fixture) == (3, 2)
    assert redrive(fixture) == (1, 0), "those two are not acked yet"
    fixture.broker.settlement.settle("g", [message.receipt for message in receive(fixture)])
    assert redrive(fixture) == (1, 1)


def test_ids_and_where_together_are_refused_and_too_many_ids(fixture):
    known = dead(fixture, "a")
    with pytest.raises(InvalidRequest, match="not both"):
        redrive(fixture, ids=known, where={"reason": {"exists": True}})
    with pytest.raises(InvalidRequest, match="limit is 10000"):
        redrive(fixture, ids=[f"0-{n}" for n in range(10_001)])
    assert redrive(fixture, ids=[]) == (0, 0), "an empty list names none"


# --- dropping --------------------------------------------------------------------------------------------------------


def test_dropped_messages_are_forgotten_for_good_and_their_copies_stay(tmp_path):
    with running(tmp_path) as before:
        known = dead(before, *"abc")
        settled(before)
        assert drop(before, known[:1]) == 1
        assert drop(before, known[:1]) == 0
        assert ids(listed(before)) == known[1:]
        assert drop(before) == 2
        clock = before.clock
    with running(tmp_path, clock) as after:
        assert listed(after).messages == []
        assert redrive(after) == (0, 0)
        assert there(after, "in.dlq") == ["a", "b", "c"]


def test_the_calls_between_brokers_carry_lists_redrives_and_drops(fixture):
    """A call from another broker does the same as a local call."""
    known = dead(fixture, "a", "b")
    broker = fixture.broker
    group, topic = broker.groups.get("g"), broker.topics.get("in").state
    share = dead_letters.DeadShare(0)

    def ask(name, **more):
        call = dead_letters.DeadCall("g", group.group_id, "in", topic.topic_id, **{"shares": [share], **more})
        ((value, refused),) = msgspec.msgpack.decode(broker.serve_peer(name, msgspec.msgpack.encode(call), None))
        assert refused is None, refused
        return value

    messages, complete = ask("dead_letters", limit=10)
    assert (len(messages), complete) == (2, True)
    first, second = (int(each.split("-")[1]) for each in known)
    where = {"value": {"eq": "a"}}
    assert ask("match_dead", where=where) == [[first, first + 1]]
    ranges = ((first, first + 1),)
    assert ask("redrive", shares=[dead_letters.DeadShare(0, ranges=ranges)]) == 1
    assert ask("drop_dead", shares=[dead_letters.DeadShare(0, ranges=((first, second + 1),))]) == 1
    assert [message.record.value for message in receive(fixture)] == [b"a"]


def test_other_greenlets_run_while_many_dead_letters_are_redriven_and_dropped(fixture, monkeypatch):
    monkeypatch.setattr(dead_letters, "RANGES_IN_A_RECORD", 10)
    send(fixture, *(str(number) for number in range(100)))
    messages = receive(fixture, 100)[::2]
    give_up(fixture, messages)
    turns = [0]

    def others() -> None:
        while True:
            gevent.sleep(0)
            turns[0] += 1

    greenlet = gevent.spawn(others)
    try:
        assert redrive(fixture, ids=[f"0-{message.offset}" for message in messages[:25]]) == (25, 25)
        assert turns[0] >= 2
        turns[0] = 0
        assert drop(fixture) == 25
        assert turns[0] >= 2
    finally:
        greenlet.kill()
    assert ids(listed(fixture)) == []


@pytest.fixture
def pauses(monkeypatch):
    """Record the pauses of the test's own greenlet, one for ten offsets. The first pause calls `meanwhile`."""
    monkeypatch.setattr(dead_letters, "OFFSETS_A_TURN", 10)
    monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: 0.0)
    me, seen = gevent.getcurrent(), []

    def let_go(meanwhile=lambda: None) -> list[None]:
        def give_way() -> None:
            if gevent.getcurrent() is me:
                seen.append(None)
                if len(seen) == 1:
                    meanwhile()

        monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", give_way)
        monkeypatch.setattr(dead_letters, "give_way", give_way)
        return seen

    return let_go


def test_a_list_is_read_in_turns(fixture, pauses, monkeypatch):
    letters = scattered(fixture, 5)
    seen, seconds = pauses(), count()
    monkeypatch.setattr("portalmq.broker.partition.yielding.perf_counter", lambda: next(seconds))
    assert ids(listed(fixture, after=letters[0])) == letters[1:]
    assert len(seen) >= 4


def scattered(fixture, count: int) -> list[str]:
    """Create dead letters of which no two are adjacent, and return their ids."""
    send(fixture, *(str(number) for number in range(2 * count)))
    messages = receive(fixture, 2 * count)[::2]
    give_up(fixture, messages, topic="")
    return [f"0-{message.offset}" for message in messages]


def test_a_redrive_pauses_during_each_of_its_steps(fixture, pauses):
    letters = scattered(fixture, 50)
    seen = pauses()
    assert redrive(fixture, ids=letters[:30], rate_per_s=1_000) == (30, 30)
    assert len(seen) == 4 * 2  # the ids, the match, the redrive, the times
    seen.clear()
    assert redrive(fixture) == (20, 20)
    assert len(seen) == 3 * 1
    assert ids(listed(fixture)) == []


@pytest.mark.parametrize("step", ["match", "redrive", "write"])
def test_a_replacement_of_the_groups_fold_during_a_pause_refuses_the_call(fixture, pauses, monkeypatch, step):
    monkeypatch.setattr(dead_letters, "RANGES_IN_A_RECORD", 10)
    offsets = tuple(int(each.partition("-")[2]) for each in scattered(fixture, 20))
    ranges = tuple((offset, offset + 1) for offset in offsets)
    partition, group, topic = partition_of(fixture), fixture.broker.groups.get("g"), fixture.broker.topics.known("in")

    def call(**share: object) -> dead_letters.DeadCall:
        shares = [dead_letters.DeadShare(0, **share)]
        return dead_letters.DeadCall("g", group.group_id, "in", topic.state.topic_id, shares)

    def anew() -> None:
        partition.delivery["g"] = GroupDelivery(partition.delivery["g"].snapshot())

    letters, place = fixture.broker.dead_letters, topic.place(0)
    do = {
        "match": lambda: letters.local_match(call(offsets=offsets))([place])[place],
        "redrive": lambda: letters.local_redrive(call(ranges=ranges))([place])[place],
        "write": lambda: outcome_of(
            lambda: dead_letters._append_records(partition, "g", ranges, lambda part: Drop(part, 0))
        ),
    }[step]
    pauses(anew)
    with pytest.raises(Unavailable, match="has changed"):
        raise do()
    assert len(partition.delivery["g"].dead) == (10 if step == "write" else 20)


def test_a_redrive_whose_second_record_is_refused_is_of_unknown_outcome(fixture, monkeypatch):
    monkeypatch.setattr(dead_letters, "RANGES_IN_A_RECORD", 1)
    send(fixture, "a", "b", "c", "d")
    give_up(fixture, receive(fixture)[::2])
    partition = partition_of(fixture)
    real, records_left = partition.append_group_record, [1]

    def append(group, record, **more):
        if not records_left:
            raise NotLeader("it has moved")
        records_left.pop()
        return real(group, record, **more)

    monkeypatch.setattr(partition, "append_group_record", append)
    with pytest.raises(NotLeader) as refused:
        dead_letters._append_records(partition, "g", [(0, 1), (2, 3)], lambda part: Drop(part, 0))
    assert refused.value.outcome == "unknown"


@pytest.mark.parametrize("way", ["redrive", "drop"])
def test_what_may_be_done_on_one_partition_is_not_denied_by_another(fixture, monkeypatch, way):
    fixture.broker.create_topic("in", wire.CreateTopic(partitions=2))
    for number in range(2):
        dead(fixture, "a", partition=number)
        error = StorageFull("no room", outcome="unknown" if number else "not_applied")
        monkeypatch.setattr(partition_of(fixture, number=number), "append_group_record", raising(error))
    with pytest.raises(StorageFull) as told:
        drop(fixture) if way == "drop" else redrive(fixture)
    assert told.value.outcome == "unknown"


def raising(error: Exception):
    def raise_it(*_arguments: object, **_more: object) -> None:
        raise error

    return raise_it
