"""A stream without Spark: tests call the reader in Spark's order. Its clock moves only when it sleeps."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from portalmq.spark import options
from portalmq.spark.errors import BadOption, DataLoss, NothingThere, NoTopic, SourceError
from portalmq.spark.origin import PartitionLog, Span
from portalmq.spark.reading.stream import MessagesStream

ALL = ReadAllAvailable()


class Clock:
    """A clock that moves by sleeping. Each sleep calls the next of `on_sleep`."""

    def __init__(self, *on_sleep: Callable[[], None]) -> None:
        self.now = 1_000.0
        self.on_sleep = list(on_sleep)
        self.slept = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.slept += seconds
        if self.on_sleep:
            self.on_sleep.pop(0)()


class Pretended:
    """An origin whose logs a test sets."""

    def __init__(self, *logs: PartitionLog) -> None:
        self.found: list[PartitionLog] = list(logs)
        self.fault: Exception | None = None
        self.faults_of_spans: list[Exception] = []
        self.looks = 0

    def logs(self) -> list[PartitionLog]:
        self.looks += 1
        if self.fault is not None:
            raise self.fault
        return list(self.found)

    def offset_at(self, log: PartitionLog, timestamp_ms: int) -> int:
        return min(max(timestamp_ms, log.start_offset), log.end_offset)

    def spans(self, log: PartitionLog, start: int, end: int) -> list[Span]:
        if self.faults_of_spans:
            raise self.faults_of_spans.pop(0)
        assert log.start_offset <= start < end <= log.end_offset
        return [Span(log, start, end)]


def log(name: str, end: int, start: int = 0) -> PartitionLog:
    topic, rest = name.split("@")
    topic_id, partition = rest.split("/")
    return PartitionLog(topic, topic_id, int(partition), start, end)


@pytest.fixture
def pretended(monkeypatch) -> Pretended:
    origin = Pretended()
    monkeypatch.setattr(options.ReadOptions, "origin", lambda reading: origin)
    return origin


def reader(clock: Clock | None = None, columns: Sequence[str] = ("offset", "value"), **given: Any) -> MessagesStream:
    clock = clock or Clock()
    text = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    if "path" not in text and "bootstrap" not in text:
        text["path"] = "/pretended"
    return MessagesStream(options.stream_options(text), columns, clock=clock, sleep=clock.sleep)


def later(clock: Clock) -> None:
    """Move the clock on, so that the last look-up is too old."""
    clock.now += 6


def pieces(found: Sequence[Any]) -> list[tuple[str, int, int]]:
    return [(span.log.name, span.start, span.end) for span in found]


def test_with_fewer_rows_than_logs_they_take_turns(pretended):
    pretended.found = [log(f"t@a/{n}", 1_000_000) for n in range(5)]
    source = reader(startingOffsets="earliest")
    start, served = source.initialOffset(), Counter()
    for _ in range(10):
        end = source.latestOffset(start, ReadMaxRows(2))
        assert sum(end.values()) - sum(start.values()) == 2
        served.update(name for name in end if end[name] > start[name])
        start = end
    assert served == {f"t@a/{n}": 4 for n in range(5)}


# --- the beginning -------------------------------------------------------------------------------------------------


def test_a_stream_begins_at_the_end_by_default(pretended):
    pretended.found = [log("t@a/0", 30, start=10), log("t@a/1", 40)]
    assert reader().initialOffset() == {"t@a/0": 30, "t@a/1": 40}
    assert reader(startingOffsets="earliest").initialOffset() == {"t@a/0": 10, "t@a/1": 0}
    asked = reader(startingOffsets={"t": {"0": 23, "1": -1}})
    assert asked.initialOffset() == {"t@a/0": 23, "t@a/1": 40}
    assert reader(startingTimestamp="35").initialOffset() == {"t@a/0": 30, "t@a/1": 35}


def test_a_beginning_that_may_move_is_checkpointed_before_a_row_is_read(pretended):
    """After a crash in the first batch Spark requests the beginning again: "latest" has moved by then."""
    clock = Clock()
    pretended.found = [log("t@a/0", 30)]
    source = reader(clock)
    start = source.initialOffset()
    pretended.found = [log("t@a/0", 50)]
    assert source.latestOffset(start, ALL) == start  # the empty first batch
    assert source.initialOffset() == start, "Spark asks a second time"
    later(clock)
    assert source.latestOffset(start, ALL) == {"t@a/0": 50}
    again = reader(clock)  # killed during that empty batch
    assert again.initialOffset() == {"t@a/0": 50}
    assert again.partitions({"t@a/0": 50}, start) == []
    assert pieces(again.partitions(start, again.latestOffset(start, ALL))) == [("t@a/0", 30, 50)]


def test_the_earliest_beginning_needs_no_empty_batch(pretended):
    pretended.found = [log("t@a/0", 30)]
    source = reader(startingOffsets="earliest")
    assert source.latestOffset(source.initialOffset(), ALL) == {"t@a/0": 30}


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"t": {"0": 31}}, "ends at 30: name an offset up to that, or -1"),
        ({"t": {"7": 1}}, "partition 7 of 't', which is not read here"),
        ({"u": {"0": 1}}, "partition 0 of 'u', which is not read here"),
    ],
)
def test_a_missing_beginning_is_refused(pretended, asked, says):
    pretended.found = [log("t@a/0", 30)]
    with pytest.raises(BadOption, match=says):
        reader(startingOffsets=asked).initialOffset()


def test_a_beginning_that_was_removed_is_a_loss(pretended, caplog):
    pretended.found = [log("t@a/0", 30, start=10)]
    with pytest.raises(DataLoss, match=r"4 for t@a/0, which begins at 10 now.*failOnDataLoss=false"):
        reader(startingOffsets={"t": {"0": 4}}).initialOffset()
    lenient = reader(startingOffsets={"t": {"0": 4}}, failOnDataLoss="false")
    assert lenient.initialOffset() == {"t@a/0": 10}
    assert "begins at 10 now" in caplog.text


def test_a_missing_topic_is_an_error_if_named_and_awaited_otherwise(pretended):
    clock = Clock()
    pretended.fault = NoTopic("there is no topic 't'")
    with pytest.raises(NoTopic):
        reader(clock, topic="t").initialOffset()
    source = reader(clock)
    start = source.initialOffset()
    assert start == {} == source.latestOffset(start, ALL)
    pretended.fault, pretended.found = None, [log("t@a/0", 3)]
    later(clock)
    begun = source.latestOffset({}, ALL)
    assert begun == {"t@a/0": 0}
    later(clock)
    assert source.latestOffset(begun, ALL) == {"t@a/0": 3}
    assert clock.slept == 0


def test_a_missing_directory_is_reported_at_once(tmp_path):
    clock = Clock()
    source = reader(clock, path=str(tmp_path / "nowhere"))
    for ask in (source.initialOffset, source.prepareForTriggerAvailableNow):
        with pytest.raises(NothingThere, match="there is no directory"):
            ask()
    assert clock.slept == 0


def test_other_tables_are_no_streams():
    with pytest.raises(BadOption, match=r"'groups' is read by spark\.read"):
        reader(table="groups")


# --- the end of the next batch ----------------------------------------------------------------------------------------


def test_the_limit_is_sparks_and_not_the_options(pretended):
    pretended.found = [log("t@a/0", 1_000)]
    source = reader(startingOffsets="earliest", maxRowsPerTrigger="100")
    assert source.getDefaultReadLimit() == ReadMaxRows(100)
    assert reader().getDefaultReadLimit() == ReadAllAvailable()
    start = source.initialOffset()
    assert source.latestOffset(start, ReadMaxRows(100)) == {"t@a/0": 100}
    assert source.latestOffset(start, ALL) == {"t@a/0": 1_000}
    assert source.reportLatestOffset() == {"t@a/0": 1_000}


def test_without_new_messages_the_offset_is_the_same_text(pretended):
    """Spark compares texts: another order of names would start a new batch each time."""
    clock = Clock()
    pretended.found = [log("b@1/0", 5), log("a@2/10", 5), log("a@2/9", 5)]
    source = reader(clock, startingOffsets="earliest")
    end = source.latestOffset(source.initialOffset(), ALL)
    pretended.found.reverse()
    later(clock)
    assert json.dumps(source.latestOffset(json.loads(json.dumps(end)), ALL)) == json.dumps(end)


def test_looking_for_new_data_takes_at_most_a_fifth_of_a_core(pretended, monkeypatch):
    clock = Clock()
    pretended.found = [log("t@a/0", 5)]
    source = reader(clock, startingOffsets="earliest")
    start = source.initialOffset()
    monkeypatch.setattr(pretended, "logs", lambda: setattr(clock, "now", clock.now + 0.1) or _count(pretended))
    before, looks = clock.now, pretended.looks
    while clock.now < before + 50:
        source.latestOffset(start, ALL)
        clock.now += 0.01
    assert 80 <= pretended.looks - looks <= 101


def _count(pretended: Pretended) -> list[PartitionLog]:
    pretended.looks += 1
    return pretended.found


def test_new_partitions_and_topics_are_read_from_their_beginning(pretended):
    """The checkpoint has their beginning before a row is read."""
    clock = Clock()
    pretended.found = [log("t@a/0", 30)]
    source = reader(clock)
    start = source.initialOffset()
    source.latestOffset(start, ALL)
    pretended.found = [log("t@a/0", 31), log("t@a/1", 8), log("u@b/0", 9)]
    later(clock)
    first = source.latestOffset(start, ALL)
    assert first == {"t@a/0": 31, "t@a/1": 0, "u@b/0": 0}
    assert pieces(source.partitions(start, first)) == [("t@a/0", 30, 31)]
    second = source.latestOffset(first, ALL)
    assert pieces(source.partitions(first, second)) == [("t@a/1", 0, 8), ("u@b/0", 0, 9)]


def test_available_now_reads_the_existing_messages_and_ends(pretended):
    clock = Clock()
    pretended.found = [log("t@a/0", 100), log("t@a/1", 100)]
    source = reader(clock, startingOffsets="earliest", maxRowsPerTrigger="70")
    source.prepareForTriggerAvailableNow()
    start = source.initialOffset()
    pretended.found = [log("t@a/0", 500), log("t@a/1", 100), log("t@a/2", 50)]
    ends = [start]
    while (end := source.latestOffset(ends[-1], ReadMaxRows(70))) != ends[-1]:
        ends.append(end)
    assert len(ends) == 4
    assert ends[-1] == {"t@a/0": 100, "t@a/1": 100}


def test_available_now_takes_up_a_new_partition_of_the_last_run_and_ends(pretended):
    pretended.found = [log("t@a/0", 100), log("t@a/1", 20)]
    source = reader()
    source.prepareForTriggerAvailableNow()
    ends = [{"t@a/0": 100}]
    while (end := source.latestOffset(ends[-1], ALL)) != ends[-1]:
        ends.append(end)
    assert ends[1:] == [{"t@a/0": 100, "t@a/1": 0}, {"t@a/0": 100, "t@a/1": 20}]


# --- changes of the logs ----------------------------------------------------------------------------------------------


def test_the_offset_never_falls_when_a_replica_is_behind_for_a_moment(pretended):
    """After a fail-over the successor's record of commits is a second old."""
    clock = Clock()
    pretended.found = [log("t@a/0", 90)]
    source = reader(clock)
    start = {"t@a/0": 100}
    for _ in range(3):
        assert source.latestOffset(start, ALL) == start
        later(clock)
    pretended.found = [log("t@a/0", 130)]
    assert source.latestOffset(start, ALL) == {"t@a/0": 130}
    pretended.found = [log("t@a/0", 90)]
    later(clock)
    assert source.latestOffset(start, ALL) == start, "the patience starts again"


@pytest.mark.parametrize(
    ("now", "says"),
    [
        ([log("t@a/0", 90)], "ends at offset 90, although it was read up to 100 already.*restored"),
        ([log("u@b/0", 0)], r"t@a/0 is gone \(was its topic deleted\?\): it was read up to offset 100"),
    ],
)
@pytest.mark.parametrize("available_now", [False, True])
def test_a_lasting_fault_is_a_loss(pretended, now, says, available_now):
    clock = Clock()
    pretended.found = now
    source = reader(clock)
    start = {"t@a/0": 100, "u@b/0": 0}
    if available_now:
        source.prepareForTriggerAvailableNow()

    def asked_every_second() -> None:
        for _ in range(100):
            assert source.latestOffset(start, ALL)["t@a/0"] == 100
            clock.now += 1

    with pytest.raises(DataLoss, match=says):
        asked_every_second()
    assert 19 <= clock.now - 1_000 <= 22


def test_a_query_that_allows_loss_continues_at_the_end_and_repeats_no_row(pretended, caplog):
    clock = Clock()
    pretended.found = [log("t@a/0", 90)]
    source = reader(clock, failOnDataLoss="false")
    start, ends = {"t@a/0": 100, "gone@b/0": 7}, []
    for _ in range(30):
        end = source.latestOffset(start, ALL)
        ends += [end] if end != start else []
        start = end
        clock.now += 1
    assert ends == [{"t@a/0": 90}]
    assert "restored from an older copy" in caplog.text
    assert "gone@b/0 is gone" in caplog.text
    pretended.found = [log("t@a/0", 95)]
    assert pieces(source.partitions(start, source.latestOffset(start, ALL))) == [("t@a/0", 90, 95)]


def test_unread_messages_that_retention_removed_are_a_loss_at_once(pretended, caplog):
    pretended.found = [log("t@a/0", 90, start=50)]
    start = {"t@a/0": 10}
    strict = reader()
    for _ in range(2):
        with pytest.raises(DataLoss, match=r"offsets 10 to 49 of t@a/0 were removed before they were read"):
            strict.latestOffset(start, ALL)
    lenient = reader(failOnDataLoss="false")
    assert lenient.latestOffset(start, ReadMaxRows(5)) == {"t@a/0": 55}, (
        "the limit counts from the first available message"
    )
    assert pieces(lenient.partitions(start, {"t@a/0": 55})) == [("t@a/0", 50, 55)]
    assert caplog.text.count("offsets 10 to 49") == 1
    with pytest.raises(DataLoss, match="offsets 10 to 49 of t@a/0"):
        reader().partitions(start, {"t@a/0": 55})


def test_a_recreated_topic_is_another_topic(pretended):
    pretended.found = [log("t@b/0", 40)]
    start = {"t@a/0": 30}
    with pytest.raises(DataLoss, match=r"the topic of t@a/0 was deleted and made again, with the id b.*offset 30"):
        reader().latestOffset(start, ALL)
    clock = Clock()
    lenient = reader(clock, failOnDataLoss="false")
    first = lenient.latestOffset(start, ALL)
    assert first == {"t@b/0": 0}
    later(clock)
    assert pieces(lenient.partitions(first, lenient.latestOffset(first, ALL))) == [("t@b/0", 0, 40)]


def test_one_of_two_named_topics_is_deleted_and_the_other_is_read_on(monkeypatch):
    class Place(Pretended):
        def __init__(self, topics: Sequence[str]) -> None:
            super().__init__(*(log(f"{topic}@a/0", 20) for topic in topics if topic == "kept"))
            if "deleted" in topics:
                self.fault = NoTopic("there is no topic 'deleted'")

    monkeypatch.setattr(options.ReadOptions, "origin", lambda reading: Place(reading.topics))
    clock = Clock()
    source = reader(clock, topic="kept,deleted", failOnDataLoss="false")
    start = {"deleted@a/0": 7, "kept@a/0": 10}
    assert source.latestOffset(start, ALL) == {"deleted@a/0": 7, "kept@a/0": 20}
    clock.now += 25
    source.latestOffset(start, ALL)
    clock.now += 25
    assert source.latestOffset(start, ALL) == {"kept@a/0": 20}


def test_a_broker_that_is_away_for_a_moment_does_not_end_the_query(pretended):
    clock = Clock()
    pretended.found = [log("t@a/0", 90)]
    pretended.fault = SourceError("no broker answers")
    source = reader(clock)
    start = {"t@a/0": 50}
    for _ in range(3):
        assert source.latestOffset(start, ALL) == start
        later(clock)
    pretended.fault = None
    assert source.latestOffset(start, ALL) == {"t@a/0": 90}


def test_a_directory_that_is_missing_for_a_moment_does_not_end_the_query(pretended):
    clock = Clock()
    pretended.found = [log("t@a/0", 90)]
    source = reader(clock)
    assert source.latestOffset({"t@a/0": 50}, ALL) == {"t@a/0": 90}
    pretended.fault = NothingThere("there is no directory data/5000")
    later(clock)
    assert source.latestOffset({"t@a/0": 90}, ALL) == {"t@a/0": 90}


@pytest.mark.parametrize("ask", ["latestOffset", "partitions", "prepareForTriggerAvailableNow"])
def test_a_broker_that_stays_away_ends_the_query_with_its_sentence(pretended, ask):
    clock = Clock()
    pretended.fault = OSError("no broker answers")
    source = reader(clock)
    asked = {
        "latestOffset": lambda: source.latestOffset({"t@a/0": 50}, ALL),
        "partitions": lambda: source.partitions({"t@a/0": 50}, {"t@a/0": 60}),
        "prepareForTriggerAvailableNow": source.prepareForTriggerAvailableNow,
    }[ask]

    def asked_every_second() -> None:
        for _ in range(100):
            asked()
            clock.now += 1

    with pytest.raises(SourceError, match=r"no broker answers\. It was tried for 2\d s"):
        asked_every_second()
    assert clock.now - 1_000 < 30


def test_a_batch_that_is_read_again_waits_until_it_is_known_to_be_committed(pretended):
    pretended.found = [log("t@a/0", 55)]
    clock = Clock(lambda: pretended.found.__setitem__(0, log("t@a/0", 60)))
    source = reader(clock)
    assert pieces(source.partitions({"t@a/0": 50}, {"t@a/0": 60})) == [("t@a/0", 50, 60)]
    assert 0 < clock.slept < 1
    pretended.found = [log("t@a/0", 55)]
    with pytest.raises(DataLoss, match="ends at offset 55, and was to be read up to 60"):
        source.partitions({"t@a/0": 50}, {"t@a/0": 60})
    lenient = reader(Clock(), failOnDataLoss="false")
    assert pieces(lenient.partitions({"t@a/0": 50}, {"t@a/0": 60})) == [("t@a/0", 50, 55)]


def test_a_file_removed_during_planning_is_looked_up_again(pretended):
    clock = Clock()
    pretended.found = [log("t@a/0", 60)]
    pretended.faults_of_spans = [NothingThere("t@a/0 is nowhere"), FileNotFoundError("manifest.json")]
    source = reader(clock)
    assert pieces(source.partitions({"t@a/0": 50}, {"t@a/0": 60})) == [("t@a/0", 50, 60)]
    pretended.faults_of_spans = [SourceError("a segment is missing")] * 1_000
    with pytest.raises(SourceError, match=r"a segment is missing\. It was tried for 2\d s"):
        source.partitions({"t@a/0": 50}, {"t@a/0": 60})


def test_an_empty_range_has_no_pieces_and_needs_no_look_up(pretended):
    pretended.fault = SourceError("no broker answers")
    assert reader().partitions({"t@a/0": 50, "u@b/0": 3}, {"t@a/0": 50, "u@b/0": 3}) == []
