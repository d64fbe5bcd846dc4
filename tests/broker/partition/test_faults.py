"""A partition during faults and other work: full disks, stalled disks, kills, deletions."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import apsw
import gevent
import pytest
from support.domain import Fixture, HandClock, records, running
from support.held import held
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.core.replica.events import SessionLost
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition.long_poll import Waiter
from portalmq.broker.partition.readable import ReadablePartition
from portalmq.broker.partition.retention import Retention
from portalmq.broker.queues.group_receiver import GroupReceiver
from portalmq.broker.storage.errors import CorruptFile, DiskFull, OffsetPurged, StorageFault, WrongLog, faults_of
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.segment import Segment
from portalmq.broker.storage.state import StateFile
from portalmq.errors import (
    Backpressure,
    OffsetOutOfRange,
    OutOfOrderSequence,
    PortalMQError,
    RequestInProgress,
    StorageFull,
    Unavailable,
)


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as it:
        yield it


def send(fixture: Fixture, *values: str, **more):
    return fixture.broker.produce("t", ProduceRequest(records(*values), acks=more.pop("acks", "all"), **more))


def receive(fixture: Fixture, *, topic: str = "t", **more):
    return fixture.broker.receive_handler.receive("g", wire.ReceiveRequest([topic], **more), None)


def texts(messages) -> list[str]:
    return [message.record.value.decode() for message in messages]


def refuse(patch: pytest.MonkeyPatch, fixture: Fixture, number: int) -> None:
    """Make appends of partition `number` fail with a full disk that the guard has not noticed."""

    def refused(batches) -> None:
        raise DiskFull("no room")

    patch.setattr(fixture.broker.topics.get("t").partition(number).log, "append", refused)


def test_a_repeated_ack_is_answered_no_earlier_than_the_first(fixture, monkeypatch):
    send(fixture, "a")
    (message,) = receive(fixture)
    partition = fixture.broker.topics.get("t").partition(0)
    partition.wait_committed(partition.replica.next_offset - 1)
    with held(monkeypatch, partition.log, "append") as release:
        acks = [gevent.spawn(fixture.broker.settlement.settle, "g", [message.receipt]) for _ in range(2)]
        gevent.joinall(acks, timeout=0.1)
        assert not any(ack.ready() for ack in acks), "nothing is on disk yet"
        release()
        assert [ack.get(timeout=60) for ack in acks] == [[True], [True]]


def test_a_checkpoint_without_room_does_not_refuse_committed_records(fixture, monkeypatch):
    send(fixture, "a")

    tried: list[Segment] = []

    def full(segment: Segment) -> None:
        tried.append(segment)
        raise DiskFull("no room")

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "checkpoint", full)
        patch.setattr("portalmq.broker.storage.log.WAL_BYTES_MAX", 1)
        patch.setattr("portalmq.broker.storage.log.WAL_BYTES_DUE", 1)
        send(fixture, "b")
        eventually(lambda: tried)
        gevent.sleep(0.05)
    assert not fixture.faults
    send(fixture, "c")
    assert texts(receive(fixture, max_messages=10)) == ["a", "b", "c"]


def test_a_checkpoint_that_fails_ends_the_broker_once_and_without_a_traceback(fixture, monkeypatch):
    def fail(segment: Segment) -> None:
        raise StorageFault("fsync failed")

    unhandled = list[object]()
    monkeypatch.setattr(gevent.get_hub(), "handle_error", lambda *error: unhandled.append(error))
    monkeypatch.setattr(Segment, "checkpoint", fail)
    monkeypatch.setattr("portalmq.broker.storage.log.WAL_BYTES_DUE", 1)
    send(fixture, "a")
    eventually(lambda: fixture.faults)
    partition = fixture.broker.topics.get("t").local[0]
    eventually(lambda: partition._writer.is_idle)
    assert len(fixture.faults) == 1
    assert not unhandled


def test_a_saved_state_from_before_the_dropped_segments_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setattr("portalmq.broker.cluster.maintenance.RETAIN_EVERY_S", 3_600.0)  # only this test saves the state
    clock = HandClock()
    kept = tmp_path / "kept"
    with running(tmp_path / "data", clock) as fixture:
        config = {"segment_bytes": 1024 * 1024, "retention_ms": 3_600_000}
        fixture.broker.create_topic("t", wire.CreateTopic(config=config))
        (partition,) = fixture.broker.topics.get("t").local.values()
        send(fixture, "first")
        partition.retention.save_state()
        state_file = partition.state_file.path
        partition.state_file.park()
        shutil.copy(state_file, kept)
        receive(fixture)  # the group begins in a segment that is dropped later
        for _ in range(12):
            send(fixture, *["x" * 20_000] * 20)
        while messages := receive(fixture, max_messages=100):
            fixture.broker.settlement.settle("g", [message.receipt for message in messages])
        clock.advance(2 * 3_600_000)
        send(fixture, *["x" * 20_000] * 20)
        while messages := receive(fixture, max_messages=100):
            fixture.broker.settlement.settle("g", [message.receipt for message in messages])
        fixture.broker.maintenance.retain()
        assert partition.log.base_offset > 100
    shutil.copy(kept, state_file)
    with running(tmp_path / "data", clock) as after:
        assert after.broker.describe_group("g").lag == 0
        assert receive(after, max_messages=100) == []


def test_a_deletion_that_the_disk_refuses_leaves_a_group_that_can_be_used_and_deleted(fixture, monkeypatch):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    for number in (0, 1):
        send(fixture, f"{number}", partition=number)
    messages = receive(fixture, max_messages=10)
    fixture.broker.settlement.settle("g", [messages[0].receipt, messages[1].receipt])
    for number in (0, 1):
        send(fixture, f"{number}+", partition=number)
    later = receive(fixture, max_messages=10)
    with monkeypatch.context() as patch:
        refuse(patch, fixture, 1)
        with pytest.raises(StorageFull):
            fixture.broker.group_admin.delete("g")
    for message in later:
        try:
            fixture.broker.settlement.settle("g", [message.receipt])
        except PortalMQError:
            assert message.partition == 0, "the group has ended only there"
    fixture.broker.group_admin.delete("g")
    assert sorted(texts(receive(fixture, max_messages=10))) == ["0", "0+", "1", "1+"], "a new group starts over"


def test_a_topic_may_be_deleted_while_its_state_is_being_saved(fixture, monkeypatch):
    send(fixture, "a")
    (partition,) = fixture.broker.topics.get("t").local.values()
    directory = partition.log.directory
    with held(monkeypatch, partition.state_file, "save") as release:
        saving = gevent.spawn(partition.retention.save_state)
        gevent.sleep(0.01)
        gevent.spawn_later(0.2, release)
        fixture.broker.delete_topic("t")
        saving.get(timeout=60)
    assert not directory.exists(), "a late save creates no files"


def test_acked_leases_are_forgotten_before_they_would_have_ended(fixture):
    for _ in range(3_000):
        send(fixture, "a", acks="none")
    while messages := receive(fixture, max_messages=1, visibility_timeout_ms=12 * 3_600_000):
        fixture.broker.settlement.begin_acks("g", [messages[0].receipt], forward=True)
    assert len(fixture.broker.topics.get("t").partition(0).delivery["g"]._wakeups) < 1_500


def test_a_receive_that_outlived_its_topic_does_not_sleep(fixture, monkeypatch):
    send(fixture, "a")
    (message,) = receive(fixture)
    request = wire.ReceiveRequest(["t"], wait_ms=30_000, ack=[message.receipt])
    log = fixture.broker.topics.get("t").partition(0).log
    gevent.sleep(0.05)
    with held(monkeypatch, log, "append") as release:
        late = gevent.spawn(fixture.broker.receive_handler.ack_and_receive, "g", request, None)
        gevent.sleep(0.01)
        deleting = gevent.spawn(fixture.broker.delete_topic, "t")
        gevent.sleep(0.01)
        release()
        gevent.joinall([late, deleting], timeout=20)
    assert late.ready()


def test_a_first_request_that_the_disk_refuses_is_in_progress_and_then_forgotten(fixture, monkeypatch):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    log = fixture.broker.topics.get("t").partition(0).log
    with monkeypatch.context() as patch:
        refuse(patch, fixture, 0)
        with held(monkeypatch, log, "append") as release:
            first = gevent.spawn(send, fixture, "a", partition=0, idempotency_key="k")
            gevent.sleep(0.01)
            with pytest.raises(RequestInProgress):
                send(fixture, "a", partition=0, idempotency_key="k")
            release()
            gevent.joinall([first], timeout=60)
    assert isinstance(first.exception, StorageFull)
    send(fixture, "a", partition=0, idempotency_key="k")
    assert texts(receive(fixture, max_messages=10)) == ["a"]


def test_a_start_on_a_full_disk_retries_with_pauses(tmp_path, monkeypatch):
    with monkeypatch.context() as patch, running(tmp_path) as before:
        for saves in ("save_state", "save_last"):  # as if it was killed: then its epoch begins at once
            patch.setattr(Retention, saves, lambda retention: None)
        send(before, "a")
    tries: list[float] = []

    with monkeypatch.context() as patch:

        def refused(log: Log, batches) -> None:
            tries.append(time.monotonic())
            if len(tries) == 5:
                patch.undo()
            raise DiskFull("no room")

        patch.setattr(Log, "append", refused)
        with running(tmp_path) as after:
            assert len(tries) == 5
            assert min(later - earlier for earlier, later in pairwise(tries)) > 0.05
            assert texts(receive(after)) == ["a"]


def test_a_storage_fault_is_raised_as_a_public_error(fixture, monkeypatch):
    send(fixture, "a")
    log = fixture.broker.topics.get("t").partition(0).log

    def failing(error):
        def fail(*_):
            raise error

        return fail

    monkeypatch.setattr(log, "advance_log_start", failing(DiskFull("no room")))
    with pytest.raises(DiskFull) as full:
        fixture.broker.browser.purge("t", partition=None, before_offset=None)
    told = fixture.broker.explain(full.value)
    assert isinstance(told, StorageFull)
    assert told.outcome == "unknown", "the record may be in the log"
    monkeypatch.setattr(log, "find_message_id", failing(StorageFault("I/O error")))
    with pytest.raises(StorageFault) as fault:
        send(fixture, "b", idempotency_key="k")
    assert isinstance(fixture.broker.explain(fault.value), Unavailable)
    assert len(fixture.faults) == 1, "the broker ends"


@pytest.mark.parametrize("is_met_before", [False, True])
def test_a_damaged_page_that_an_append_meets_closes_its_partition_alone(tmp_path, monkeypatch, is_met_before):
    """Found by `make simulate-shell SEED=18584`: it ended the broker, at each start. The log knows of the damage when
    another change has met it."""
    with running(tmp_path) as fixture:
        send(fixture, "a")
        fixture.broker.create_topic("u", wire.CreateTopic(partitions=1))
        partition = fixture.broker.topics.get("t").partition(0)
        fault = CorruptFile("0.sqlite: CorruptError: database disk image is malformed")

        def damaged(*_, **__):
            raise fault

        if is_met_before:
            partition.log._fault = fault
        else:
            for name in ("append", "append_at_once"):
                monkeypatch.setattr(partition.log, name, damaged)
        with pytest.raises(Unavailable, match="a file is damaged on this broker") as refused:
            send(fixture, "b")
        assert refused.value.outcome == "unknown"
        eventually(lambda: partition.closed)
        with pytest.raises(Unavailable):
            send(fixture, "c")
        fixture.broker.produce("u", ProduceRequest(records("d")))
        key = (partition.topic_id, 0)
        assert "malformed" in fixture.broker.topics._opener.unusable[key].fault
        assert fixture.faults == []


def malformed(*_, **__):
    raise CorruptFile("0.sqlite: CorruptError: database disk image is malformed")


@pytest.mark.parametrize("task", ["save_state", "retain", "sweep", "close_idle_files"])
def test_a_damaged_page_that_maintenance_meets_is_reported_and_delays_no_other_partition(fixture, monkeypatch, task):
    """It ended the broker, again and again after each start."""
    fixture.broker.create_topic("u", wire.CreateTopic(partitions=1))
    for topic in "tu":
        fixture.broker.produce(topic, ProduceRequest(records("a", expires_at_ms=1 << 42)))
        receive(fixture, topic=topic)
    damaged, other = (fixture.broker.topics.get(topic).partition(0) for topic in "tu")
    done: list[object] = []
    owner, method = {
        "save_state": (StateFile, "save"),
        "retain": (Log, "seal"),
        "sweep": (GroupReceiver, "sweep"),
        "close_idle_files": (Log, "park"),
    }[task]
    before = getattr(owner, method)

    def meets(it, *arguments, **more):
        if it in (damaged.log, damaged.state_file) or getattr(it, "partition", None) is damaged:
            malformed()
        done.append(it)
        return before(it, *arguments, **more)

    for partition in (damaged, other):
        partition.wait_committed(partition.replica.next_offset - 1)
        partition.log.roll()
    if task == "close_idle_files":
        fixture.broker.maintenance.save_state()
        fixture.broker.maintenance.close_idle_files()
    monkeypatch.setattr(owner, method, meets)
    getattr(fixture.broker.maintenance, task)()
    assert "malformed" in damaged.fault
    assert other.fault == ""
    assert done
    assert fixture.faults == []


@pytest.mark.parametrize("is_timer", [True, False])
def test_a_damaged_page_that_a_wake_up_meets_is_reported(fixture, monkeypatch, is_timer):
    """Found by `make simulate-shell SEED=32570`: the greenlet that wakes waiting receives ended."""
    send(fixture, "a")
    receive(fixture)
    partition = fixture.broker.topics.get("t").partition(0)
    (source,) = (each for each in fixture.broker.groups._attached.values() if each.partition is partition)
    monkeypatch.setattr(source._wakeup, "on_timer" if is_timer else "has_messages", malformed)
    source._wakeup._waiters[Waiter()] = None
    source._wakeup._fire() if is_timer else source.notify()
    assert "malformed" in partition.fault
    timer = source._wakeup._timer
    assert timer is not None
    source.notify()
    assert source._wakeup._timer is timer, "new messages do not put it off"
    source._wakeup._waiters.clear()


def test_a_damaged_page_that_a_call_meets_is_reported(fixture):
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").partition(0)
    with pytest.raises(CorruptFile) as raised, faults_of(partition.log.directory):
        raise apsw.CorruptError("database disk image is malformed")
    assert isinstance(fixture.broker.explain(raised.value), Unavailable)
    assert "malformed" in partition.fault


def test_a_damaged_page_that_the_last_save_meets_does_not_end_the_broker(fixture, monkeypatch):
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").partition(0)
    monkeypatch.setattr(partition.state_file, "save", malformed)
    partition.close()
    assert fixture.faults == []
    assert not partition.log.is_open


@pytest.mark.parametrize("is_alone", [True, False])
def test_damage_that_is_met_after_a_full_disk_closes_its_partition_alone(fixture, monkeypatch, is_alone):
    """When the log is read again. `is_alone`: in the greenlet of the call that waits for it."""
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").partition(0)
    refuse(monkeypatch, fixture, 0)
    monkeypatch.setattr(partition.log, "append_at_once", partition.log.append)
    monkeypatch.setattr("portalmq.broker.partition.partition.recover", malformed)
    calls = [gevent.spawn(send, fixture, value) for value in ("b" if is_alone else "bcd")]
    for call in calls:
        with pytest.raises(Unavailable, match="a file is damaged on this broker") as refused:
            call.get(timeout=60)
        assert refused.value.outcome == "unknown"
    eventually(lambda: partition.closed)
    assert fixture.faults == []


def test_a_damaged_page_that_a_purge_meets_does_not_end_the_broker(fixture, monkeypatch):
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").partition(0)

    def damaged(*_):
        raise CorruptFile("0.sqlite: CorruptError: database disk image is malformed")

    monkeypatch.setattr(partition.log, "advance_log_start", damaged)
    with pytest.raises(CorruptFile) as raised:
        fixture.broker.browser.purge("t", partition=None, before_offset=None)
    told = fixture.broker.explain(raised.value)
    assert isinstance(told, Unavailable)
    assert told.outcome == "unknown"
    assert fixture.faults == []


def test_errors_of_storage_are_raised_as_public_errors(fixture):
    purged = fixture.broker.explain(OffsetPurged(3, 7))
    assert isinstance(purged, OffsetOutOfRange)
    assert (purged.status, purged.outcome, purged.extra["log_start_offset"]) == (416, "unknown", 7)
    swapped = fixture.broker.explain(WrongLog("0.sqlite belongs to another log"))
    assert isinstance(swapped, Unavailable)
    assert (swapped.outcome, fixture.faults) == ("unknown", [])


def test_a_replaced_file_is_damage_and_not_a_programming_error(fixture, monkeypatch):
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").partition(0)

    def read(*_, **__):
        raise WrongLog("0.sqlite belongs to another log")

    monkeypatch.setattr(partition.log, "read", read)
    partition.reader.forget()
    with pytest.raises(Unavailable, match="damaged"):
        list(fixture.broker.browser.read_all("t", None))
    assert partition.fault
    assert fixture.faults == []


def test_a_purge_under_a_compaction_does_not_end_the_broker(fixture, monkeypatch):
    fixture.broker.create_topic("t", wire.CreateTopic(config={"cleanup": "compact"}))
    fixture.broker.produce("t", ProduceRequest(records("a", key=b"k")))
    partition = fixture.broker.topics.get("t").partition(0)
    asked: list[int] = []

    def read(offset: int, **_):
        asked.append(offset)
        raise OffsetPurged(offset, offset + 1)

    monkeypatch.setattr(partition.log, "read", read)
    fixture.broker.maintenance.compact()
    assert asked
    assert fixture.faults == []


def test_maintenance_on_a_full_disk_releases_the_ballast_first(fixture):
    fixture.disk.is_full = True
    fixture.broker.maintenance.retain()
    assert fixture.disk.released


def test_a_partition_that_is_never_at_rest_is_saved_too(fixture):
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").partition(0)
    fixture.broker.maintenance.save_state()
    before = partition.state_file.load()[0].applied
    waiting = gevent.spawn(send, fixture, "b")
    gevent.sleep(0)  # its offset is allotted, but it is not on disk yet
    assert partition.replica.next_offset > partition.high_watermark
    fixture.broker.maintenance.save_state()
    waiting.get(timeout=60)
    again = gevent.spawn(send, fixture, "c")
    gevent.sleep(0)
    fixture.broker.maintenance.save_state()
    assert partition.state_file.load()[0].applied > before
    again.get(timeout=60)


def test_appends_during_a_checkpoint_without_room_are_still_written(fixture, monkeypatch):
    """A follower writes nothing more before that: it would stop for ever."""
    send(fixture, "a")
    log = fixture.broker.topics.get("t").partition(0).log
    monkeypatch.setattr("portalmq.broker.storage.log.WAL_BYTES_DUE", 1)

    def full() -> None:
        raise DiskFull("no room")

    monkeypatch.setattr(log, "checkpoint", full)
    with held(monkeypatch, log, "checkpoint") as release:
        send(fixture, "b")
        late = gevent.spawn(send, fixture, "c")
        gevent.sleep(0.02)
        release()
        assert late.get(timeout=60)


def test_a_gap_in_a_sequence_is_final_only_when_no_successor_can_have_the_batch_before(fixture, monkeypatch):
    """Found by `make simulate-shell SEED=10375`: a deposed leader refused what its successor appended."""
    producer = fixture.broker.new_producer(None)
    stamp = wire.ProducerStamp(producer.id, producer.epoch, 5)
    with monkeypatch.context() as patch:
        patch.setattr(ReadablePartition, "wait_led", lambda partition: partition._wait_vouched(lambda: False, 0))
        with pytest.raises(Unavailable) as unknown:
            send(fixture, "a", producer=stamp)
        assert unknown.value.outcome == "not_applied"
    with pytest.raises(OutOfOrderSequence):
        send(fixture, "a", producer=stamp)


def test_a_retry_after_a_lost_session_finds_a_message_not_yet_on_disk(fixture, monkeypatch):
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").partition(0)
    with held(monkeypatch, partition.log, "append") as release:
        first = gevent.spawn(send, fixture, "b", idempotency_key="k")
        gevent.sleep(0.02)
        partition.step(SessionLost())
        eventually(lambda: partition.serves)
        with pytest.raises(RequestInProgress):
            send(fixture, "b", idempotency_key="k")
        release()
        gevent.joinall([first], timeout=60)
    eventually(lambda: partition.high_watermark == partition.replica.next_offset)
    assert send(fixture, "b", idempotency_key="k")[0].offset == partition.high_watermark - 1
    assert texts(receive(fixture, max_messages=10)) == ["a", "b"]


def test_a_delayed_message_without_a_waiter_is_not_skipped_before_it_is_committed(fixture, monkeypatch):
    """A leader that loses its session and continues to lead answers its waiters with an unknown outcome. Their records
    may still commit: until then no cursor may pass the time of the append."""
    receive(fixture)
    partition = fixture.broker.topics.get("t").partition(0)
    due_ms = fixture.clock.wall_ms() + 1_000
    fixture.broker.produce("t", ProduceRequest(records("later", deliver_at_ms=due_ms)))
    with held(monkeypatch, partition.log, "append") as release:
        partition.submit(tuple(records("sooner", deliver_at_ms=due_ms - 500)), 6)
        gevent.sleep(0.02)
        partition.step(SessionLost())
        eventually(lambda: partition.serves)
        fixture.clock.advance(2_000)
        taken = texts(receive(fixture, max_messages=10))
        release()
    eventually(lambda: partition.high_watermark == partition.replica.next_offset)
    taken += texts(receive(fixture, max_messages=10))
    assert taken == ["sooner", "later"]


def test_uncommitted_leases_are_bounded(fixture, monkeypatch):
    monkeypatch.setattr("portalmq.broker.partition.appending.UNCOMMITTED_RECORDS_MAX", 5)
    receive(fixture)
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").partition(0)
    fixture.broker.put_group("g", {"max_deliveries": 100})
    with held(monkeypatch, partition.log, "append") as release:
        while partition.uncommitted.records < 5:
            receive(fixture)
            fixture.clock.advance(60_000)
        with pytest.raises(Backpressure) as refused:
            receive(fixture)
        assert refused.value.outcome == "not_applied"
        release()
    eventually(lambda: partition.high_watermark == partition.replica.next_offset)
    assert texts(receive(fixture)) == ["a"]


def test_a_failed_retention_of_one_partition_does_not_stop_the_others(fixture, monkeypatch):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    first, second = fixture.broker.topics.get("t").led()
    cleaned: list[int] = []

    def refuse_to(*limits) -> None:
        raise Unavailable("not committed")

    monkeypatch.setattr(first.retention, "retain", refuse_to)
    monkeypatch.setattr(second.retention, "retain", lambda *limits: cleaned.append(second.number))
    fixture.broker.maintenance.retain()
    assert cleaned == [1]


def no_room(*_: object, **__: object):
    raise DiskFull("no room")


def test_a_parked_partition_that_cannot_reopen_its_files_refuses_and_recovers(fixture, monkeypatch):
    send(fixture, "before")
    partition = fixture.broker.topics.get("t").local[0]
    partition.retention.save_state()
    partition.log.park()
    refused = [gevent.spawn(outcome_of, fixture, value) for value in ("no", "neither")]
    with monkeypatch.context() as patch:
        patch.setattr(Segment, "open_live", no_room)
        eventually(lambda: partition._refused_ms > 0)
        refused.append(gevent.spawn(outcome_of, fixture, "nor this"))
        eventually(
            lambda: partition._writer.queued_bytes > 0 or refused[-1].ready()
        )  # the append may have failed already
    gevent.joinall(refused, raise_error=True)
    assert [outcome.value for outcome in refused] == ["not_applied"] * 3
    send(fixture, "after")
    assert texts(receive(fixture, max_messages=10)) == ["before", "after"]
    assert not fixture.faults


def outcome_of(fixture, value: str) -> str:
    with pytest.raises(StorageFull) as caught:
        send(fixture, value)
    return caught.value.outcome


@pytest.mark.parametrize("method", ["seal", "drop_segments_below", "replica_start"])
def test_old_messages_that_a_full_disk_keeps_are_removed_later(fixture, monkeypatch, method):
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").local[0]
    partition.log.roll()
    send(fixture, "b")
    partition.log.seal(partition.high_watermark)
    partition.retention.purge(None)
    with monkeypatch.context() as patch:
        patch.setattr(partition.log, method, no_room)
        fixture.broker.maintenance.retain()
    fixture.broker.maintenance.retain()
    assert partition.log.base_offset > 0
    assert not fixture.faults


def test_a_purge_that_waited_while_its_leader_was_elected_again_writes_nothing(fixture, monkeypatch):
    """The fold of a leader that does not serve yet may lack records of the one before: its STATE would forget them."""
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").local[0]
    end = partition.replica.next_offset
    with monkeypatch.context() as patch:
        patch.setattr(partition.retention, "open_order", lambda upto, within_s: setattr(partition, "serves", False))
        with pytest.raises(Unavailable):
            partition.retention.purge(None)
        assert partition.replica.next_offset == end
        partition.serves = True
    partition.retention.purge(None)
    assert partition.log.log_start_offset == partition.high_watermark - 2


def test_a_partition_whose_state_cannot_be_saved_closes_its_log_and_ends_the_broker(fixture, monkeypatch):
    """Found by the simulated shell, by an fsync that failed while a broker was stopped."""
    send(fixture, "a")
    partition = fixture.broker.topics.get("t").local[0]

    def fail(*_, **__):
        raise StorageFault("fsync failed")

    monkeypatch.setattr(partition.state_file, "save", fail)
    monkeypatch.setattr(partition.state_file, "save_high_watermark", fail)
    partition.changed = True
    partition.close()
    assert len(fixture.faults) == 1
    assert not partition.log.is_open
