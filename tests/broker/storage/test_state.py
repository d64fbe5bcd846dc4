"""The saved fold: it is loaded unchanged or not at all, and people can read it."""

import os
import time
from contextlib import closing

import apsw
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.log_files import IDENTITY, Writer, crash_image, numbered, open_log

from portalmq.broker.core.fold import (
    HELD_MS,
    DeadFold,
    GroupFold,
    PartitionFold,
    PauseFold,
    ProducerFold,
    SpanFold,
    StreamFold,
    encode_fold,
)
from portalmq.broker.core.replica.age import SavedAge
from portalmq.broker.storage.batch import BatchKind
from portalmq.broker.storage.errors import DiskFull
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.state import StateFile

LATER_MS = 9_000_000_000_000
AGE = SavedAge(1_700_000_000_000, 1_700_000_001_000)


def fold_of_two_groups():
    return PartitionFold(
        applied=100,
        log_start_offset=5,
        epochs=[(1, 0), (4, 50)],
        producers=[ProducerFold(7, 2, [(0, 10, 20, 1_000), (10, 5, 31, 1_100)]), ProducerFold(3, 0, [])],
        groups=[
            GroupFold(
                "workers",
                5,
                60,
                [
                    SpanFold(10, 12, 1, 0, True, 1_000, LATER_MS, 0, 2, "consumer 7", 4),
                    SpanFold(20, 25, 2, 1, False, 1_000, 1_500),
                    SpanFold(30, 31, 1, 0, False, 1_000, LATER_MS, 7),
                    SpanFold(40, 41, 0, 0, False, 0, HELD_MS),
                ],
                {"attempt-b": (9_000, [(10, 11), (11, 12)]), "attempt-a": (8_000, [])},
                1_234,
                [(7, 0, 31), (39, 5_000, 80)],
                [(0, 0, 70), (39, LATER_MS, 81)],
                [DeadFold(6, 8, 5, 1_200, "too hot"), DeadFold(9, 10, 1, 1_300, "expired", 39)],
                [(b"c" * 16, 44), (b"b" * 16, 45)],
                {"attempt-b": (4, [3, 3])},
                [PauseFold(3, True, 1_350, "the database moves", "eva")],
            ),
            GroupFold("audit", 0, 90, []),
        ],
        streams=[
            StreamFold("readers", 30, 4, "reader-1", 1_400, [(b"s" * 16, 50)]),
            StreamFold("archive", 0, 0, "", 0),
        ],
        outbox=[(44, "workers"), (50, "readers")],
        cancelled=[(82, 84), (86, 87)],
        compacted=40,
    )


def view(directory, name):
    connection = apsw.Connection(str(directory / "state.sqlite"), flags=apsw.SQLITE_OPEN_READONLY)
    names = [row[1] for row in connection.execute(f"PRAGMA table_info({name})")]
    return [dict(zip(names, row, strict=True)) for row in connection.execute(f"SELECT * FROM {name}")]


def test_without_a_save_nothing_is_loaded(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    assert state.load() is None
    assert state.highest_epoch() == -1
    assert list(tmp_path.iterdir()) == []


def test_a_fold_comes_back_unchanged(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(fold_of_two_groups(), 95)
    assert state.load() == (fold_of_two_groups(), 95)
    state.close()
    assert StateFile(tmp_path, identity=IDENTITY).load() == (fold_of_two_groups(), 95)


numbers = st.integers(0, 2**53)
lanes = st.integers(0, 63)
spans = st.lists(
    st.builds(
        SpanFold,
        numbers,
        numbers,
        numbers,
        numbers,
        st.booleans(),
        numbers,
        numbers,
        lanes,
        numbers,
        st.text(max_size=3),
    ),
    max_size=4,
)
spots = st.lists(st.tuples(lanes, numbers, numbers), max_size=4)
dead = st.lists(st.builds(DeadFold, numbers, numbers, numbers, numbers, st.text(max_size=5), lanes), max_size=4)
# Few values, so that lists have much in common.
commits = st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 3)), max_size=6)
groups = st.builds(
    GroupFold,
    st.sampled_from(["a", "b", "c"]),
    numbers,
    numbers,
    spans.map(lambda found: list({span.start: span for span in sorted(found, key=lambda span: span.start)}.values())),
    st.dictionaries(
        st.text(max_size=5), st.tuples(numbers, st.lists(st.tuples(numbers, numbers), max_size=3)), max_size=3
    ),
    numbers,
    spots,
    spots,
    dead,
    commits,
)
streams = st.builds(
    StreamFold, st.sampled_from(["a", "r", "s"]), numbers, numbers, st.text(max_size=5), numbers, commits
)
producers = st.builds(
    ProducerFold, st.integers(0, 4), numbers, st.lists(st.tuples(numbers, numbers, numbers, numbers), max_size=3)
)
folds = st.builds(
    PartitionFold,
    numbers,
    numbers,
    st.lists(st.tuples(numbers, numbers), max_size=3, unique_by=lambda epoch: epoch[0]).map(sorted),
    st.lists(producers, max_size=4, unique_by=lambda producer: producer.producer_id),
    st.lists(groups, max_size=3, unique_by=lambda group: group.group),
    st.lists(streams, max_size=3, unique_by=lambda stream: stream.group),
    st.lists(st.tuples(numbers, st.sampled_from(["a", "b"])), max_size=4),
    st.lists(st.tuples(numbers, numbers), max_size=4),
    numbers,
)


@settings(max_examples=60, deadline=None)
@given(st.lists(folds, min_size=1, max_size=4), st.booleans())
def test_any_fold_saved_after_another_is_loaded_unchanged(tmp_path_factory, saved, reopen):
    directory = tmp_path_factory.mktemp("state")
    state = StateFile(directory, identity=IDENTITY)
    for fold in saved:
        state.save(fold, 1)
        if reopen:
            state.park()
    loaded = state.load()
    assert loaded is not None
    assert encode_fold(loaded[0]) == encode_fold(saved[-1])
    state.close()


def test_only_what_changed_is_written(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    fold = fold_of_two_groups()
    fold.groups += [GroupFold(f"g{n}", 0, 0, []) for n in range(200)]
    state.save(fold, 95)
    before = state._connection.total_changes()
    fold.applied, fold.groups[7].next = 101, 9
    state.save(fold, 96)
    assert state._connection.total_changes() - before < 15
    assert state.load() == (fold, 96)


def test_removed_groups_and_producers_are_not_loaded(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    fold = fold_of_two_groups()
    state.save(fold, 95)
    smaller = msgspec.structs.replace(
        fold, groups=fold.groups[1:], producers=fold.producers[1:], streams=fold.streams[1:], outbox=[], cancelled=[]
    )
    state.save(smaller, 95)
    assert state.load() == (smaller, 95)
    tables = ("spans", "attempts", "producer_batches", "cursors", "ahead", "dead_ranges", "commits", "stream_commits")
    for table in (*tables, "outbox", "cancelled"):
        assert view(tmp_path, table) == []


def test_of_many_commits_only_the_new_ones_are_written(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    commits = [(n.to_bytes(16), 2 * n) for n in range(5_010)]
    fold = PartitionFold(groups=[GroupFold("g", 0, 0, [], commits=commits[:5_000])])
    state.save(fold, 0)
    before = state._connection.total_changes()
    later = PartitionFold(groups=[GroupFold("g", 0, 0, [], commits=commits[10:])])
    state.save(later, 0)
    assert state._connection.total_changes() - before < 40
    assert state.load() == (later, 0)


def test_another_logs_state_is_not_loaded_and_is_replaced(tmp_path):
    StateFile(tmp_path, identity=IDENTITY).save(fold_of_two_groups(), 95)
    other = StateFile(tmp_path, identity=LogIdentity("cluster-1", "orders", "topic-id-2", 0))
    assert other.load() is None
    assert other.highest_epoch() == -1
    other.save(PartitionFold(applied=1), 1)
    assert other.load() == (PartitionFold(applied=1), 1)


@pytest.mark.parametrize("damage", [b"", b"rubbish" * 1_000])
def test_a_damaged_file_is_not_loaded_and_is_replaced(tmp_path, damage):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(fold_of_two_groups(), 95)
    state.park()
    (tmp_path / "state.sqlite").write_bytes(damage)
    assert state.load() is None
    assert state.highest_epoch() == -1
    state.save(fold_of_two_groups(), 96)
    assert state.load() == (fold_of_two_groups(), 96)


@pytest.mark.parametrize("meddling", [
    "UPDATE spans SET end_offset = 13 WHERE start_offset = 10",
    "DELETE FROM groups WHERE group_name = 'workers'",
    "DELETE FROM producers",
    "DELETE FROM commits",
    "UPDATE stream_offsets SET committed_offset = 31 WHERE group_name = 'readers'",
    "UPDATE spans SET lane = 0",
    "UPDATE meta SET value = 41 WHERE key = 'compacted'",
    "UPDATE meta SET value = 99 WHERE key = 'applied'",
    "UPDATE meta SET value = 94 WHERE key = 'high_watermark'",
    "DELETE FROM meta WHERE key = 'digest'",
    "DROP TABLE attempts",
    "DROP TABLE meta",
])  # fmt: skip
def test_an_inconsistent_state_is_not_loaded(tmp_path, meddling):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(fold_of_two_groups(), 95)
    state.park()
    connection = apsw.Connection(str(tmp_path / "state.sqlite"))
    connection.execute(meddling)
    connection.close()
    assert state.load() is None
    state.save(fold_of_two_groups(), 96)
    assert state.load() == (fold_of_two_groups(), 96)


def test_the_highest_epoch_never_falls_and_outlives_a_save(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save_highest_epoch(7)
    state.save_highest_epoch(5)
    assert state.load() is None
    state.save(fold_of_two_groups(), 95)
    state.close()
    assert StateFile(tmp_path, identity=IDENTITY).highest_epoch() == 7


@pytest.mark.parametrize("damage", [b"", b"rubbish" * 1_000])
def test_the_highest_epoch_outlives_damage_to_a_file_in_use(tmp_path, damage):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save_highest_epoch(7)
    state.park()
    (tmp_path / "state.sqlite").write_bytes(damage)
    assert state.highest_epoch() == 7
    state.save(fold_of_two_groups(), 95)
    state.close()
    again = StateFile(tmp_path, identity=IDENTITY)
    assert again.highest_epoch() == 7
    assert again.load() == (fold_of_two_groups(), 95)


def test_the_highest_epoch_outlives_a_file_whose_fold_is_damaged(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save_highest_epoch(7)
    state.save(fold_of_two_groups(), 95)
    state.close()
    with closing(apsw.Connection(str(tmp_path / "state.sqlite"))) as connection:
        connection.execute("DROP VIEW ready; DROP TABLE spans")
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(fold_of_two_groups(), 96)
    state.close()
    again = StateFile(tmp_path, identity=IDENTITY)
    assert again.highest_epoch() == 7
    assert again.load() == (fold_of_two_groups(), 96)


@pytest.mark.parametrize("damage", ["a row that has moved", "a header of a later SQLite"])
def test_what_cannot_be_written_over_is_replaced(tmp_path, damage):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save_highest_epoch(7)
    state.save(PartitionFold(applied=5), 5)
    if damage == "a row that has moved":
        with closing(apsw.Connection(str(state.path))) as connection:
            connection.execute("INSERT INTO outbox VALUES ('', 0, 5, 'g')")
    else:
        state.park()
        with state.path.open("r+b") as file:
            file.seek(18)
            file.write(b"\x42")
    state.save(PartitionFold(applied=7, outbox=[(6, "g")]), 6)
    assert state.load() == (PartitionFold(applied=7, outbox=[(6, "g")]), 6)
    assert state.highest_epoch() == 7
    state.close()


@pytest.mark.parametrize("text", [b"digest", b"schema_version"])
def test_a_text_that_is_no_utf_8_costs_the_saved_fold_alone(tmp_path, text):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(PartitionFold(applied=5), 5)
    state.close()
    content = state.path.read_bytes()
    at = content.rfind(text)
    state.path.write_bytes(content[:at] + b"\xf4" + content[at + 1 :])
    after = StateFile(tmp_path, identity=IDENTITY)
    assert (after.load(), after.highest_epoch()) == (None, -1)
    after.save(PartitionFold(applied=6), 6)
    assert after.load() == (PartitionFold(applied=6), 6)
    after.close()


def test_the_epoch_of_another_logs_state_is_dropped(tmp_path):
    StateFile(tmp_path, identity=IDENTITY).save_highest_epoch(7)
    other = StateFile(tmp_path, identity=LogIdentity("cluster-1", "orders", "topic-id-2", 0))
    other.save(PartitionFold(applied=1), 1)
    assert other.highest_epoch() == -1


def test_an_epoch_that_a_kill_left_in_the_wal_is_on_disk_before_it_is_known(tmp_path):
    state = StateFile(tmp_path / "state", identity=IDENTITY)
    state.save_highest_epoch(7)
    image = crash_image(tmp_path / "state", tmp_path / "image")
    assert (image / "state.sqlite-wal").stat().st_size > 0
    state = StateFile(image, identity=IDENTITY)
    assert state.highest_epoch() == 7
    assert (image / "state.sqlite-wal").stat().st_size == 0


def test_a_file_of_an_older_version_loses_its_fold_and_keeps_the_highest_epoch(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save_highest_epoch(7)
    state.save(fold_of_two_groups(), 95)
    state.park()
    connection = apsw.Connection(str(tmp_path / "state.sqlite"))
    connection.execute("UPDATE meta SET value = 1 WHERE key = 'schema_version'; DROP TABLE stream_commits")
    connection.close()
    assert state.load() is None
    assert state.highest_epoch() == 7
    state.save(fold_of_two_groups(), 96)
    state.close()
    again = StateFile(tmp_path, identity=IDENTITY)
    assert again.load() == (fold_of_two_groups(), 96)
    assert again.highest_epoch() == 7


def test_the_epoch_is_fsynced_and_the_fold_is_not(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save_highest_epoch(1)
    assert state._connection.execute("PRAGMA synchronous").get == 2
    assert state._connection.execute("PRAGMA fullfsync").get == 1
    state.save(fold_of_two_groups(), 95)
    assert state._connection.execute("PRAGMA synchronous").get == 1


def test_a_full_disk_keeps_the_previous_state(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(fold_of_two_groups(), 95)
    connection = state._connection
    connection.execute(f"PRAGMA max_page_count = {connection.execute('PRAGMA page_count').get}")
    large = fold_of_two_groups()
    large.groups[0].attempts = {f"attempt-{n}": (n, [(n, n + 1)]) for n in range(2_000)}
    with pytest.raises(DiskFull):
        state.save(large, 96)
    assert state.load() == (fold_of_two_groups(), 95)
    state.save(fold_of_two_groups(), 97)
    assert state.load() == (fold_of_two_groups(), 97)


def test_a_parked_state_holds_no_file(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(fold_of_two_groups(), 95)
    state.park()
    assert os.listdir(tmp_path) == ["state.sqlite"]
    assert state.load() == (fold_of_two_groups(), 95)


# --- the views --------------------------------------------------------------------------------------------------------


def test_the_views_show_the_messages_by_state(tmp_path):
    StateFile(tmp_path, identity=IDENTITY).save(fold_of_two_groups(), 95)
    assert view(tmp_path, "in_flight") == [{
        "group_name": "workers", "start_offset": 10, "end_offset": 12, "messages": 2, "deliveries": 1,
        "granted_at_ms": 1_000, "lease_expires_at_ms": LATER_MS,
    }]  # fmt: skip
    assert view(tmp_path, "scheduled") == [{
        "group_name": "workers", "start_offset": 30, "end_offset": 31, "deliveries": 1, "available_at_ms": LATER_MS,
    }]  # fmt: skip
    assert [tuple(row.values()) for row in view(tmp_path, "ready")] == [
        ("workers", 20, 25, 2), ("audit", 90, 95, 0), ("workers", 60, 95, 0),
    ]  # fmt: skip
    assert [tuple(row.values()) for row in view(tmp_path, "dead")] == [
        ("workers", 6, 8, 2, 5, "too hot", 1_200), ("workers", 9, 10, 1, 1, "expired", 1_300),
    ]  # fmt: skip


def test_the_message_of_an_expired_lease_is_ready_again(tmp_path):
    fold = fold_of_two_groups()
    fold.groups[0].spans = [SpanFold(10, 12, 1, 0, True, 1_000, int(time.time() * 1_000) - 5_000)]
    StateFile(tmp_path, identity=IDENTITY).save(fold, 60)
    assert view(tmp_path, "in_flight") == []
    assert [tuple(row.values()) for row in view(tmp_path, "ready")] == [("workers", 10, 12, 1)]


def test_the_lag_counts_messages_and_not_offsets(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    for _ in range(10):
        writer.put(*numbered(4))
        writer.put_control(BatchKind.ACK)
    fold = PartitionFold(applied=50, groups=[GroupFold("g", 0, 20, [SpanFold(6, 9, 1, 0, True, 0, LATER_MS)])])
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(fold, 50)
    assert [row["lag"] for row in view(tmp_path, "lag")] == [None]
    state.save(fold, 50, log.messages_before)
    assert view(tmp_path, "lag") == [{
        "group_name": "g", "next_offset": 20, "high_watermark": 50, "never_delivered": 24, "not_done": 3, "lag": 27,
    }]  # fmt: skip


def test_the_high_watermark_rises_without_a_new_fold_and_never_falls(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    for _ in range(10):
        writer.put(*numbered(4))
        writer.put_control(BatchKind.ACK)
    fold = PartitionFold(applied=20, groups=[GroupFold("g", 0, 20, [])])
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save_high_watermark(30, log.messages_before)
    assert state.load() is None
    state.save(fold, 20, log.messages_before)
    for high_watermark in (30, 50, 40):
        state.save_high_watermark(high_watermark, log.messages_before)
    assert state.load() == (fold, 50)
    (lag,) = view(tmp_path, "lag")
    assert (lag["high_watermark"], lag["never_delivered"]) == (50, 24)


def test_the_age_is_kept_by_saves_that_do_not_know_it(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(PartitionFold(applied=1), 1, age=AGE)
    state.save(PartitionFold(applied=2), 2)
    state.forget()
    after = StateFile(tmp_path, identity=IDENTITY)
    assert after.load() is None
    assert after.age == AGE


@pytest.mark.parametrize("meddling", ["value = value + 1", "value = CAST(value AS TEXT)", "value = 0"])
def test_a_damaged_age_does_not_count(tmp_path, meddling):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(PartitionFold(applied=1), 1, age=AGE)
    state.park()
    with closing(apsw.Connection(str(state.path))) as connection:
        connection.execute(f"UPDATE meta SET {meddling} WHERE key = 'age_ms'")
    assert not state.is_sound()
    after = StateFile(tmp_path, identity=IDENTITY)
    assert after.load() == (PartitionFold(applied=1), 1)
    assert after.age is None


def test_a_closed_file_is_resumed_with_its_age(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(PartitionFold(applied=1), 1, age=AGE)
    state.highest_epoch()
    state.park()
    assert state.saved is not None
    after = StateFile(tmp_path, identity=IDENTITY)
    after.resume(state.saved)
    assert after.age == AGE


def test_the_view_of_streams_shows_their_lag_in_messages(tmp_path):
    log = open_log(tmp_path)
    writer = Writer(log)
    for _ in range(10):
        writer.put(*numbered(4))
        writer.put_control(BatchKind.CLAIM)
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save(PartitionFold(applied=50, streams=[StreamFold("readers", 20, 3, "one", 0)]), 50, log.messages_before)
    assert view(tmp_path, "streams") == [{
        "group_name": "readers", "committed_offset": 20, "generation": 3, "member": "one", "high_watermark": 50,
        "lag": 24,
    }]  # fmt: skip


def test_forgetting_the_fold_keeps_the_highest_epoch(tmp_path):
    state = StateFile(tmp_path, identity=IDENTITY)
    state.save_highest_epoch(7)
    state.save(PartitionFold(applied=5, epochs=[(1, 0)]), 5, durable=True)
    assert state.load() == (PartitionFold(applied=5, epochs=[(1, 0)]), 5)
    state.forget()
    state.close()
    again = StateFile(tmp_path, identity=IDENTITY)
    assert again.load() is None
    assert again.highest_epoch() == 7
