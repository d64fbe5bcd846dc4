"""Replicas with damaged files or a full disk: never a wrong answer, and recovery without an operator."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import apsw
import gevent
import pytest
from gevent.monkey import get_original
from support.replicas import Group, contents, eventually, replicas, send, values

from portalmq.broker.cluster.rpc.brokers import ReplicaLogEnd
from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.partition import retention
from portalmq.broker.partition.fetch_answers import RecordsAnswer
from portalmq.broker.replication.fetch_protocol import ReplicaFetchAnswer, decode_answer, encode
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.errors import DiskFull, StorageFault
from portalmq.broker.storage.state import StateFile
from portalmq.errors import PortalMQError, StorageFull, Unavailable

HOUR_MS = 3_600_000


def settle(group: Group) -> None:
    eventually(lambda: group.leader.serves and group.agree())


def spoil(group: Group, broker_id: int) -> None:
    """Change a message on disk behind the broker's back."""
    partition = group.partition(broker_id)
    partition.log.park()
    group.hosts[broker_id].cache.drop(partition._cache_key)
    (file,) = partition.log.directory.glob("*0.sqlite")
    connection = apsw.Connection(str(file))
    connection.execute("UPDATE messages SET value = CAST('spoilt' AS BLOB) WHERE value = CAST('b' AS BLOB)")
    assert connection.changes() == 1
    connection.close()


def lost(tmp_path: Path, broker_id: int) -> list[str]:
    place = tmp_path / str(broker_id) / "lost+found"
    return sorted(str(found.relative_to(place)) for found in place.glob("*/*")) if place.exists() else []


def test_a_follower_with_a_damaged_batch_is_rebuilt_from_the_leader(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a", "b", "c")
        settle(group)
        spoil(group, 3)
        while group.partition(3).retention.scrub():
            pass
        eventually(lambda: group.partition(3).store_uuid == "store-3/1")
        eventually(lambda: group.state.isr == (1, 2, 3) and group.state.store_uuids[3] == "store-3/1")
        settle(group)
        assert values(group.partition(3)) == ["a", "b", "c"]
        assert lost(tmp_path, 3) == ["t@topic-id-1/0"]
        assert any(proposal.resigns for proposal in group.proposals)


def test_a_leader_with_a_damaged_batch_resigns_and_never_serves_it(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a", "b", "c")
        settle(group)
        spoil(group, 1)
        with pytest.raises(Unavailable, match="damaged"):
            list(group.partition(1).reader.pieces(0, 100, 100))
        eventually(lambda: group.state.leader is None)
        assert group.state.isr == (2, 3)
        group.elect(2)
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)
        assert values(group.partition(1)) == ["a", "b", "c"]
        assert group.state.store_uuids[1] == "store-1/1"


def test_a_log_reset_during_a_scrub_is_not_a_fault(tmp_path, monkeypatch):
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        log = group.leader.log
        read = log.read_to_copy

        def begun_anew(offset: int, *, max_bytes: int, below: int):
            monkeypatch.undo()
            log.reset(1_000, 1_000, 0)
            return read(offset, max_bytes=max_bytes, below=below)

        monkeypatch.setattr(log, "read_to_copy", begun_anew)
        assert not group.leader.retention.scrub()
        assert not group.hosts[1].faults
        assert not group.leader.fault


def test_a_damaged_batch_is_not_served_to_a_follower(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        group.cut(3)
        eventually(lambda: group.state.isr == (1, 2))
        send(group.leader, "a", "b", "c")
        spoil(group, 1)
        group.mend(3)
        eventually(lambda: group.state.leader is None)
        assert "spoilt" not in values(group.partition(3))
        group.elect(2)
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)
        assert all(values(partition) == ["a", "b", "c"] for partition in group.partitions())


def test_the_only_replica_keeps_its_files(tmp_path):
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        send(group.leader, "a")
        send(group.leader, "b")
        send(group.leader, "c")
        spoil(group, 1)
        with pytest.raises(Unavailable, match="damaged"):
            list(group.leader.reader.pieces(0, 100, 100))
        assert group.leader.serves
        assert group.leader.fault
        send(group.leader, "d")
        assert lost(tmp_path, 1) == []


def test_a_replica_that_was_set_aside_and_not_yet_replaced_does_not_look_complete(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a")
        settle(group)
        group.stop(3)
        folder = tmp_path / "3" / "partitions" / "t@topic-id-1" / "0"
        aside = tmp_path / "3" / "lost+found" / "t@topic-id-1"
        aside.mkdir(parents=True)
        folder.rename(aside / "0")  # here the broker was killed
        partition = group.start(3, incarnation=2)
        assert partition.store_uuid == "store-3/1"
        eventually(lambda: group.state.isr == (1, 2, 3) and group.state.store_uuids[3] == "store-3/1")
        settle(group)


def test_a_file_that_is_no_database_any_more_is_rebuilt_at_the_start(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, *"abc")
        settle(group)
        group.stop(2)
        (file,) = (tmp_path / "2").glob("partitions/*/0/*0.sqlite")
        file.write_bytes(b"nothing" * 1_000)
        group.start(2, incarnation=2)
        eventually(lambda: group.state.isr == (1, 2, 3) and group.state.store_uuids[2] == "store-2/1")
        settle(group)


def test_a_replica_whose_number_of_rebuilds_is_damaged_is_rebuilt(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, *"abc")
        settle(group)
        group.stop(2)
        (folder,) = (tmp_path / "2").glob("partitions/*/0")
        (folder / "store.id").write_bytes(b"\xb1\n")
        group.start(2, incarnation=2)
        eventually(lambda: group.state.isr == (1, 2, 3) and "/" in group.state.store_uuids[2])
        settle(group)
        assert int(group.state.store_uuids[2].removeprefix("store-2/")) > 1_000_000  # no number that was used before


def test_replicas_that_are_all_damaged_are_all_kept(tmp_path):
    """One cause may damage equal files on equal disks: the ISR does not prove that another replica is whole."""
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, *"abc")
        settle(group)
        files = []
        for broker_id in (1, 2, 3):
            group.stop(broker_id)
            (file,) = (tmp_path / str(broker_id)).glob("partitions/*/0/*0.sqlite")
            files.append((file, file.read_bytes()))
            file.write_bytes(b"nothing" * 1_000)
        for broker_id in (1, 2, 3):
            group.unusable[broker_id] = ReplicaLogEnd("", 1, 0, 0, 0, fault="not opened yet")
            assert group.start(broker_id, incarnation=2) is None
        assert [lost(tmp_path, broker_id) for broker_id in (1, 2, 3)] == [[], [], []]
        assert group.state.isr == (1, 2, 3)
        for file, content in files[:2]:
            file.write_bytes(content)
        for broker_id in (1, 2, 3):  # the first and the third find another replica that is whole
            group.start(broker_id, incarnation=3)
        group.elect(1)
        eventually(lambda: group.state.isr == (1, 2, 3) and group.state.store_uuids[3] == "store-3/1")
        settle(group)
        assert all(values(partition) == ["a", "b", "c"] for partition in group.partitions())


def test_a_replica_that_lost_its_end_is_kept_while_no_other_replica_reports_that_end(tmp_path):
    with replicas(tmp_path, 2) as group:
        settle(group)
        send(group.leader, *"abc")
        send(group.leader, *"def")
        settle(group)
        group.partition(1).retention.save_state()
        group.stop(2)
        group.stop(1)
        (file,) = (tmp_path / "1").glob("partitions/*/0/*0.sqlite")
        connection = apsw.Connection(str(file))
        connection.execute("DELETE FROM messages WHERE offset >= 4")
        connection.execute("DELETE FROM batches WHERE base_offset >= 4")
        connection.close()
        assert group.start(1, incarnation=2) is None
        standing = group.unusable[1]
        assert (standing.end, standing.fault) == (4, "")
        assert "it had committed records up to 7" in standing.lossy
        assert not standing.is_whole(group.state, 1)
        group.start(2, incarnation=2)
        group.elect(2)
        group.start(1, incarnation=3)
        eventually(lambda: group.state.store_uuids[1] == "store-1/1")
        settle(group)
        assert values(group.partition(1)) == list("abcdef")


def test_a_replica_with_an_uncommitted_tail_still_reports_its_committed_end(tmp_path):
    with replicas(tmp_path, 2) as group:
        settle(group)
        send(group.leader, *"abc")
        partition = group.partition(1)
        partition.retention.save_state()
        send(partition, *"def")
        acknowledged = partition.high_watermark
        group.stop(2)
        waiting = gevent.spawn(send, partition, "g")
        eventually(lambda: partition.log.end_offset > acknowledged)
        assert partition.high_watermark == acknowledged
        files = partition.state_file.path
        group.stop(1)
        waiting.kill()
    connection = apsw.Connection(str(files))
    assert connection.execute("SELECT value FROM meta WHERE key = 'high_watermark'").get == acknowledged
    connection.close()


def test_a_log_that_lost_its_end_is_rebuilt_and_not_trusted(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, *"abc")
        send(group.leader, *"def")
        settle(group)
        partition = group.partition(3)
        partition.retention.save_state()
        group.stop(3)
        (file,) = (tmp_path / "3").glob("partitions/*/0/*0.sqlite")
        connection = apsw.Connection(str(file))
        connection.execute("DELETE FROM messages WHERE offset >= 4")
        connection.execute("DELETE FROM batches WHERE base_offset >= 4")
        connection.close()
        group.start(3, incarnation=2)
        eventually(lambda: group.state.isr == (1, 2, 3) and group.state.store_uuids[3] == "store-3/1")
        settle(group)


def test_frames_changed_in_transit_are_refused_and_fetched_again(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        left = [3]

        def flip(answer: bytes) -> bytes:
            read = decode_answer(answer)
            if left[0] and any(isinstance(each, RecordsAnswer) and each.frames for each in read.partitions):
                left[0] -= 1
                return answer.replace(b"precious", b"prec1ous")
            return answer

        group.hosts[3].network.alter = flip
        send_soon = gevent.spawn(send, group.leader, "precious")
        eventually(lambda: values(group.partition(3)) == ["precious"])
        send_soon.get(timeout=60)
        assert left == [0]
        settle(group)


def test_a_malformed_answer_of_a_leader_is_not_stored(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)

        def repeat(answer: bytes) -> bytes:
            read = decode_answer(answer)
            return encode(
                ReplicaFetchAnswer(
                    read.known,
                    [
                        RecordsAnswer(*each.key, each.echo, [*each.frames, *each.frames], each.high_watermark)
                        if isinstance(each, RecordsAnswer)
                        else each
                        for each in read.partitions
                    ],
                )
            )

        group.hosts[3].network.alter = repeat
        gevent.spawn(send, group.leader, "once")
        eventually(lambda: group.state.isr == (1, 2))
        assert values(group.partition(3)) == []
        group.hosts[3].network.alter = lambda answer: answer
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)


# --- full disks -------------------------------------------------------------------------------------------------------


def refuse(patch: pytest.MonkeyPatch, group: Group, broker_id: int) -> None:
    def refused(batches) -> None:
        raise DiskFull("no room")

    patch.setattr(group.partition(broker_id).log, "append", refused)


def refuse_sent(patch: pytest.MonkeyPatch, group: Group, broker_id: int) -> None:
    """Refuse transactions as soon as the other replicas have their records."""
    others = [partition for partition in group.partitions() if partition is not group.partition(broker_id)]

    def refused(batches) -> None:
        while any(other.log.end_offset < batches[-1].end_offset for other in others):
            time.sleep(0.001)
        raise DiskFull("no room")

    patch.setattr(group.partition(broker_id).log, "append", refused)


def test_a_follower_with_a_full_disk_leaves_the_isr_and_returns_by_itself(tmp_path, monkeypatch):
    with replicas(tmp_path, 3) as group:
        settle(group)
        with monkeypatch.context() as patch:
            refuse(patch, group, 3)
            send(group.leader, "a")
            eventually(lambda: group.state.isr == (1, 2))
            send(group.leader, "b")
            assert group.partition(3).log.end_offset == 1
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)
        assert values(group.partition(3)) == ["a", "b"]


def test_a_leader_with_a_full_disk_reports_it_and_continues_when_there_is_room(tmp_path, monkeypatch):
    """With followers that wait for records, it would have sent them the refused ones."""
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a")
        group.leader.sends_ahead = False
        with monkeypatch.context() as patch:
            refuse(patch, group, 1)
            for _ in range(3):
                with pytest.raises(StorageFull) as refusal:
                    send(group.leader, "refused")
                assert refusal.value.outcome == "not_applied"
        send(group.leader, "b")
        settle(group)
        assert all(values(partition) == ["a", "b"] for partition in group.partitions())


def test_a_leader_whose_disk_refuses_what_followers_have_gives_up_its_epoch(tmp_path, monkeypatch):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a")
        settle(group)
        epoch = group.state.leader_epoch
        with monkeypatch.context() as patch:
            refuse_sent(patch, group, 1)
            with pytest.raises(StorageFull) as refusal:
                send(group.leader, "perhaps")
            assert refusal.value.outcome == "unknown"
            eventually(lambda: group.state.leader is None)
        assert group.state.isr == (1, 2, 3)
        group.elect(2)
        settle(group)
        send(group.leader, "b")
        settle(group)
        assert group.state.leader_epoch == epoch + 1
        assert all(values(partition) == ["a", "perhaps", "b"] for partition in group.partitions())


def test_a_leader_sends_a_batch_while_its_own_disk_writes_it(tmp_path, monkeypatch):
    with replicas(tmp_path, 3) as group:
        settle(group)
        append, go_on = group.leader.log.append, threading.Event()

        def slow(batches) -> None:
            go_on.wait()
            append(batches)

        monkeypatch.setattr(group.leader.log, "append", slow)
        pending = group.leader.submit((Record(b"a"),), 1)
        eventually(lambda: all(group.partition(other).log.end_offset == pending.base_offset + 1 for other in (2, 3)))
        assert group.leader.high_watermark == pending.base_offset  # its own commit is missing
        go_on.set()
        assert group.leader.outcome(pending)[0] == pending.base_offset


def test_a_repeated_send_is_not_denied_when_the_disk_refuses_another(tmp_path, monkeypatch):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)
        group.cut(2)
        group.cut(3)
        batch, stamp = (Record(b"a"),), Stamp(7, 0, 0)
        first = group.leader.submit(batch, 1, stamp=stamp)
        eventually(lambda: group.leader.log.end_offset == 2)
        again = group.leader.submit(batch, 1, stamp=stamp)
        refuse(monkeypatch, group, 1)
        refused = group.leader.submit((Record(b"b"),), 1)
        with pytest.raises(StorageFull) as told:
            group.leader.outcome(refused)
        assert told.value.outcome == "not_applied"
        with pytest.raises(PortalMQError) as told:
            group.leader.outcome(again)
        assert told.value.outcome == "unknown"
        monkeypatch.undo()
        group.mend(2)
        group.mend(3)
        assert group.leader.outcome(first)[0] == 1


def test_a_leader_without_room_for_its_epoch_start_writes_it_later(tmp_path, monkeypatch):
    with replicas(tmp_path, 3) as group:
        settle(group)
        with monkeypatch.context() as patch:
            refuse(patch, group, 2)
            group.elect(2)
            eventually(
                lambda: group.partition(2).replica.leading and group.partition(2).action_queue.remembering is None
            )
            with pytest.raises(StorageFull):
                send(group.partition(2), "refused")
            assert not group.partition(2).serves
        eventually(lambda: group.partition(2).serves)
        send(group.partition(2), "b")
        settle(group)


def test_the_start_of_an_epoch_that_waits_behind_a_refused_transaction_is_written_once(tmp_path, monkeypatch):
    """Its offset follows records that the disk refused: at that offset it would leave a hole."""
    with replicas(tmp_path, 3) as group:
        settle(group)
        partition = group.leader
        with monkeypatch.context() as patch:
            refuse(patch, group, 1)

            def full(epochs: EpochFile, seen: dict[tuple[str, int], int]) -> None:
                raise DiskFull("no room")

            patch.setattr(EpochFile, "save", full)
            pending = partition.submit((Record(b"refused"),), 7)
            group.elect(1)
            assert partition.action_queue.remembering is not None
            with pytest.raises(PortalMQError):
                partition.outcome(pending)
            eventually(lambda: partition._writer.is_idle)
        eventually(lambda: partition.action_queue.remembering is None and partition.serves)
        send(partition, "b")
        settle(group)
        assert values(partition) == ["b"]


def test_a_replica_without_room_to_store_an_epoch_does_not_act_in_it(tmp_path, monkeypatch):
    with replicas(tmp_path, 3) as group:
        settle(group)
        with monkeypatch.context() as patch:

            def full(epochs: EpochFile, seen: dict[tuple[str, int], int]) -> None:
                if "/3/" in str(epochs.path):
                    raise DiskFull("no room")
                return original(epochs, seen)

            original = EpochFile.save
            patch.setattr(EpochFile, "save", full)
            group.elect(2)
            eventually(lambda: group.state.isr == (1, 2))
            end = group.partition(3).log.end_offset
            send(group.partition(2), "without")
            assert group.partition(3).log.end_offset == end
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)


def test_an_unclean_election_truncates_committed_records_only_once(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a")
        settle(group)
        group.cut(3)
        eventually(lambda: group.state.isr == (1, 2))
        send(group.leader, "b")
        send(group.leader, "c")
        for partition in group.partitions():
            partition.retention.save_state()
        group.severed = {1, 2}
        group.elect(3, isr=(3,), unclean=True)
        eventually(lambda: group.partition(3).replica.leading)
        group.severed = set()
        group.announce()
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)
        assert all(values(partition) == ["a"] for partition in group.partitions())
        group.stop(1)
        group.start(1, incarnation=2)
        settle(group)
        assert group.partition(1).store_uuid == "store-1"


def test_a_log_that_diverges_below_the_high_watermark_is_quarantined(tmp_path):
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, "a")
        settle(group)
        group.cut(3)
        eventually(lambda: group.state.isr == (1, 2))
        send(group.leader, "b")
        settle_of(group, 1, 2)
        group.severed = {1, 2}
        group.elect(3, isr=(3,))  # an unclean election without its mark, which no controller makes
        eventually(lambda: group.partition(3).replica.leading)
        group.severed = set()
        group.announce()
        eventually(lambda: group.partition(1).replica.quarantined and group.partition(2).replica.quarantined)
        assert values(group.partition(1)) == ["a", "b"]


def settle_of(group: Group, *brokers: int) -> None:
    eventually(lambda: len({group.partition(n).high_watermark for n in brokers}) == 1)
    eventually(lambda: len({contents(group.partition(n)) for n in brokers}) == 1)


def test_a_partition_that_is_closed_while_its_disk_refuses_is_closed_soon(tmp_path, monkeypatch):
    with replicas(tmp_path, 3) as group:
        settle(group)
        with monkeypatch.context() as patch:
            refuse(patch, group, 1)
            group.elect(1)
            eventually(lambda: group.partition(1).replica.leading)
            gevent.sleep(0.3)
            host = group.hosts[1]
            with gevent.Timeout(30):
                group.stop(1)
            assert not host.faults


def test_a_round_of_the_scrub_ends_while_the_log_grows(tmp_path, monkeypatch):
    monkeypatch.setattr(retention, "SCRUB_BYTES", 1)
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        send(group.leader, "a")
        send(group.leader, "b")
        ends = group.leader.log.end_offset
        parts = 1
        while group.leader.retention.scrub():
            send(group.leader, "more")
            parts += 1
            assert parts <= ends


def test_a_state_file_that_cannot_be_written_again_is_a_fault_of_the_disk(tmp_path, monkeypatch):
    with replicas(tmp_path, 1) as group:
        eventually(lambda: group.leader.serves)
        send(group.leader, "a")
        group.leader.retention.save_state()
        (group.leader.log.directory / "state.sqlite").write_bytes(b"spoilt")

        def save(self, *_arguments, **_more):
            raise StorageFault("the disk failed")

        with monkeypatch.context() as patch:
            patch.setattr(StateFile, "save", save)
            assert group.leader.retention.repair() == [retention.STATE_REPLACED]
        assert [str(fault) for fault in group.hosts[1].faults] == ["the disk failed"]
        group.hosts[1].faults.clear()


def test_the_state_file_is_closed_beside_the_event_loop(tmp_path, monkeypatch):
    closed_by = []
    close = StateFile.close

    def noted(self):
        closed_by.append(get_original("_thread", "get_ident")())
        close(self)

    monkeypatch.setattr(StateFile, "close", noted)
    with replicas(tmp_path, 1) as group:
        group.leader.close()
    assert closed_by
    assert get_original("_thread", "get_ident")() not in closed_by
