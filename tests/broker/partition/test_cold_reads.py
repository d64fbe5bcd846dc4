"""Reads from disk over HTTP run one at a time, so many readers cost the broker no more than one."""

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
    """A topic with two partitions of several batches, none of them in memory. A read returns one batch, and an answer
    has no time limit."""
    monkeypatch.setattr(serving, "COLD_READ_BYTES", 1)
    monkeypatch.setattr(fetching, "GATHER_S", 3_600)
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
        for number in range(2 * PIECES):
            fixture.broker.produce("t", ProduceRequest([Record(b"%d" % number)], partition=number % 2))
        for number in range(2):
            fixture.broker.topics.get("t").partition(number).reader.forget()
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
            partition.reader.forget()
            assert len(fixture.broker.receive_handler.receive("g", request, None)) == 25
        assert len(threads) >= 4
        assert native_thread() not in threads


def test_a_batch_read_ahead_from_files_that_changed_is_not_kept(tmp_path):
    with running(tmp_path) as fixture:
        fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
        partition = fixture.broker.topics.get("t").partition(0)
        fixture.broker.produce("t", ProduceRequest([Record(b"a")]))
        (piece,) = partition.reader.pieces(0, partition.readable_end, 1)
        partition.reader.forget()
        changes = []

        class Pool:
            """A thread pool that changes the files during a call, if the test says so."""

            def apply(self, work, arguments):
                found = work(*arguments)
                if changes.pop():
                    partition.reader.forget()
                return found

        for is_changed in (True, False):
            changes[:] = [is_changed]
            partition.reader._read_ahead_at = -1
            partition.reader.read_ahead(Pool(), piece.start, partition.readable_end)
            kept = partition.host.cache.find(partition._cache_key, piece.start)
            assert (kept is None) is is_changed


def test_one_of_many_readers_reads_from_disk_at_a_time_and_all_are_served(cold, monkeypatch):
    at_once, most, order = 0, 0, []
    read = serving.LeaderReplication._read

    def noted(self, *arguments):
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        order.append(self._partition.number)
        try:
            gevent.sleep(0)  # lets any other reader read
            self._partition.reader.forget()
            return read(self, *arguments)
        finally:
            at_once -= 1

    monkeypatch.setattr(serving.LeaderReplication, "_read", noted)
    readers = [gevent.spawn(fetch, cold, number % 2) for number in range(4)]
    gevent.joinall(readers, timeout=60, raise_error=True)
    assert all(len(reader.get()[0].frames) == PIECES for reader in readers)
    assert most == 1
    assert set(order[: len(readers)]) == {0, 1}, "no reader waits until another ends"


def test_a_slow_answer_is_sent_with_a_part_of_the_request(cold, monkeypatch):
    monkeypatch.setattr(fetching, "GATHER_S", 0)
    first, second = fetch(cold, 0, 1)
    assert len(first.frames) == 1
    assert (second.frames, second.next_offset) == ([], 0), "the next request starts with it"
    assert second.error is None


def test_a_read_from_memory_does_not_wait_for_reads_from_disk(cold):
    fetch(cold, 1)
    with cold.broker.reader_fetch._turn, gevent.Timeout(60):
        assert len(fetch(cold, 1)[0].frames) == PIECES
