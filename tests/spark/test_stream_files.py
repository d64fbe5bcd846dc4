"""A stream over real files, without Spark: tests call the reader in Spark's order."""

from __future__ import annotations

import json
import pickle
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows
from support.data_directory import START_MS, numbered, written

from portalmq.spark import options
from portalmq.spark.errors import DataLoss
from portalmq.spark.reading import log_poller
from portalmq.spark.reading.positions import sorted_positions
from portalmq.spark.reading.stream import MessagesStream

ALL = ReadAllAvailable()


def reader(path: Path, **given: Any) -> MessagesStream:
    text = {name: value if isinstance(value, str) else json.dumps(value) for name, value in given.items()}
    return MessagesStream(options.stream_options(text | {"path": str(path)}), ("offset", "value"))


def values(source: MessagesStream, start: dict[str, int], end: dict[str, int]) -> list[bytes]:
    """Return the batch as Spark's workers read it, from a pickled reader and pickled pieces."""
    source = MessagesStream(source.reading, source.columns)
    spans = pickle.loads(pickle.dumps(source.partitions(start, end)))
    worker = pickle.loads(pickle.dumps(MessagesStream(source.reading, source.columns)))
    return [value for span in spans for batch in worker.read(span) for value in batch.column("value").to_pylist()]


def test_each_message_is_in_one_batch(data):
    source = reader(data, topic="t", startingOffsets="earliest")
    start, found, rows = source.initialOffset(), Counter(), []
    while (end := source.latestOffset(start, ReadMaxRows(7))) != start:
        batch = values(source, start, end)
        rows.append(len(batch))
        found.update(batch)
        start = end
    assert found == {b"%d" % number: 2 for number in range(30)}
    assert max(rows) <= 7
    assert set(start) == {log.name for log in source._read_logs()}


def test_a_stream_begins_at_a_time(data):
    source = reader(data, topic="t", startingTimestamp=str(START_MS + 60_000))
    start = source.initialOffset()
    source.prepareForTriggerAvailableNow()
    assert Counter(values(source, start, source.latestOffset(start, ALL))) == {b"%d" % n: 2 for n in range(10, 30)}


def test_a_batch_is_the_same_when_it_is_read_again_from_rolled_and_sealed_files(tmp_path):
    path = tmp_path / "data"
    with written(path) as place:
        place.topic("t")
        place.put("t", *numbered(20))
    source = reader(path, startingOffsets="earliest")
    start = source.initialOffset()
    end = source.latestOffset(start, ALL)
    planned = pickle.dumps(source.partitions(start, end))
    first = values(source, start, end)
    with written(path) as place:
        place.roll("t")
        place.put("t", *numbered(20, start=20))
        place.roll("t")
    worker = MessagesStream(source.reading, source.columns)
    meanwhile = [
        value
        for span in pickle.loads(planned)
        for batch in worker.read(span)
        for value in batch.column("value").to_pylist()
    ]
    assert first == meanwhile == values(source, start, end) == numbered(20)
    fresh = reader(path)
    assert values(fresh, end, fresh.latestOffset(end, ALL)) == numbered(20, start=20)


def test_a_purge_between_two_batches_is_a_loss(tmp_path, caplog):
    path = tmp_path / "data"
    with written(path) as place:
        place.topic("t")
        place.put("t", *numbered(10))
    source = reader(path, startingOffsets="earliest")
    start = source.initialOffset()
    with written(path) as place:
        place.roll("t")
        place.put("t", *numbered(10, start=10))
        place.fixture.broker.browser.purge("t", partition=None, before_offset=None)
        place.put("t", b"after the purge")
    with pytest.raises(DataLoss, match=r"offsets 0 to \d+ of t@\w+/0 were removed before they were read"):
        reader(path).latestOffset(start, ALL)
    lenient = reader(path, failOnDataLoss="false")
    assert values(lenient, start, lenient.latestOffset(start, ALL)) == [b"after the purge"]


def test_a_segment_removed_between_planning_and_reading_is_a_loss(data):
    source = reader(data, topic="t", startingOffsets="earliest")
    start = source.initialOffset()
    spans = source.partitions(start, source.latestOffset(start, ALL))
    for path in data.glob("partitions/t@*/0/00000000000000000000.sqlite"):
        path.unlink()
    with pytest.raises(DataLoss, match="were removed while they were read"):
        [list(source.read(span)) for span in spans]
    lenient = reader(data, topic="t", failOnDataLoss="false")
    left = sum(batch.num_rows for span in spans for batch in lenient.read(span))
    assert left == 50


def test_a_deleted_topic_does_not_stop_the_others(data, tmp_path):
    """The option names the topic, or has overlapping patterns."""
    given = {"topic": "t,empty,t*", "failOnDataLoss": "false"}
    source = reader(data, startingOffsets="earliest", **given)
    start = source.initialOffset()
    (gone,) = data.glob("partitions/empty@*")
    shutil.rmtree(gone)
    end = source.latestOffset(start, ALL)
    assert set(end) == set(start), "the topic may return in a moment"
    assert Counter(values(source, start, end)) == {b"%d" % number: 2 for number in range(30)}


def test_a_pattern_without_a_match_is_awaited(tmp_path):
    with written(tmp_path / "data") as place:
        place.topic("other")
    source = reader(tmp_path / "data", topic="temp_*,wind_?")
    assert source.initialOffset() == {} == source.latestOffset({}, ALL)
    with written(tmp_path / "data") as place:
        place.topic("wind_1")
        place.put("wind_1", *numbered(3))
    source.prepareForTriggerAvailableNow()
    begun = source.latestOffset({}, ALL)
    assert values(source, begun, source.latestOffset(begun, ALL)) == numbered(3)


def test_a_checkpoint_continues_with_another_broker_of_the_cluster(tmp_path):
    """The checkpoint has the names of topics, not of directories."""
    with written(tmp_path / "one") as place:
        place.topic("t")
        place.put("t", *numbered(10))
    source = reader(tmp_path / "one", startingOffsets="earliest")
    end = source.latestOffset(source.initialOffset(), ALL)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    with written(tmp_path / "two") as place:
        place.put("t", *numbered(5, start=10))
    other = reader(f"{tmp_path / 'one'},{tmp_path / 'two'}")
    assert values(other, end, other.latestOffset(end, ALL)) == numbered(5, start=10)


def test_names_are_sorted_as_text():
    assert list(sorted_positions({"b@1/0": 1, "a@1/9": 2, "a@1/10": 3})) == ["a@1/10", "a@1/9", "b@1/0"]


def test_the_patience_is_what_the_documents_say():
    text = (Path(__file__).resolve().parents[2] / "docs" / "SPARK.md").read_text()
    assert f"{log_poller.PATIENCE_S:g} s" in text
