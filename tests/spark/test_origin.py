"""Pieces become tasks: few pieces are one task each, many small ones share tasks, and none is lost."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from pyspark.sql.datasource import InputPartition
from support.data_directory import numbered, written

from portalmq.spark.columns import COLUMNS
from portalmq.spark.options import batch_options, stream_options
from portalmq.spark.origin import PACKED_OFFSETS, TASKS_FEW, PartitionLog, Span, SpanGroup, packed, spans_of
from portalmq.spark.reading.batch import MessagesReader
from portalmq.spark.reading.stream import MessagesStream

SEGMENTS = TASKS_FEW + 22


def spans(*sizes: int) -> list[Span]:
    log, found, start = PartitionLog("t", "id", 0, 0, sum(sizes)), [], 0
    for size in sizes:
        found.append(Span(log, start, start + size))
        start += size
    return found


def test_few_pieces_are_a_task_each():
    pieces = spans(*[10] * TASKS_FEW)
    assert packed(pieces) == pieces
    assert packed([]) == []


def test_thousands_of_small_pieces_are_some_hundred_tasks():
    pieces = spans(*[10] * (30 * TASKS_FEW + 1))
    tasks = packed(pieces)
    assert len(tasks) <= TASKS_FEW
    assert [span for task in tasks for span in spans_of(task)] == pieces


def test_big_pieces_have_tasks_of_their_own():
    pieces = spans(*[PACKED_OFFSETS // 2 + 1, 10, 10] * TASKS_FEW)
    tasks = packed(pieces)
    assert [span for task in tasks for span in spans_of(task)] == pieces
    assert all(sum(span.end - span.start for span in spans_of(task)) <= PACKED_OFFSETS for task in tasks)


def test_no_task_reads_more_than_requested():
    pieces = spans(*[10] * (3 * TASKS_FEW))
    assert packed(pieces, 10) == pieces
    assert all(sum(span.end - span.start for span in spans_of(task)) == 20 for task in packed(pieces, 29))


def test_an_extra_task_of_spark_reads_nothing():
    assert spans_of(InputPartition(None)) == ()


@pytest.fixture
def small_segments(tmp_path: Path) -> Path:
    with written(tmp_path / "data") as data:
        data.topic("t")
        for segment in range(SEGMENTS):
            data.put("t", *numbered(2, start=2 * segment))
            data.partition("t").log.roll()
        data.partition("t").log.seal(data.partition("t").high_watermark)
    return tmp_path / "data"


def test_many_small_segments_are_read_once_by_fewer_tasks(small_segments):
    reader = MessagesReader(batch_options({"path": str(small_segments)}), tuple(COLUMNS))
    tasks = [pickle.loads(pickle.dumps(task)) for task in reader.partitions()]
    assert len(tasks) < SEGMENTS
    assert any(isinstance(task, SpanGroup) for task in tasks)
    rows = [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]
    assert [row["value"] for row in rows] == numbered(2 * SEGMENTS)

    given = {"path": str(small_segments), "startingOffsets": "earliest"}
    stream = MessagesStream(stream_options(given), ("value",))
    begin = stream.initialOffset()
    tasks = stream.partitions(begin, stream.latestOffset(begin, stream.getDefaultReadLimit()))
    assert len(tasks) < SEGMENTS
    assert [row["value"] for task in tasks for batch in stream.read(task) for row in batch.to_pylist()] == numbered(
        2 * SEGMENTS
    )


def test_a_removed_segment_does_not_affect_the_others_of_its_task(small_segments):
    reader = MessagesReader(batch_options({"path": str(small_segments), "failOnDataLoss": "false"}), ("value",))
    task = next(task for task in reader.partitions() if isinstance(task, SpanGroup))
    there = numbered(2 * len(task.spans))
    Path(task.spans[0].path).unlink()
    assert [row["value"] for batch in reader.read(task) for row in batch.to_pylist()] == there[2:]
