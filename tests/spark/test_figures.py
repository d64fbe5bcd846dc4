"""Every figure of a throughput report agrees with a count by plain Python and SQL of the same files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from support.compared import agrees
from support.data_directory import numbered, written
from support.plain_figures import logs_in
from support.story import busy

from portalmq import wire
from portalmq.broker.core.queue.records import Ack
from portalmq.spark.errors import BadOption
from portalmq.spark.figures import lists
from portalmq.spark.figures.report_figures import bucket_width_ms
from portalmq.spark.report import model

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def report(spark: SparkSession, out: Path, *paths: Path, topics: list[str] | None = None) -> model.Report:
    from portalmq.spark.figures import report_figures

    return report_figures.compute(spark, list(paths), topics, out, made_at_ms=1)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return busy(tmp_path_factory.mktemp("story") / "data")


def test_all_figures_agree_with_a_count_in_plain_sql(spark: SparkSession, story: Path, tmp_path: Path) -> None:
    logs = logs_in(story)
    made = report(spark, tmp_path / "parquet", story)
    agrees(made, logs)
    # The messages contain every case that the figures cover.
    shop = next(group for group in made.groups if group.group == "shop")
    assert min(shop.nacked, shop.dead, shop.redelivered) > 0
    assert sum(1 for each in made.fail_overs if each.gap_ms is not None) == 2
    assert any(each.lag for each in made.lag)
    assert made.bucket_ms == 1_000


def test_topics_without_messages_and_without_groups(spark: SparkSession, tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t", partitions=2)
    made = report(spark, tmp_path / "parquet", tmp_path / "data")
    agrees(made, logs_in(tmp_path / "data"))
    assert made.topics[0].size is None
    assert (made.totals.messages, made.totals.messages_per_s, made.groups, made.lag) == (0, 0.0, [], [])


def test_one_message(spark: SparkSession, tmp_path: Path) -> None:
    with written(tmp_path / "data") as data:
        data.topic("t")
        data.put("t", b"alone")
    made = report(spark, tmp_path / "parquet", tmp_path / "data")
    agrees(made, logs_in(tmp_path / "data"))
    assert (made.totals.messages_per_s, made.totals.peak_messages_per_s) == (1.0, 1.0)


def test_a_message_acked_without_a_delivery_record_counts_as_delivered(spark: SparkSession, tmp_path: Path) -> None:
    """After a fail-over the log lacks the dead leader's last deliveries, and has the acks that followed."""
    with written(tmp_path / "data") as data:
        data.topic("t")
        offsets = data.put("t", *numbered(10))
        request = wire.ReceiveRequest(topics=["t"], max_messages=6, wait_ms=0)
        given = data.fixture.broker.receive_handler.receive("g", request, None)
        data.fixture.broker.settlement.settle("g", [message.receipt for message in given])
        ahead = tuple((0, 0, offset) for offset in offsets[7:])
        data.partition("t").append_group_record("g", Ack((), data.fixture.clock.now_ms(), ahead)).wait()
    made = report(spark, tmp_path / "parquet", tmp_path / "data")
    agrees(made, logs_in(tmp_path / "data"))
    (group,) = made.groups
    assert (group.delivered, group.acked, made.lag[0].lag) == (9, 9, 1)


def test_a_list_that_workers_wrote_to_local_disks_is_not_read_as_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "FEW_ROWS", 0)
    written: list[str] = []
    writer = SimpleNamespace(mode=lambda mode: SimpleNamespace(parquet=written.append))
    frame = SimpleNamespace(coalesce=lambda count: SimpleNamespace(write=writer))
    with pytest.raises(BadOption, match="has to be a directory that all machines of the cluster share"):
        lists._written(frame, pa.table({"n": [1]}), tmp_path / "topics")
    assert written == [f"file://{tmp_path}/topics"]


def test_a_long_list_is_read_back_from_any_directory_name(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lists, "FEW_ROWS", 0)
    frame = spark.range(3).toDF("n")
    for name in ("of [1] {a,b}", "of 100%20", "of *"):
        again = lists._written(frame, pa.table({"n": [0]}), tmp_path / name / "topics")
        assert isinstance(again, DataFrame)
        assert sorted(row["n"] for row in again.collect()) == [0, 1, 2]


@pytest.mark.prove
def test_long_lists_keep_the_busiest_entries_and_sum_up_the_rest(
    spark: SparkSession, story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TOPICS_SHOWN", "PARTITIONS_SHOWN", "PRODUCERS_SHOWN", "GROUPS_SHOWN", "LAG_SHOWN"):
        monkeypatch.setattr(model, name, 1)
    made = report(spark, tmp_path / "parquet", story)
    logs = logs_in(story)
    assert made.left_out == {"topics": 2, "partitions": 3, "producers": 2, "groups": 3, "lag": 6}
    assert [each.topic for each in made.topics] == ["orders"]
    assert {each.topic for each in made.throughput} == {"orders", model.OTHERS}
    total = sum(len(log.messages) for log in logs)
    assert sum(each.messages for each in made.throughput) == sum(each.messages for each in made.sizes) == total
    assert {(each.topic, each.partition) for each in made.partition_throughput} == {("orders", 0)}
    assert {each.group for each in made.latency_over_time} == {made.groups[0].group} == {"readers"}
    assert spark.read.parquet(str(tmp_path / "parquet" / "topics")).count() == 3


@pytest.mark.parametrize(
    ("span_ms", "width_ms"),
    [
        (0, 1_000),
        (239_000, 1_000),
        (240_000, 2_000),
        (3_600_000, 30_000),
        (86_400_000, 600_000),
        (10**12, 86_400_000 * 64),
    ],
)
def test_buckets_are_round_and_few(span_ms: int, width_ms: int) -> None:
    first = 1_699_999_200_000
    assert bucket_width_ms(first, first + span_ms) == width_ms
