"""One broker's files are damaged: no answer uses them, and the replica is rebuilt without an operator."""

from __future__ import annotations

import os
from itertools import takewhile
from pathlib import Path

import apsw
import pytest
from support.cluster import Cluster, wait_until
from support.load import Load, check, everything_in, loads

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PAGE_BYTES = 4096
# A round of the scrub takes this time for each partition: the topics of earlier tests are there, too.
SCRUBS_OFTEN = "from portalmq.broker.replication import ticker; ticker.SCRUB_EVERY_S = 0.05"


def partition_of(home: Path, topic: str) -> Path:
    (folder,) = home.glob(f"partitions/{topic}@*/0")
    return folder


def loaded(cluster: Cluster, topic: str):
    cluster.admin().create_topic(topic)
    with loads(cluster.urls, topic=topic) as running:
        for load in running:
            load.wait_for_acked(3_000)
    cluster.wait_in_sync(topic)
    return running


def end_of(running: list[Load]) -> int:
    """The end offset below which everything was acknowledged."""
    return 1 + max(acked.offset for load in running for acked in load.acked)


def holds_all(folder: Path, end: int) -> bool:
    """Return whether the files of a replica reach `end`; False while they are being created."""
    try:
        return end <= 1 + max(read_one(file, "SELECT max(offset) FROM messages") or 0 for file in segments_of(folder))
    except (apsw.Error, ValueError):
        return False


def segments_of(folder: Path) -> list[Path]:
    return list(folder.glob("0*.sqlite"))


def is_rebuilt(cluster: Cluster, home: Path, topic: str, end: int) -> bool:
    """Return whether the damaged replica is in lost+found and a complete new one is in sync in its place. Right after
    the move the new one is incomplete, and may still be listed as in sync."""
    return (
        bool(list(home.glob(f"lost+found/{topic}@*/0")))
        and any(holds_all(folder, end) for folder in home.glob(f"partitions/{topic}@*/0"))
        and all(in_sync(cluster, asked, topic) == set(cluster.brokers) for asked in cluster.running)
    )


def in_sync(cluster: Cluster, asked: int, topic: str) -> set[int]:
    return {broker_id for partition in cluster.partitions(topic, asked) for broker_id in partition["isr"]}


def read_one(file: Path, query: str) -> int | None:
    connection = apsw.Connection(f"file:{file}?mode=ro", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI)
    try:
        return connection.execute(query).get
    finally:
        connection.close()


def serve_all_from(cluster: Cluster, broker_id: int, topic: str) -> None:
    """Make this broker the leader: kill the others, the last one only when these two are in sync."""
    leader = cluster.wait_for_leader(topic)
    if leader != broker_id:
        other = next(each for each in cluster.running if each not in {leader, broker_id})
        cluster.kill(other)
        cluster.wait_out_of_sync(other, topic)  # the broker to read from is the only one left to elect
        cluster.kill(leader)
        wait_until(lambda: cluster.leader(topic) == broker_id, "it leads")
        cluster.start(other)


def stopped_follower(cluster: Cluster, topic: str) -> tuple[int, Path, Path]:
    """Stop a broker that does not lead. Return its id, its data directory, and the topic's only segment there."""
    leader = cluster.wait_for_leader(topic)
    follower = next(broker_id for broker_id in cluster.running if broker_id != leader)
    cluster.brokers[follower].stop()
    home: Path = cluster.brokers[follower].data_dir
    (file,) = segments_of(partition_of(home, topic))
    return follower, home, file


def test_bit_flips_at_rest_are_detected_without_a_reader(cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch):
    running = loaded(cluster, topic)
    damaged, home, file = stopped_follower(cluster, topic)
    content = bytearray(file.read_bytes())
    pages = range(16 * PAGE_BYTES, len(content), PAGE_BYTES)
    assert len(pages) > 10
    for at in pages:
        content[at + PAGE_BYTES // 2] ^= 0x55
    file.write_bytes(content)
    monkeypatch.setattr(cluster.brokers[damaged], "prelude", SCRUBS_OFTEN)
    cluster.start(damaged)
    wait_until(lambda: is_rebuilt(cluster, home, topic, end_of(running)), "the scrub has found it", 90)
    serve_all_from(cluster, damaged, topic)
    check(running, everything_in(cluster.brokers[damaged].url, topic))
    cluster.kill(damaged)  # the next test starts it with the usual interval


def spoil_the_last_page(file: Path) -> None:
    """Write zeros over the page of the newest messages: the next append reads it, or the scrub is faster."""
    leaves = "FROM dbstat WHERE name = 'messages' AND pagetype = 'leaf' ORDER BY path DESC LIMIT 1"
    last = read_one(file, f"SELECT pageno {leaves}")
    assert last
    with file.open("r+b") as content:
        content.seek((last - 1) * PAGE_BYTES)
        content.write(bytes(PAGE_BYTES))


def test_a_damaged_page_in_the_way_of_appends_ends_no_broker(cluster: Cluster, topic: str):
    running = loaded(cluster, topic)
    damaged, home, file = stopped_follower(cluster, topic)
    spoil_the_last_page(file)
    cluster.start(damaged)
    worker = cluster.brokers[damaged].worker
    with loads(cluster.urls, ["after"], topic=topic) as more:
        more[0].wait_for_acked(50)
    running += more
    wait_until(lambda: is_rebuilt(cluster, home, topic, end_of(running)), "a new replica is in place", 60)
    assert cluster.brokers[damaged].worker == worker
    said = cluster.brokers[damaged].stderr()
    assert "cannot be written: it is closed" in said or "will be rebuilt from another replica" in said
    serve_all_from(cluster, damaged, topic)
    check(running, everything_in(cluster.brokers[damaged].url, topic))


def saved_high_watermark(folder: Path) -> int:
    return read_one(folder / "state.sqlite", "SELECT value FROM meta WHERE key = 'high_watermark'") or 0


def lose_the_end(wal: Path) -> None:
    """Cut half of the valid frames off: frames of an earlier log may follow them."""
    content = wal.read_bytes()
    salts, frame_bytes = content[16:24], 24 + PAGE_BYTES
    frames = range(32, len(content) - frame_bytes + 1, frame_bytes)
    valid = sum(1 for _ in takewhile(lambda at: content[at + 8 : at + 16] == salts, frames))
    assert valid >= 2
    os.truncate(wal, 32 + valid // 2 * frame_bytes)


def test_a_broker_whose_disk_lost_fsynced_records_does_not_lead(cluster: Cluster, topic: str):
    """It lost the end of its fsynced write-ahead log, and does not lead without the lost records."""
    running = loaded(cluster, topic)
    # A checkpoint may have followed the last of them. The next one is not due yet.
    with loads(cluster.urls, ["after"], topic=topic) as more:
        more[0].wait_for_acked(50)
    running += more
    cluster.wait_in_sync(topic)
    damaged = cluster.wait_for_leader(topic)
    home: Path = cluster.brokers[damaged].data_dir
    folder = partition_of(home, topic)
    end = end_of(running)
    wait_until(lambda: saved_high_watermark(folder) >= end, "the high watermark is saved too")
    cluster.kill(damaged)
    (wal,) = folder.glob("0*.sqlite-wal")
    lose_the_end(wal)
    cluster.start(damaged)
    wait_until(lambda: is_rebuilt(cluster, home, topic, end), "a new replica is in place", 60)
    serve_all_from(cluster, damaged, topic)
    check(running, everything_in(cluster.brokers[damaged].url, topic))
