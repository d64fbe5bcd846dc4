"""The benchmark's rivals read the same messages as the source; otherwise a comparison has no meaning."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from support.data_directory import numbered, written

from portalmq.broker.bench.spark import Contestant, contest, report
from portalmq.broker.bench.spark import Selected as SelectedFiles
from portalmq.broker.bench.spark_rivals import ALL, TWO, Tuples, pieces, plain_rows
from portalmq.broker.storage.batch import Record
from portalmq.spark.files.directories import Directories


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with written(path) as data:
        data.topic("t", partitions=2)
        for partition in range(2):
            data.put("t", *numbered(10), partition=partition)
            data.later(1_000)
            data.put("t", Record(b"{}", "application/json", b"k", {"a": "b"}, priority=3), partition=partition)
            data.roll("t", partition)
            data.put("t", *numbered(5), partition=partition)
    return path


def rows_of(directory: Path, columns: tuple[str, ...]) -> list[tuple]:
    origin = Directories([str(directory)], ["t"])
    return [
        tuple(
            dict(value) if name == "headers" and value is not None else value
            for name, value in zip(columns, row.values(), strict=True)
        )
        for log in origin.logs()
        for span in origin.spans(log, log.start_offset, log.end_offset)
        for batch in span.batches(columns)
        for row in batch.to_pylist()
    ]


@pytest.mark.parametrize("columns", [ALL, TWO], ids=["all", "two"])
def test_tuples_are_the_rows_of_the_source(directory, columns):
    source = Tuples({"path": str(directory), "columns": ",".join(columns)})
    reader = source.reader(source.schema())
    read = [row for piece in reader.partitions() for row in reader.read(piece)]
    assert read == rows_of(directory, columns)
    assert len(read) == 32


@pytest.mark.parametrize("columns", [ALL, TWO], ids=["all", "two"])
def test_the_plain_scan_counts_what_the_source_counts(directory, columns):
    found = [(piece.path, piece.start, piece.end) for piece in pieces(directory)]
    assert plain_rows(found, columns) == (32, sum(len(value) for _, value in rows_of(directory, TWO)))


def test_a_fraction_selects_a_part_of_each_file(directory):
    assert [piece.end - piece.start for piece in pieces(directory, 3)] == [3, 3, 3, 3]


def test_a_contestant_that_loses_rows_does_not_win(capsys):
    honest, hasty = Contestant("honest", lambda: (10, 1_000)), Contestant("hasty", lambda: (9, 900))
    assert contest([honest], 3, (10, 1_000))["honest"] > 0
    with pytest.raises(AssertionError, match="hasty found 9 messages"):
        contest([honest, hasty], 3, (10, 1_000))


def test_the_report_divides_by_the_rival():
    rates = {f"{who} {columns}": 100.0 for who in ("spark", "tuples") for columns in ("all", "two")}
    for columns in ("all", "two"):
        rates |= {f"plain {columns}, 1 process": 50.0, f"plain {columns}, 2 processes": 400.0}
    figures = report(rates, {"scan": 140.2}, SelectedFiles(60, 1, 10))
    assert figures["all: spark / tuples"] == 1
    assert figures["two: spark / plain, 1 process"] == 2
    assert figures["two: spark / plain, 2 processes"] == 0.25
    assert figures["peak of a Python worker, scan, MB"] == 140


def test_timestamps_are_read_as_times(directory):
    source = Tuples({"path": str(directory), "columns": ",".join(ALL)})
    reader = source.reader(source.schema())
    first = next(iter(reader.read(reader.partitions()[0])))
    assert first[ALL.index("timestamp")] == datetime(2023, 11, 14, 22, 0, tzinfo=UTC)
