"""Data directories: every committed message once, whatever the state of the files, and errors that name faults."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.cluster import wait_until
from support.data_directory import START_MS, numbered, written
from support.log_files import Writer

from portalmq import Admin
from portalmq.broker.partition import compaction
from portalmq.broker.partition.compaction import Compactor
from portalmq.broker.storage.batch import Record
from portalmq.broker.storage.log import Log as StoredLog
from portalmq.broker.storage.schema import LogIdentity
from portalmq.spark.errors import DamagedFile, DataLoss, NothingThere, NoTopic, SourceError
from portalmq.spark.files import replica, segment
from portalmq.spark.files.directories import Directories
from portalmq.spark.origin import rows_of

COLUMNS = ("topic", "partition", "offset", "value")


def rows(*paths: Path, topics: list[str] | None = None, **more: int) -> list[tuple[str, int, int, bytes]]:
    """Return all rows in the order of reading."""
    origin = Directories([str(path) for path in paths], topics, **more)
    return [
        tuple(row[name] for name in COLUMNS)
        for log in origin.logs()
        for span in origin.spans(log, log.start_offset, log.end_offset)
        for batch in span.batches(COLUMNS)
        for row in batch.to_pylist()
    ]


def values(*paths: Path, **more) -> list[bytes]:
    return [value for *_, value in rows(*paths, **more)]


def segments_of(path: Path, topic: str = "t", number: int = 0) -> list[Path]:
    return sorted(path.glob(f"partitions/{topic}@*/{number}/0*.sqlite"))


def state_of(path: Path, topic: str = "t", number: int = 0) -> Path:
    (found,) = path.glob(f"partitions/{topic}@*/{number}/state.sqlite")
    return found


def copy_of(path: Path) -> Path:
    """Another broker's directory with the same replicas."""
    return Path(shutil.copytree(path, path.with_name(f"{path.name}-copy")))


def listing(path: Path) -> list[tuple[str, int, int]]:
    return sorted((str(each), each.stat().st_size, each.stat().st_mtime_ns) for each in path.rglob("*"))


def remove(path: Path) -> None:
    path.chmod(0o644)
    path.unlink()


# --- rows -------------------------------------------------------------------------------------------------------------


def test_every_message_is_read_once_and_in_order(data):
    assert [(topic, partition, value) for topic, partition, _, value in rows(data)] == [
        ("t", partition, b"%d" % number) for partition in range(2) for number in range(30)
    ]


def test_a_file_may_be_read_in_several_pieces(data):
    whole, pieces = rows(data), rows(data, span_offsets=3)
    assert whole == pieces
    origin = Directories([str(data)], ["t"], 3)
    spans = [span for log in origin.logs() for span in origin.spans(log, log.start_offset, log.end_offset)]
    assert max(span.end - span.start for span in spans) == 3


def test_reading_a_stopped_broker_writes_no_byte(data):
    before = listing(data)
    assert len(rows(data)) == 60
    assert listing(data) == before


def test_an_empty_topic_has_no_rows(data):
    assert rows(data, topics=["empty"]) == []


def test_internal_topics_are_read_when_they_are_named(tmp_path):
    with written(tmp_path / "data") as directory:
        directory.topic("t")
        directory.put("t", b"own")
        directory.topic("other")
        directory.put("other", b"internal")
    (folder,) = (tmp_path / "data/partitions").glob("other@*")
    folder.rename(folder.with_name(folder.name.replace("other@", "__other@")))
    assert values(tmp_path / "data") == [b"own"]
    assert values(tmp_path / "data", topics=["__other"]) == [b"internal"]


def test_replicas_and_aliases_of_a_directory_are_read_once(data, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(data)
    assert rows(data, copy_of(data), link, data / ".." / data.name) == rows(data)


@pytest.fixture
def behind(tmp_path) -> tuple[Path, Path]:
    """A leader with 20 messages, and a follower with the first 10 committed and a diverged tail."""
    path = tmp_path / "leader"
    with written(path) as directory:
        directory.topic("t")
        directory.put("t", *numbered(10))
    follower = copy_of(path)
    with written(path) as directory:
        directory.put("t", *numbered(10, start=10))
    (place,) = follower.glob("partitions/t@*/0")
    with closing(sqlite3.connect(state_of(follower))) as connection:
        meta = dict(connection.execute("SELECT key, value FROM meta"))
    identity = LogIdentity(meta["cluster_id"], "t", meta["topic_id"], 0)
    log = StoredLog.open(place, identity=identity)
    Writer(log, at_ms=START_MS).put(*[b"never committed"] * 30)
    log.close()
    return path, follower


def test_the_replica_with_the_most_committed_messages_is_read(behind):
    leader, follower = behind
    assert values(leader, follower) == values(follower, leader) == numbered(20)


def test_uncommitted_messages_are_not_shown(behind):
    _, follower = behind
    assert values(follower) == numbered(10)


def test_a_diverged_tail_does_not_replace_missing_messages(behind):
    leader, follower = behind
    (path,) = segments_of(leader)
    whole = path.read_bytes()
    path.write_bytes(b"torn")
    with pytest.raises(DamagedFile):
        values(leader, follower)
    path.unlink()
    with pytest.raises(DamagedFile, match="a segment is missing: there is none that holds offset"):
        values(leader, follower)
    path.write_bytes(whole)
    assert values(leader, follower) == numbered(20)


def test_retention_removes_segments_from_the_front(data):
    with written(data) as directory:
        partition = directory.partition("t")
        second = int(segments_of(data)[1].name[:20])
        assert partition.log.drop_segments_below(second) == 1
    assert [value for _, partition, _, value in rows(data) if partition == 0] == numbered(20, start=10)


def test_purged_messages_that_are_still_in_the_file_are_not_shown(tmp_path):
    with written(tmp_path) as directory:
        directory.topic("t")
        offsets = directory.put("t", *numbered(10))
        directory.fixture.broker.browser.purge("t", partition=0, before_offset=offsets[4])
    assert values(tmp_path) == numbered(6, start=4)
    with closing(sqlite3.connect(segments_of(tmp_path)[0])) as connection:
        assert connection.execute("SELECT count(*) FROM messages").fetchone() == (10,)


def test_compaction_leaves_holes_and_empty_segments(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "portalmq.broker.cluster.maintenance.COMPACT_EVERY_S", 3_600.0
    )  # the broker's own record is between them
    monkeypatch.setattr(compaction, "DIRTY_BYTES_MIN", 1)
    monkeypatch.setattr(compaction, "DIRTY_A_CLEAN", 0)
    with written(tmp_path) as directory:
        directory.topic("t", cleanup="compact")
        for number in range(3):
            directory.put("t", *[Record(b"%d" % number, key=b"%d" % key) for key in range(4)])
            directory.roll("t")
        directory.put("t", Record(b"3", key=b"0"))
        removed: list[int] = []
        Compactor(directory.fixture.broker, removed.append).compact_if_due(directory.partition("t"), keeps_last=True)
    assert sum(removed) == 9
    with closing(sqlite3.connect(f"file:{segments_of(tmp_path)[0]}?immutable=1", uri=True)) as connection:
        assert connection.execute("SELECT count(*) FROM messages").fetchone() == (0,)
    assert values(tmp_path) == [b"2", b"2", b"2", b"3"]


def test_a_recreated_topic_is_another_topic(tmp_path):
    path = tmp_path / "data"
    with written(path) as directory:
        directory.topic("t")
        directory.put("t", b"of the first")
    away = copy_of(path)
    with written(path) as directory:
        directory.fixture.broker.delete_topic("t")
        directory.topic("t")
        directory.put("t", b"of the second")
        wait_until(lambda: len(list(path.glob("partitions/t@*"))) == 1, "the first one's files are gone")
    assert values(path) == [b"of the second"]
    with pytest.raises(SourceError, match="was deleted and made again"):
        values(path, away)


def test_partitions_are_spread_over_brokers(data):
    other = copy_of(data)
    shutil.rmtree(state_of(data, number=0).parent)
    shutil.rmtree(state_of(other, number=1).parent)
    assert len(rows(data, other)) == 60
    with pytest.raises(NothingThere, match=r"partition 0 of 't' is in none of .*name the data directories of all"):
        rows(data)


# --- files that are missing, torn or foreign --------------------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_missing_segment_is_reported_or_read_from_another_replica(data, which):
    whole = rows(data)
    other = copy_of(data)
    remove(segments_of(data)[which])
    with pytest.raises(DamagedFile, match="a segment is missing"):
        rows(data)
    assert rows(data, other) == whole


def test_different_segments_may_be_missing_in_different_replicas(data):
    whole = rows(data)
    other = copy_of(data)
    remove(segments_of(data)[1])
    remove(segments_of(other)[2])
    assert rows(data, other) == rows(other, data) == whole


def test_a_partition_without_a_file_is_reported(data):
    for path in segments_of(data):
        remove(path)
    with pytest.raises(DamagedFile, match="holds no segment any more"):
        rows(data)


@pytest.mark.parametrize("which", [0, 1, 2])
@pytest.mark.parametrize("content", [b"", b"no SQLite at all" * 100, None])
def test_a_torn_segment_is_reported_or_read_from_another_replica(data, which, content):
    whole = rows(data)
    other = copy_of(data)
    path = segments_of(data)[which]
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2] if content is None else content)
    with pytest.raises(DamagedFile, match="It was left as it is") as told:
        rows(data)
    assert str(path) in str(told.value)
    assert rows(data, other) == whole


def test_another_log_s_newest_segment_is_reported(data):
    mine, foreign = segments_of(data)[2], segments_of(data, number=1)[2]
    assert mine.name == foreign.name
    mine.write_bytes(foreign.read_bytes())
    with pytest.raises(DamagedFile, match="belongs to partition 1 of the topic"):
        rows(data)


def test_a_foreign_database_is_reported(data):
    path = segments_of(data)[1]
    remove(path)
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("CREATE TABLE albums(title)")
        connection.commit()
    with pytest.raises(DamagedFile, match="is not a file of PortalMQ"):
        rows(data)


def test_a_newer_version_s_files_are_not_guessed_at(data):
    with closing(sqlite3.connect(segments_of(data)[2])) as connection:
        connection.execute("UPDATE meta SET value = 3 WHERE key = 'schema_version'")
        connection.commit()
    with pytest.raises(SourceError, match="written by a newer PortalMQ"):
        rows(data)


def test_without_the_state_unsealed_files_are_not_read(data):
    whole = rows(data)
    other = copy_of(data)
    state_of(data).unlink()
    with pytest.raises(DamagedFile, match="only it says which of the newest messages are committed"):
        rows(data)
    assert rows(data, other) == whole


def test_sealed_files_are_read_without_the_state(data):
    for number in range(2):
        state_of(data, number=number).unlink()
        segments_of(data, number=number)[2].unlink()
    state_of(data, "empty").parent.parent.rename(data / "elsewhere")
    assert [value for _, _, _, value in rows(data)] == numbered(20) * 2


@pytest.mark.parametrize("content", [b"torn" * 1000, b""])
def test_a_torn_state_is_reported_or_read_from_another_replica(data, content):
    whole = rows(data)
    other = copy_of(data)
    state_of(data).write_bytes(content)
    with pytest.raises(DamagedFile, match=r"state\.sqlite"):
        rows(data)
    assert rows(data, other) == whole


def test_a_torn_manifest_is_reported_or_read_from_another_replica(data):
    whole = rows(data)
    other = copy_of(data)
    segments_of(data)[0].with_name("manifest.json").write_text("{")
    with pytest.raises(DamagedFile, match="is no manifest"):
        rows(data)
    assert rows(data, other) == whole


def test_a_file_removed_after_planning_is_data_loss(data):
    origin = Directories([str(data)], ["t"])
    log = origin.logs()[0]
    span = origin.spans(log, log.start_offset, log.end_offset)[0]
    remove(segments_of(data)[0])
    with pytest.raises(DataLoss, match="were removed while they were read"):
        list(span.batches(COLUMNS))


def test_a_machine_that_does_not_see_the_directory_reports_it_and_no_loss(data):
    """An executor of a cluster does not see the directory; it must not report removed messages."""
    origin = Directories([str(data)], ["t"])
    log = origin.logs()[0]
    span = origin.spans(log, log.start_offset, log.end_offset)[0]
    data.rename(data.with_name("elsewhere"))
    with pytest.raises(NothingThere, match=rf"{data} is not there on this machine .*option bootstrap"):
        list(rows_of(span, COLUMNS, fails_on_data_loss=False))


def test_files_are_planned_under_the_given_name(data):
    """The name may be a link, whose target may differ on other machines of a cluster."""
    link = data.with_name("link")
    link.symlink_to(data)
    origin = Directories([str(link), str(data)], ["t"])
    log = origin.logs()[0]
    spans = origin.spans(log, log.start_offset, log.end_offset)
    assert all(span.path.is_relative_to(link) and span.elsewhere == () for span in spans)


# --- invalid directories ----------------------------------------------------------------------------------------------


def test_a_directory_without_broker_data_is_reported(data, tmp_path):
    with pytest.raises(NothingThere, match=r"there is no directory .*nowhere: name what the broker was given"):
        rows(tmp_path / "nowhere")
    with pytest.raises(NothingThere, match="has no folder 'partitions'"):
        rows(data / "control")
    with pytest.raises(NothingThere, match="there is no directory"):
        rows(data / "identity.json")
    (tmp_path / "fresh/partitions").mkdir(parents=True)
    with pytest.raises(NoTopic, match=r"there are no topics in .*fresh yet"):
        rows(tmp_path / "fresh")
    with pytest.raises(NoTopic, match="there is no topic 'x' in"):
        rows(data, topics=["t", "x"])
    (data / "partitions/stray@abc").write_text("a file")
    assert len(rows(data)) == 60


def test_two_clusters_are_not_mixed(data, tmp_path):
    with written(tmp_path / "other") as directory:
        directory.topic("t")
    (data / "identity.json").write_text('{"cluster_id": "one"}')
    (tmp_path / "other/identity.json").write_text('{"cluster_id": "two"}')
    with pytest.raises(SourceError, match="are of two clusters: read each cluster by itself"):
        rows(data, tmp_path / "other")
    (data / "identity.json").write_text("{")
    with pytest.raises(DamagedFile, match="is no broker's identity"):
        rows(data)


# --- planning ---------------------------------------------------------------------------------------------------------


def test_a_time_is_found_exactly(data):
    origin = Directories([str(data)], ["t"])
    with closing(sqlite3.connect(":memory:")) as found:
        found.execute("CREATE TABLE batches(base_offset, ms)")
        for path in segments_of(data):
            with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
                rows = connection.execute("SELECT base_offset, appended_at_ms FROM batches").fetchall()
            found.executemany("INSERT INTO batches VALUES (?, ?)", rows)
        log = origin.logs()[0]
        for ms in (0, *range(START_MS - 1, START_MS + 180_000, 20_000), *range(START_MS, START_MS + 180_001, 30_000)):
            expected = found.execute("SELECT min(base_offset) FROM batches WHERE ms >= ?", (ms,)).fetchone()[0]
            assert origin.offset_at(log, ms) == (log.end_offset if expected is None else expected)


def test_a_time_is_found_in_another_replicas_file(data):
    other = copy_of(data)
    alone = Directories([str(data)], ["t"])
    expected = [alone.offset_at(log, START_MS + 1) for log in alone.logs()]
    path = segments_of(data)[1]
    path.chmod(0o644)
    path.write_bytes(b"torn")
    both = Directories([str(data), str(other)], ["t"])
    assert [both.offset_at(log, START_MS + 1) for log in both.logs()] == expected
    alone = Directories([str(data)], ["t"])
    with pytest.raises(DamagedFile):
        alone.offset_at(alone.logs()[0], START_MS + 1)


def test_a_query_reads_each_file_once_for_its_plan(data, monkeypatch):
    looks, asked = [], []
    monkeypatch.setattr(replica, "opened", lambda path: asked.append(path) or segment.opened(path))
    look = Directories._found
    monkeypatch.setattr(Directories, "_found", lambda origin: looks.append(1) or look(origin))
    origin = Directories([str(data)])
    logs = origin.logs()
    for log in logs:
        origin.spans(log, log.start_offset, log.end_offset)
    assert len(asked) == len(set(asked)) == 2 * len(logs)  # the state and the newest segment of each
    for log in logs:
        origin.offset_at(log, START_MS)
    assert len(asked) == 2 * len(logs) + sum(log.end_offset > 0 for log in logs)
    assert len(looks) == 1


def test_later_commits_are_seen(behind):
    leader, follower = behind
    origin = Directories([str(follower)])
    (log,) = origin.logs()
    shutil.copy(state_of(leader), state_of(follower))
    for path in segments_of(follower):
        remove(path)
    for path in segments_of(leader):
        shutil.copy(path, state_of(follower).parent)
    assert origin.spans(log, log.start_offset, log.end_offset + 1)
    with pytest.raises(SourceError, match="are not known to be committed"):
        origin.spans(log, log.start_offset, log.end_offset + 1_000)


def test_a_file_that_a_broker_opens_during_the_read_is_read_again(data, monkeypatch):
    """A broker starts to write between the two checks of the file."""
    path = state_of(data)
    asked = []

    def opened(place):
        asked.append(place)
        if len(asked) == 1:
            path.touch()
        return segment.opened(place)

    monkeypatch.setattr(replica, "opened", opened)
    origin = Directories([str(data)], ["t"])
    assert [log.end_offset for log in origin.logs()] == [31, 31]
    assert asked.count(path) == 2


# --- read-only directories -------------------------------------------------------------------------------------------

READER = """
import os, sys
from portalmq.spark.files import directories
from adbc_driver_sqlite import dbapi
with dbapi.connect(":memory:") as connection, connection.cursor() as cursor:
    cursor.execute("SELECT 1")  # what is loaded late is loaded now: nobody may not look everywhere
    cursor.fetch_arrow_table()
if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
origin = directories.Directories(sys.argv[1:])
try:
    for log in origin.logs():
        for span in origin.spans(log, log.start_offset, log.end_offset):
            print(sum(batch.num_rows for batch in span.batches(["offset"])))
except Exception as error:
    print(error)
"""


def read_by_somebody_who_may_not_write(path: Path, *secret: Path) -> str:
    for each in (path, *path.rglob("*")):
        each.chmod(0o555 if each.is_dir() else 0o444)
    before = listing(path)
    for each in secret:
        each.chmod(0)
    answer = subprocess.run(
        [sys.executable, "-c", READER, path], capture_output=True, text=True, timeout=60, check=True
    )
    for each in secret:
        each.chmod(0o555 if each.is_dir() else 0o444)
    assert listing(path) == before
    for each in (path, *path.rglob("*")):
        each.chmod(0o755)
    return answer.stdout


def test_directories_are_read_without_the_right_to_write(tmp_path):
    with (
        tempfile.TemporaryDirectory() as folder,
        written(tmp_path / "data") as directory,
    ):  # other users may not see tmp_path
        Path(folder).chmod(0o755)
        directory.topic("t")
        directory.put("t", *numbered(10))
        directory.partition("t").retention.save_state()
        killed = Path(shutil.copytree(directory.path, Path(folder, "killed")))
        directory.fixture.close()
        stopped = Path(shutil.copytree(directory.path, Path(folder, "stopped")))
        assert list(killed.rglob("*-wal"))
        assert not list(stopped.rglob("*-wal"))
        assert read_by_somebody_who_may_not_write(stopped) == "10\n"
        assert read_by_somebody_who_may_not_write(killed) == "10\n"
        for path in killed.rglob("*-shm"):
            path.unlink()
        assert "SQLite has to recover its write-ahead log, and may not write to" in (
            read_by_somebody_who_may_not_write(killed)
        )


def test_unreadable_files_are_not_reported_as_damaged(data):
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        copy = Path(shutil.copytree(data, Path(folder, "copy")))
        place = next(copy.glob("partitions/t@*/0"))
        for secret in (
            copy,
            place,
            place / "manifest.json",
            place / "state.sqlite",
            place / "00000000000000000000.sqlite",
        ):
            said = read_by_somebody_who_may_not_write(copy, secret)
            assert "may not be read by this user" in said, (secret, said)
            assert str(copy) in said


# --- a directory in use -----------------------------------------------------------------------------------------------


@pytest.mark.cluster
def test_a_broker_s_directory_is_read_while_it_runs(tmp_path):
    with BrokerProcess(tmp_path / "broker") as broker:
        Admin([broker.url]).create_topic("t", partitions=2)
        for number in range(20):
            broker.request("POST", f"/v1/topics/t/messages?partition={number % 2}", b"%d" % number)
            assert len(values(broker.data_dir)) <= number + 1
        wait_until(lambda: len(values(broker.data_dir)) == 20, "all committed messages are shown")
        assert sorted(map(int, values(broker.data_dir))) == list(range(20))
        broker.kill()
        assert sorted(map(int, values(broker.data_dir))) == list(range(20))
        broker.start()
        assert sorted(map(int, values(broker.data_dir))) == list(range(20))
    assert sorted(map(int, values(broker.data_dir))) == list(range(20))
