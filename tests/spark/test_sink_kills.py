"""A streaming job whose driver is killed repeatedly with SIGKILL, and a leader of its topic once: every row is in the
topic exactly once. PORTALMQ_SPARK_KILLS=10 sets more kills."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.cluster import Cluster, wait_until
from support.data_directory import written
from support.sink_job import SinkJob

KILLS = int(os.environ.get("PORTALMQ_SPARK_KILLS", "2"))

pytestmark = [pytest.mark.prove, pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600 + 150 * KILLS)]

ROWS_A_BATCH = 400
BATCHES_A_KILL = 2
WITHIN_S = 240.0
# Each epoch begins with a record of its own in each partition.
EPOCHS_MAX = 60


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster") as cluster:
        yield cluster


def stored(cluster: Cluster, topic: str) -> int:
    """Return the approximate number of the topic's records, which includes the starts of epochs."""
    return sum(partition["high_watermark"] for partition in cluster.partitions(topic))


def messages(cluster: Cluster, topic: str) -> Iterator[dict]:
    for number in range(len(cluster.partitions(topic))):
        offset = 0
        while True:
            page = cluster.ask(f"/v1/topics/{topic}/partitions/{number}/messages?offset={offset}&limit=1000")
            yield from page["messages"]
            if page["next_offset"] >= page["high_watermark"]:
                break
            offset = page["next_offset"]


def wait_in_the_middle(cluster: Cluster, job: SinkJob, batches: int) -> None:
    """Wait until `batches` batches are done and the topic has some rows of the next one, which is held."""

    def is_there() -> bool:
        assert not job.has_ended(), f"it ended before it was killed:\n{job.said()}"
        return job.committed() == batches and stored(cluster, "out") > job.offsets(batches) + EPOCHS_MAX

    wait_until(is_there, "a batch under way", WITHIN_S)


def test_every_row_is_in_the_topic_once_after_kills_of_driver_and_leader(cluster, tmp_path: Path):
    total = ROWS_A_BATCH * BATCHES_A_KILL * (KILLS + 2)
    values = [b"%d" % (number // 2) for number in range(total)]  # each row has an equal one, mostly in the same batch
    with written(tmp_path / "source") as source:
        source.topic("t", partitions=2)
        for start in range(0, total, 500):
            source.put("t", *values[start : start + 500], partition=start // 500 % 2)
    cluster.admin().create_topic("out", partitions=3)
    cluster.wait_in_sync("out")
    done = unfinished = 0
    options = {
        "path": str(tmp_path / "source"),
        "topic": "t",
        "startingOffsets": "earliest",
        "maxRowsPerTrigger": str(ROWS_A_BATCH),
        "into": ",".join(cluster.urls),
        "to": "out",
    }
    with SinkJob(tmp_path / "job") as job:
        for kill in range(KILLS):
            done += 1
            job.hold(done)
            job.start(options)
            wait_in_the_middle(cluster, job, done)
            if kill == KILLS // 2:
                cluster.kill(cluster.wait_for_leader("out"))
                done += 1
                job.hold(done)
                wait_in_the_middle(cluster, job, done)
            job.kill()
            unfinished += job.batches() > job.committed()
        job.hold(None)
        job.start(options)
        wait_until(job.has_ended, "the end of the job", WITHIN_S)
    cluster.heal()
    found = Counter(message["value"] for message in messages(cluster, "out"))
    twice = {value: count for value, count in found.items() if count > 2}
    assert found == Counter(value.decode() for value in values), f"too often: {twice}"
    print(f"{KILLS} kills, {total} rows: {msgspec.json.encode(twice)!r}")
    assert unfinished == KILLS, "a kill interrupted no batch, so Spark ran none again: the test proved nothing"
