"""Replicas have compressed batches as the producer sent them, and serve them after a change of leader."""

from __future__ import annotations

import gevent
import pytest
from support.compressed import data_of, reading_records, readings
from support.replicas import contents, eventually, replicas, send

from portalmq.broker.partition.fetch_answers import RecordsAnswer
from portalmq.broker.replication import fetcher
from portalmq.broker.replication.fetch_protocol import ReplicaFetchRequest, decode_answer
from portalmq.broker.storage import batch as batch_module
from portalmq.errors import NotLeader

HOUR_MS = 3_600_000


def settle(group) -> None:
    eventually(lambda: group.leader.serves and group.agree())


def send_readings(partition, start: int, count: int = 20) -> tuple[int, int]:
    records = reading_records(count, start)
    size = sum(len(record.value) for record in records)
    return partition.append(tuple(records), size, compressed=data_of(records))


def stored(partition):
    """Return the batches as they are in the files."""
    log = partition.log
    batches = log.read_to_copy(log.log_start_offset, max_bytes=1 << 30, below=log.end_offset)
    return [(batch.base_offset, batch.compressed, batch.crc) for batch in batches if batch.records]


def delivered(partition) -> list[bytes]:
    pieces = partition.reader.pieces(0, partition.readable_end, 10_000)
    return [record.value for piece in pieces for record in piece.records()]


def test_values_are_stored_plain_while_a_follower_is_of_a_version_that_knows_no_compressed_batches(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(fetcher, "ReplicaFetchRequest", lambda *fields, **_: ReplicaFetchRequest(*fields))
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)
        send_readings(group.leader, 0)
        settle(group)
        for partition in group.partitions():
            assert [compressed for _, compressed, _ in stored(partition)] == [b""]
            assert delivered(partition) == readings(20)


def test_a_follower_that_is_gone_and_never_fetched_does_not_end_compression(tmp_path):
    with replicas(tmp_path, 2, least=1) as group:
        group.hosts[2].fetchers.close()
        eventually(lambda: group.state.isr == (1,))
        eventually(lambda: group.leader.serves)
        serving = group.leader.serving
        serving._knows_compressed.clear()
        assert serving.may_compress()
        serving._knows_compressed[2] = False
        assert not serving.may_compress(), "it fetched, and said that it knows none"


def test_all_replicas_hold_the_values_as_they_came_and_a_new_leader_serves_them(tmp_path):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)
        send_readings(group.leader, 0)
        send(group.leader, "plain")
        send_readings(group.leader, 100)
        settle(group)
        first = stored(group.partition(1))
        assert [compressed for _, compressed, _ in first] == [
            data_of(reading_records(20)), b"", data_of(reading_records(20, 100))
        ]  # fmt: skip
        assert all(stored(partition) == first for partition in group.partitions())
        group.elect(2)
        eventually(lambda: group.partition(2).serves)
        assert delivered(group.partition(2)) == [*readings(20), b"plain", *readings(20, 100)]
        send_readings(group.partition(2), 200)
        settle(group)
        assert all(stored(partition) == stored(group.partition(2)) for partition in group.partitions())
        assert delivered(group.partition(2))[-20:] == readings(20, 200)


def test_what_only_the_old_leader_had_is_removed_with_its_values(tmp_path):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)
        send_readings(group.leader, 0)
        settle(group)
        group.cut(1)
        lost = gevent.spawn(send_readings, group.partition(1), 500)
        eventually(lambda: len(stored(group.partition(1))) == 2)
        group.elect(2, isr=(2, 3))
        eventually(lambda: group.partition(2).serves)
        send_readings(group.partition(2), 100)
        group.mend(1)
        eventually(lambda: group.partition(1).log.end_offset == group.partition(2).log.end_offset)
        with pytest.raises(NotLeader):
            lost.get(timeout=60)
        settle(group)
        assert contents(group.partition(1)) == contents(group.partition(2))
        assert delivered(group.partition(2)) == [*readings(20), *readings(20, 100)]


def test_followers_do_not_decompress(tmp_path, monkeypatch):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)

        def refuse(*arguments):
            raise AssertionError("values were decompressed")

        with monkeypatch.context() as patch:
            patch.setattr(batch_module, "values_of", refuse)
            send_readings(group.leader, 0)
            eventually(lambda: len({len(stored(partition)) for partition in group.partitions()}) == 1)


def test_compressed_values_changed_in_transit_are_refused_and_fetched_again(tmp_path):
    with replicas(tmp_path, 3, lag_ms=HOUR_MS) as group:
        settle(group)
        left = [3]
        data = data_of(reading_records(20))

        def flip(answer: bytes) -> bytes:
            read = decode_answer(answer)
            if left[0] and any(isinstance(each, RecordsAnswer) and each.frames for each in read.partitions):
                left[0] -= 1
                return answer.replace(data, data[:-1] + bytes([data[-1] ^ 1]))
            return answer

        group.hosts[3].network.alter = flip
        send_soon = gevent.spawn(send_readings, group.leader, 0)
        eventually(lambda: stored(group.partition(3)))
        send_soon.get(timeout=60)
        assert left == [0]
        settle(group)
        assert stored(group.partition(3)) == stored(group.leader)


def test_a_replica_that_begins_from_nothing_copies_from_the_files_without_decompressing(tmp_path, monkeypatch):
    with replicas(tmp_path, 2, lag_ms=HOUR_MS) as group:
        settle(group)
        send_readings(group.leader, 0)
        settle(group)
        group.leader.reader.forget()
        group.hosts[1].cache.drop(group.leader._cache_key)
        with monkeypatch.context() as patch:
            patch.setattr(batch_module, "values_of", None)
            frames = group.leader.serving.frames(0, 1 << 20)
        assert [frame.crc for frame in frames] == [crc for _, _, crc in contents(group.leader)]
