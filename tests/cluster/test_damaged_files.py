"""One broker's files are not what was written: never an answer with them, and the replica is whole again by itself."""

from __future__ import annotations

from pathlib import Path

import apsw
import pytest
from support.cluster import Cluster, wait_until
from support.load import check, everything_in, loads

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(180)]

PAGE_BYTES = 4096


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


def is_rebuilt(cluster: Cluster, home: Path, topic: str) -> bool:
    """Whether the damaged replica lies in lost+found, and another one is in sync in its place."""
    return bool(list(home.glob(f"lost+found/{topic}@*/0"))) and len(cluster.partitions(topic)[0]["isr"]) == 3


def serve_all_from(cluster: Cluster, broker_id: int, topic: str) -> None:
    """Let this broker lead: the others are killed, the last one when only those two are in sync."""
    leader = cluster.wait_for_leader(topic)
    if leader != broker_id:
        other = next(each for each in cluster.running if each not in {leader, broker_id})
        cluster.kill(other)
        wait_until(lambda: other not in cluster.partitions(topic)[0]["isr"], "it is the only one left to be elected")
        cluster.kill(leader)
        wait_until(lambda: cluster.leader(topic) == broker_id, "it leads")
        cluster.start(other)


def test_bits_that_flip_at_rest_are_found_though_nobody_reads_them(cluster: Cluster, topic: str):
    running = loaded(cluster, topic)
    leader = cluster.wait_for_leader(topic)
    damaged = next(broker_id for broker_id in cluster.running if broker_id != leader)
    cluster.brokers[damaged].stop()
    home: Path = cluster.brokers[damaged].data_dir
    (file,) = partition_of(home, topic).glob("0*.sqlite")
    content = bytearray(file.read_bytes())
    pages = range(16 * PAGE_BYTES, len(content), PAGE_BYTES)
    assert len(pages) > 10
    for at in pages:
        content[at + PAGE_BYTES // 2] ^= 0x55
    file.write_bytes(content)
    cluster.start(damaged)
    wait_until(lambda: is_rebuilt(cluster, home, topic), "the scrub has found it", 90)
    serve_all_from(cluster, damaged, topic)
    check(running, everything_in(cluster.brokers[damaged].url, topic))


def saved_high_watermark(folder: Path) -> int:
    connection = apsw.Connection(
        f"file:{folder / 'state.sqlite'}?mode=ro", flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI
    )
    found = connection.execute("SELECT value FROM meta WHERE key = 'high_watermark'").get
    connection.close()
    return found or 0


def test_a_disk_that_forgot_what_it_had_promised_makes_no_leader(cluster: Cluster, topic: str):
    """It lost the end of its write-ahead log, fsynced as that was, and does not lead without what it lost."""
    running = loaded(cluster, topic)
    damaged = cluster.wait_for_leader(topic)
    home: Path = cluster.brokers[damaged].data_dir
    folder = partition_of(home, topic)
    end = cluster.partitions(topic)[0]["high_watermark"]
    wait_until(lambda: saved_high_watermark(folder) >= end, "what is committed is saved too")
    cluster.kill(damaged)
    (wal,) = folder.glob("0*.sqlite-wal")
    with wal.open("r+b") as file:
        file.truncate(wal.stat().st_size // 2)
    cluster.start(damaged)
    wait_until(lambda: is_rebuilt(cluster, home, topic), "it has begun anew", 60)
    serve_all_from(cluster, damaged, topic)
    check(running, everything_in(cluster.brokers[damaged].url, topic))
