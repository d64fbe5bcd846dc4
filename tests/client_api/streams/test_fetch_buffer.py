"""A stream consumer's read-ahead: in order, bounded, from the leader, and from offsets that exist."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator

import msgspec
import pytest
from support.cluster import WITHIN_S, wait_until

from portalmq import stream_wire as contract
from portalmq.errors import Unavailable
from portalmq.network.connection import Address, parse_address
from portalmq.network.http_answer import Fields, HttpAnswer
from portalmq.streams.fetch_buffer import FetchBuffer, TopicPartition
from portalmq.transport.request import Request

NOW_MS = 1_000_000
PLACE = ("t", 0)


def frame(base: int, *values: str, expires_at_ms: int | None = None) -> contract.Frame:
    records = tuple(contract.FrameRecord(value.encode(), "text/plain", expires_at_ms=expires_at_ms) for value in values)
    header = msgspec.msgpack.encode(contract.FrameHead(base, len(values), 0, 0, 1, -1, -1, -1, 5, ""))
    body = msgspec.msgpack.encode(records)
    return contract.Frame(header, zlib.crc32(body, zlib.crc32(header)), body)


class Leader:
    """A transport that answers fetches from a script; the last answer repeats."""

    def __init__(self) -> None:
        self.asked: list[contract.FetchRequest] = []
        self.script: list[Callable[[contract.PartitionOffset], contract.FetchedPartition]] = []
        self.leaders: dict[TopicPartition, Address] = {}
        self.waits = threading.Event()
        self.let_go = threading.Event()

    def leader_of(self, place: TopicPartition) -> Address | None:
        return self.leaders.get(place)

    def leader_reported(self, place: TopicPartition, url: object) -> bool:
        self.leaders[place] = parse_address(str(url))
        return True

    def call(self, request: Request, *, timeout_s: float) -> HttpAnswer:
        asked = msgspec.json.decode(request.body, type=contract.FetchRequest)
        self.asked.append(asked)
        if not self.script:
            self.waits.set()
            self.let_go.wait(120)
            raise Unavailable("nothing more")
        answer = self.script.pop(0)
        fetched = contract.FetchAnswer([answer(each) for each in asked.partitions])
        return HttpAnswer(200, Fields(), msgspec.msgpack.encode(fetched))


@pytest.fixture
def leader() -> Iterator[Leader]:
    made = Leader()
    yield made
    made.let_go.set()


@pytest.fixture
def feeds(leader: Leader) -> Iterator[FetchBuffer]:
    made = FetchBuffer(leader, lambda: NOW_MS)  # type: ignore[arg-type]
    yield made
    made.close()


def brings(*frames: contract.Frame, end: int) -> Callable[[contract.PartitionOffset], contract.FetchedPartition]:
    return lambda asked: contract.FetchedPartition(asked.topic, asked.partition, end, end, 0, list(frames))


def refuses(**problem: object) -> Callable[[contract.PartitionOffset], contract.FetchedPartition]:
    return lambda asked: contract.FetchedPartition(asked.topic, asked.partition, error=problem)


def begin(feeds: FetchBuffer, offset: int = 0, since: int = 1) -> None:
    feeds.add([contract.AssignedPartition(*PLACE, offset, since)])


def batch(feeds: FetchBuffer) -> list[str]:
    """Wait for the next batch, deliver all of it, and return it."""

    def one() -> list[str]:
        with feeds.lock:
            found = feeds.take()
            if found is None:
                return []
            found.next = len(found.records)
            found.buffer.handed = found.end
            return [f"{offset}:{record.value.decode()}" for offset, record in found.records]

    return wait_until(one, "a batch")


def test_batches_arrive_in_order_from_the_given_offset(leader: Leader, feeds: FetchBuffer) -> None:
    leader.script = [brings(frame(0, "a", "b", "c"), end=3), brings(frame(5, "d"), end=9)]
    begin(feeds, offset=1)
    assert batch(feeds) == ["1:b", "2:c"]
    assert batch(feeds) == ["5:d"]
    wait_until(lambda: len(leader.asked) == 3, "the fetches continue")
    assert [asked.partitions[0].offset for asked in leader.asked] == [1, 3, 9]


def test_expired_messages_are_skipped(leader: Leader, feeds: FetchBuffer) -> None:
    leader.script = [brings(frame(0, "gone", expires_at_ms=NOW_MS), frame(1, "there"), end=2)]
    begin(feeds)
    assert batch(feeds) == ["1:there"]
    assert feeds.by_partition[PLACE].done == 1


def test_a_wrong_checksum_is_fetched_again(leader: Leader, feeds: FetchBuffer) -> None:
    good = frame(0, "a")
    leader.script = [brings(contract.Frame(good.header, good.crc ^ 1, good.body), end=1), brings(good, end=1)]
    begin(feeds)
    assert batch(feeds) == ["0:a"]


def test_the_leader_is_learned_from_not_leader_answers(leader: Leader, feeds: FetchBuffer) -> None:
    leader.script = [refuses(code="not_leader", leader_url="http://other:5000"), brings(frame(0, "a"), end=1)]
    begin(feeds)
    assert batch(feeds) == ["0:a"]
    assert leader.leaders[PLACE].host == "other"


def test_below_the_start_of_the_log_reading_continues_there(leader: Leader, feeds: FetchBuffer) -> None:
    gone = refuses(code="offset_out_of_range", status=416, log_start_offset=7, high_watermark=9)
    leader.script = [gone, brings(frame(7, "a"), end=8)]
    begin(feeds, offset=2)
    assert batch(feeds) == ["7:a"]


def test_a_paused_partition_keeps_the_rest_of_its_batch(leader: Leader, feeds: FetchBuffer) -> None:
    leader.script = [brings(frame(0, "a", "b"), end=2)]
    begin(feeds)
    first = wait_until(lambda: _locked(feeds), "a batch")
    first.next = 1  # type: ignore[attr-defined]
    feeds.paused.add(PLACE)
    assert _locked(feeds) is None
    feeds.paused.clear()
    assert _locked(feeds) is first


def _locked(feeds: FetchBuffer) -> object:
    with feeds.lock:
        return feeds.take()


def test_buffers_of_revoked_partitions_are_dropped(leader: Leader, feeds: FetchBuffer) -> None:
    leader.script = [brings(frame(0, "old"), end=1)]
    begin(feeds)
    assert leader.waits.wait(WITHIN_S), "the next fetch"
    before = feeds.by_partition[PLACE]
    assert before.frames
    begin(feeds, offset=40, since=2)
    assert before.gone
    leader.script.append(brings(frame(40, "new"), end=41))
    leader.let_go.set()
    assert batch(feeds) == ["40:new"]


def test_read_ahead_is_bounded_by_the_room(leader: Leader) -> None:
    feeds = FetchBuffer(leader, lambda: NOW_MS, prefetch_bytes=1)  # type: ignore[arg-type]
    large = "x" * 300_000
    leader.script = [brings(frame(number, large), end=number + 1) for number in range(10)]
    begin(feeds)
    wait_until(lambda: feeds.by_partition[PLACE].frames, "the first batch")
    wait_until(lambda: feeds._idle, "the end of read-ahead")
    assert len(leader.asked) == 1
    assert batch(feeds)[0].startswith("0:x")
    wait_until(lambda: len(leader.asked) == 2, "the next fetch after it")
    feeds.close()
