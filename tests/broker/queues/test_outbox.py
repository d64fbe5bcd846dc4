"""Outputs of commits are appended once and in order, whatever happens between the order and its end."""

from __future__ import annotations

from random import Random

import gevent
import msgspec
import pytest
from gevent.event import Event
from support.domain import records, running
from support.outputs import (
    commit,
    hold_outputs,
    outputs,
    partition_of,
    receive,
    release_outputs,
    send,
    settled,
    stored_in,
    there,
)
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.queues import outbox
from portalmq.broker.queues.commit import OutputMessage
from portalmq.broker.storage.batch import BatchKind, Record
from portalmq.broker.storage.errors import CorruptFile, DiskFull, TooManyOpenFiles
from portalmq.errors import Backpressure, StorageFull, TopicNotFound, Unavailable


@pytest.fixture
def fixture(tmp_path):
    with running(tmp_path) as it:
        yield it


def test_missing_topics_are_created_or_refused_as_configured(fixture):
    send(fixture, "a", "b")
    messages = receive(fixture)
    commit(fixture, messages[:1], outputs("A", topic="new"))
    settled(fixture)
    assert there(fixture, "new") == ["A"]
    fixture.broker.topics._auto_create = False
    with pytest.raises(TopicNotFound):
        commit(fixture, messages[1:], outputs("A", topic="newer"))


def test_outputs_keep_their_order_key_and_options_and_go_where_their_key_points(fixture):
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=4))
    send(fixture, *(str(n) for n in range(20)))
    for message in receive(fixture, 20):
        key = b"k%d" % (message.offset % 3)
        record = Record(b"%d" % message.offset, wire.TEXT, key, {"h": "1"}, None, None, 7)
        commit(fixture, [message], [OutputMessage("out", record)])
    settled(fixture)
    stored = stored_in(fixture, "out")
    assert len(stored) == 20
    for key in {each.record.key for each in stored}:
        own = [each for each in stored if each.record.key == key]
        assert len({each.partition for each in own}) == 1
        values = [int(each.record.value) for each in own]
        assert values == sorted(values)
    produced = fixture.broker.produce("out", ProduceRequest(records("x", key=b"k1")))
    assert produced[0].partition == next(each.partition for each in stored if each.record.key == b"k1")
    assert {(each.record.headers["h"], each.record.priority) for each in stored} == {("1", 7)}


def test_a_commit_survives_a_restart_with_its_repeat_and_its_outputs(tmp_path):
    with running(tmp_path) as before:
        send(before, "a", "b")
        messages = receive(before)
        hold_outputs(before)
        first = commit(before, messages, outputs("A", "B"))
        assert there(before) == []
        clock = before.clock
    with running(tmp_path, clock) as after:
        eventually(lambda: there(after) == ["A", "B"])
        assert commit(after, messages, outputs("A", "B")) == first
        settled(after)
        assert there(after) == ["A", "B"]


def test_outputs_that_were_appended_before_done_was_written_are_not_appended_again(tmp_path):
    with running(tmp_path) as before:
        send(before, "a")
        messages = receive(before)
        own = before.broker.outboxes.of(partition_of(before))
        own._done = lambda finished: gevent.sleep(3_600)  # the broker stops between the two
        commit(before, messages, outputs("A", "B"))
        eventually(lambda: there(before) == ["A", "B"])
        clock = before.clock
    with running(tmp_path, clock) as after:
        assert partition_of(after).groups.outbox or there(after) == ["A", "B"]
        settled(after)
        assert there(after) == ["A", "B"]


def test_too_many_open_outputs_are_refused_and_accepted_later(fixture, monkeypatch):
    monkeypatch.setattr(outbox, "OPEN_COMMITS_MAX", 3)
    send(fixture, *"abcdefgh")
    messages = receive(fixture)
    real, blocked = fixture.broker.produce_handler.copies, [True]

    def copies(topic, shares):
        if blocked:
            raise Unavailable("no leader", retry_after_s=0.01)
        return real(topic, shares)

    fixture.broker.outboxes._destinations.copies = copies
    for message in messages[:3]:
        commit(fixture, [message], outputs(str(message.offset)))
    with pytest.raises(Backpressure, match="3 commits") as refused:
        commit(fixture, messages[3:4], outputs("3"))
    assert refused.value.outcome == "not_applied"
    commit(fixture, messages[4:5]), "one without outputs leaves nothing open"
    blocked.clear()
    settled(fixture)
    commit(fixture, messages[3:4], outputs(str(messages[3].offset)))
    settled(fixture)
    assert there(fixture) == [str(message.offset) for message in messages[:4]], "in the order of the commits"


def test_orders_from_before_an_election_count_against_a_bound_of_their_own(fixture, monkeypatch):
    monkeypatch.setattr(outbox, "OPEN_ORDERS_MAX", 3)
    send(fixture, *"abcd")
    messages = receive(fixture)
    hold_outputs(fixture)
    for message in messages[:3]:
        commit(fixture, [message], outputs(str(message.offset)))
    fixture.broker.outboxes.on_leading(fixture.broker.topics.get("in"), partition_of(fixture))
    with pytest.raises(Backpressure, match="3 orders") as refused:
        commit(fixture, messages[3:], outputs("3"))
    assert refused.value.outcome == "not_applied"
    release_outputs(fixture)
    settled(fixture)
    commit(fixture, messages[3:], outputs("3"))


def test_outputs_do_not_hold_their_place_while_a_partition_has_no_leader(fixture, monkeypatch):
    topic, _ = fixture.broker.topics.create("out", wire.CreateTopic())
    leaders = fixture.broker.leaders
    monkeypatch.setattr(leaders, "_patience_s", 3_600.0)
    monkeypatch.setattr(leaders._map, "leader_of", lambda place: None)
    with gevent.Timeout(60):
        (error,) = fixture.broker.produce_handler.copies(topic, {0: records("a", message_id=bytes(16))}).values()
    assert "has no leader" in error.detail


def test_open_outputs_are_bounded_in_bytes(fixture, monkeypatch):
    monkeypatch.setattr(outbox, "OPEN_BYTES_MAX", 1_000)
    send(fixture, "a", "b")
    messages = receive(fixture)
    monkeypatch.setattr(fixture.broker.outboxes._destinations, "copies", lambda *_: gevent.sleep(3_600))
    commit(fixture, messages[:1], outputs("x" * 900))
    with pytest.raises(Backpressure):
        commit(fixture, messages[1:], outputs("x" * 900))


def test_outputs_for_a_topic_that_was_deleted_are_dropped_and_hold_nothing_up(fixture):
    send(fixture, "a", "b")
    fixture.broker.create_topic("gone", wire.CreateTopic())
    messages = receive(fixture)
    hold_outputs(fixture)
    commit(fixture, messages[:1], outputs("A", topic="gone"))
    commit(fixture, messages[1:], outputs("B"))
    fixture.broker.delete_topic("gone")
    release_outputs(fixture)
    settled(fixture)
    assert there(fixture) == ["B"]
    assert "gone" not in {topic.name for topic in fixture.broker.list_topics()}


def test_a_topic_is_not_deleted_before_the_outputs_of_its_commits_are_appended(fixture, monkeypatch):
    """They were answered with 200, and went with the log that ordered them."""
    send(fixture, "a")
    messages = receive(fixture)
    hold_outputs(fixture)
    commit(fixture, messages, outputs("A"))
    monkeypatch.setattr("portalmq.broker.messages.browse.ORDERS_WITHIN_S", 0.05)
    with pytest.raises(Unavailable, match="'in' was not deleted") as refused:
        fixture.broker.delete_topic("in")
    assert refused.value.outcome == "not_applied"
    release_outputs(fixture)
    settled(fixture)
    fixture.broker.delete_topic("in")
    assert there(fixture) == ["A"]


def test_a_topic_is_not_deleted_while_its_leader_does_not_tell_of_outputs(fixture, monkeypatch):
    monkeypatch.setattr(outbox, "CLOSING_S", 0.05)
    monkeypatch.setattr(fixture.broker.leaders, "_patience_s", 0.05)
    send(fixture, "a")
    messages = receive(fixture)
    hold_outputs(fixture)
    commit(fixture, messages, outputs("A"))
    partition_of(fixture).serves = False
    with pytest.raises(Unavailable, match="the leader of partition 0 has not told"):
        fixture.broker.delete_topic("in")
    fixture.broker.delete_topic("in", force=True)
    assert "in" not in {topic.name for topic in fixture.broker.list_topics()}


def test_an_order_that_may_never_be_committed_keeps_no_topic(fixture):
    send(fixture, "a")
    partition = partition_of(fixture)
    partition.groups.outbox[partition.high_watermark] = "g"
    fixture.broker.browser.check_outputs("in")


def test_a_commit_during_the_deletion_of_its_topic_is_carried_out(fixture, monkeypatch):
    send(fixture, "a")
    messages = receive(fixture)
    hold_outputs(fixture)
    delete = fixture.broker.topics.delete

    def commit_first(name):
        commit(fixture, messages, outputs("A"))
        delete(name)

    monkeypatch.setattr(fixture.broker.topics, "delete", commit_first)
    deleting = gevent.spawn(fixture.broker.delete_topic, "in")
    eventually(lambda: fixture.broker.topics.get("in") is None)
    release_outputs(fixture)
    deleting.get()
    assert there(fixture) == ["A"]


def test_an_output_waits_for_a_partition_that_is_not_known_here_yet(fixture, monkeypatch):
    """It went to another partition, and the next leader, which knew the partition, stored it there too."""
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=4))
    topic, asked = fixture.broker.topics.get("out"), Event()
    grown, confirm = topic.state, topic._confirm
    send(fixture, "a", "b")
    messages = receive(fixture)
    hold_outputs(fixture)
    commit(fixture, messages[:1], [OutputMessage("out", Record(b"A"), 3)])
    monkeypatch.setattr(topic, "_confirm", lambda missing: (asked.set(), confirm(missing)))
    topic.state = msgspec.structs.replace(grown, partitions=1)
    release_outputs(fixture)
    assert asked.wait(10)
    topic.state = grown
    settled(fixture)
    assert [(each.partition, each.record.value) for each in stored_in(fixture, "out")] == [(3, b"A")]


def test_an_output_for_a_partition_that_does_not_exist_any_more_goes_to_another(fixture):
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=4))
    send(fixture, "a")
    messages = receive(fixture)
    hold_outputs(fixture)
    commit(fixture, messages, [OutputMessage("out", Record(b"A"), 3)])
    fixture.broker.delete_topic("out")
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=1))
    release_outputs(fixture)
    settled(fixture)
    assert [(each.partition, each.record.value) for each in stored_in(fixture, "out")] == [(0, b"A")]


def test_a_purge_waits_for_open_outputs(fixture, monkeypatch):
    send(fixture, "a")
    messages = receive(fixture)
    hold_outputs(fixture)
    commit(fixture, messages, outputs("A"))
    monkeypatch.setattr("portalmq.broker.partition.retention.ORDERS_WITHIN_S", 0.05)
    with pytest.raises(Unavailable, match="nothing was purged"):
        fixture.broker.browser.purge("in", partition=None, before_offset=None)
    release_outputs(fixture)
    settled(fixture)
    fixture.broker.browser.purge("in", partition=None, before_offset=None)
    assert there(fixture) == ["A"]


def test_an_order_whose_end_the_disk_refuses_is_processed_again_without_new_messages(fixture, monkeypatch):
    """Found by `make simulate-shell SEED=32191`: it stayed open, and retention and purges waited for it. What it
    ordered is not appended again, however long the disk is full."""
    monkeypatch.setattr(outbox, "REFUSED_PAUSE_S", 0.02)
    send(fixture, "a")
    messages = receive(fixture, 1)
    refused: list[int] = []
    copies, asked = fixture.broker.outboxes._destinations.copies, []

    def counted(topic, shares):
        asked.append(shares)
        return copies(topic, shares)

    monkeypatch.setattr(fixture.broker.outboxes._destinations, "copies", counted)

    def refusing(append):
        def attempt(batches, **more):
            if len(refused) < 3 and any(batch.kind == BatchKind.DONE for batch in batches):
                refused.append(batches[0].base_offset)
                raise DiskFull("no room")
            return append(batches, **more)

        return attempt

    log = partition_of(fixture).log
    for name in ("append", "append_at_once"):
        monkeypatch.setattr(log, name, refusing(getattr(log, name)))
    commit(fixture, messages, outputs("A"))
    eventually(lambda: len(refused) == 3 and not partition_of(fixture).groups.outbox)
    assert len(asked) == 1
    assert there(fixture) == ["A"]


@pytest.mark.parametrize("damaged", [0, 1])
@pytest.mark.parametrize("fault", [CorruptFile("malformed"), TooManyOpenFiles("none left")])
def test_a_damaged_partition_repeats_no_output_in_its_siblings(fixture, monkeypatch, damaged, fault):
    """Until the damage is mended the order is tried again, at last after the siblings have forgotten its ids."""
    send(fixture, "a")
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=2))
    asked: list[int] = []

    def fail(*_):
        asked.append(fixture.clock.advance(2 * wire.DAY_MS))
        raise fault

    monkeypatch.setattr(partition_of(fixture, "out", damaged).log, "find_message_id", fail)
    monkeypatch.setattr(outbox, "PAUSE_MAX_S", 0.01)
    both = outputs("A", partition=damaged) + outputs("B", partition=1 - damaged)
    commit(fixture, receive(fixture, 1), both)
    eventually(lambda: len(asked) > 3)
    assert len(partition_of(fixture).groups.outbox) == 1
    assert there(fixture) == ["B"]
    assert ("malformed" in partition_of(fixture, "out", damaged).fault) == isinstance(fault, CorruptFile)
    assert partition_of(fixture).fault == ""
    assert fixture.faults == []


def test_retention_keeps_messages_that_the_outbox_reads(fixture):
    send(fixture, "a")
    messages = receive(fixture)
    hold_outputs(fixture)
    commit(fixture, messages, outputs("A"))
    partition = partition_of(fixture)
    (order,) = partition.groups.outbox
    for _ in range(3):
        send(fixture, "x" * 1000)
        fixture.broker.pool.apply(partition.log.roll)
    fixture.clock.advance(30 * wire.DAY_MS)
    partition.retention.retain(1_000, None, 1)
    assert partition.log.base_offset <= order
    release_outputs(fixture)
    settled(fixture)
    assert there(fixture) == ["A"]
    fixture.clock.advance(2 * wire.DAY_MS)
    partition.retention.retain(1_000, None, 1)
    assert partition.log.base_offset > order


def test_large_outputs_go_in_several_shipments(fixture, monkeypatch):
    monkeypatch.setattr(outbox, "OUTPUT_BATCH_BYTES_MAX", 2_000)
    send(fixture, "a", "b")
    shipped: list[int] = []
    real = fixture.broker.outboxes._destinations.copies

    def copies(topic, shares):
        shipped.append(sum(len(share) for share in shares.values()))
        return real(topic, shares)

    fixture.broker.outboxes._destinations.copies = copies
    values = [f"{n}".rjust(500) for n in range(20)]
    for message in receive(fixture):
        commit(fixture, [message], outputs(*values))
    settled(fixture)
    assert there(fixture) == values * 2
    assert max(shipped) <= 5


def test_ids_differ_by_partition_record_epoch_and_place(fixture):
    send(fixture, "a")
    commit(fixture, receive(fixture), outputs("A", "A"))
    settled(fixture)
    ids = [stored.record.message_id for stored in stored_in(fixture, "out")]
    assert len(set(ids)) == 2
    order = next(batch for batch in partition_of(fixture).log.control_records() if batch.kind == BatchKind.COMMIT)
    topic_id = partition_of(fixture).topic_id
    assert ids == [outbox.output_id(topic_id, 0, order, index) for index in range(2)]
    later = msgspec.structs.replace(order, leader_epoch=order.leader_epoch + 1)
    assert outbox.output_id(topic_id, 0, later, 0) not in ids


def test_an_order_is_read_from_the_files_when_the_cache_has_lost_it(fixture):
    send(fixture, "a", "b")
    hold_outputs(fixture)
    for message in receive(fixture):
        commit(fixture, [message], outputs(message.record.value.decode()))
    partition = partition_of(fixture)
    fixture.broker.cache.drop(partition._cache_key)
    release_outputs(fixture)
    settled(fixture)
    assert there(fixture) == ["a", "b"]
    assert partition.reader.control_at(10_000) is None


@pytest.mark.parametrize("seed", range(5))
def test_with_random_faults_each_output_is_appended_once_and_in_order(fixture, monkeypatch, seed):
    """Appends fail before, during or after the write, and the outbox restarts, while commits continue."""
    chance = Random(seed)
    monkeypatch.setattr(outbox, "PAUSE_FIRST_S", 0.0005)
    monkeypatch.setattr(outbox, "PAUSE_MAX_S", 0.002)
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=3))
    real = fixture.broker.outboxes._destinations.copies

    def copies(topic, shares):
        some = {number: share for number, share in shares.items() if chance.random() < 0.7}
        if chance.random() < 0.4:
            if some and chance.random() < 0.7:
                real(topic, some)
            raise Unavailable("nobody knows", outcome="unknown", retry_after_s=0)
        return real(topic, shares)

    fixture.broker.outboxes._destinations.copies = copies
    send(fixture, *(str(n) for n in range(60)))
    messages = receive(fixture, 60)
    while messages:
        own = [messages.pop(0) for _ in range(min(len(messages), chance.randint(1, 4)))]
        publish = [each for m in own for each in outputs(m.record.value.decode(), key=b"%d" % (m.offset % 7))]
        while True:
            try:
                commit(fixture, own, publish)
                break
            except (StorageFull, Unavailable):
                continue
        if chance.random() < 0.3:  # another leader begins with the fold of the log
            partition = partition_of(fixture)
            topic = fixture.broker.topics.get("in")
            fixture.broker.outboxes.on_stepped_down(partition)
            gevent.sleep(0)
            fixture.broker.outboxes.on_leading(topic, partition)
        gevent.sleep(0)
    settled(fixture)
    stored = stored_in(fixture, "out")
    assert sorted(int(each.record.value) for each in stored) == list(range(60))
    for key in {each.record.key for each in stored}:
        own = [int(each.record.value) for each in stored if each.record.key == key]
        assert own == sorted(own)


def test_an_order_that_waits_longer_than_the_dedup_window_is_not_appended_again_where_it_was(fixture, monkeypatch):
    """One partition of a topic refuses appends for an hour; the other partitions hold each message once."""
    monkeypatch.setattr(outbox, "PAUSE_FIRST_S", 0.001)
    fixture.broker.create_topic("fine", wire.CreateTopic(config={"dedup_window_ms": 1_000}))
    fixture.broker.create_topic("out", wire.CreateTopic(partitions=2, config={"dedup_window_ms": 1_000}))
    stuck = partition_of(fixture, "out", 1)
    real, tries = stuck.submit, [0]

    def submit(*arguments, **more):
        if tries[0] < 5:
            tries[0] += 1
            fixture.clock.advance(3_600_000)
            raise Backpressure("no room", retry_after_s=0)
        return real(*arguments, **more)

    stuck.submit = submit
    send(fixture, "a")
    publish = [*outputs("F", topic="fine"), *outputs("A", partition=0), *outputs("B", partition=1)]
    commit(fixture, receive(fixture), publish)
    settled(fixture)
    assert tries == [5]
    assert (there(fixture, "fine"), there(fixture)) == (["F"], ["A", "B"])
