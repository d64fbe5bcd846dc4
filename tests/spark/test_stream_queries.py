"""Streaming queries in Spark itself: its calls of the source, its checkpoints, and the errors that users see."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import StreamingQueryException
from support.data_directory import numbered, written

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

ENDS_WITHIN_S = 240


def run(spark, folder: Path, **given: str) -> Any:
    """Run a query that reads the existing messages into Parquet and ends."""
    messages = spark.readStream.format("portalmq").options(**given).load()
    query = (
        messages.selectExpr("partition", "offset", "cast(value as string) value")
        .writeStream.option("checkpointLocation", str(folder / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(folder / "rows"), format="parquet")
    )
    try:
        assert query.awaitTermination(ENDS_WITHIN_S), "it ends by itself"
    finally:
        query.stop()
    return query


def rows(spark, folder: Path) -> list[str]:
    return sorted(row.value for row in spark.read.schema("value string").parquet(str(folder / "rows")).collect())


def checkpointed(folder: Path, batch: int) -> dict[str, int]:
    """Return the end of a micro-batch from Spark's checkpoint."""
    return json.loads((folder / "checkpoint" / "offsets" / str(batch)).read_text().splitlines()[2])


def test_existing_messages_are_read_once_in_bounded_batches(spark, data: Path, tmp_path: Path):
    query = run(spark, tmp_path, path=str(data), topic="t", startingOffsets="earliest", maxRowsPerTrigger="25")
    batches = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
    assert sum(batches) == 60
    assert max(batches) <= 25
    assert rows(spark, tmp_path) == sorted(f"{number}" for number in range(30) for _ in range(2))
    assert run(spark, tmp_path, path=str(data), topic="t").recentProgress[-1].numInputRows == 0


def test_a_crash_in_the_first_batch_does_not_move_its_beginning(spark, data: Path, tmp_path: Path):
    run(spark, tmp_path, path=str(data), topic="empty")
    first = checkpointed(tmp_path, 0)
    with written(data) as place:
        place.put("empty", *numbered(5))
    shutil.rmtree(tmp_path / "checkpoint" / "commits")  # as if killed before the end of the first batch
    run(spark, tmp_path, path=str(data), topic="empty")
    assert checkpointed(tmp_path, 0) == first
    assert rows(spark, tmp_path) == ["0", "1", "2", "3", "4"]


@pytest.mark.prove
def test_removed_unread_messages_are_reported_to_the_user(spark, data: Path, tmp_path: Path):
    given = {"path": str(data), "topic": "t"}
    run(spark, tmp_path, **given, startingOffsets="earliest")
    with written(data) as place:
        place.put("t", b"never read")
        place.fixture.broker.browser.purge("t", partition=None, before_offset=None)
        place.put("t", b"after the purge")
    with pytest.raises(StreamingQueryException, match=r"offsets \d+ to \d+ of t@\w+/0 were removed before they were"):
        run(spark, tmp_path, **given)
    run(spark, tmp_path, **given, failOnDataLoss="false")
    assert "never read" not in rows(spark, tmp_path)
    assert "after the purge" in rows(spark, tmp_path)


def test_the_example_in_the_documents_runs_as_pasted(spark, tmp_path: Path):
    text = (Path(__file__).resolve().parents[2] / "docs" / "SPARK.md").read_text()
    example = text.split("## Streaming\n")[1].split("```python\n")[1].split("```")[0]
    with written(tmp_path / "data" / "5000") as place:
        place.topic("temp_1")
        place.put("temp_1", *numbered(5))
    for folder in ("data", "out"):  # Spark's own processes run in another folder
        example = example.replace(f'"{folder}/', f'"{tmp_path}/{folder}/')
    exec(example, {"spark": spark})
    found = spark.read.parquet(str(tmp_path / "out" / "messages")).collect()
    assert sorted(row.value for row in found) == ["0", "1", "2", "3", "4"]
