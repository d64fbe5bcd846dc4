"""A stream during kills of leaders, by three data directories and by HTTP: without Spark, in Spark's order."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows
from support.cluster import Cluster
from support.load import loads

from portalmq.spark import options
from portalmq.spark.reading.stream import MessagesStream

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PARTITIONS = 2
ROWS_MAX = 500
READ_WITHIN_S = 120.0


class Query:
    """Calls a source as Spark does, one micro-batch after the other."""

    def __init__(self, **given: str) -> None:
        self.rows: list[tuple[int, int, str]] = []
        self.restart(**given)
        self.position = self.source.initialOffset()

    def restart(self, **given: str) -> None:
        """Restart from the checkpoint, with other options."""
        reading = options.stream_options(given | {"topic": "t", "startingOffsets": "earliest"})
        self.source = MessagesStream(reading, ("partition", "offset", "value"))

    def run_until(self, rows: int) -> None:
        """Run micro-batches until `rows` rows are read."""
        deadline = time.monotonic() + READ_WITHIN_S
        while len(self.rows) < rows:
            assert time.monotonic() < deadline, f"{len(self.rows)} of {rows} rows within {READ_WITHIN_S:g} s"
            self.run_batch()

    def run_batch(self) -> None:
        end = self.source.latestOffset(self.position, ReadMaxRows(ROWS_MAX))
        assert all(end[name] >= offset for name, offset in self.position.items()), "the end of a batch fell"
        batch = [
            (row["partition"], row["offset"], row["value"].decode())
            for span in self.source.partitions(self.position, end)
            for rows in self.source.read(span)
            for row in rows.to_pylist()
        ]
        assert len(batch) <= ROWS_MAX
        if end == self.position:
            time.sleep(0.01)  # Spark's own wait between look-ups
        self.rows += batch
        self.position = end


@pytest.mark.prove
def test_leaders_are_killed_and_every_message_is_read_once(tmp_path: Path):
    with Cluster(tmp_path) as cluster:
        cluster.admin().create_topic("t", partitions=PARTITIONS)
        cluster.wait_in_sync("t")
        paths = ",".join(str(broker.data_dir) for broker in cluster.brokers.values())
        doors = itertools.cycle([{"path": paths}, {"bootstrap": ",".join(cluster.urls)}])
        query = Query(**next(doors))
        with loads(cluster.urls, topic="t", partitions=PARTITIONS, pause_s=0.002) as running:
            query.run_until(1_000)
            for partition in range(PARTITIONS):
                killed = cluster.wait_for_leader("t", partition)
                cluster.kill(killed)
                query.run_until(len(query.rows) + 1_000)
                cluster.start(killed)
                cluster.wait_in_sync("t")
                query.restart(**next(doors))
        sent = {(each.partition, each.offset): each.value for load in running for each in load.acked}
        query.run_until(len(sent))
    assert {(partition, offset): value for partition, offset, value in query.rows} == sent
    assert len(query.rows) == len(sent), "a message was read twice"
    for number in range(PARTITIONS):
        offsets = [offset for partition, offset, _ in query.rows if partition == number]
        assert all(before < after for before, after in itertools.pairwise(offsets))
