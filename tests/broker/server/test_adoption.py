"""Adoption: the state restored from given directories, and directories that do not belong together."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.domain import records, running

from portalmq import wire
from portalmq.broker.cluster.exits import EX_STORAGE, StartupError
from portalmq.broker.cluster.replicas import ADDED, BEGUN_AGAIN, Files, read_topic
from portalmq.broker.cluster.rpc.brokers import ReplicaLogEnd
from portalmq.broker.cluster.unclean_election import NotElected, choose
from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.server.adoption import (
    PRODUCER_IDS_APART,
    Adoption,
    Description,
    NotAdopted,
    ReplicaFound,
    known_brokers,
    remember_brokers,
    state_of,
    topic_of,
    write_back,
)
from portalmq.broker.server.adoption_reading import read_directories
from portalmq.broker.storage.disk import BROKERS_FILE, DataDirectory, read_brokers, read_identity
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.errors import CorruptFile, DiskFull
from portalmq.contract.schedules import SCHEDULE_IDS_FROM
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.locks import LockOutcome, LockTable
from portalmq.control_plane.plane import Create
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState, PartitionState, TopicState, broker_path, encode
from portalmq.errors import Fenced


def found(broker_id: int, last_epoch: int = 1, end: int = 10, **fields: object) -> ReplicaFound:
    return ReplicaFound(broker_id, f"store-{broker_id}", last_epoch, end, **{"highest_epoch": last_epoch, **fields})  # type: ignore[arg-type]


class TestWhoIsInSync:
    def test_all_that_hold_the_same_are(self) -> None:
        state = state_of([found(2), found(1), found(3)])
        assert state == PartitionState(None, 2, (1, 2, 3), (1, 2, 3), {n: f"store-{n}" for n in (1, 2, 3)}, {})

    def test_the_later_epoch_counts_more_than_the_longer_log(self) -> None:
        state = state_of([found(1, 3, 100), found(2, 4, 50), found(3, 4, 49)])
        assert (state.isr, state.replicas, state.leader_epoch) == ((2,), (1, 2, 3), 5)

    def test_the_new_epoch_is_above_every_epoch_seen(self) -> None:
        assert state_of([found(1, 3), found(2, 3, 4, highest_epoch=9)]).leader_epoch == 10
        assert state_of([found(1, 3), found(2, fault="damaged", highest_epoch=12)]).leader_epoch == 13

    def test_a_damaged_replica_is_not_in_sync(self) -> None:
        state = state_of([found(1, 2, 5), found(2, 9, 99, fault="broker 2: damaged")])
        assert (state.isr, state.replicas, state.store_uuids) == ((1,), (1, 2), {1: "store-1"})
        assert state_of([found(1, fault="x")]).isr == ()

    @given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), min_size=1, max_size=4))
    def test_no_in_sync_replica_holds_less_than_another(self, logs: list[tuple[int, int]]) -> None:
        state = state_of([found(number, *log) for number, log in enumerate(logs)])
        assert {logs[number] for number in state.isr} == {max(logs)}


def losses(replicas: list[ReplicaFound], config: wire.TopicConfig | None = None) -> list[str]:
    topic = TopicState("t", "id", 1, 1, len(replicas), config or wire.TopicConfig())
    return Adoption(topics={"id": topic}, replicas={("id", 0): replicas}).losses()


class TestWhatIsMissing:
    def test_a_broker_that_is_known_and_not_given_is_named(self) -> None:
        adoption = Adoption(missing={2: "http://b2"})
        assert adoption.losses() == ["the data directory of broker 2 (http://b2) is not among them"]

    def test_a_partition_without_a_whole_replica_is_named(self) -> None:
        assert losses([found(1, fault="broker 1: torn")]) == [
            "partition 0 of topic 't' has no whole replica: broker 1: torn"
        ]

    @pytest.mark.parametrize(
        ("replicas", "least", "is_loss"),
        [
            ([found(1), found(2), found(3)], None, False),
            ([found(1), found(2), found(3, fault="torn")], None, False),
            ([found(1), found(2), found(3, fault="torn")], 1, True),
            ([found(1), found(2), found(3, fault="torn")], 2, False),
            ([found(1), found(2), found(3, fault="torn")], 3, True),
            ([found(1, end=9), found(2), found(3, fault="torn")], None, True),
            ([found(1), found(2, fault="torn"), found(3, fault="torn")], None, True),
            ([found(1), found(2, fault="torn")], None, True),
            ([found(1, fault="torn"), *[found(n, 0, 0, joining=ADDED) for n in (2, 3)]], None, True),
            ([found(1, fault="torn"), *[found(n, 0, 0, joining=ADDED) for n in (2, 3, 4, 5)]], None, True),
            ([found(1, fault="torn"), found(2, 0, 0, joining=ADDED), found(3, 0, 0)], None, True),
            ([found(1), found(2), found(3, fault="torn", joining=ADDED)], None, False),
            ([found(1, 0, 0, joining=BEGUN_AGAIN), found(2, 0, 0, joining=BEGUN_AGAIN), found(3)], None, True),
            ([found(1, 0, 0, joining=BEGUN_AGAIN), found(2), found(3)], None, False),
            ([found(1, 0, 0, joining=BEGUN_AGAIN), found(2), found(3)], 1, True),
            ([found(1, 0, 0, joining=ADDED), found(2, 0, 0, joining=ADDED), found(3)], None, False),
        ],
    )
    def test_a_damaged_replica_that_may_have_held_most_is_named(self, replicas, least, is_loss) -> None:
        messages = losses(replicas, wire.TopicConfig(min_insync_replicas=least))
        assert bool(messages) == is_loss
        assert all("may lack what a damaged replica alone held: t" in loss for loss in messages)

    def test_a_partition_that_was_never_opened_begins_empty(self) -> None:
        topic = TopicState("t", "id", 1, 1, 3, wire.TopicConfig())
        adoption = Adoption(topics={"id": topic}, brokers={1: "a", 2: "b"})
        (state,) = adoption.partitions(topic)
        assert (set(state.isr), state.leader_epoch, state.store_uuids) == ({1, 2}, 1, {1: "a", 2: "b"})
        assert adoption.losses() == []

    def test_the_description_with_most_partitions_is_used(self) -> None:
        small = TopicState("t", "id", 2, 2, 3, wire.TopicConfig(retention_ms=3_600_000))
        grown = TopicState("t", "id", 5, 2, 3, wire.TopicConfig())
        latest = topic_of([Description(2, 1, small), Description(1, 2, grown), Description(0, 3, small)])
        assert latest == msgspec.structs.replace(small, partitions=5)

    def test_a_partition_that_no_replica_in_sync_is_left_of_is_named(self) -> None:
        (loss,) = losses([found(2, 0, 0, joining=ADDED), found(3, 0, 0, joining=ADDED)])
        assert loss == "partition 0 of topic 't' has no replica that was in sync already"


class TestRememberingBrokers:
    def test_those_that_are_away_stay(self, tmp_path: Path) -> None:
        remember_brokers(tmp_path, {1: "http://one", 2: "http://two"})
        remember_brokers(tmp_path, {1: "http://moved"})
        assert known_brokers(tmp_path) == {1: "http://moved", 2: "http://two"}

    def test_it_is_written_only_when_it_changes(self, tmp_path: Path) -> None:
        remember_brokers(tmp_path, {1: "http://one"})
        before = (tmp_path / BROKERS_FILE).stat().st_mtime_ns
        remember_brokers(tmp_path, {1: "http://one"})
        assert (tmp_path / BROKERS_FILE).stat().st_mtime_ns == before

    def test_a_directory_without_the_file_has_no_brokers(self, tmp_path: Path) -> None:
        assert known_brokers(tmp_path) == {}


def directory(path: Path, cluster_id: str = "c", broker_id: int = 1) -> Path:
    DataDirectory.open(path, cluster_id=cluster_id, broker_id=broker_id).close()
    return path


class TestDirectoriesThatDoNotFit:
    def test_of_two_clusters(self, tmp_path: Path) -> None:
        with pytest.raises(NotAdopted, match="adopt the directories of one cluster") as refused:
            read_directories([directory(tmp_path / "a"), directory(tmp_path / "b", "other", 2)])
        assert refused.value.exit_code == 73

    def test_of_one_broker(self, tmp_path: Path) -> None:
        with pytest.raises(NotAdopted, match="are both of broker 1"):
            read_directories([directory(tmp_path / "a"), directory(tmp_path / "b")])

    def test_one_that_is_in_use(self, tmp_path: Path) -> None:
        held = DataDirectory.open(tmp_path / "a")
        with pytest.raises(NotAdopted, match="is used by the process"):
            read_directories([tmp_path / "a"])
        held.close()

    def test_a_path_that_is_not_a_data_directory(self, tmp_path: Path) -> None:
        for path in (tmp_path, tmp_path / "nowhere"):
            with pytest.raises(NotAdopted, match="no broker's data directory"):
                read_directories([path])
        assert not (tmp_path / "nowhere").exists()


def flipped(content: bytes) -> Iterator[bytes]:
    for bit in range(8 * len(content)):
        yield content[: bit // 8] + bytes([content[bit // 8] ^ 1 << bit % 8]) + content[bit // 8 + 1 :]


def complaint(read: Callable[[Path], object], path: Path) -> str:
    """Return the beginning of what `read` says of a damaged file, "" if it takes it for whole."""
    try:
        read(path)
    except CorruptFile as fault:
        return str(fault).partition(":")[0]
    return ""


class TestFlippedBits:
    """Each bit of the small files: what is read is of the directory, or an error says that the file is damaged."""

    def test_of_the_brokers(self, tmp_path: Path) -> None:
        remember_brokers(tmp_path, {1: "http://one", 2: "http://two"})
        file = tmp_path / BROKERS_FILE
        for content in flipped(file.read_bytes()):
            file.write_bytes(content)
            assert complaint(read_brokers, tmp_path) in ("", f"{file} is damaged")
            assert isinstance(known_brokers(tmp_path), dict)

    def test_of_the_identity(self, tmp_path: Path) -> None:
        file = directory(tmp_path) / "identity.json"
        for content in (*flipped(file.read_bytes()), b"\xff"):
            file.write_bytes(content)
            assert complaint(read_identity, tmp_path) in ("", f"{file} is damaged")
        with pytest.raises(NotAdopted, match="restore it from a copy"):
            read_directories([tmp_path])

    def test_of_a_topic(self, tmp_path: Path) -> None:
        folder = tmp_path / "orders@id"
        folder.mkdir()
        file = folder / "topic.json"
        content = encode(TopicState("orders", "id", 2, 2, 3, wire.TopicConfig(min_insync_replicas=1)))
        damaged = 0
        for each in flipped(content):
            file.write_bytes(each)
            topic = read_topic(folder)
            damaged += topic is None
            assert topic is None or (topic.name, topic.topic_id) == ("orders", "id")
        assert damaged > len(content)

    def test_a_list_that_is_damaged_is_a_loss_unless_another_one_is_there(self, tmp_path: Path) -> None:
        paths = [directory(tmp_path / "1"), directory(tmp_path / "2", broker_id=2)]
        remember_brokers(paths[0], {1: "http://one", 2: "http://two"})
        (paths[1] / BROKERS_FILE).write_bytes(b"\xff")
        assert read_directories(paths).losses() == []
        (loss,) = read_directories(paths[1:]).losses()
        assert "is damaged" in loss
        assert "one may be missing" in loss

    def test_the_settings_of_a_topic_come_from_a_directory_that_has_them(self, tmp_path: Path) -> None:
        paths = [directory(tmp_path / "1"), directory(tmp_path / "2", broker_id=2)]
        topic = TopicState("orders", "id", 1, 1, 2, wire.TopicConfig(retention_ms=3_600_000))
        for path in paths:
            Files(path, "c", path.name).describe(topic)
        for path in paths:
            (path / "partitions" / "orders@id" / "topic.json").write_bytes(b'{"config": {"a": "\xff"}}')
            adoption = read_directories(paths)
            assert adoption.topics["id"].config == (topic.config if path is paths[0] else wire.TopicConfig())
        assert adoption.undescribed == {"id"}

    def test_a_damaged_replica_of_a_topic_without_settings_may_have_held_most(self) -> None:
        topic = TopicState("t", "id", 1, 1, 3, wire.TopicConfig())
        replicas = [found(1), found(2), found(3, fault="torn")]
        adoption = Adoption(topics={"id": topic}, replicas={("id", 0): replicas}, undescribed={"id"})
        assert "may lack what a damaged replica alone held" in adoption.losses()[0]


class TestWritingBack:
    @pytest.fixture
    def catalog(self, tmp_path: Path) -> Catalog:
        plane = Standalone(tmp_path / "plane")
        plane.start()
        return Catalog(plane)

    @pytest.fixture
    def adoption(self, tmp_path: Path) -> Adoption:
        data = tmp_path / "data"
        with running(data) as fixture:
            cluster_id = fixture.broker.cluster_id
            fixture.broker.create_topic("t", wire.CreateTopic(partitions=2))
            identity = fixture.broker.new_producer(None)
            stamp = wire.ProducerStamp(identity.id, identity.epoch, 0)
            fixture.broker.produce_range("t", ProduceRequest(records("a", "b"), partition=0, producer=stamp))
            fixture.broker.receive_handler.receive("g", wire.ReceiveRequest(topics=["t"]), None)
        (data / "identity.json").write_text(f'{{"cluster_id": "{cluster_id}", "broker_id": 1, "store_uuid": "store"}}')
        return read_directories([data])

    def test_the_new_epoch_is_above_those_of_a_damaged_replica(self, tmp_path: Path, adoption: Adoption) -> None:
        data = tmp_path / "data"
        (topic,) = adoption.topics.values()
        epochs = EpochFile(data)
        epochs.save({(topic.topic_id, 0): 40})
        epochs.close()
        for path in (data / "partitions" / f"t@{topic.topic_id}" / "0").glob("0*.sqlite"):
            path.write_bytes(b"damaged")
        (state, _) = read_directories([data]).partitions(topic)
        assert (state.isr, state.leader_epoch) == ((), 41)

    @pytest.mark.parametrize(
        "fault",
        [DiskFull("no room"), OSError(errno.ENOSPC, "No space left"), OSError(errno.EACCES, "Permission denied")],
    )
    @pytest.mark.parametrize("method", ["open", "read_joining"])
    def test_a_full_disk_is_no_damage_and_no_permission_is_none(
        self, tmp_path: Path, adoption: Adoption, monkeypatch: pytest.MonkeyPatch, fault: Exception, method: str
    ) -> None:
        def fails(self: Files, *given: object, **named: object) -> None:
            raise fault

        monkeypatch.setattr(Files, method, fails)
        with pytest.raises(
            NotAdopted, match=rf"{str(fault).replace('[', '.').replace(']', '.')}\. .*adopt again"
        ) as refused:
            read_directories([tmp_path / "data"])
        assert refused.value.exit_code == EX_STORAGE

    def test_topics_groups_ids_and_claims_come_back(self, catalog: Catalog, adoption: Adoption) -> None:
        messages = write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        assert messages[1] == "topic t: 2 partitions"
        assert catalog.find_cluster_id() == adoption.cluster_id
        assert {number: held.value.store_uuid for number, held in catalog.claims().items()} == {1: "store"}
        topic = catalog.topic("t")
        states = [held.value for held in catalog.partitions(topic).values()]
        assert [(state.leader, state.isr, state.store_uuids) for state in states] == [(None, (1,), {1: "store"})] * 2
        assert all(state.leader_epoch >= 2 for state in states)
        assert list(catalog.groups()) == ["g"]
        assert catalog.next_producer(None).id > PRODUCER_IDS_APART

    @pytest.mark.parametrize("paused", [True, False])
    def test_groups_stay_paused_or_not_and_a_later_change_counts(
        self, tmp_path: Path, catalog: Catalog, paused: bool
    ) -> None:
        """Found by `make simulate-shell SEED=52038`: a clock had been a day ahead, and a pause did not count."""
        with running(tmp_path / "data") as before:
            before.broker.create_topic("t", wire.CreateTopic())
            assert not before.broker.receive_handler.receive("g", wire.ReceiveRequest(["t"]), None)
            before.clock.day_ms += wire.DAY_MS
            for wanted in [not paused, paused]:
                before.broker.group_admin.pause("g", paused=wanted, reason=f"{wanted}", by="me")
            cluster_id = before.broker.cluster_id
            (delivery,) = (each.delivery["g"] for each in before.broker.topics.partitions())
        identity = f'{{"cluster_id": "{cluster_id}", "broker_id": 1, "store_uuid": "store"}}'
        (tmp_path / "data" / "identity.json").write_text(identity)
        adoption = read_directories([tmp_path / "data"])
        for _ in range(2):
            write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
            pause = catalog.group("g").pause
            assert (pause.paused, pause.number, pause.reason) == (paused, delivery.pause.number, f"{paused}")
        later = catalog.pause_group("g", paused=not paused, at_ms=1_700_000_000_000).pause
        assert delivery.is_paused(later.number, later.paused) is not paused
        write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        assert catalog.group("g").pause == later

    def test_fencing_tokens_rise_over_adoptions(self, tmp_path: Path, catalog: Catalog, adoption: Adoption) -> None:
        locks = LockTable(catalog.plane)

        def ask(name: str, owner: str) -> LockOutcome:
            return locks.ask(name, owner, 1_000, lambda *_: 0, {})

        tokens = [ask("held", "a").state.token]
        for name in "first", "second":
            adoption = replace(adoption, last_token=adoption.last_token + 1_000)
            write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
            with pytest.raises(Fenced):
                locks.renew("held", "a", tokens[-1], None, lambda *_: 0)
            assert not ask("held", "b").granted  # its ttl runs
            tokens.append(ask("held", "a").state.token)
            assert ask(name, "b").state.token > tokens[-1] > tokens[-2]
        assert tokens[1] > 1_000 * 10**9

    def test_tokens_rise_where_the_clock_is_behind_what_the_logs_have(self, tmp_path: Path) -> None:
        ahead_ms = 4_000_000_000_000
        with running(tmp_path / "data") as before:
            before.broker.create_topic("t", wire.CreateTopic())
            before.clock.day_ms = ahead_ms
            before.broker.produce("t", ProduceRequest(records("a")))
            cluster_id = before.broker.cluster_id
        identity = f'{{"cluster_id": "{cluster_id}", "broker_id": 1, "store_uuid": "store"}}'
        (tmp_path / "data" / "identity.json").write_text(identity)
        assert read_directories([tmp_path / "data"]).last_token >= ahead_ms

    def test_the_ids_of_producers_stay_below_those_of_schedules(self, tmp_path: Path) -> None:
        with running(tmp_path / "other") as fixture:
            cluster_id = fixture.broker.cluster_id
            fixture.broker.create_topic("t", wire.CreateTopic())
            stamp = Stamp(SCHEDULE_IDS_FROM + 7, 1_000, 0)
            fixture.broker.topics.get("t").local[0].append(tuple(records("tick")), 4, stamp=stamp)
        identity = f'{{"cluster_id": "{cluster_id}", "broker_id": 1, "store_uuid": "store"}}'
        (tmp_path / "other" / "identity.json").write_text(identity)
        found = read_directories([tmp_path / "other"])
        assert 7 + PRODUCER_IDS_APART <= found.next_producer_id < SCHEDULE_IDS_FROM

    def test_ids_that_are_in_no_log_are_not_issued_again(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Two producers with one id would take each other's batches for their own."""
        times = count(10**18, 10**9)
        monkeypatch.setattr("portalmq.broker.server.adoption.time", SimpleNamespace(time_ns=lambda: next(times)))
        issued: list[int] = []
        for place in ("lost", "restored", "restored again"):
            plane = Standalone(tmp_path / place)
            plane.start()
            if issued:
                write_back(Catalog(plane), Adoption("c"), accept_loss=False, replace_cluster=False)
            issued += [Catalog(plane).next_producer(None).id for _ in range(10)]  # each broker takes a block of ids
        assert issued == sorted(set(issued))

    def test_a_repeat_changes_nothing(self, catalog: Catalog, adoption: Adoption) -> None:
        write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        before = catalog.partitions(catalog.topic("t"))
        messages = write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        assert "topic t: is there already" in messages
        assert catalog.partitions(catalog.topic("t")) == before

    def test_a_loss_has_to_be_accepted_by_name(self, catalog: Catalog, adoption: Adoption) -> None:
        adoption.missing = {2: "http://b2"}
        with pytest.raises(NotAdopted, match="--i-accept-data-loss"):
            write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        assert (catalog.find_cluster_id(), catalog.topics()) == (None, {})
        messages = write_back(catalog, adoption, accept_loss=True, replace_cluster=False)
        assert "accepted: the data directory of broker 2 (http://b2) is not among them" in messages

    def test_brokers_that_run_are_in_the_way(self, catalog: Catalog, adoption: Adoption) -> None:
        catalog.register_broker(4, BrokerState("http://b4", 1, "s"))
        with pytest.raises(NotAdopted, match="brokers 4 are registered"):
            write_back(catalog, adoption, accept_loss=True, replace_cluster=True)

    def test_a_broker_that_registered_through_another_server_is_in_the_way(
        self, catalog: Catalog, adoption: Adoption, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late = BrokerState("http://b4", 1, "s")
        monkeypatch.setattr(catalog.plane, "sync", lambda: catalog.plane.commit(Create(broker_path(4), encode(late))))
        with pytest.raises(NotAdopted, match="brokers 4 are registered"):
            write_back(catalog, adoption, accept_loss=True, replace_cluster=True)
        assert catalog.find_cluster_id() is None

    def test_another_cluster_with_topics_is_never_replaced(self, catalog: Catalog, adoption: Adoption) -> None:
        catalog.cluster_id("other")
        with pytest.raises(NotAdopted, match="--replace-cluster"):
            write_back(catalog, adoption, accept_loss=False, replace_cluster=False)
        catalog.create_topic("u", wire.CreateTopic(), brokers={1: BrokerState("http://b1", 1, "s")})
        with pytest.raises(NotAdopted, match="under a chroot of their own"):
            write_back(catalog, adoption, accept_loss=True, replace_cluster=True)
        assert catalog.find_cluster_id() == "other"

    def test_another_topic_of_the_name_is_left_alone(self, catalog: Catalog, adoption: Adoption) -> None:
        catalog.cluster_id(adoption.cluster_id)
        other, _ = catalog.create_topic("t", wire.CreateTopic(), brokers={1: BrokerState("http://b1", 1, "s")})
        with pytest.raises(NotAdopted, match="another topic 't'"):
            write_back(catalog, adoption, accept_loss=True, replace_cluster=True)
        assert catalog.topic("t") == other


def standing(last_epoch: int, end: int, store: str = "s", fault: str = "") -> ReplicaLogEnd:
    return ReplicaLogEnd(store, 1, last_epoch, end, 0, fault)


class TestChoosingByName:
    HELD = PartitionState(None, 5, (1,), (1, 2, 3), {1: "s1", 2: "s2", 3: "s3"}, {})

    def test_the_replica_with_most_of_the_latest_epoch_leads(self) -> None:
        assert choose(self.HELD, {2: standing(4, 90), 3: standing(5, 10)}) == 3
        assert choose(self.HELD, {2: standing(5, 11), 3: standing(5, 10)}) == 2
        assert choose(self.HELD, {2: standing(5, 10), 3: standing(5, 10)}) == 2

    def test_the_one_that_is_named_leads_if_it_can(self) -> None:
        assert choose(self.HELD, {2: standing(4, 90), 3: standing(5, 10)}, 2) == 2
        with pytest.raises(NotElected, match="broker 1 cannot lead"):
            choose(self.HELD, {2: standing(4, 90)}, 1)
        with pytest.raises(NotElected, match="a page is torn"):
            choose(self.HELD, {2: standing(4, 90, fault="a page is torn")}, 2)

    def test_it_is_refused_while_one_in_sync_is_there(self) -> None:
        with pytest.raises(NotElected, match="broker 1 is there"):
            choose(self.HELD, {1: standing(5, 20, "s1"), 2: standing(4, 90)})

    @pytest.mark.parametrize("first", [standing(5, 20, "emptied"), standing(5, 20, "s1", fault="damaged")])
    def test_a_recorded_in_sync_replica_that_is_lost_does_not_prevent_the_election(self, first: ReplicaLogEnd) -> None:
        assert choose(self.HELD, {1: first, 2: standing(6, 90)}) == 2

    def test_an_empty_one_does_not_lead_by_itself_while_something_was_set_aside(self) -> None:
        aside = ("/data/lost+found/t@id/0 (4,096 bytes, offsets 0 to 0 and on)",)
        emptied = msgspec.structs.replace(standing(0, 0), set_aside=aside)
        with pytest.raises(NotElected, match=r"broker 3: /data/lost\+found") as refused:
            choose(self.HELD, {2: standing(0, 0), 3: emptied})
        assert refused.value.exit_code == 73
        assert choose(self.HELD, {2: standing(0, 0), 3: emptied}, 2) == 2
        assert choose(self.HELD, {2: standing(1, 1), 3: emptied}) == 2
        with pytest.raises(NotElected, match=r"none is there with a replica that is whole.*lost\+found"):
            choose(self.HELD, {3: msgspec.structs.replace(emptied, fault="damaged")})

    def test_one_that_lost_its_end_leads_when_there_is_no_better_one(self) -> None:
        lossy = msgspec.structs.replace(standing(5, 10, "s1"), lossy="its log ends at 10")
        assert choose(self.HELD, {1: lossy}) == 1
        assert choose(self.HELD, {1: lossy, 2: standing(5, 11)}) == 2

    def test_no_replica_gives_an_empty_isr(self) -> None:
        for log_ends in ({}, {2: standing(1, 1, fault="damaged")}):
            with pytest.raises(StartupError, match="none is there with a replica that is whole") as refused:
                choose(self.HELD, log_ends)
            assert refused.value.exit_code == 69
