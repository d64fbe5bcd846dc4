"""The common part of the tables beside `messages`: columns, pruning, and tasks.

A piece is a range of offsets within one segment file. A task takes many small pieces, since it costs more to start than
a few thousand rows cost to read. A piece is read in chunks, each entirely from one replica, so that another replica can
replace a missing or damaged file without duplicate rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from portalmq.spark.columns import Table
from portalmq.spark.errors import BadOption, DamagedFile
from portalmq.spark.files.directories import Directories, FileSpan, missing_file
from portalmq.spark.files.replica import DirectoryReplica
from portalmq.spark.files.segment import is_at_rest
from portalmq.spark.options import EARLIEST, LATEST, Bound, ReadOptions
from portalmq.spark.origin import PartitionLog

CHUNK_OFFSETS = 65_536
PIECES_IN_A_TASK = 64

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Piece:
    """Offsets [start, end) of a log, all in the file `path`. `elsewhere` has other replicas' directories."""

    log: PartitionLog
    start: int
    end: int
    path: Path
    elsewhere: tuple[Path, ...]

    def chunks(self, offsets: int = CHUNK_OFFSETS) -> Iterator[Piece]:
        for low in range(self.start, self.end, offsets):
            yield replace(self, start=low, end=min(low + offsets, self.end))

    def read(self, read: Callable[[Path, int, int], list[T]]) -> list[T]:
        """Return the result of `read(file, low, high)` for the piece, from the first readable replica.

        Raises DataLoss when no replica has the file any more, DamagedFile when none has an intact one.
        """
        fault: FileNotFoundError | DamagedFile
        try:
            return _read_quietly(self.path, self.start, self.end, read)
        except (FileNotFoundError, DamagedFile) as error:
            fault = error
        for directory in self.elsewhere:
            found: list[T] = []
            try:
                for segment in DirectoryReplica(directory).segments(self.start, self.end):
                    low, high = max(self.start, segment.base_offset), min(self.end, segment.end_offset)
                    found += _read_quietly(segment.path, low, high, read)
            except (FileNotFoundError, DamagedFile):
                continue
            return found
        if isinstance(fault, FileNotFoundError):
            raise missing_file(self.path, self.log, self.start, self.end) from fault
        raise fault


def _read_quietly(path: Path, low: int, high: int, read: Callable[[Path, int, int], list[T]]) -> list[T]:
    """Read a file, and again if it was opened for writing during a read as a file at rest."""
    was_at_rest = path.is_file() and is_at_rest(path)
    try:
        found = read(path, low, high)
    except DamagedFile:
        if was_at_rest and not is_at_rest(path):
            return read(path, low, high)
        raise
    return found if not was_at_rest or is_at_rest(path) else read(path, low, high)


class TableReader(DataSourceReader):
    """A reader of the columns in `schema` of `table`."""

    table: ClassVar[Table]

    def __init__(self, reading: ReadOptions, schema: StructType) -> None:
        self.columns = self.table.columns_of(schema)
        self.reading = reading

    def origin(self) -> Directories:
        """Return the origin. Raises BadOption for options that only the table of messages supports."""
        reading, name = self.reading, self.table.name
        if reading.bootstrap:
            raise BadOption(f"table {name} exists only in the brokers' files: name their data directories as path")
        if reading.starting != Bound(EARLIEST) or reading.ending != Bound(LATEST):
            raise BadOption(
                f"table {name} is read as a whole: leave the starting and ending options out, and filter it"
            )
        return Directories(reading.paths, reading.topics, reading.span_offsets)


def pieces_of(origin: Directories, log: PartitionLog) -> list[Piece]:
    spans = origin.spans(log, log.start_offset, log.end_offset)
    return [Piece(log, span.start, span.end, span.path, span.elsewhere) for span in spans if isinstance(span, FileSpan)]


class Task(InputPartition):
    """Pieces that one Spark task reads one after another."""

    def __init__(self, pieces: tuple[Piece, ...]) -> None:
        super().__init__(None)
        self.pieces = pieces


def packed(pieces: Sequence[Piece], offsets_max: int) -> list[tuple[Piece, ...]]:
    """Group the pieces in order, with at most `offsets_max` offsets a group; a larger piece is a group of its own."""
    groups: list[list[Piece]] = []
    room = 0
    for piece in pieces:
        size = piece.end - piece.start
        if not groups or size > room or len(groups[-1]) == PIECES_IN_A_TASK:
            groups.append([])
            room = offsets_max
        groups[-1].append(piece)
        room -= size
    return [tuple(group) for group in groups]
