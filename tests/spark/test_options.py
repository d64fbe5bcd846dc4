"""Options: the meaning of each, and errors that name the valid options."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from portalmq.network.tls import TlsFiles
from portalmq.spark import options
from portalmq.spark.errors import BadOption
from portalmq.spark.options import EARLIEST, LATEST, Bound, batch_options, schema_options, stream_options, write_options
from portalmq.spark.origin import SPAN_OFFSETS, PartitionLog

PATH = {"path": "/data/1"}


def test_names_are_read_in_any_case():
    reading = batch_options({"PATH": " /a , /b,/a", "Topic": "x,y", "MAXROWSPERPARTITION": "7"})
    assert (reading.paths, reading.topics, reading.span_offsets) == (("/a", "/b"), ("x", "y"), 7)


def test_omitted_options_have_defaults():
    reading = batch_options(PATH)
    assert reading.topics is None
    assert reading.columns is None
    assert reading.token is None
    assert (reading.starting, reading.ending) == (Bound(EARLIEST), Bound(LATEST))
    assert reading.fails_on_data_loss
    assert reading.span_offsets == SPAN_OFFSETS
    assert reading.table == "messages"
    assert stream_options(PATH).starting == Bound(LATEST)
    assert stream_options(PATH).rows_per_trigger_max is None


def test_several_paths_of_one_load_are_taken():
    assert batch_options({"paths": '["/a", "/b"]'}).paths == ("/a", "/b")


def test_offsets_of_single_partitions_leave_the_others_whole():
    reading = batch_options(
        PATH | {"startingOffsets": '{"t": {"0": 23, "1": -1}}', "endingOffsets": '{"t": {"0": 40}}'}
    )

    def of(number: int) -> tuple[int, int]:
        log = PartitionLog("t", "id", number, 0, 100)
        return reading.starting.of(log), reading.ending.of(log)

    assert [of(0), of(1), of(2)] == [(23, 40), (LATEST, LATEST), (EARLIEST, LATEST)]


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("1735689600000", 1735689600000),
        ("2025-01-01T00:00:00Z", 1735689600000),
        ("2025-01-01 02:00:00+02:00", 1735689600000),
        ("2025-01-01T00:00:00.0001Z", 1735689600001),
        ("1969-12-31T23:59:59Z", 0),
    ],
)
def test_a_time_is_unix_ms_or_rfc_3339(text, ms):
    reading = batch_options(PATH | {"startingTimestamp": text, "startingOffsets": "latest"})
    assert reading.starting.timestamp_ms == ms


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({}, "name where to read from: path"),
        (PATH | {"bootstrap": "http://b"}, "name one of them, not both"),
        (PATH | {"topics": "x"}, "did you mean topic"),
        (PATH | {"startingOffset": "earliest"}, "did you mean startingOffsets or endingOffsets"),
        (PATH | {"subscribe": "x"}, "did you mean topic?"),
        (PATH | {"kafka.bootstrap.servers": "x"}, "did you mean bootstrap?"),
        (PATH | {"quux": "x"}, "there is no option 'quux': The options of a batch read are path, bootstrap"),
        (PATH | {"maxRowsPerTrigger": "5"}, "'maxRowsPerTrigger' is not for a batch read"),
        (PATH | {"topic": " "}, "topic is empty"),
        (PATH | {"topic": "a,,b"}, "empty name between its commas"),
        (PATH | {"maxRowsPerPartition": "0"}, "maxRowsPerPartition='0' is no whole number from 1 on"),
        (PATH | {"maxRowsPerPartition": "1e6"}, "no whole number"),
        (PATH | {"failOnDataLoss": "no"}, "neither true nor false"),
        (PATH | {"table": "leases"}, "the tables are messages"),
        (PATH | {"startingOffsets": "begin"}, "write earliest, latest, or JSON as in"),
        (PATH | {"endingOffsets": "earliest"}, "write latest, or JSON as in"),
        (PATH | {"startingOffsets": '{"t": 5}'}, "is not understood"),
        (PATH | {"startingOffsets": '{"t": {"0": "5"}}'}, "is not understood"),
        (PATH | {"startingOffsets": '{"t": {"0": 5}'}, "is not understood"),
        (PATH | {"startingOffsets": '{"t": {"first": 5}}'}, "'first' of 't' is no partition's number"),
        (PATH | {"startingOffsets": '{"t": {"0": -3}}'}, "-2 stands for the earliest, -1 stands for the latest"),
        (PATH | {"endingOffsets": '{"t": {"0": -2}}'}, "-1 stands for the latest"),
        (PATH | {"startingTimestamp": "yesterday"}, "is no time: write ms since 1970"),
        (PATH | {"startingTimestamp": "2025-01-01T00:00:00"}, "with its zone"),
        (PATH | {"startingTimestamp": "2000", "endingTimestamp": "1000"}, "is after endingTimestamp"),
    ],
)
def test_bad_options_are_reported(given, sentence):
    with pytest.raises(BadOption) as told:
        batch_options(given)
    assert sentence in str(told.value)


def test_a_stream_has_no_end():
    with pytest.raises(BadOption, match="'endingOffsets' is not for a stream that is read"):
        stream_options(PATH | {"endingOffsets": "latest"})
    assert stream_options(PATH | {"maxRowsPerTrigger": "1000"}).rows_per_trigger_max == 1000


def test_a_schema_is_known_before_the_kind_of_query():
    assert schema_options(PATH | {"maxRowsPerTrigger": "5", "endingOffsets": "latest"}).columns is None


def test_writing_takes_its_own_options():
    given = {"bootstrap": "http://a, http://b", "topic": "t", "query": "q", "checkpointLocation": "/c"}
    found = write_options(given)
    assert (found.bootstrap, found.topic, found.query) == (("http://a", "http://b"), "t", "q")
    with pytest.raises(BadOption, match="bootstrap is missing"):
        write_options({"topic": "t"})
    with pytest.raises(BadOption, match="one name in writing"):
        write_options({"bootstrap": "http://a", "topic": "t,u"})
    with pytest.raises(BadOption, match="'path' is not for writing"):
        write_options({"path": "/data"})


def test_the_document_has_every_option():
    document = (Path(__file__).parents[2] / "docs/SPARK.md").read_text()
    _, _, rows = document.partition("## Options of reading")
    told = {name for row in re.findall(r"^\| (`.*?) \|", rows, re.M) for name in re.findall(r"`(\w+)`", row)}
    given = {name for name in {*options._BATCH, *options._STREAM} if name != "paths"}
    assert told >= given
    assert all(f"`{name}`" in document for name in options._WRITING if name != "checkpointLocation")


def test_files_for_tls_are_options_of_their_own():
    given = {"bootstrap": "https://h:1", "tls_ca": "/ca.pem", "tls_client_cert": "/c.pem", "tls_client_key": "/c.key"}
    files = TlsFiles("/ca.pem", "/c.pem", "/c.key")
    assert [read(given).tls for read in (options.batch_options, options.stream_options)] == [files, files]
    assert options.write_options(given).tls == files
    assert options.write_options({"bootstrap": "https://h:1"}).tls == TlsFiles()


def test_a_token_is_not_shown_with_the_other_options():
    reading = options.batch_options({"bootstrap": "http://h:1", "token": "s3cret"})
    writing = options.write_options({"bootstrap": "http://h:1", "token": "s3cret"})
    assert (reading.token, writing.token) == ("s3cret", "s3cret")
    assert "s3cret" not in f"{reading} {writing}"
