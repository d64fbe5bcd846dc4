"""Records come back byte for byte, and people can read them in the file."""

from contextlib import closing
from itertools import count

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from support.log_files import Writer, everything, open_log

from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.rows import is_text, text_or_blob
from portalmq.broker.storage.segment import FEW_BATCHES

JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


def rows(directory, sql):
    file = next(directory.glob("0*.sqlite"))
    return apsw.Connection(str(file), flags=apsw.SQLITE_OPEN_READONLY).execute(sql).fetchall()


def columns_of(directory, table):
    return [name for _, name, *_ in rows(directory, f"PRAGMA table_info({table})")]


some_bytes = st.one_of(st.binary(max_size=40), st.text(max_size=20).map(str.encode), st.just(b"a\0b"), st.just(b""))
some_ms = st.none() | st.integers(0, 2**53)
records = st.builds(
    Record,
    value=some_bytes,
    content_type=st.sampled_from([JSON, TEXT, "application/octet-stream", "text/csv", "image/png", "", "Täxt/\0x"]),
    key=st.none() | some_bytes,
    headers=st.none() | st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3),
    deliver_at_ms=some_ms,
    expires_at_ms=some_ms,
    priority=st.integers(-5, 9),
    message_id=st.none() | st.binary(min_size=16, max_size=16),
    body_hash=st.none() | st.binary(min_size=8, max_size=8),
)
alike = st.builds(
    lambda values, content_type: [Record(value, content_type) for value in values],
    st.lists(some_bytes, min_size=1, max_size=60),
    st.sampled_from([JSON, TEXT, "application/octet-stream"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(records, min_size=1, max_size=25) | alike, min_size=1, max_size=4))
def test_any_record_comes_back_unchanged(tmp_path_factory, batches):
    log = open_log(tmp_path_factory.mktemp("log"))
    writer = Writer(log)
    sent = [writer.messages_batch(batch) for batch in batches]
    log.append(sent)
    assert everything(log) == sent
    log.close()


@settings(max_examples=40, deadline=None)
@given(st.lists(records, min_size=FEW_BATCHES + 1, max_size=8))
def test_single_messages_are_stored_as_those_of_a_large_transaction(tmp_path_factory, sent):
    alone, together = tmp_path_factory.mktemp("alone"), tmp_path_factory.mktemp("together")
    for directory in (alone, together):
        with closing(open_log(directory)) as log:
            writer = Writer(log)
            batches = [writer.messages_batch([record]) for record in sent]
            if directory is alone:
                for batch in batches:
                    log.append([batch])
            else:
                log.append(batches)
    for table in ("batches", "messages"):
        columns = ", ".join(f"{name}, typeof({name})" for name in columns_of(alone, table))
        wanted = f"SELECT {columns} FROM {table} ORDER BY 1"
        assert rows(alone, wanted) == rows(together, wanted)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 10, 99, 100, 101, 1_000, 1_234])
def test_batches_of_every_size_come_back(tmp_path, size):
    log = open_log(tmp_path)
    writer = Writer(log)
    plain = writer.put(*[Record(b"%d" % n, JSON) for n in range(size)])
    full = writer.put(*[Record(b"%d" % n, JSON, b"k%d" % n, {"n": str(n)}, priority=n % 3) for n in range(size)])
    assert everything(log) == [plain, full]


@pytest.mark.parametrize("content_type", [JSON, "application/octet-stream"])
@pytest.mark.parametrize(
    "odd", [{}, {"message_id": None}, {"body_hash": None}, {"message_id": b"short"}, {"key": b"k"}]
)
def test_identities_come_back_when_one_has_another_length(tmp_path, content_type, odd):
    log = open_log(tmp_path)
    identities = [(b"%016d" % n, b"%08d" % n) for n in range(20)]
    batch = [
        Record(b"%d" % n, content_type, message_id=message_id, body_hash=body_hash)
        for n, (message_id, body_hash) in enumerate(identities)
    ]
    batch[7] = replace(batch[7], **odd)
    stored = Writer(log).put(*batch)
    assert everything(log) == [stored]
    for record in batch:
        if record.message_id is not None:
            found = log.find_message_ids([record.message_id], 0)[0]
            assert found[record.message_id][:2] == (batch.index(record), record.body_hash)


def test_many_small_batches_of_one_transaction_are_joined_only_where_they_touch(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    kinds = count()
    batches = []
    for n in range(300):
        writer.at_ms += n % 3 == 0
        if n % 5 == 0:
            batches.append(writer.control_batch(11, b"body %d" % next(kinds), "g"))
        batches.append(writer.messages_batch([b"%d" % n], stamp=(7, 0, n)))
    log.append(batches)
    assert everything(log) == batches
    assert rows(tmp_path, "SELECT count(*) FROM messages AS m JOIN batches AS b ON b.base_offset = m.offset"
                " AND b.appended_at_ms = m.timestamp_ms") == [(300,)]  # fmt: skip


def test_json_and_text_are_stored_as_text_and_the_rest_as_blob(tmp_path):
    writer = Writer(open_log(tmp_path))
    writer.put(
        Record(b'{"a":1}', JSON),
        Record("grün".encode(), TEXT),
        Record(b'{"a":1}'),
        Record(b"\xff", JSON),
        Record(b"a\0b", TEXT),
        Record(b"", TEXT),
    )
    assert [kind for (kind,) in rows(tmp_path, "SELECT typeof(value) FROM messages")] == [
        "text", "text", "blob", "blob", "blob", "text",
    ]  # fmt: skip
    assert rows(tmp_path, "SELECT json_extract(value, '$.a') FROM messages WHERE offset = 0") == [(1,)]


def test_a_batch_with_one_invalid_text_keeps_every_value(tmp_path):
    log = open_log(tmp_path)
    values = [b'{"n":%d}' % n for n in range(50)] + [b"\xff\xfe"]
    sent = Writer(log).put(*[Record(value, JSON) for value in values])
    assert everything(log) == [sent]
    assert rows(tmp_path, "SELECT typeof(value), count(*) FROM messages GROUP BY 1") == [("blob", 1), ("text", 50)]


def test_two_values_that_are_valid_only_together_stay_blobs(tmp_path):
    writer = Writer(open_log(tmp_path))
    writer.put(*[Record(half, TEXT) for half in "€".encode().partition(b"\x82")[::2]])
    assert rows(tmp_path, "SELECT DISTINCT typeof(value) FROM messages") == [("blob",)]


def test_no_key_differs_from_an_empty_key(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(Record(b"v"), Record(b"v", key=b""))
    assert [record.key for record in everything(log)[0].records] == [None, b""]


def test_no_headers_differ_from_empty_headers(tmp_path):
    log = open_log(tmp_path)
    Writer(log).put(Record(b"v"), Record(b"v", headers={}), Record(b"v", headers={"a\n": "\u2028\0"}))
    assert [record.headers for record in everything(log)[0].records] == [None, {}, {"a\n": "\u2028\0"}]


def test_a_content_type_is_written_once(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    everything(log)  # a reader that knows only the preset types
    writer.put(*[Record(b"v", "image/png")] * 3)
    writer.put(Record(b"v", "image/png"), Record(b"v", "image/gif"))
    assert rows(tmp_path, "SELECT id, name FROM content_types WHERE id > 2") == [(3, "image/png"), (4, "image/gif")]
    assert everything(log)[1].records[1].content_type == "image/gif"


def test_unused_columns_take_no_space(tmp_path):
    writer = Writer(open_log(tmp_path))
    writer.put(Record(b"v"), Record(b"v", key=b"k"))
    unused = "key, headers, deliver_at_ms, expires_at_ms, message_id, body_hash, priority"
    assert rows(tmp_path, f"SELECT {unused} FROM messages WHERE offset = 0") == [(None,) * 6 + (0,)]


@pytest.mark.parametrize("content_type", ["application/octet-stream", JSON, TEXT])
def test_a_message_of_100_bytes_takes_at_most_150_on_disk(tmp_path, content_type):
    log = open_log(tmp_path)
    writer = Writer(log, at_ms=1_790_000_000_000)
    for _ in range(30):
        writer.put(*[Record(b"x" * 100, content_type)] * 1_000)
    log.close()
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= 150 * 30_000


def test_text_media_types_are_stored_as_text():
    assert all(
        map(is_text, ["text/html", "TEXT/plain; charset=x", JSON, "application/json; a=b", "application/x+json"])
    )
    assert not any(map(is_text, ["", "application/octet-stream", "image/png", "application/jsonx"]))


def test_text_with_a_nul_is_a_blob():
    assert (text_or_blob(b"ab"), text_or_blob(b"a\0b"), text_or_blob(b"\xff")) == ("ab", b"a\0b", b"\xff")
