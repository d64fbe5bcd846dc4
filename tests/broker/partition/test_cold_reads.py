"""Reads from disk over HTTP run one at a time, so that they cost the broker no more than one reader would."""

from __future__ import annotations

import gevent
import pytest
from gevent import monkey
from support.domain import Fixture, running

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition import serving
from portalmq.broker.storage.batch import Record
from portalmq.broker.streams import reader_fetch as fetching

PIECES = 6
native_thread = monkey.get_original("_thread", "get_ident")


@pytest.fixture
def cold(tmp_path, monkeypatch):
    """A topic with two partitions of several batches, nothing of which is in memory, and one batch a read; an answer
    may take as long as it does."""
    monkeypatch.setattr(serving, "COLD_READ_BYTES", 1)
    monkeypatch.setattr(fetching, "GATHER_S", 3_600)
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
        for number in range(2 * PIECES):
            fixture.broker.produce("t", ProduceRequest([Record(b"%d" % number)], partition=number % 2))
        for number in range(2):
            fixture.broker.topics.get("t").partition(number).forget_read()
        yield fixture


def fetch(fixture: Fixture, *partitions: int) -> list[fetching.PartitionFrames]:
    asked = [contract.PartitionOffset("t", partition, 0) for partition in partitions]
    return fixture.broker.reader_fetch.fetch(contract.FetchRequest(asked, 1 << 20, 0), None)


def test_the_batch_that_a_receive_begins_with_is_read_on_a_native_thread(tmp_path, monkeypatch):
    threads = []
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
        fixture.broker.put_group("g", {"start": "earliest"})
        partition = fixture.broker.topics.get("t").partition(0)
        for _ in range(2):
            fixture.broker.produce("t", ProduceRequest([Record(b"%d" % number) for number in range(50)]))
        read = partition.log.read

        def noted(*arguments, **named):
            threads.append(native_thread())
            return read(*arguments, **named)

        monkeypatch.setattr(partition.log, "read", noted)
        request = wire.ReceiveRequest(["t"], max_messages=25)
        for _ in range(4):
            partition.forget_read()
            assert len(fixture.broker.receive("g", request, None)) == 25
        assert len(threads) >= 4
        assert native_thread() not in threads


def test_what_was_read_ahead_from_files_that_have_changed_since_is_not_kept(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
        partition = fixture.broker.topics.get("t").partition(0)
        fixture.broker.produce("t", ProduceRequest([Record(b"a")]))
        (piece,) = partition.pieces(0, partition.readable_end, 1)
        partition.forget_read()
        changes = []

        class Pool:
            """A pool in whose calls files may change."""

            def apply(self, work, arguments):
                found = work(*arguments)
                if changes.pop():
                    partition.forget_read()
                return found

        for is_changed in (True, False):
            changes[:] = [is_changed]
            partition._reader._read_ahead_at = -1
            partition._reader.read_ahead(Pool(), piece.start, partition.readable_end)
            kept = partition.host.cache.find(partition._cache_key, piece.start)
            assert (kept is None) is is_changed


def test_of_many_readers_of_the_disk_one_reads_at_a_time_and_all_are_served(cold, monkeypatch):
    at_once, most, order = 0, 0, []
    read = serving.LeaderReplication._read

    def noted(self, *arguments):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        order.append(self._partition.number)
        try:
            gevent.sleep(0)  # any other reader would read now
            self._partition.forget_read()
            return read(self, *arguments)
        finally:
            at_once -= 1

    monkeypatch.setattr(serving.LeaderReplication, "_read", noted)
    readers = [gevent.spawn(fetch, cold, number % 2) for number in range(4)]
    gevent.joinall(readers, timeout=60, raise_error=True)
    assert all(len(reader.get()[0].frames) == PIECES for reader in readers)
    assert most == 1
    assert set(order[: len(readers)]) == {0, 1}, "nobody was kept waiting until another was done"


def test_an_answer_that_takes_a_while_goes_out_with_a_piece_of_what_was_asked(cold, monkeypatch):
    monkeypatch.setattr(fetching, "GATHER_S", 0)
    first, second = fetch(cold, 0, 1)
    assert len(first.frames) == 1
    assert (second.frames, second.next_offset) == ([], 0), "it is asked for again, and is first then"
    assert second.error is None


def test_a_read_from_memory_does_not_wait_for_reads_from_disk(cold):
    fetch(cold, 1)
    with cold.broker.reader_fetch._turn, gevent.Timeout(60):
        assert len(fetch(cold, 1)[0].frames) == PIECES
