"""Every figure of a throughput report agrees with what plain Python and SQL find in the same files."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.compared import agrees
from support.plain_figures import logs_in
from support.story import busy

from portalmq.spark.report import model

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def report(spark: SparkSession, out: Path, *paths: Path, topics: list[str] | None = None) -> model.Report:
    from portalmq.spark import figures

    return figures.report(spark, list(paths), topics, out, made_at_ms=1)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return busy(tmp_path_factory.mktemp("story") / "data")


def test_all_figures_agree_with_a_count_in_plain_sql(spark: SparkSession, story: Path, tmp_path: Path) -> None:
    logs = logs_in(story)
    made = report(spark, tmp_path / "parquet", story)
    agrees(made, logs)
    # The story holds what the figures are to tell of.
    shop = next(group for group in made.groups if group.group == "shop")
    assert min(shop.nacked, shop.dead, shop.redelivered) > 0
    assert sum(1 for each in made.fail_overs if each.gap_ms is not None) == 2
    assert any(each.lag for each in made.lag)
    assert made.bucket_ms == 1_000
