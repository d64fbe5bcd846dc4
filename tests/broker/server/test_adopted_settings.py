"""Adoption brings back the settings of topics and groups, and lets no broker start before all of it is there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace as replace_found
from pathlib import Path

import pytest
from msgspec.structs import replace
from support.domain import running

from portalmq import wire
from portalmq.broker.cluster.exits import StartupError
from portalmq.broker.cluster.replicas import Files
from portalmq.broker.cluster.saved_copy import GROUPS, Saved
from portalmq.broker.core.queue.records import Claim
from portalmq.broker.server.adoption import EPOCHS_APART, Adoption, ReplicaFound, write_back
from portalmq.broker.server.adoption_reading import read_directories
from portalmq.broker.server.preflight import IdentityRequest, joined
from portalmq.broker.storage.disk import DataDirectory, DirectoryInUse, StoreIdentity
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState, GroupState, PartitionState, PauseState, TopicState, encode
from portalmq.control_plane.stream_groups import StreamGroups

KEYED = GroupState("keyed", wire.GroupConfig(ordering="key"), "id")
STREAM = GroupState("stream", wire.GroupConfig(mode="stream", start="latest"), "id")
TOPIC = TopicState("t", "id", 1, 1, 2, wire.TopicConfig())


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    plane = Standalone(tmp_path / "plane")
    plane.start()
    yield Catalog(plane)
    plane.close()


def directory(path: Path, broker_id: int = 1) -> Path:
    DataDirectory.open(path, cluster_id="c", broker_id=broker_id).close()
    return path


def found(broker_id: int, end: int, queues: dict[str, PauseState] | None = None, **streams: int) -> ReplicaFound:
    return ReplicaFound(broker_id, "s", 1, end, 1, queues=queues or {}, streams=streams)


def later(broker_id: int) -> ReplicaFound:
    return replace_found(found(broker_id, 100), last_epoch=9, highest_epoch=9)


def state_in(catalog: Catalog) -> PartitionState:
    return catalog.partitions(catalog.topic("t"))[0].value


def run(catalog: Catalog) -> None:
    """Let three brokers start, and end."""
    for broker_id in (1, 2, 3):
        catalog.claim_broker_id("s", broker_id)
        catalog.next_incarnation(broker_id, "s")


def adoption_of(*replicas: ReplicaFound, saved: Saved[GroupState] | None = None) -> Adoption:
    return Adoption(
        "c",
        topics={"id": TOPIC},
        brokers={1: "s", 2: "s", 3: "s"},
        replicas={("id", 0): list(replicas)},
        saved_groups=saved,
    )


class TestGroups:
    def test_those_of_the_latest_copy_have_its_settings(self, tmp_path: Path, catalog: Catalog) -> None:
        paths = [directory(tmp_path / str(number), number) for number in (1, 2, 3)]
        GROUPS.write(paths[0], 1_000, [encode(GroupState("keyed", wire.GroupConfig()))])
        GROUPS.write(paths[1], 2_000, [encode(KEYED), encode(STREAM)])
        (paths[2] / GROUPS.file).write_bytes(b"x")
        messages = write_back(catalog, read_directories(paths), accept_loss=False, replace_cluster=False)
        assert {name: held.config for name, held in catalog.groups().items()} == {
            "keyed": KEYED.config,
            "stream": STREAM.config,
        }
        assert any(
            "groups keyed, stream" in each and "as they were at 1970-01-01T00:00:02Z" in each for each in messages
        )
        assert f"{paths[2] / GROUPS.file} is damaged: its checksum differs" in messages

    def test_one_that_only_logs_have_keeps_its_mode(self, tmp_path: Path, catalog: Catalog) -> None:
        """Members of a stream group were refused for good, and its offsets went with the group of the other mode."""
        with running(tmp_path / "data") as before:
            before.broker.create_topic("t", wire.CreateTopic(partitions=1))
            before.broker.put_group("s", {"mode": "stream"})
            before.broker.topics.get("t").partition(0).append_group_record("s", Claim("m", 7, 0, 1)).wait()
            assert not before.broker.receive_handler.receive("q", wire.ReceiveRequest(["t"]), None)
            cluster_id = before.broker.cluster_id
        identity = f'{{"cluster_id": "{cluster_id}", "broker_id": 1, "store_uuid": "store"}}'
        (tmp_path / "data" / "identity.json").write_text(identity)
        write_back(catalog, read_directories([tmp_path / "data"]), accept_loss=False, replace_cluster=False)
        groups = catalog.groups()
        assert {name: held.config.mode for name, held in groups.items()} == {"s": "stream", "q": "queue"}
        roster = StreamGroups(catalog.plane).roster(groups["s"].group_id)
        assert roster.value.generation > 7, "a member of before is not taken for one that joins now"
        assert StreamGroups(catalog.plane).roster(groups["q"].group_id) is None

    def test_the_mode_in_the_logs_counts_more_than_a_copy(self) -> None:
        saved = Saved(1, [KEYED, STREAM])
        groups = adoption_of(found(1, 10, {"stream": PauseState()}, keyed=3), saved=saved).groups()
        assert {name: group.config.mode for name, group in groups.items()} == {"keyed": "stream", "stream": "queue"}

    def test_logs_that_are_not_kept_do_not_count(self) -> None:
        """Such a log may lack the end of a group, and its name was given to another one since."""
        paused = PauseState(9, paused=True)
        groups = adoption_of(found(1, 10, {"g": PauseState(1)}), found(2, 9, {"g": paused, "ended": paused})).groups()
        assert {name: group.pause for name, group in groups.items()} == {"g": PauseState(1)}


class TestTopics:
    @pytest.mark.parametrize("latest", [1, 2])
    def test_the_settings_that_were_written_last_are_used_and_told(
        self, tmp_path: Path, catalog: Catalog, latest: int
    ) -> None:
        paths = [directory(tmp_path / str(number), number) for number in (1, 2)]
        for number, path in enumerate(paths, 1):
            topic = TopicState("t", "id", 1, 1, 2, wire.TopicConfig(retention_ms=number * 3_600_000))
            Files(path, "c", path.name).describe(topic)
            file = path / "partitions" / "t@id" / "topic.json"
            os.utime(file, (0, 1_000 + (number == latest)))
        before = [(path / "partitions" / "t@id" / "topic.json").read_bytes() for path in paths]
        adoption = read_directories(paths)
        assert adoption.topics["id"].config.retention_ms == latest * 3_600_000
        assert [(path / "partitions" / "t@id" / "topic.json").read_bytes() for path in paths] == before
        messages = write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        assert any("topic t: its settings differ" in each and f"of broker {latest} " in each for each in messages)

    def test_without_any_description_ids_go_to_the_partitions_that_they_went_to(self, tmp_path: Path) -> None:
        paths = [directory(tmp_path / str(number), number) for number in (1, 2)]
        for path, numbers in zip(paths, [(0, 5), (4,)], strict=True):
            for number in numbers:
                (path / "partitions" / "t@id" / str(number)).mkdir(parents=True)
        topic = read_directories(paths).topics["id"]
        assert (topic.partitions, topic.first_partitions) == (6, 6)

    def test_the_least_number_of_copies_that_may_have_been_in_force_counts(self, tmp_path: Path) -> None:
        paths = [directory(tmp_path / str(number), number) for number in (1, 2)]
        for least, path in enumerate(paths, 1):
            Files(path, "c", path.name).describe(
                TopicState("t", "id", 1, 1, 2, wire.TopicConfig(min_insync_replicas=least))
            )
        adoption = read_directories(paths)
        lost = ReplicaFound(1, fault="torn")
        adoption.replicas = {("id", 0): [lost, found(2, 10), found(3, 10)]}
        (loss,) = adoption.losses()
        assert "may lack what a damaged replica alone held: torn" in loss


class TestOrder:
    @pytest.mark.parametrize("step", ["reserve_producer_ids", "claim_broker_id", "restore_topic", "restore_group"])
    @pytest.mark.parametrize("before", ["", "c"])
    def test_no_broker_can_start_before_all_is_written(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, step: str, before: str
    ) -> None:
        """It would move the folders of topics that it does not find, and give ids of producers out again. One with an
        empty directory would make another cluster."""
        if before:
            catalog.cluster_id(before)
        adoption = adoption_of(found(1, 10, {"g": PauseState()}))

        def interrupted(*given: object, **named: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(catalog, step, interrupted)
            with pytest.raises(KeyboardInterrupt):
                write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        for held in (None, StoreIdentity("c", 1, "s")):
            with pytest.raises(StartupError, match="repeat it"):
                joined(catalog, IdentityRequest(held, "s", False, "http://127.0.0.1:1"), None, patience_s=0)
        write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        assert catalog.find_cluster_id() == "c"

    def test_a_cluster_that_is_replaced_is_gone_before(self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        catalog.cluster_id("another")
        seen: list[str | None] = []
        monkeypatch.setattr(
            catalog, "restore_topic", lambda *given, **named: seen.append(catalog.find_cluster_id()) or True
        )
        write_back(catalog, adoption_of(found(1, 10)), accept_loss=False, replace_cluster=True)
        assert (seen, catalog.find_cluster_id()) == (["adopting c"], "c")
        write_back(catalog, adoption_of(found(1, 10)), accept_loss=False, replace_cluster=False)
        assert seen[1:] == ["adopting c"], "the topic is not there yet"

    def test_a_repetition_stops_nobody(self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch) -> None:
        adoption = adoption_of(found(1, 10, {"g": PauseState()}))
        write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        monkeypatch.setattr(catalog, "begin_adoption", pytest.fail)
        write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        assert catalog.find_cluster_id() == "c"

    @pytest.mark.parametrize("is_interrupted", [True, False])
    def test_more_directories_count_when_it_is_repeated(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch, is_interrupted: bool
    ) -> None:
        """The state that an adoption wrote stayed, and what only the third replica had was lost."""
        first, ends = adoption_of(found(1, 10, {"g": PauseState()})), catalog.replace_cluster_id
        first.brokers = {1: "s"}

        def interrupted(wanted: str) -> None:
            if wanted == "c":
                raise KeyboardInterrupt
            ends(wanted)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            if is_interrupted:
                patch.setattr(catalog, "replace_cluster_id", interrupted)
            write_back(catalog, first, accept_loss=False, replace_cluster=False)
        assert (catalog.find_cluster_id() == "c") is not is_interrupted
        assert state_in(catalog).isr == (1,)
        both = adoption_of(found(1, 10), found(2, 20), saved=Saved(1, [replace(KEYED, name="g")]))
        both.topics["id"] = replace(TOPIC, config=wire.TopicConfig(retention_ms=5_000))
        assert "topic t: 1 partitions" in "".join(write_back(catalog, both, accept_loss=False, replace_cluster=False))
        assert state_in(catalog).isr == (2,)
        assert catalog.topic("t").config.retention_ms == 5_000
        assert catalog.group("g").config.ordering == "key"


class TestAnOlderState:
    """ZooKeeper was restored from a copy that is older than the directories."""

    @pytest.mark.parametrize(
        ("then", "now"),
        [
            ([found(1, 10), found(2, 10), found(3, 10)], [later(1), later(2), found(3, 10)]),
            ([found(1, 10), found(2, 10), found(3, 10)], [found(1, 100), found(2, 100), found(3, 10)]),
        ],
        ids=["a later epoch", "the same epoch"],
    )
    def test_who_was_in_sync_then_is_not_now(
        self, catalog: Catalog, then: list[ReplicaFound], now: list[ReplicaFound]
    ) -> None:
        write_back(catalog, adoption_of(*then), accept_loss=False, replace_cluster=False)
        run(catalog)
        before = state_in(catalog)
        assert before.isr == (1, 2, 3)
        said = write_back(catalog, adoption_of(*now), accept_loss=False, replace_cluster=False)
        assert any("in place of an older state" in each for each in said)
        after = state_in(catalog)
        assert after.isr == (1, 2)
        assert after.leader_epoch > max(before.leader_epoch, *(each.highest_epoch for each in now))

    def test_partitions_that_were_added_since_come_back(self, catalog: Catalog) -> None:
        write_back(catalog, adoption_of(found(1, 10)), accept_loss=False, replace_cluster=False)
        grown = adoption_of(found(1, 10))
        grown.topics[TOPIC.topic_id] = replace(TOPIC, partitions=3)
        write_back(catalog, grown, accept_loss=False, replace_cluster=False)
        assert catalog.topic("t").partitions == len(catalog.partitions(catalog.topic("t"))) == 3

    def test_a_state_that_brokers_used_is_not_replaced_by_what_fewer_directories_have(
        self, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Not even when the adoption that left it alone is interrupted, and repeated."""
        used = PartitionState(1, 9, (1, 3), (1, 2, 3), {1: "s", 3: "s"}, {1: 5, 3: 6})
        catalog.cluster_id("c")
        run(catalog)
        catalog.restore_topic(TOPIC, [used])
        adoption = adoption_of(replace_found(found(2, 10), last_epoch=5, highest_epoch=5))
        adoption.topics["gone"] = replace(TOPIC, name="gone", topic_id="gone")

        def interrupted(*given: object, **named: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(catalog, "restore_topic", interrupted)
            with pytest.raises(KeyboardInterrupt):
                write_back(catalog, adoption, accept_loss=True, replace_cluster=False)
        for _ in range(2):
            write_back(catalog, adoption, accept_loss=True, replace_cluster=False)
            assert state_in(catalog) == used

    def test_only_partitions_that_are_older_are_replaced(self, catalog: Catalog) -> None:
        used = [
            PartitionState(isr[0], 9, isr, isr, dict.fromkeys(isr, "s"), dict.fromkeys(isr, 5))
            for isr in ((1, 2), (3,))
        ]
        topic = replace(TOPIC, partitions=2)
        catalog.cluster_id("c")
        run(catalog)
        catalog.restore_topic(topic, used)
        adoption = adoption_of(found(1, 10), found(2, 20))
        adoption.topics["id"] = topic
        write_back(catalog, adoption, accept_loss=True, replace_cluster=False)
        after = {number: held.value for number, held in catalog.partitions(catalog.topic("t")).items()}
        assert (after[0].isr, after[0].leader_epoch, after[1]) == ((2,), 10, used[1])

    @pytest.mark.parametrize("given", [(1, 2, 3), (3,)])
    def test_a_partition_that_was_missing_is_found_later(self, catalog: Catalog, given: tuple[int, ...]) -> None:
        """What a first adoption began empty is not replaced without the directories that it is in."""
        first = adoption_of()
        first.brokers = {1: "s", 2: "s"}
        write_back(catalog, first, accept_loss=True, replace_cluster=False)
        before = state_in(catalog)
        assert before.isr == (1, 2)
        more = adoption_of(found(3, 10))
        more.brokers = dict.fromkeys(given, "s")
        write_back(catalog, more, accept_loss=True, replace_cluster=False)
        assert state_in(catalog).isr == ((3,) if len(given) == 3 else before.isr)

    def test_a_deleted_topic_stays_deleted(self, catalog: Catalog) -> None:
        """Its folder is still on a broker that was away."""
        write_back(catalog, adoption_of(found(1, 10)), accept_loss=False, replace_cluster=False)
        run(catalog)
        catalog.delete_topic("t", now_ms=1)
        write_back(catalog, adoption_of(found(1, 10)), accept_loss=False, replace_cluster=False)
        assert catalog.find_topic("t") is None

    def test_a_disk_that_was_begun_again_replaces_nobody_who_is_not_given(self, catalog: Catalog) -> None:
        used = PartitionState(1, 9, (1, 2), (1, 2, 3), {1: "s", 2: "s"}, {1: 5, 2: 6})
        catalog.cluster_id("c")
        run(catalog)
        catalog.restore_topic(TOPIC, [used])
        again = replace_found(found(2, 10), store_uuid="s/1")
        fewer = adoption_of(again, found(3, 10))
        fewer.brokers = {2: "s", 3: "s"}
        write_back(catalog, fewer, accept_loss=True, replace_cluster=False)
        assert state_in(catalog) == used
        write_back(catalog, adoption_of(again, found(1, 10)), accept_loss=True, replace_cluster=False)
        assert state_in(catalog).store_uuids == {1: "s", 2: "s/1"}

    def test_members_that_are_not_given_stay_out_of_sync(self, catalog: Catalog) -> None:
        used = PartitionState(1, 1, (1, 2), (1, 2, 3), {1: "s", 2: "s"}, {1: 5, 2: 6})
        catalog.cluster_id("c")
        run(catalog)
        catalog.restore_topic(TOPIC, [used])
        fewer = adoption_of(later(2))
        fewer.brokers = {2: "s"}
        write_back(catalog, fewer, accept_loss=True, replace_cluster=False)
        assert (state_in(catalog).isr, state_in(catalog).replicas) == ((2,), (1, 2, 3))

    def test_settings_of_a_later_state_stay(self, catalog: Catalog) -> None:
        brokers = {1: BrokerState("http://b1", 1, "s")}
        write_back(catalog, adoption_of(found(1, 10)), accept_loss=False, replace_cluster=False)
        run(catalog)
        catalog.alter_topic("t", wire.AlterTopic(partitions=2, config={"retention_ms": 5_000}), brokers=brokers)
        before = catalog.partitions(catalog.topic("t"))
        write_back(catalog, adoption_of(found(1, 10)), accept_loss=False, replace_cluster=False)
        assert (catalog.topic("t").config.retention_ms, catalog.partitions(catalog.topic("t"))) == (5_000, before)

    def test_a_broker_that_is_not_given_may_have_later_epochs(self) -> None:
        adoption = adoption_of(found(1, 10))
        near = adoption.partitions(TOPIC)[0].leader_epoch
        adoption.missing = {2: "http://b2"}
        assert adoption.partitions(TOPIC)[0].leader_epoch == near + EPOCHS_APART


class TestLocks:
    def test_the_directories_stay_locked_until_it_is_done(self, tmp_path: Path) -> None:
        path = directory(tmp_path / "1")
        with ExitStack() as opened:
            read_directories([path], opened)
            with pytest.raises(DirectoryInUse):
                DataDirectory.open(path)
        DataDirectory.open(path).close()
