"""Topics from the mirror, and the files of their replicas: opened completely, removed only with authority."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import gevent
import msgspec
import pytest
from support.domain import Fixture, HandClock, records, running
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.cluster.replicas import Files, RecordedReplica
from portalmq.broker.cluster.rpc.brokers import LogEndRequest
from portalmq.broker.cluster.unclean_election import answer_log_end
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.storage.log import Log
from portalmq.control_plane import state
from portalmq.control_plane.catalog import Versioned
from portalmq.control_plane.plane import PlaneUnavailable
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import TopicState
from portalmq.errors import NotLeader, PartitionNotFound, Unavailable
from portalmq.wire import TopicConfig


@pytest.fixture
def fixture(tmp_path: Path):
    with running(tmp_path) as it:
        yield it


def send(fixture: Fixture, *values: str, topic: str = "t"):
    return fixture.broker.produce(topic, ProduceRequest(records(*values)))


def folder_of(tmp_path: Path, name: str = "t") -> Path:
    (folder,) = (tmp_path / "partitions").glob(f"{name}@*")
    return folder


def test_a_hundred_partitions_are_created_and_opened_within_seconds(tmp_path):
    """On a slow machine the limit is five times what creating their files alone takes."""
    clock = HandClock()
    began = time.monotonic()
    for number in range(100):
        open_and_close(Files(tmp_path / "bare", "cluster", "store"), number)
    bare_s = time.monotonic() - began
    with running(tmp_path, clock) as before:
        began = time.monotonic()
        before.broker.create_topic("t", wire.CreateTopic(partitions=100))
        made_s = time.monotonic() - began
        assert len(before.broker.topics.get("t").led()) == 100
    began = time.monotonic()
    with running(tmp_path, clock) as after:
        opened_s = time.monotonic() - began
        assert len(after.broker.topics.get("t").led()) == 100
    print(f"made in {made_s:.2f} s, opened in {opened_s:.2f} s; the files alone in {bare_s:.2f} s")
    assert max(made_s, opened_s) < max(10, 5 * bare_s), "the aim is 3 s on an otherwise idle disk"


def test_a_folder_names_its_topic(fixture, tmp_path):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
    path = folder_of(tmp_path) / "topic.json"
    assert state.decode(path.read_bytes(), TopicState) == fixture.broker.topics.get("t").state
    fixture.broker.alter_topic("t", wire.AlterTopic(config={"retention_ms": 3_600_000}))
    eventually(lambda: state.decode(path.read_bytes(), TopicState).config.retention_ms == 3_600_000)


def test_a_replica_is_not_visible_before_it_is_open(fixture, monkeypatch):
    opened = Log.open.__func__

    met = threading.Event()

    def slowly(*arguments, **more):
        assert met.wait(60), "a reader looks up the replica while it opens"
        return opened(Log, *arguments, **more)

    monkeypatch.setattr(Log, "open", slowly)
    making = gevent.spawn(fixture.broker.create_topic, "t", wire.CreateTopic(partitions=1))
    seen: list[type[Exception]] = []
    while not making.ready():
        try:
            topic = fixture.broker.topics.get("t")
            if topic is not None:
                topic.partition(0)
        except Unavailable:
            seen.append(Unavailable)
            met.set()
        gevent.sleep(0.01)
    assert Unavailable in seen
    assert fixture.broker.topics.get("t").partition(0).serves


def test_a_missing_partition_and_one_led_elsewhere_raise_different_errors(fixture):
    send(fixture, "a")
    topic = fixture.broker.topics.get("t")
    with pytest.raises(PartitionNotFound):
        topic.partition(1)
    held = fixture.broker.mirror.partitions[topic.state.topic_id, 0]
    topic.local.clear()
    elsewhere = msgspec.structs.replace(held.value, leader=2, isr=(1, 2), replicas=(1, 2))
    fixture.broker.mirror.partitions[topic.state.topic_id, 0] = type(held)(elsewhere, held.version)
    with pytest.raises(NotLeader) as told:
        topic.partition(0)
    assert told.value.extra["leader"] == 2


def test_files_of_a_deleted_topic_are_removed_and_a_new_topic_of_its_name_is_empty(fixture, tmp_path):
    send(fixture, "old")
    old = folder_of(tmp_path)
    fixture.broker.delete_topic("t")
    assert not old.exists()
    send(fixture, "new")
    assert folder_of(tmp_path) != old
    assert [stored.record.value for stored in fixture.broker.browser.read_all("t", None)] == [b"new"]


def test_the_open_replicas_are_those_of_the_topics_that_exist(fixture):
    topics = fixture.broker.topics

    def are_listed() -> bool:
        return [*topics.partitions()] == [each for topic in topics for each in topic.local.values()]

    send(fixture, "old")
    (old,) = topics.partitions()
    fixture.broker.delete_topic("t")
    assert topics.partitions() == ()
    send(fixture, "new")
    assert old not in topics.partitions()
    send(fixture, "another", topic="u")
    assert are_listed()
    assert len(topics.partitions()) == 2
    topic = topics.get("u")
    rebuilt = topic.local[0]
    topics._opener._rebuild(topic, rebuilt)
    assert rebuilt not in topics.partitions()
    eventually(lambda: 0 in topic.local)
    assert are_listed()


def test_no_file_is_moved_while_the_control_plane_is_unavailable(fixture, tmp_path, monkeypatch):
    fixture.broker.topics.files.set_aside_strays()  # wait for the pass that starts with the broker
    stray = tmp_path / "partitions" / "stray@0123"
    stray.mkdir(parents=True)

    def silent() -> None:
        raise PlaneUnavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(fixture.plane, "sync", silent)
        fixture.broker.topics.files.set_aside_strays()
        assert stray.exists()
    fixture.broker.topics.files.set_aside_strays()
    assert not stray.exists()
    assert (tmp_path / "lost+found" / "stray@0123").exists()


def test_stray_files_are_set_aside_once_the_disk_has_room(fixture, tmp_path, monkeypatch):
    """Found by the simulated shell: on a full disk the search ended for good."""
    files = fixture.broker.topics.files
    files.set_aside_strays()  # wait for the pass that starts with the broker
    stray = tmp_path / "partitions" / "stray@0123"
    stray.mkdir(parents=True)

    def full(directory: Path) -> None:
        raise OSError(errno.ENOSPC, "no space left", str(directory))

    with monkeypatch.context() as patch:
        patch.setattr("portalmq.broker.cluster.replicas.make_directory", full)
        assert not files.set_aside_strays()
    assert files.set_aside_strays()
    assert (tmp_path / "lost+found" / "stray@0123").exists()
    assert fixture.faults == []


def test_stray_files_are_set_aside_once_the_control_plane_is_available(tmp_path, monkeypatch):
    stray = tmp_path / "partitions" / "stray@0123"
    stray.mkdir(parents=True)
    faults = iter([PlaneUnavailable("no answer")] * 3)
    readable = Standalone.get_children

    def get_children(self: Standalone, path: str):
        for fault in faults if path == state.DELETED and gevent.getcurrent() is not started else ():
            raise fault
        return readable(self, path)

    started = gevent.getcurrent()
    monkeypatch.setattr(Standalone, "get_children", get_children)
    monkeypatch.setattr("portalmq.broker.cluster.topic_files.STRAYS_AGAIN_S", 0.0)
    with running(tmp_path) as it:
        eventually(lambda: not stray.exists())
        it.broker.topics.files.set_aside_strays()  # waits for the pass that starts with the broker
    assert next(faults, None) is None
    assert (tmp_path / "lost+found" / "stray@0123").exists()


def test_a_topic_created_during_the_search_for_strays_stays(fixture, tmp_path, monkeypatch):
    topics = fixture.broker.topics
    topics.files.set_aside_strays()
    listed = Files.folders

    def and_then_one_is_made(files: Files):
        found = listed(files)
        (tmp_path / "partitions" / "late@1").mkdir()
        return found

    monkeypatch.setattr(Files, "folders", and_then_one_is_made)
    topics.files.set_aside_strays()
    assert (tmp_path / "partitions" / "late@1").exists()


def test_a_replica_being_set_aside_is_not_opened_before_that_ends(fixture, tmp_path, monkeypatch):
    send(fixture, "a")
    topics = fixture.broker.topics
    topic = topics.get("t")
    damaged = topic.local[0]
    close = damaged.close

    def slowly(**how) -> None:
        topics._sync_partition(topic.state.topic_id, 0)  # the mirror changes during the close
        gevent.sleep(0.2)
        close(**how)

    monkeypatch.setattr(damaged, "close", slowly)
    topics._opener._rebuild(topic, damaged)
    eventually(lambda: 0 in topic.local)
    assert topic.local[0].store_uuid == "store/1"
    assert list((folder_of(tmp_path) / "0").glob("*.sqlite"))
    assert list((tmp_path / "lost+found" / folder_of(tmp_path).name / "0").glob("*.sqlite"))


def test_a_damaged_replica_alone_in_the_isr_does_not_query_the_control_plane(fixture, monkeypatch):
    send(fixture, "a")
    topics, asked = fixture.broker.topics, []
    topic = topics.get("t")
    mirror, key = topics._host.membership.mirror, (topic.state.topic_id, 0)
    monkeypatch.setattr("portalmq.broker.cluster.replica_opener.ASK_AGAIN_S", 0.01)
    monkeypatch.setattr(topics._opener, "_is_whole_elsewhere", lambda key: asked.append(key))
    mending = gevent.spawn(topics._opener.repair, topic, topic.local[0])
    gevent.sleep(0.05)
    assert not asked
    held = mirror.partitions[key]
    also_2 = msgspec.structs.replace(held.value, replicas=(1, 2), isr=(1, 2))
    monkeypatch.setitem(mirror.partitions, key, Versioned(also_2, held.version))
    eventually(lambda: asked)
    mending.kill()


# --- store uuids of a replica -----------------------------------------------------------------------------------------

TOPIC = TopicState("t", "id", 1, 1, 1, TopicConfig())


def open_and_close(files: Files, number: int = 0) -> str:
    log, state_file, _, store_uuid = files.open(TOPIC, number)
    log.close()
    state_file.close()
    return store_uuid


def test_each_replica_that_begins_again_has_a_new_store_uuid(tmp_path):
    files = Files(tmp_path, "cluster", "store")
    assert [open_and_close(files), open_and_close(files)] == ["store", "store"]
    for life in (1, 2, 3):
        files.set_aside(TOPIC, 0)
        assert open_and_close(files) == f"store/{life}"
        assert open_and_close(files) == f"store/{life}"
    assert len(list((tmp_path / "lost+found" / "t@id").iterdir())) == 3


def test_a_replica_whose_topic_was_set_aside_and_came_back_does_not_look_complete(tmp_path):
    files = Files(tmp_path, "cluster", "store")
    open_and_close(files)
    files.clean_up(files.folders(), set(), set())
    assert open_and_close(files) == "store/1"


def test_an_emptied_replica_killed_before_it_creates_its_log_does_not_look_complete(tmp_path):
    files = Files(tmp_path, "cluster", "store")
    open_and_close(files)
    files.set_aside(TOPIC, 0)
    (files.folder(TOPIC) / "0").mkdir()  # here the broker was killed
    assert open_and_close(files) == "store/1"


def test_a_replica_is_noted_as_joining_until_it_is_in_sync(fixture, tmp_path):
    fixture.broker.create_topic("t", wire.CreateTopic(partitions=1))
    topics, marker = fixture.broker.topics, folder_of(tmp_path) / "0" / "joining"
    topic = topics.get("t")
    assert not marker.exists()
    partition = topic.local.pop(0)
    partition.close()
    replicas = topics._replicas
    store = partition.store_uuid
    for recorded, is_marked in (
        (RecordedReplica("", is_in_sync=False), True),  # it was added
        (RecordedReplica(store, is_in_sync=False), True),
        (RecordedReplica(store, is_in_sync=True), False),
        (RecordedReplica(store, is_in_sync=False), False),  # it lags
        (RecordedReplica("another", is_in_sync=True), True),  # it was begun again
    ):
        opened = replicas.open(topic.state, 0, lambda: False, recorded=recorded)
        assert marker.exists() == is_marked
        opened.close()
    opened = replicas.open(topic.state, 0, lambda: False)
    replicas.note_recorded(topic.state, opened, RecordedReplica("another", is_in_sync=True))
    gevent.idle()
    assert marker.exists()
    replicas.note_recorded(topic.state, opened, RecordedReplica(store, is_in_sync=True))
    eventually(lambda: not marker.exists())
    opened.close()
    replicas._closed[topic.state.topic_id, 0] = SimpleNamespace(store_uuid=store)
    assert replicas.resume(topic.state, 0, RecordedReplica("", is_in_sync=False)) is None, "it is opened, and marked"


def test_a_damaged_partition_without_another_replica_is_kept_closed_and_the_others_are_served(tmp_path):
    with running(tmp_path) as before:
        for topic in ("t", "u"):
            send(before, "a", topic=topic)
        topic_id = before.broker.topics.get("t").state.topic_id
    (file,) = folder_of(tmp_path).glob("0/0*.sqlite")
    content = file.read_bytes()
    file.write_bytes(b"nothing" * 1_000)
    with running(tmp_path) as damaged:
        topics = damaged.broker.topics
        eventually(lambda: topics.closed_log_end(topic_id, 0) is not None)
        assert topics.is_settled
        send(damaged, "b", topic="u")
        with pytest.raises(Unavailable):
            send(damaged, "b")
        standing = answer_log_end(topics, LogEndRequest(topic_id, 0))
        assert (standing.end, bool(standing.fault), standing.set_aside) == (0, True, ())
        assert not damaged.faults
        assert not (tmp_path / "lost+found").exists()
    file.write_bytes(content)
    with running(tmp_path) as mended:
        eventually(lambda: mended.broker.topics.is_settled)
        send(mended, "b")
        eventually(lambda: mended.broker.topics.get("t").partition(0).log.message_count_total == 2)


def test_the_files_of_a_partition_in_lost_and_found_are_described(fixture, tmp_path):
    send(fixture, "a")
    state = fixture.broker.topics.get("t").state
    aside = tmp_path / "lost+found" / f"t@{state.topic_id}" / "0"
    aside.mkdir(parents=True)
    (aside / f"{400:020d}.sqlite").write_bytes(b"x" * 1_000)
    (told,) = fixture.broker.topics.set_aside(state.topic_id, 0)
    assert told == f"{aside} (1,000 bytes, offsets 400 to 400 and on)"
