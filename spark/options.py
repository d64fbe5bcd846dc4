"""The options of the format "portalmq": the name, the operations that take it, and the accepted values of each.

Spark passes option names in any case, and values as text. Each operation accepts the options that it uses, and rejects
the others with an error that suggests similar names: an option without effect hides a mistake.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec

from portalmq.network.tls import NO_FILES, TLS_NAMES, TlsFiles
from portalmq.spark.errors import BadOption
from portalmq.spark.origin import SPAN_OFFSETS, Origin, PartitionLog

EARLIEST: Final = -2  # as Kafka writes it in its JSON
LATEST: Final = -1
OFFSET_MAX: Final = (1 << 63) - 1
TABLES = ("messages", "deliveries", "batches", "groups")

_CONNECTION = ("bootstrap", "token", *TLS_NAMES)
_ORIGIN = ("path", "paths", *_CONNECTION)
_READING = (*_ORIGIN, "topic", "columns", "table", "failOnDataLoss", "maxRowsPerPartition")
_STARTS = ("startingOffsets", "startingTimestamp")
_BATCH = (*_READING, *_STARTS, "endingOffsets", "endingTimestamp", "pushdown")
_STREAM = (*_READING, *_STARTS, "maxRowsPerTrigger")
_WRITING = (*_CONNECTION, "topic", "query", "checkpointLocation")

# Options of Spark's Kafka source, and ours.
_KAFKA = {
    "subscribe": "topic",
    "subscribepattern": "topic",
    "assign": "topic",
    "kafka.bootstrap.servers": "bootstrap",
    "maxoffsetspertrigger": "maxRowsPerTrigger",
    "startingoffsetsbytimestamp": "startingTimestamp",
    "endingoffsetsbytimestamp": "endingTimestamp",
    "maxrecordsperpartition": "maxRowsPerPartition",
    "minpartitions": "maxRowsPerPartition",
}


@dataclass(frozen=True, slots=True)
class Bound:
    """A starting or ending point, before it is resolved in the logs.

    `offsets` has single partitions, topic -> partition -> offset, EARLIEST or LATEST; `otherwise`, EARLIEST or LATEST,
    is for all others. `timestamp_ms` wins over both.
    """

    otherwise: int
    offsets: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    timestamp_ms: int | None = None

    def of(self, log: PartitionLog) -> int:
        """Return the offset in this log, EARLIEST, or LATEST. Ignores `timestamp_ms`."""
        return self.offsets.get(log.topic, {}).get(log.partition, self.otherwise)


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read. Exactly one of `paths` and `bootstrap` is not empty; `topics` None: all but internal ones."""

    paths: tuple[str, ...]
    bootstrap: tuple[str, ...]
    token: str | None = field(repr=False)
    tls: TlsFiles
    topics: tuple[str, ...] | None
    columns: tuple[str, ...] | None
    starting: Bound
    ending: Bound
    rows_per_trigger_max: int | None
    fails_on_data_loss: bool
    pushes_down: bool
    span_offsets: int
    table: str

    def origin(self) -> Origin:
        """Return the origin that the options name: data directories or brokers. Raises SourceError."""
        if self.paths:
            from portalmq.spark.files.directories import Directories

            return Directories(self.paths, self.topics, self.span_offsets)
        from portalmq.spark.http_api.brokers import Brokers

        return Brokers(self.bootstrap, self.topics, self.span_offsets, token=self.token, tls=self.tls)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write. `topic` None: a column has it. `query` None: the writer generates a new one."""

    bootstrap: tuple[str, ...]
    token: str | None = field(repr=False)
    topic: str | None
    query: str | None
    tls: TlsFiles = NO_FILES


def schema_options(options: Mapping[str, str]) -> ReadOptions:
    """Return the options for a schema, before batch or stream is known. Raises BadOption."""
    return _reading(_Options(options, (*_BATCH, "maxRowsPerTrigger"), "reading"), Bound(EARLIEST))


def batch_options(options: Mapping[str, str]) -> ReadOptions:
    """Return the options of a batch read. Raises BadOption."""
    return _reading(_Options(options, _BATCH, "a batch read"), Bound(EARLIEST))


def stream_options(options: Mapping[str, str]) -> ReadOptions:
    """Return the options of a streaming read. Raises BadOption."""
    return _reading(_Options(options, _STREAM, "a stream that is read"), Bound(LATEST))


def write_options(options: Mapping[str, str]) -> WriteOptions:
    """Return the options of a write. Raises BadOption."""
    given = _Options(options, _WRITING, "writing")
    bootstrap = given.names("bootstrap")
    if not bootstrap:
        raise BadOption('bootstrap is missing: name a broker, as in .option("bootstrap", "http://localhost:5000")')
    topics = given.names("topic")
    if len(topics) > 1:
        raise BadOption("topic takes one name in writing; rows for several topics say theirs in a column `topic`")
    return WriteOptions(bootstrap, given.text("token"), topics[0] if topics else None, given.text("query"), given.tls())


class _Options:
    """The options as given, looked up by name in any case."""

    def __init__(self, options: Mapping[str, str], known: tuple[str, ...], operation: str) -> None:
        names = {name.lower(): name for name in known}
        self._values: dict[str, str] = {}
        for given, value in options.items():
            if given.lower() not in names:
                raise BadOption(_unknown(given, known, operation))
            self._values[names[given.lower()]] = value

    def text(self, name: str) -> str | None:
        value = self._values.get(name)
        if value is not None and not value.strip():
            raise BadOption(f"{name} is empty: give it a value, or leave it out")
        return value.strip() if value is not None else None

    def tls(self) -> TlsFiles:
        return TlsFiles(*map(self.text, TLS_NAMES))

    def names(self, name: str) -> tuple[str, ...]:
        """Return a list separated by commas; empty when the option is absent."""
        text = self.text(name)
        if text is None:
            return ()
        found = tuple(part.strip() for part in text.split(","))
        if not all(found):
            raise BadOption(f"{name}={text!r} has an empty name between its commas")
        return tuple(dict.fromkeys(found))

    def number(self, name: str) -> int | None:
        text = self.text(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= OFFSET_MAX):
            raise BadOption(f"{name}={text!r} is no whole number from 1 on")
        return int(text)

    def truth(self, name: str, otherwise: bool) -> bool:
        text = (self.text(name) or str(otherwise)).lower()
        if text not in {"true", "false"}:
            raise BadOption(f"{name}={text!r} is neither true nor false")
        return text == "true"

    def paths(self) -> tuple[str, ...]:
        """Return the paths. `load(["a", "b"])` arrives as JSON in Spark's own option `paths`."""
        several = self.text("paths")
        if several is None:
            return self.names("path")
        try:
            return tuple(msgspec.json.decode(several, type=list[str]))
        except msgspec.MsgspecError as error:
            raise BadOption(f"paths={several!r} is no JSON list of texts ({error}): use path") from error


def _unknown(given: str, known: tuple[str, ...], operation: str) -> str:
    shown = [name for name in known if name not in {"paths", "checkpointLocation"}]
    by_lower = {name.lower(): name for name in shown}
    near = [by_lower[name] for name in difflib.get_close_matches(given.lower(), by_lower, n=3)]
    from_kafka = _KAFKA.get(given.lower())
    if from_kafka in shown:
        near = [from_kafka]
    elsewhere = {name.lower() for name in (*_BATCH, *_STREAM, *_WRITING)}
    what = f"option {given!r} is not for {operation}" if given.lower() in elsewhere else f"there is no option {given!r}"
    hint = f"did you mean {' or '.join(near)}? " if near and given.lower() not in elsewhere else ""
    return f"{what}: {hint}The options of {operation} are {', '.join(shown)}"


def _reading(given: _Options, starting: Bound) -> ReadOptions:
    paths, bootstrap = given.paths(), given.names("bootstrap")
    if bool(paths) == bool(bootstrap):
        raise BadOption(
            "path and bootstrap are two sources of the same rows: name one of them, not both"
            if paths
            else "name where to read from: path, the data directories of the brokers, or bootstrap, their URLs"
        )
    starting = _bound(given, "startingOffsets", "startingTimestamp", starting)
    ending = _bound(given, "endingOffsets", "endingTimestamp", Bound(LATEST))
    if (starting.timestamp_ms or 0) > (OFFSET_MAX if ending.timestamp_ms is None else ending.timestamp_ms):
        raise BadOption(f"startingTimestamp ({starting.timestamp_ms} ms) is after endingTimestamp: swap them")
    table = given.text("table") or "messages"
    if table not in TABLES:
        raise BadOption(f"there is no table {table!r}: the tables are {', '.join(TABLES)}")
    return ReadOptions(
        paths=paths,
        bootstrap=bootstrap,
        token=given.text("token"),
        tls=given.tls(),
        topics=given.names("topic") or None,
        columns=given.names("columns") or None,
        starting=starting,
        ending=ending,
        rows_per_trigger_max=given.number("maxRowsPerTrigger"),
        fails_on_data_loss=given.truth("failOnDataLoss", True),
        pushes_down=given.truth("pushdown", False),
        span_offsets=given.number("maxRowsPerPartition") or SPAN_OFFSETS,
        table=table,
    )


def _bound(given: _Options, name: str, by_time: str, otherwise: Bound) -> Bound:
    """Parse a bound. A partition that the JSON leaves out is read whole: more rather than less."""
    moment = given.text(by_time)
    if moment is not None:
        return Bound(otherwise.otherwise, timestamp_ms=_unix_ms(by_time, moment))
    text = given.text(name)
    if text is None:
        return otherwise
    is_start = name == "startingOffsets"
    if text.lower() == "earliest" and is_start:
        return Bound(EARLIEST)
    if text.lower() == "latest":
        return Bound(LATEST)
    return Bound(EARLIEST if is_start else LATEST, _offsets(name, text, is_start))


def _offsets(name: str, text: str, is_start: bool) -> Mapping[str, Mapping[int, int]]:
    words = "earliest, latest" if is_start else "latest"
    shape = f'write {words}, or JSON as in {{"orders": {{"0": 23, "1": {LATEST}}}}}, topic, partition and offset'
    try:
        found = msgspec.json.decode(text, type=dict[str, dict[str, int]])
    except msgspec.MsgspecError as error:
        raise BadOption(f"{name}={text!r} is not understood ({error}): {shape}") from error
    for topic, partitions in found.items():
        for number, offset in partitions.items():
            if not (number.isascii() and number.isdecimal()):
                raise BadOption(f"{name}: {number!r} of {topic!r} is no partition's number: {shape}")
            if not (EARLIEST if is_start else LATEST) <= offset <= OFFSET_MAX:
                raise BadOption(
                    f"{name}: {offset} for {topic!r}, partition {number}, is no offset: they begin at 0;"
                    f" {f'{EARLIEST} stands for the earliest, ' if is_start else ''}{LATEST} stands for the latest"
                )
    return {topic: {int(number): offset for number, offset in each.items()} for topic, each in found.items()}


_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def _unix_ms(name: str, text: str) -> int:
    """Return the first ms that is not before the moment, so that a range of times begins and ends exactly."""
    if text.isascii() and text.isdecimal() and int(text) <= OFFSET_MAX // 1000:
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise BadOption(
            f"{name}={text!r} is no time: write ms since 1970, as in 1735689600000, or RFC 3339 with its zone, as in"
            " 2025-01-01T00:00:00Z"
        )
    return max(0, -((_EPOCH - moment) // timedelta(milliseconds=1)))
