"""A streaming job that is killed repeatedly with SIGKILL during writes: each message is written once.

`PORTALMQ_SPARK_KILLS` sets the number of kills (2 in the suite, 10 in the full proof). Each start continues by the next
origin in `PORTALMQ_SPARK_DOORS`, from the same checkpoint.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from itertools import cycle
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.cluster import wait_until
from support.load import Load
from support.stream_job import StreamJob, started

from portalmq import Admin
from portalmq.spark import options

pytestmark = [pytest.mark.prove, pytest.mark.spark, pytest.mark.cluster, pytest.mark.timeout(600)]

KILLS = int(os.environ.get("PORTALMQ_SPARK_KILLS", "2"))
SEED = int(os.environ.get("PORTALMQ_SPARK_SEED", "0")) or random.randrange(1, 10**6)
DOORS = os.environ.get("PORTALMQ_SPARK_DOORS", "path,bootstrap").split(",")
PARTITIONS = 2
# The time from a batch's plan to a kill: a batch takes about half a second here.
KILL_WITHIN_S = 0.8


def test_a_killed_job_writes_every_message_once(spark, tmp_path: Path):
    print(f"PORTALMQ_SPARK_SEED={SEED}")
    chance = random.Random(SEED)
    with BrokerProcess(tmp_path / "broker") as broker:
        with Admin(broker.url) as admin:
            admin.create_topic("t", partitions=PARTITIONS)
        where = {"path": str(broker.data_dir), "bootstrap": broker.url}
        given = {"topic": "t", "startingOffsets": "earliest", "maxRowsPerTrigger": "2000"}
        doors = cycle({door: where[door]} for door in DOORS)
        load = Load(broker.url, "load", topic="t", partitions=PARTITIONS, pause_s=0.003)
        try:
            with StreamJob(tmp_path / "job") as job:
                planned = []
                for _ in range(KILLS):
                    job.start(given | next(doors))
                    load.wait_for_acked(100)  # messages exist that a kill could lose
                    job.wait_for_batches(chance.choice((1, 1, 2)))
                    time.sleep(chance.uniform(0, KILL_WITHIN_S))
                    job.kill()
                    planned.append(job.batches())
        finally:
            load.stop()
        assert not load.failures
        sent = {(each.partition, each.offset): each.value for each in load.acked}
        last = {"topic": "t"} | next(doors)
        _wait_until_readable(last, sent)
        query = started(spark, job.folder, last, available_now=True)
        assert query.awaitTermination(240)
        assert query.exception() is None
    rows = job.rows()
    print(f"{len(rows)} rows; batches planned before each kill: {planned}; files that do not count: {_leftovers(job)}")
    times = Counter((row["partition"], row["offset"]) for row in rows)
    assert max(times.values()) == 1, "a message was written twice"
    assert {(row["partition"], row["offset"]): row["value"] for row in rows} == sent
    assert len(sent) >= 100 * KILLS


def _wait_until_readable(given: dict[str, str], sent: dict[tuple[int, int], str]) -> None:
    """The files show commits up to a second late."""
    ends = {
        number: max(offset for partition, offset in sent if partition == number) + 1 for number in range(PARTITIONS)
    }
    origin = options.stream_options(given).origin()
    wait_until(
        lambda: all(log.end_offset >= ends[log.partition] for log in origin.logs()), "all that was acked is readable"
    )


def _leftovers(job: StreamJob) -> int:
    return sum(1 for _ in (job.folder / "rows").glob("*.parquet")) - len(job._files())
