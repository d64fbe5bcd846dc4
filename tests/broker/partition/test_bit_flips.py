"""A bit flips in a file of a running replica: the scrub finds it within one round, the replica is whole again, and no
reader gets a wrong byte."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import apsw
import pytest
from support.replicas import TOPIC_ID, Group, eventually, replicas, send, values

from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.retention import Retention
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.epochs import EpochFile
from portalmq.errors import Unavailable

TEXTS = [f"message {number}" for number in range(60)]


def settle(group: Group) -> None:
    eventually(lambda: group.leader.serves and group.agree())


@contextlib.contextmanager
def filled(tmp_path: Path) -> Iterator[Group]:
    """Three replicas, each with a sealed segment, an active one, a manifest and a saved state."""
    with replicas(tmp_path, 3) as group:
        settle(group)
        send(group.leader, *TEXTS[:30])
        settle(group)
        for partition in group.partitions():
            partition.log.roll()
        send(group.leader, *TEXTS[30:])
        settle(group)
        for partition in group.partitions():
            partition.retention.retain(None, None, 0)
            partition.retention.save_state()
            assert partition.log.sealed_upto == partition.log.active_base_offset
        yield group


def close_files(group: Group, broker_id: int) -> Partition:
    """Close the files, so that nothing in memory hides what is on disk."""
    partition = group.partition(broker_id)
    partition.log.park()
    partition.state_file.park()
    group.hosts[broker_id].cache.drop(partition._cache_key)
    return partition


def flip(file: Path, what: bytes) -> None:
    """Flip one bit, in the middle of `what`."""
    content = bytearray(file.read_bytes())
    content[content.index(what) + len(what) // 2] ^= 1
    mode = file.stat().st_mode
    os.chmod(file, 0o640)
    file.write_bytes(content)
    os.chmod(file, mode)


def round_of(retention: Retention) -> None:
    while retention.scrub():
        pass


def read(partition: Partition) -> list[str]:
    found = partition.reader.pieces(0, 1_000, 1_000)
    return [record.value.decode() for piece in found for record in piece.records()]


@pytest.mark.parametrize("broker_id", [1, 3])
@pytest.mark.parametrize("text", [TEXTS[15], TEXTS[45]], ids=["sealed", "active"])
def test_a_flip_in_a_segment_is_found_and_the_replica_is_copied_from_another(tmp_path, text, broker_id):
    with filled(tmp_path) as group:
        partition = close_files(group, broker_id)
        (file,) = [each for each in partition.log.directory.glob("0*.sqlite") if text.encode() in each.read_bytes()]
        flip(file, text.encode())
        with pytest.raises(Unavailable, match="damaged"):  # readers find it too, before the scrub
            read(partition)
        round_of(partition.retention)
        assert partition.fault
        eventually(lambda: group.partition(broker_id).store_uuid == f"store-{broker_id}/1")
        if broker_id == 1:
            group.elect(2)
        eventually(lambda: group.state.isr == (1, 2, 3))
        settle(group)
        assert all(read(each) == TEXTS for each in group.partitions())


def test_a_flip_in_a_manifest_is_found_and_the_file_is_written_again(tmp_path):
    with filled(tmp_path) as group:
        partition = group.partition(3)
        manifest = partition.log.directory / "manifest.json"
        round_of(partition.retention)  # notes that the sealed segment was checked
        before = manifest.read_bytes()
        assert b'"checked": true' in before
        for part in (b'"newest_ms"', b'"sha256"', b"end_offset", b'"crc"', b"segments"):
            flip(manifest, part)
            assert manifest.read_bytes() != before
            round_of(partition.retention)
            assert manifest.read_bytes() == before, part
        flip(manifest, before[before.index(b'"newest_ms": ') + 13 :].split(b",")[0])  # a valid one with another time
        round_of(partition.retention)
        assert manifest.read_bytes() == before
        assert not partition.fault
        assert values(partition) == TEXTS


def test_a_changed_epoch_of_a_replica_is_found_and_the_file_is_written_again(tmp_path):
    with filled(tmp_path) as group:
        partition = group.partition(3)
        file = group.root / "3" / "epochs.sqlite"
        for flipped in ("UPDATE epochs SET highest_leader_epoch = highest_leader_epoch + 4", "DELETE FROM epochs"):
            with contextlib.closing(apsw.Connection(str(file))) as connection:
                connection.execute(flipped)
                assert connection.changes()
            round_of(partition.retention)
            assert EpochFile(file.parent).highest((TOPIC_ID, 0)) == partition.replica.highest_epoch
        file.unlink()
        round_of(partition.retention)
        assert EpochFile(file.parent).highest((TOPIC_ID, 0)) == partition.replica.highest_epoch
        assert not partition.fault


META = "UPDATE meta SET value = value + 4 WHERE key = "


@pytest.mark.parametrize(
    "flipped",
    [
        META + "'highest_leader_epoch'",
        META + "'high_watermark'",
        META + "'applied'",
        "UPDATE epochs SET start_offset = start_offset + 64",
        "DELETE FROM meta WHERE key = 'digest'",
    ],
)
def test_a_changed_value_in_a_state_file_is_found_and_the_file_is_written_again(tmp_path, flipped):
    with filled(tmp_path) as group:
        partition = close_files(group, 3)
        saved = partition.state_file.load()
        partition.state_file.park()
        with contextlib.closing(apsw.Connection(str(partition.state_file.path))) as connection:
            connection.execute(flipped)
            assert connection.changes()
        round_of(partition.retention)
        assert partition.state_file.load() == saved
        partition.state_file.park()
        with contextlib.closing(apsw.Connection(str(partition.state_file.path))) as connection:
            epoch = connection.execute("SELECT value FROM meta WHERE key = 'highest_leader_epoch'").get
        assert epoch == partition.replica.highest_epoch
        assert not partition.fault


def test_a_flip_in_the_pages_of_a_state_file_is_found(tmp_path):
    with filled(tmp_path) as group:
        partition = close_files(group, 3)
        saved = partition.state_file.load()
        partition.state_file.park()
        flip(partition.state_file.path, partition.state_file.identity.topic_id.encode())
        round_of(partition.retention)
        assert partition.state_file.load() == saved


def test_a_state_file_that_is_gone_is_written_again(tmp_path):
    with filled(tmp_path) as group:
        partition = close_files(group, 3)
        saved = partition.state_file.load()
        partition.state_file.park()
        partition.state_file.path.unlink()
        round_of(partition.retention)
        assert partition.state_file.load() == saved
        assert partition.state_file.highest_epoch() == partition.replica.highest_epoch


def test_a_message_that_was_read_before_is_not_served_after_a_flip(tmp_path):
    """A single message of a batch that was verified is read alone."""
    with filled(tmp_path) as group:
        partition = close_files(group, 3)
        assert read(partition) == TEXTS
        close_files(group, 3)
        (offset,) = [at for at in range(100) if text_at(partition, at) == TEXTS[45]]
        close_files(group, 3)
        flip(max(partition.log.directory.glob("0*.sqlite")), TEXTS[45].encode())
        with pytest.raises(Unavailable, match="damaged"):
            text_at(partition, offset)


def text_at(partition: Partition, offset: int) -> str:
    found = partition.reader.pieces(offset, offset + 1, 1)
    return "".join(record.value.decode() for piece in found for record in piece.records())


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE messages SET timestamp_ms = timestamp_ms + 1 WHERE offset = (SELECT max(offset) FROM messages)",
        "UPDATE records SET kind = kind + 1 WHERE offset = (SELECT max(offset) FROM records)",
    ],
)
def test_columns_that_no_checksum_covers_are_compared_with_the_batch(tmp_path, damage):
    with filled(tmp_path) as group:
        group.leader.retention.write_state().wait()
        settle(group)
        partition = close_files(group, 3)
        with contextlib.closing(apsw.Connection(str(max(partition.log.directory.glob("0*.sqlite"))))) as connection:
            connection.execute(damage)
            assert connection.changes()
        round_of(partition.retention)
        assert "contradicts" in partition.fault


@pytest.mark.parametrize("place", [bytes.index, bytes.rindex], ids=["table", "index"])
def test_a_flip_in_a_row_or_in_an_index_of_the_active_segment_is_found(tmp_path, place):
    with filled(tmp_path) as group:
        number = b"the number of it"
        group.leader.append((Record(b"with a number", message_id=number),), 1)
        settle(group)
        partition = close_files(group, 3)
        file = max(partition.log.directory.glob("0*.sqlite"))
        content = bytearray(file.read_bytes())
        assert content.count(number) == 2
        content[place(bytes(content), number)] ^= 1
        file.write_bytes(content)
        round_of(partition.retention)
        assert partition.fault
        eventually(lambda: group.partition(3).store_uuid == "store-3/1")


def test_a_segment_that_was_damaged_before_it_was_sealed_is_found(tmp_path):
    """Its SHA-256 is that of the damaged file."""
    with filled(tmp_path) as group:
        partition = group.partition(3)
        send(group.leader, "the last")
        settle(group)
        partition.log.roll()
        file = partition.log.directory / f"{partition.log._segments[-2].base_offset:020d}.sqlite"
        close_files(group, 3)
        flip(file, TEXTS[45].encode())
        assert partition.log.seal(partition.log.end_offset) == 1
        round_of(partition.retention)
        assert "checksum" in partition.fault
        eventually(lambda: group.partition(3).store_uuid == "store-3/1")
        settle(group)
        assert read(group.partition(3)) == [*TEXTS, "the last"]
