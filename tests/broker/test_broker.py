"""Topics, producing, browsing and recovery over real logs."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import gevent
import pytest
from support.domain import Fixture, HandClock, records, running
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.errors import DiskFull, StorageFault
from portalmq.errors import (
    Fenced,
    InvalidRequest,
    MessageTooLarge,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PartitionNotFound,
    StorageFull,
    TopicExists,
    TopicNotFound,
    Unavailable,
)


@pytest.fixture
def fixture(tmp_path: Path):
    with running(tmp_path) as it:
        yield it


def send(fixture: Fixture, *values: str, topic: str = "t", key: bytes | None = None, **more):
    return fixture.broker.produce(
        topic, ProduceRequest(records(*values, key=key), acks=more.pop("acks", "all"), **more)
    )


def page(fixture: Fixture, topic: str = "t", partition: int = 0, **more):
    settings = {"offset": None, "position": "earliest", "at_ms": None, "limit": 100, "wait_ms": 0, "peer": None, **more}
    return fixture.broker.browser.browse(topic, partition, **settings)


def texts(messages) -> list[str]:
    return [message.record.value.decode() for message in messages]


# --- topics ----------------------------------------------------------------------------------------------------------


def test_a_topic_may_be_created_again_only_with_the_same_settings(fixture):
    request = wire.CreateTopic(partitions=2)
    assert fixture.broker.create_topic("t", request)[1]
    assert not fixture.broker.create_topic("t", request)[1]
    assert not fixture.broker.create_topic("t", wire.CreateTopic())[1]
    with pytest.raises(TopicExists):
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))


def test_the_first_message_creates_a_missing_topic(fixture):
    (result,) = send(fixture, "a", topic="new")
    assert result.partition == 0
    assert [topic.name for topic in fixture.broker.list_topics()] == ["new"]


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a b", "ü", "x" * 191, "../../etc", "a\n"])
def test_an_invalid_name_is_refused(fixture, name):
    with pytest.raises(InvalidRequest):
        send(fixture, "a", topic=name)


@pytest.mark.parametrize(
    "config",
    [
        {"retention_ms": 0},
        {"retention_ms": 2**53},
        {"dedup_window_ms": 2**64},
        {"retention_ms": "long"},
        {"colour": "red"},
        {"segment_bytes": 1},
        {"cleanup": "shrink"},
        {"default_ttl_ms": 0},
        {"max_backlog_messages": -5},
        {"min_insync_replicas": 9},
    ],
)
def test_settings_that_are_wrong_are_refused(fixture, config):
    with pytest.raises(InvalidRequest):
        fixture.broker.create_topic("t", wire.CreateTopic(config=config))
    with pytest.raises(TopicNotFound):
        fixture.broker.describe_topic("t")


def test_partitions_can_be_added_and_not_removed(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    described = fixture.broker.alter_topic("t", wire.AlterTopic(partitions=4))
    assert [each.partition for each in described.partitions] == [0, 1, 2, 3]
    with pytest.raises(InvalidRequest):
        fixture.broker.alter_topic("t", wire.AlterTopic(partitions=3))


def test_a_deleted_topic_is_gone_with_its_files(fixture, tmp_path):
    send(fixture, "a")
    assert len(list((tmp_path / "partitions").iterdir())) == 1
    fixture.broker.delete_topic("t")
    assert list((tmp_path / "partitions").iterdir()) == []
    with pytest.raises(TopicNotFound):
        page(fixture)
    send(fixture, "b")
    assert texts(page(fixture).messages) == ["b"]


# --- producing -------------------------------------------------------------------------------------------------------


def test_offsets_rise_and_the_first_need_not_be_zero(fixture):
    first, second = send(fixture, "a", "b")
    (third,) = send(fixture, "c")
    assert first.offset < second.offset < third.offset


def test_the_same_key_goes_to_the_same_partition(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=7))
    for key in (b"a", b"b", b"sensor-1"):
        (result,) = send(fixture, "x", key=key)
        assert result.partition == zlib.crc32(key) % 7


def test_messages_without_a_key_are_spread_batch_by_batch(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    batches = [{result.partition for result in send(fixture, "x", "y")} for _ in range(3)]
    assert [len(batch) for batch in batches] == [1, 1, 1]
    assert set().union(*batches) == {0, 1, 2}


def test_each_message_of_a_batch_may_name_its_partition(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=3))
    results = fixture.broker.produce("t", ProduceRequest(records("a", "b", "c"), [2, None, 0]))
    assert (results[0].partition, results[2].partition) == (2, 0)
    with pytest.raises(PartitionNotFound):
        fixture.broker.produce("t", ProduceRequest(records("a", "b"), [0, 3]))
    assert len(list(fixture.broker.browser.read_all("t", None))) == 3, (
        "a batch is checked whole before anything is appended"
    )


def test_a_message_over_the_topics_limit_is_refused_with_its_whole_batch(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(config={"max_message_bytes": 10}))
    with pytest.raises(MessageTooLarge, match="message 1 "):
        send(fixture, "small", "x" * 11)
    assert page(fixture).messages == []


def test_acks_none_answers_at_once_without_an_offset(fixture):
    (result,) = send(fixture, "a", acks="none")
    assert result.offset == -1
    send(fixture, "b")
    assert texts(page(fixture).messages) == ["a", "b"]


def test_acks_leader_is_answered(fixture):
    (result,) = send(fixture, "a", acks="leader")
    assert result.offset >= 0


def test_many_at_once_share_transactions_and_keep_their_order(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    assert fixture.broker.topics.wait_settled(60)  # a send before that is refused, and repeated after the others
    greenlets = [gevent.spawn(send, fixture, str(number)) for number in range(200)]
    gevent.joinall(greenlets, timeout=60, raise_error=True)
    offsets = [greenlet.get()[0].offset for greenlet in greenlets]
    assert offsets == sorted(offsets)
    assert texts(page(fixture, limit=1000).messages) == [str(number) for number in range(200)]


def test_a_full_disk_refuses_before_anything_is_lost(fixture):
    send(fixture, "a")
    fixture.disk.is_full = True
    with pytest.raises(StorageFull):
        send(fixture, "b")
    fixture.disk.is_full = False
    send(fixture, "c")
    assert texts(page(fixture).messages) == ["a", "c"]


# --- the two identities ----------------------------------------------------------------------------------------------


def stamp(sequence: int, epoch: int = 0, producer: int = 7) -> wire.ProducerStamp:
    return wire.ProducerStamp(producer, epoch, sequence)


def test_a_batch_repeated_by_its_producer_is_appended_once(fixture):
    first = send(fixture, "a", "b", producer=stamp(0))
    assert send(fixture, "a", "b", producer=stamp(0)) == first
    assert texts(page(fixture).messages) == ["a", "b"]


def test_a_batch_repeated_while_the_first_is_on_its_way_is_appended_once(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    greenlets = [gevent.spawn(send, fixture, "a", producer=stamp(0)) for _ in range(10)]
    gevent.joinall(greenlets, timeout=60, raise_error=True)
    assert len({greenlet.get()[0].offset for greenlet in greenlets}) == 1
    assert texts(page(fixture).messages) == ["a"]


def test_gaps_and_older_epochs_are_refused(fixture):
    send(fixture, "a", producer=stamp(0, epoch=3))
    with pytest.raises(OutOfOrderSequence):
        send(fixture, "b", producer=stamp(2, epoch=3))
    with pytest.raises(Fenced):
        send(fixture, "b", producer=stamp(1, epoch=2))
    assert texts(page(fixture).messages) == ["a"]


def test_a_producer_is_known_after_a_restart(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        first = send(before, "a", producer=stamp(0))
    with running(tmp_path, clock) as after:
        assert send(after, "a", producer=stamp(0)) == first
        send(after, "b", producer=stamp(1))
        assert texts(page(after).messages) == ["a", "b"]


# --- browsing --------------------------------------------------------------------------------------------------------


def test_browsing_continues_at_the_next_offset_and_skips_gaps(fixture):
    send(fixture, "a", "b")
    fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)  # a record between the messages
    send(fixture, "c")
    first = page(fixture, limit=2)
    assert texts(first.messages) == ["a", "b"]
    second = page(fixture, offset=first.next_offset, position=None)
    assert texts(second.messages) == ["c"]
    assert second.next_offset == second.high_watermark
    assert page(fixture, offset=second.next_offset, position=None).messages == []


def test_browsing_from_the_latest_shows_only_new_messages(fixture):
    send(fixture, "a")
    assert page(fixture, position="latest").messages == []


def test_browsing_from_a_time(fixture):
    send(fixture, "old")
    fixture.clock.advance(10_000)
    send(fixture, "new")
    assert texts(page(fixture, at_ms=fixture.clock.day_ms, position=None).messages) == ["new"]
    assert texts(page(fixture, at_ms=0, position=None).messages) == ["old", "new"]
    assert page(fixture, at_ms=fixture.clock.day_ms + 1, position=None).messages == []


def test_a_browse_may_wait_for_the_first_message(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic())
    browser = gevent.spawn(page, fixture, position="latest", wait_ms=60_000)
    gevent.sleep(0)
    send(fixture, "a")
    assert texts(browser.get(timeout=50).messages) == ["a"]


def test_offsets_outside_the_log_are_refused(fixture):
    send(fixture, "a")
    with pytest.raises(OffsetOutOfRange):
        page(fixture, offset=1_000, position=None)
    with pytest.raises(PartitionNotFound):
        page(fixture, partition=1)


def test_a_purge_removes_lower_offsets_for_readers_and_groups(fixture):
    send(fixture, *"abcd")
    fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=1), None)
    offset = page(fixture).messages[2].offset
    fixture.broker.browser.purge("t", partition=0, before_offset=offset)
    assert texts(page(fixture).messages) == ["c", "d"]
    with pytest.raises(OffsetOutOfRange):
        page(fixture, offset=offset - 1, position=None)
    assert [m.record.value for m in fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)] == [
        b"c",
        b"d",
    ]
    fixture.broker.browser.purge("t", partition=None, before_offset=None)
    assert page(fixture).messages == []
    assert fixture.broker.describe_group("g").lag == 0


def test_a_purge_survives_a_restart(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        send(before, *"abcd")
        before.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=1), None)
        before.broker.browser.purge("t", partition=None, before_offset=None)
        send(before, "e")
    with running(tmp_path, clock) as after:
        assert texts(page(after).messages) == ["e"]
        assert [
            m.record.value for m in after.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)
        ] == [b"e"]


# --- recovery and upkeep ---------------------------------------------------------------------------------------------


def test_all_data_survives_a_restart_and_the_epoch_rises(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        send(before, *"abc")
        epoch = before.broker.describe_topic("t").partitions[0].leader_epoch
    with running(tmp_path, clock) as after:
        assert texts(page(after).messages) == ["a", "b", "c"]
        assert after.broker.describe_topic("t").partitions[0].leader_epoch > epoch
        send(after, "d")
        assert texts(page(after).messages) == ["a", "b", "c", "d"]


def test_the_saved_state_may_be_deleted(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as before:
        send(before, *"abc", producer=stamp(0))
        (message, *_) = before.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=1), None)
        before.broker.settlement.settle("g", [message.receipt])
    for path in tmp_path.glob("partitions/*/*/state.sqlite*"):
        path.unlink()
    with running(tmp_path, clock) as after:
        assert [
            m.record.value for m in after.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)
        ] == [b"b", b"c"]
        send(after, *"abc", producer=stamp(0))
        assert texts(page(after).messages) == ["a", "b", "c"]


def test_unknown_files_are_moved_and_kept(tmp_path):
    stray = tmp_path / "partitions" / "stray@0123" / "0"
    stray.mkdir(parents=True)
    (stray / "data").write_text("precious")
    kept = tmp_path / "lost+found" / "stray@0123" / "0" / "data"
    with running(tmp_path):
        eventually(kept.exists)
    assert kept.read_text() == "precious"


def test_files_of_a_deleted_topic_are_removed_when_a_kill_left_them(tmp_path):
    with running(tmp_path) as before:
        send(before, "a")
        (folder,) = (tmp_path / "partitions").iterdir()
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        before.broker.delete_topic("t")
    copy.rename(folder)
    with running(tmp_path):
        eventually(lambda: not folder.exists())
    assert not (tmp_path / "lost+found").exists()


def fill(fixture: Fixture, batches: int) -> None:
    for number in range(batches):
        send(fixture, *[f"{number:04d}" + "x" * 20_000] * 20)


def test_old_segments_go_when_no_active_group_needs_them(tmp_path):
    clock = HandClock()
    with running(tmp_path, clock) as fixture:
        fixture.broker.create_topic(
            "t", wire.CreateTopic(config={"segment_bytes": 1024 * 1024, "retention_ms": 3_600_000})
        )
        (unread,) = fixture.broker.topics.get("t").local.values()
        fill(fixture, 12)
        assert fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"], max_messages=1), None)
        clock.advance(2 * 3_600_000)
        fill(fixture, 1)
        fixture.broker.maintenance.retain()
        assert unread.log.log_start_offset <= 1, "the group has not done its first message"
        while messages := fixture.broker.receive_handler.receive(
            "g", wire.ReceiveRequest(["t"], max_messages=100), None
        ):
            fixture.broker.settlement.settle("g", [message.receipt for message in messages])
        fixture.broker.maintenance.retain()
        start = unread.log.log_start_offset
        assert start > 100
        first = page(fixture, limit=1).messages[0]
        assert first.offset >= start
        lag = fixture.broker.describe_group("g").lag
    for path in tmp_path.glob("partitions/*/*/state.sqlite*"):
        path.unlink()
    with running(tmp_path, clock) as after:
        assert after.broker.describe_group("g").lag == lag == 0, "recovery folds from the newest STATE record"
        assert page(after, limit=1).messages[0].offset == first.offset


def test_calls_after_the_drain_are_refused_and_nothing_is_applied(fixture):
    send(fixture, "a")
    fixture.broker.drain()
    with pytest.raises(Unavailable) as caught:
        send(fixture, "b")
    assert caught.value.outcome == "not_applied"
    assert texts(page(fixture).messages) == ["a"]


def refuse_once(fixture: Fixture, monkeypatch) -> None:
    """The next transaction meets a full disk that the guard did not foresee."""
    log = fixture.broker.topics.get("t").partition(0).log
    append = log.append

    def refused(batches) -> None:
        monkeypatch.setattr(log, "append", append)
        raise DiskFull("no room")

    monkeypatch.setattr(log, "append", refused)


def test_a_transaction_that_the_disk_refuses_leaves_no_trace(fixture, monkeypatch):
    send(fixture, "a", producer=stamp(0))
    refuse_once(fixture, monkeypatch)
    with pytest.raises(StorageFull) as caught:
        send(fixture, "b", producer=stamp(1))
    assert caught.value.outcome == "not_applied"
    send(fixture, "b", producer=stamp(1))
    assert texts(page(fixture).messages) == ["a", "b"]


def test_appends_queued_behind_a_refused_transaction_are_refused_with_it(fixture, monkeypatch):
    fixture.broker.create_topic("t", wire.CreateTopic())
    refuse_once(fixture, monkeypatch)
    greenlets = [gevent.spawn(send, fixture, str(n), producer=stamp(n)) for n in range(5)]
    gevent.joinall(greenlets, timeout=60)
    refused = [isinstance(greenlet.exception, StorageFull) for greenlet in greenlets]
    assert refused == [True] * 5
    for n in range(5):
        send(fixture, str(n), producer=stamp(n))
    assert texts(page(fixture).messages) == ["0", "1", "2", "3", "4"]


def test_an_ack_that_the_disk_refuses_leaves_the_message_leased(fixture, monkeypatch):
    send(fixture, "a")
    (message,) = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)
    fixture.broker.topics.get("t").partition(0).wait_committed(3)
    refuse_once(fixture, monkeypatch)
    with pytest.raises(StorageFull):
        fixture.broker.settlement.settle("g", [message.receipt])
    assert fixture.broker.describe_group("g").in_flight == 1
    assert fixture.broker.settlement.settle("g", [message.receipt]) == [True]
    assert fixture.broker.describe_group("g").lag == 0


def test_a_group_whose_start_was_refused_begins_at_its_next_receive(fixture, monkeypatch):
    send(fixture, "a")
    refuse_once(fixture, monkeypatch)
    with pytest.raises(StorageFull):
        fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)
    (message,) = fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)
    assert message.delivery_count == 1


def test_a_storage_fault_is_answered_unknown_and_ends_the_broker(fixture, monkeypatch):
    send(fixture, "a")
    log = fixture.broker.topics.get("t").partition(0).log

    def failed(batches) -> None:
        raise StorageFault("I/O error")

    monkeypatch.setattr(log, "append", failed)
    with pytest.raises(Unavailable) as caught:
        send(fixture, "b")
    assert caught.value.outcome == "unknown"
    assert len(fixture.faults) == 1
    assert not fixture.broker.ready


def test_an_idle_partition_closes_its_files_and_opens_them_again(fixture):
    send(fixture, "a")
    fixture.broker.maintenance.save_state()
    fixture.broker.maintenance.close_idle_files()
    fixture.broker.maintenance.close_idle_files()
    assert texts(page(fixture).messages) == ["a"]
    send(fixture, "b")
    assert texts(page(fixture).messages) == ["a", "b"]


def test_a_waiting_browse_ends_when_its_topic_is_deleted(fixture):
    send(fixture, "a")
    waiting = gevent.spawn(page, fixture, position="latest", wait_ms=60_000)
    gevent.sleep(0)
    fixture.broker.delete_topic("t")
    waiting.join(timeout=50)
    assert isinstance(waiting.exception, TopicNotFound)


def test_reading_a_whole_queue_ends_with_an_error_when_the_topic_is_deleted(fixture):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    for partition in (0, 1):
        send(fixture, "a", partition=partition)
    messages = fixture.broker.browser.read_all("t", None)
    assert next(messages).partition == 0
    fixture.broker.delete_topic("t")
    with pytest.raises(Unavailable):
        list(messages)
    assert fixture.faults == []


def test_acks_none_gives_no_offset_to_a_repeat_either(fixture):
    for _ in range(2):
        (result,) = send(fixture, "a", acks="none", idempotency_key="k")
        assert result.offset == -1
