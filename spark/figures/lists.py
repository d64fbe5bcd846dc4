"""The lists of a report: each is written in full, then cut for display.

The lists are small, and a separate query costs more to plan and to start than to run. So one query answers all of them:
each of its rows is a row of one list, in the column with that list's name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as f
from pyspark.sql.types import ArrayType

from portalmq.spark.errors import BadOption
from portalmq.spark.report.model import OTHERS

# A list up to this many rows, some MB, is collected; a longer one stays in Spark.
FEW_ROWS = 100_000
# Characters that Spark treats as a pattern in a path that it reads, but not in one that it writes.
_GLOBBED = re.compile(r"[][{}*?\\]")


@dataclass(frozen=True)
class Figures:
    """A list: `frame` has all of its rows, `order` the columns that order them, descending after a "-"."""

    name: str
    frame: DataFrame
    kind: type[msgspec.Struct]
    order: tuple[str, ...]

    def ordered(self, rows: DataFrame) -> DataFrame:
        return rows.orderBy(*(f.desc(name[1:]) if name.startswith("-") else f.asc(name) for name in self.order))


@dataclass(frozen=True)
class Top(Figures):
    """A list that is cut to its first `shown` rows."""

    shown: int


@dataclass(frozen=True)
class Series(Figures):
    """A list limited to the topics, partitions or groups that the list `of` shows. With `has_others` the rows of other
    topics are summed up."""

    of: str
    has_others: bool = False


@dataclass(frozen=True)
class Collected:
    lists: Mapping[str, list[Any]]
    # Entries missing from the lists that are cut: name -> number.
    left_out: Mapping[str, int]


def queries(figures: Sequence[Figures]) -> dict[str, DataFrame]:
    """Return the queries for `tables`."""
    return {each.name: each.ordered(each.frame.coalesce(1)).limit(FEW_ROWS + 1) for each in figures}


def collected(tops: Sequence[Top], series: Sequence[Series], found: Mapping[str, pa.Table], parquet: Path) -> Collected:
    """Write the lists in full below `parquet`, and return them cut for display. `found` has the rows of `queries`."""
    figures: list[Figures] = [*tops, *series]
    written = {each.name: _written(each.frame, found[each.name], parquet / each.name) for each in figures}
    shown: dict[str, list[Any]] = {}
    left_out: dict[str, int] = {}
    for top in tops:
        rows, count = _first(written[top.name], top)
        shown[top.name] = _converted(rows, top.kind)
        if count > rows.num_rows:
            left_out[top.name] = count - rows.num_rows
    for each in series:
        rows = _of_what_is_shown(written[each.name], each, shown, left_out)
        shown[each.name] = _converted(rows, each.kind)
    return Collected(shown, left_out)


def tables(frames: Mapping[str, DataFrame]) -> dict[str, pa.Table]:
    """Return the rows of several frames, each in its order, from one query."""
    # Each row in an array of one: a null struct would make all its fields nullable, and take their space.
    missing = {
        name: f.lit(None).cast(ArrayType(frame.schema, containsNull=False)).alias(name)
        for name, frame in frames.items()
    }
    parts = [
        frame.select(*(f.array(f.struct("*")).alias(name) if name == mine else no for name, no in missing.items()))
        for mine, frame in frames.items()
    ]
    rows = reduce(DataFrame.unionAll, parts).toArrow()
    return {name: _fields(rows.column(name)) for name in frames}


def _fields(column: pa.ChunkedArray) -> pa.Table:
    structs = column.combine_chunks().flatten()
    return pa.Table.from_arrays(structs.flatten(), schema=pa.schema(list(structs.type)))


def _written(frame: DataFrame, rows: pa.Table, path: Path) -> DataFrame | pa.Table:
    """Write all rows of a list, in order, to its Parquet file, and return them. Short lists are in memory, and are
    written here. Spark writes long ones, and reads them again for each use. One file, since every list is an aggregate.
    Raises BadOption."""
    if rows.num_rows <= FEW_ROWS:
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        pq.write_table(rows, path / "part-00000.parquet")
        return rows
    url = f"file://{path}"  # a cluster's Spark may take a bare path for its own file system
    frame.coalesce(1).write.mode("overwrite").parquet(url)
    if not any(path.glob("part-*")):  # a worker wrote it to its own disk, which Spark counts as success
        raise BadOption(
            f"Spark's workers do not write where this program reads: --out ({path}) has to be a directory that all"
            " machines of the cluster share"
        )
    return frame.sparkSession.read.schema(frame.schema).parquet(_GLOBBED.sub(r"\\\g<0>", url))


def _first(written: DataFrame | pa.Table, top: Top) -> tuple[pa.Table, int]:
    """Return the displayed rows, and the number of all rows."""
    if isinstance(written, pa.Table):
        return written.slice(0, top.shown), written.num_rows
    return top.ordered(written).limit(top.shown).toArrow(), written.count()


def _of_what_is_shown(
    written: DataFrame | pa.Table, series: Series, shown: Mapping[str, list[Any]], left_out: Mapping[str, int]
) -> pa.Table:
    if isinstance(written, pa.Table):
        if series.of not in left_out:
            return written
        written = series.frame.sparkSession.createDataFrame(written)
    if series.of in left_out:
        is_shown = _is_shown(series.of, shown[series.of])
        written = _with_others(written, series, is_shown) if series.has_others else written.where(is_shown)
    return series.ordered(written).toArrow()


def _is_shown(of: str, shown: Sequence[Any]) -> Column:
    if of == "topics":
        return f.col("topic").isin([each.topic for each in shown])
    if of == "groups":
        return f.col("group").isin(sorted({each.group for each in shown}))
    names = [f"{each.topic}/{each.partition}" for each in shown]
    return f.concat_ws("/", "topic", f.col("partition").cast("string")).isin(names)


def _with_others(rows: DataFrame, series: Series, is_shown: Column) -> DataFrame:
    topic = f.when(is_shown, f.col("topic")).otherwise(f.lit(OTHERS))
    sums = [f.sum(column).alias(column) for column in ("messages", "bytes") if column in rows.columns]
    return rows.withColumn("topic", topic).groupBy(*series.order).agg(*sums)


def _converted(rows: pa.Table, kind: type[msgspec.Struct]) -> list[Any]:
    return [msgspec.convert(row, kind) for row in rows.to_pylist()]
