from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import pytest
from support.interrupted import Interrupted

from portalmq import wire
from portalmq.control_plane import state
from portalmq.control_plane.catalog import ATTEMPTS, PRODUCER_ID_BLOCK, BrokerIdTaken, Catalog
from portalmq.control_plane.plane import Create, PlaneUnavailable, VersionMismatch
from portalmq.control_plane.state import BrokerState
from portalmq.errors import (
    GroupModeMismatch,
    GroupNotFound,
    InvalidRequest,
    PortalMQError,
    TopicExists,
    TopicNotFound,
    Unavailable,
)

ONE = {1: BrokerState("http://localhost:5000", 4, "store-1")}
THREE = {number: BrokerState(f"http://localhost:500{number}", number, f"store-{number}") for number in (1, 2, 3)}


def create(catalog: Catalog, name: str = "t", **fields: object) -> tuple[state.TopicState, bool]:
    return catalog.create_topic(name, wire.CreateTopic(**fields), brokers=ONE)  # type: ignore[arg-type]


class TestTheCluster:
    def test_id_and_key_are_made_once_and_kept(self, plane: Interrupted, catalog: Catalog) -> None:
        made = catalog.cluster_id(), catalog.receipt_key()
        assert len(made[1]) == 32
        assert (catalog.cluster_id(), catalog.receipt_key()) == made
        assert (Catalog(plane).cluster_id(), Catalog(plane).receipt_key()) == made

    def test_when_two_brokers_make_the_key_the_first_wins(self, plane: Interrupted, catalog: Catalog) -> None:
        plane.meanwhile.append(lambda: plane.commit(Create(state.RECEIPT_KEY, b"first")))
        assert catalog.receipt_key() == b"first"

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    def test_a_lost_answer_makes_no_second_key(self, plane: Interrupted, catalog: Catalog, lost: str) -> None:
        setattr(plane, lost, 1)
        assert catalog.receipt_key() == catalog.receipt_key()


class TestBrokers:
    def test_a_registered_broker_is_listed(self, catalog: Catalog) -> None:
        catalog.register_broker(10, ONE[1])
        catalog.register_broker(9, ONE[1])
        assert list(catalog.brokers().items()) == [(9, ONE[1]), (10, ONE[1])]

    def test_a_restart_within_the_old_session_replaces_its_own_entry(self, catalog: Catalog) -> None:
        catalog.register_broker(1, BrokerState("http://old", 1, "store"))
        catalog.register_broker(1, BrokerState("http://new", 2, "store"))
        assert catalog.brokers() == {1: BrokerState("http://new", 2, "store")}

    def test_another_data_directory_cannot_take_the_id(self, catalog: Catalog) -> None:
        catalog.register_broker(1, BrokerState("http://first", 1, "store"))
        with pytest.raises(BrokerIdTaken, match="http://first"):
            catalog.register_broker(1, BrokerState("http://second", 2, "other store"))


class TestCreatingTopics:
    def test_a_misspelt_setting_is_refused_with_the_valid_names(self, catalog: Catalog) -> None:
        with pytest.raises(InvalidRequest, match=r"retention_hours.*the settings are .*retention_ms, retention_bytes"):
            catalog.create_topic("t", wire.CreateTopic(config={"retention_hours": 1}), brokers=THREE)

    def test_a_new_topic_has_a_leader_for_each_partition(self, catalog: Catalog) -> None:
        topic, created = catalog.create_topic("t", wire.CreateTopic(partitions=6), brokers=THREE)
        assert created
        assert (topic.partitions, topic.first_partitions, topic.replication_factor) == (6, 6, 3)
        held = catalog.partitions(topic)
        assert sorted(partition.value.leader or 0 for partition in held.values()) == [1, 1, 2, 2, 3, 3]
        for partition in held.values():
            assert partition.value.leader_epoch == 1
            assert partition.value.isr == partition.value.replicas
            assert partition.value.store_uuids == {1: "store-1", 2: "store-2", 3: "store-3"}
            assert partition.value.incarnations == {1: 1, 2: 2, 3: 3}

    def test_with_fewer_brokers_than_the_default_factor_it_starts_on_those(self, catalog: Catalog) -> None:
        topic, _ = create(catalog)
        assert topic.replication_factor == 3
        assert catalog.partitions(topic)[0].value.replicas == (1,)

    def test_a_repeated_creation_with_equal_fields_returns_the_topic(self, catalog: Catalog) -> None:
        first, _ = create(catalog, partitions=2, config={"retention_ms": 5})
        for fields in ({}, {"partitions": 2}, {"config": {"retention_ms": 5}}, {"config": {"cleanup": "delete"}}):
            assert create(catalog, **fields) == (first, False)

    @pytest.mark.parametrize(
        ("fields", "named"),
        [
            (
                {"partitions": 3},
                r"exists with other settings \(now partitions 2\)\. .* PATCH, or with `portalmq topic alter`",
            ),
            ({"replication_factor": 1}, r"replication_factor 3\)\. .* keeps its replication_factor"),
            ({"config": {"retention_ms": None}}, r"config\.retention_ms 604800000\)\. Change"),
        ],
    )
    def test_a_repeated_creation_with_other_fields_is_refused(
        self, catalog: Catalog, fields: dict[str, object], named: str
    ) -> None:
        create(catalog, partitions=2)
        with pytest.raises(TopicExists, match=named):
            create(catalog, **fields)

    @pytest.mark.parametrize(
        "fields",
        [
            {"config": {"retention": 1}},
            {"config": {"retention_ms": "long"}},
            {"config": {"retention_ms": 0}},
            {"replication_factor": 2},
            {"config": {"min_insync_replicas": 4}},
        ],
    )
    def test_wrong_settings_are_refused(self, catalog: Catalog, fields: dict[str, object]) -> None:
        with pytest.raises(InvalidRequest):
            create(catalog, **fields)
        assert catalog.topics() == {}

    @pytest.mark.parametrize("name", ["", "a/b", "..", "a b", "x" * 191])
    def test_a_name_outside_the_pattern_is_refused(self, catalog: Catalog, name: str) -> None:
        for call in (lambda: create(catalog, name), lambda: catalog.topic(name), lambda: catalog.ensure_group(name)):
            with pytest.raises(InvalidRequest):
                call()

    def test_brokers_that_go_during_a_creation_do_not_fail_it(self, plane: Interrupted, catalog: Catalog) -> None:
        """Found by the simulated shell: an error of the program when the last one went."""
        present, children = dict(ONE), plane.children

        def go(path: str) -> list[str]:
            present.clear()
            return children(path)

        plane.children = go  # type: ignore[method-assign]
        topic, _ = catalog.create_topic("t", wire.CreateTopic(), brokers=present)
        assert present == {}
        held = catalog.partition(topic.topic_id, 0)
        assert held is not None
        assert held.value.replicas == (1,)

    def test_without_brokers_a_creation_has_to_wait(self, catalog: Catalog) -> None:
        with pytest.raises(Unavailable):
            catalog.create_topic("t", wire.CreateTopic(), brokers={})

    def test_a_thousand_partitions_take_several_commits_and_appear_at_once(
        self, plane: Interrupted, catalog: Catalog
    ) -> None:
        seen: list[int] = []
        plane.watch(lambda _path: seen.append(len(catalog.topics())))
        topic, _ = create(catalog, partitions=1_000)
        assert len(catalog.partitions(topic)) == 1_000
        assert seen == sorted(seen), "the topic appeared before all of its partitions"
        assert seen.count(0) > 900

    def test_of_two_concurrent_creations_one_wins_and_keeps_its_partitions(
        self, plane: Interrupted, catalog: Catalog
    ) -> None:
        plane.meanwhile = [lambda: None, lambda: create(Catalog(plane), partitions=150)]
        topic, created = create(catalog, partitions=150)
        assert not created
        assert catalog.sweep() == 1
        assert plane.children(state.PARTITIONS) == [topic.topic_id]
        assert len(catalog.partitions(topic)) == 150

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    def test_a_lost_answer_is_looked_up(self, plane: Interrupted, catalog: Catalog, lost: str) -> None:
        setattr(plane, lost, 1)
        topic, created = create(catalog)
        assert created
        assert catalog.topics() == {"t": topic}

    def test_a_refusal_after_a_lost_answer_is_decided_by_what_was_read_after_a_sync(
        self, plane: Interrupted, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A second sync would give no new information; it fails, as if the lost attempt could not have been applied."""
        real = plane.sync

        def sync() -> None:
            if plane.syncs:
                raise PlaneUnavailable("the control plane is away")
            real()

        def another() -> None:
            create(Catalog(plane), partitions=7)
            plane.lose_requests = 1

        plane.meanwhile = [another]
        monkeypatch.setattr(plane, "sync", sync)
        with pytest.raises(TopicExists):
            create(catalog, partitions=3)

    @pytest.mark.parametrize("before", range(6))
    def test_a_sweep_during_a_creation_removes_nothing_in_use(
        self, plane: Interrupted, catalog: Catalog, before: int
    ) -> None:
        plane.meanwhile = [lambda: None] * before + [lambda: Catalog(plane).sweep()]
        topic, created = create(catalog, partitions=150)
        assert created
        assert len(catalog.partitions(topic)) == 150


class TestRestoringTopics:
    """`portalmq adopt` writes topics back."""

    @pytest.mark.parametrize("late_by", range(20))
    @pytest.mark.parametrize(
        ("partitions", "late"),
        [(1, "/topics/t"), *((150, f"/{it}") for it in ("partitions/id", "topics/t")), (350, "/topics/t")],
    )
    def test_a_commit_that_comes_late_costs_no_partition(
        self, plane: Interrupted, catalog: Catalog, partitions: int, late: str, late_by: int
    ) -> None:
        """Found by `make simulate-shell SEED=56798`: the attempt after it removed the partitions of the first."""
        topic = state.TopicState("t", "id", partitions, partitions, 1, wire.TopicConfig())
        plane.late, plane.late_by = late, late_by
        seen: list[int] = []
        look = super(Interrupted, plane).get_children  # which lets no time pass
        plane.watch(lambda _path: seen.extend(len(look("/partitions/id")) for _ in look(state.TOPICS)))
        assert catalog.restore_topic(topic, [state.PartitionState(1, 1, (1,), (1,), {}, {})] * partitions)
        for _ in range(late_by + 1):
            plane.sync()
        assert catalog.topics() == {"t": topic}
        assert len(catalog.partitions(topic)) == partitions
        assert set(seen) <= {partitions}, "the topic appeared before all of its partitions"
        assert not catalog.restore_topic(topic, [state.PartitionState(1, 1, (1,), (1,), {}, {})] * partitions)

    @pytest.mark.parametrize("before", range(5))
    def test_a_sweep_of_an_earlier_attempt_removes_nothing_that_a_later_one_restores(
        self, plane: Interrupted, catalog: Catalog, before: int
    ) -> None:
        topic, partitions = left_by_an_attempt(plane)
        restored: list[bool] = []
        plane.meanwhile = [lambda: None] * before + [
            lambda: restored.append(Catalog(plane).restore_topic(topic, partitions))
        ]
        catalog.sweep()
        if not restored:
            plane.meanwhile.pop()()
        assert restored == [True]
        assert len(catalog.partitions(topic)) == 300

    @pytest.mark.parametrize("late_by", range(20))
    @pytest.mark.parametrize("late", ["/partitions/id/0", "/partitions/id/249"])
    def test_a_removal_that_comes_late_removes_nothing_that_was_restored(
        self, plane: Interrupted, catalog: Catalog, late: str, late_by: int
    ) -> None:
        topic, partitions = left_by_an_attempt(plane)
        plane.late, plane.late_by = late, late_by
        assert catalog.restore_topic(topic, partitions)
        for _ in range(late_by + 1):
            plane.sync()
        assert len(catalog.partitions(topic)) == 300


def left_by_an_attempt(plane: Interrupted) -> tuple[state.TopicState, list[state.PartitionState]]:
    """Return a topic of 300 partitions; of an attempt to restore it 250 are there."""
    partitions = [state.PartitionState(1, 1, (1,), (1,), {}, {})] * 300
    plane.commit(Create("/partitions/id"))
    for number in range(250):
        plane.commit(Create(state.partition_path("id", number), state.encode(partitions[0])))
    return state.TopicState("t", "id", 300, 300, 1, wire.TopicConfig()), partitions


class TestAlteringTopics:
    def test_settings_change_and_others_stay(self, catalog: Catalog) -> None:
        create(catalog, config={"retention_ms": 5})
        altered = catalog.alter_topic("t", wire.AlterTopic(config={"max_backlog_messages": 9}), brokers=ONE)
        assert (altered.config.retention_ms, altered.config.max_backlog_messages) == (5, 9)
        assert catalog.topic("t") == altered

    def test_partitions_are_added_and_the_first_count_is_remembered(self, catalog: Catalog) -> None:
        topic, _ = create(catalog, partitions=2)
        before = catalog.partitions(topic)
        altered = catalog.alter_topic("t", wire.AlterTopic(partitions=5), brokers=ONE)
        assert (altered.partitions, altered.first_partitions) == (5, 2)
        after = catalog.partitions(altered)
        assert len(after) == 5
        assert {number: after[number] for number in before} == before

    def test_the_next_growth_completes_an_interrupted_one(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog)
        plane.meanwhile = [lambda: None, lambda: catalog.put_group("g", {}), *[plane.close]]
        with pytest.raises(Unavailable):
            catalog.alter_topic("t", wire.AlterTopic(partitions=300), brokers=ONE)
        plane.start()
        assert catalog.topic("t").partitions == 1
        altered = catalog.alter_topic("t", wire.AlterTopic(partitions=300), brokers=ONE)
        assert len(catalog.partitions(altered)) == 300

    def test_partitions_cannot_be_removed(self, catalog: Catalog) -> None:
        create(catalog, partitions=2)
        with pytest.raises(InvalidRequest, match="only grow"):
            catalog.alter_topic("t", wire.AlterTopic(partitions=1), brokers=ONE)

    def test_two_concurrent_changes_are_both_applied(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog)
        other = wire.AlterTopic(config={"retention_ms": 1})
        plane.meanwhile.append(lambda: Catalog(plane).alter_topic("t", other, brokers=ONE))
        catalog.alter_topic("t", wire.AlterTopic(config={"retention_bytes": 2}), brokers=ONE)
        config = catalog.topic("t").config
        assert (config.retention_ms, config.retention_bytes) == (1, 2)

    @pytest.mark.parametrize("change", [wire.AlterTopic(config={"retention_ms": 5}), wire.AlterTopic(partitions=2)])
    def test_a_topic_that_was_deleted_and_created_meanwhile_stays_another(
        self, plane: Interrupted, catalog: Catalog, change: wire.AlterTopic
    ) -> None:
        """Both have the same version, and the later one got the id of the deleted one."""
        old, _ = create(catalog)
        rival = Catalog(plane)

        def create_again() -> None:
            rival._remove_all = lambda path: None  # type: ignore[method-assign]  # it ended before that
            rival.delete_topic("t", now_ms=0)
            create(rival)

        plane.meanwhile.append(create_again)
        altered = catalog.alter_topic("t", change, brokers=ONE)
        assert altered.topic_id == catalog.topic("t").topic_id != old.topic_id
        assert len(catalog.partitions(altered)) == altered.partitions

    def test_a_topic_that_is_deleted_between_the_reads_of_a_change_stays_another(
        self, plane: Interrupted, catalog: Catalog
    ) -> None:
        create(catalog)
        rival, read_home = Catalog(plane), catalog._home

        def home_of_a_deleted_one(topic: state.TopicState) -> object:
            catalog._home = read_home  # type: ignore[method-assign]
            rival._remove_all = lambda path: None  # type: ignore[method-assign]  # it ended before that
            rival.delete_topic("t", now_ms=0)
            home = read_home(topic)
            create(rival)
            return home

        catalog._home = home_of_a_deleted_one  # type: ignore[method-assign,assignment]
        altered = catalog.alter_topic("t", wire.AlterTopic(config={"retention_ms": 5}), brokers=ONE)
        assert altered.topic_id == catalog.topic("t").topic_id
        assert altered.topic_id not in catalog.tombstones()

    def test_a_missing_topic_is_not_found(self, catalog: Catalog) -> None:
        with pytest.raises(TopicNotFound):
            catalog.alter_topic("t", wire.AlterTopic(), brokers=ONE)


class TestDeletingTopics:
    def test_a_deletion_leaves_a_tombstone_and_removes_the_partitions(
        self, plane: Interrupted, catalog: Catalog
    ) -> None:
        topic, _ = create(catalog, partitions=250)
        assert catalog.delete_topic("t", now_ms=77) == topic
        assert catalog.find_topic("t") is None
        assert plane.children(state.PARTITIONS) == []
        assert catalog.tombstones() == {topic.topic_id: state.Tombstone("t", topic.topic_id, 250, 77)}
        catalog.forget_tombstone(topic.topic_id)
        assert catalog.tombstones() == {}

    def test_a_topic_of_the_same_name_is_another_topic(self, catalog: Catalog) -> None:
        old, _ = create(catalog)
        held = catalog.partitions(old)[0]
        catalog.delete_topic("t", now_ms=0)
        new, created = create(catalog)
        assert created
        assert new.topic_id != old.topic_id
        with pytest.raises(Exception, match="NodeMissing"):
            catalog.set_partition(old.topic_id, 0, held.value, held.version)

    def test_a_missing_topic_is_not_found(self, catalog: Catalog) -> None:
        with pytest.raises(TopicNotFound):
            catalog.delete_topic("t", now_ms=0)

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    def test_a_lost_answer_is_looked_up(self, plane: Interrupted, catalog: Catalog, lost: str) -> None:
        topic, _ = create(catalog)
        setattr(plane, lost, 1)
        assert catalog.delete_topic("t", now_ms=0) == topic
        assert list(catalog.tombstones()) == [topic.topic_id]

    def test_a_sweep_removes_the_rest_of_a_crashed_creation(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog, "kept")
        create(catalog)
        plane.meanwhile = [lambda: None, plane.close]
        catalog.delete_topic("t", now_ms=0)
        plane.start()
        assert len(plane.children(state.PARTITIONS)) == 2
        assert catalog.sweep() == 1
        assert plane.children(state.PARTITIONS) == [catalog.topic("kept").topic_id]
        assert catalog.sweep() == 0


class TestPartitions:
    def test_only_one_of_two_writers_with_the_same_version_succeeds(self, catalog: Catalog) -> None:
        topic, _ = create(catalog)
        held = catalog.partitions(topic)[0]
        assert catalog.set_partition(topic.topic_id, 0, held.value, held.version) == held.version + 1
        with pytest.raises(VersionMismatch):
            catalog.set_partition(topic.topic_id, 0, held.value, held.version)

    def test_a_missing_partition_is_none(self, catalog: Catalog) -> None:
        assert catalog.partition("no-such-topic", 0) is None


class TestGroups:
    def test_the_first_use_creates_a_group_with_defaults(self, catalog: Catalog) -> None:
        assert catalog.ensure_group("g").config == wire.GroupConfig()
        assert list(catalog.groups()) == ["g"]

    def test_settings_change_and_others_stay(self, catalog: Catalog) -> None:
        assert catalog.put_group("g", {"max_deliveries": 9})[1]
        group, created = catalog.put_group("g", {"ordering": "key"})
        assert not created
        assert (group.config.max_deliveries, group.config.ordering) == (9, "key")
        assert catalog.ensure_group("g") == group

    def test_the_mode_of_a_group_cannot_change(self, catalog: Catalog) -> None:
        catalog.put_group("g", {"mode": "queue"})
        with pytest.raises(GroupModeMismatch):
            catalog.put_group("g", {"mode": "stream"})

    def test_wrong_settings_are_refused(self, catalog: Catalog) -> None:
        with pytest.raises(InvalidRequest):
            catalog.put_group("g", {"max_deliveries": 0})

    def test_a_deleted_group_is_gone(self, catalog: Catalog) -> None:
        catalog.ensure_group("g")
        catalog.delete_group("g")
        for call in (catalog.group, catalog.delete_group):
            with pytest.raises(GroupNotFound):
                call("g")

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    def test_a_deletion_whose_answer_is_lost_is_looked_up(
        self, plane: Interrupted, catalog: Catalog, lost: str
    ) -> None:
        catalog.ensure_group("g")
        setattr(plane, lost, 1)
        catalog.delete_group("g")
        assert catalog.find_group("g") is None

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    @pytest.mark.parametrize("named", [True, False])
    def test_a_deletion_takes_no_group_that_was_created_meanwhile(
        self, plane: Interrupted, catalog: Catalog, lost: str, named: bool
    ) -> None:
        old, rival, original = catalog.ensure_group("g"), Catalog(plane), plane.sync
        setattr(plane, lost, 1)

        def create_again() -> None:
            plane.sync = original  # type: ignore[method-assign]
            if lost == "lose_requests":
                rival.delete_group("g")
            rival.ensure_group("g")

        plane.sync = create_again  # type: ignore[method-assign]
        catalog.delete_group("g", old.group_id if named else None)
        assert catalog.group("g").group_id != old.group_id
        with pytest.raises(Unavailable, match="created again"):
            catalog.delete_group("g", old.group_id)


class TestProducers:
    def test_anonymous_ids_differ_between_brokers_and_restarts(self, plane: Interrupted) -> None:
        catalogs = [Catalog(plane) for _ in range(3)]
        given = [catalog.next_producer(None) for catalog in catalogs for _ in range(PRODUCER_ID_BLOCK + 5)]
        assert len({identity.id for identity in given}) == len(given)
        assert {identity.epoch for identity in given} == {0}

    def test_a_named_producer_keeps_its_id_and_raises_its_epoch(self, plane: Interrupted, catalog: Catalog) -> None:
        first = catalog.next_producer("billing")
        assert first.epoch == 0
        assert Catalog(plane).next_producer("billing") == wire.ProducerIdentity(first.id, 1)
        assert catalog.next_producer("billing") == wire.ProducerIdentity(first.id, 2)
        assert catalog.next_producer("shipping").id != first.id

    @pytest.mark.parametrize("lost", ["lose_answers", "lose_requests"])
    def test_no_two_owners_get_one_epoch_when_an_answer_is_lost(
        self, plane: Interrupted, catalog: Catalog, lost: str
    ) -> None:
        first = catalog.next_producer("billing")
        setattr(plane, lost, 1)
        second = catalog.next_producer("billing")
        third = catalog.next_producer("billing")
        assert first.epoch < second.epoch < third.epoch


class TestContention:
    def test_it_gives_up_after_a_bounded_number_of_attempts(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog)
        retentions = iter(range(1, 1_000))

        def change_it_first() -> None:
            plane.meanwhile, kept = [], plane.meanwhile
            Catalog(plane).alter_topic("t", wire.AlterTopic(config={"retention_ms": next(retentions)}), brokers=ONE)
            plane.meanwhile = kept

        plane.meanwhile = [change_it_first] * 1_000
        with pytest.raises(Unavailable, match=f"{ATTEMPTS} times"):
            catalog.alter_topic("t", wire.AlterTopic(config={"retention_bytes": 1}), brokers=ONE)

    def test_a_plane_that_goes_away_after_a_lost_answer_leaves_the_outcome_unknown(
        self, plane: Interrupted, catalog: Catalog
    ) -> None:
        plane.lose_answers = 1
        plane.watch(lambda _path: plane.meanwhile.append(plane.close))
        original = plane.sync

        def gone() -> None:
            plane.close()
            original()

        plane.sync = gone  # type: ignore[method-assign]
        with pytest.raises(PortalMQError) as caught:
            create(catalog)
        assert caught.value.outcome == "unknown"

    def test_a_refusal_after_an_unknown_outcome_is_unknown_too(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog)
        plane.lose_answers = 1
        original = plane.sync

        def grown_further() -> None:
            plane.sync = original  # type: ignore[method-assign]
            Catalog(plane).alter_topic("t", wire.AlterTopic(partitions=3), brokers=ONE)

        plane.sync = grown_further  # type: ignore[method-assign]
        with pytest.raises(InvalidRequest) as caught:
            catalog.alter_topic("t", wire.AlterTopic(partitions=2), brokers=ONE)
        assert caught.value.outcome == "unknown"


class TestServersThatLag:
    """A server's older state causes no refusal for nodes just created or deleted through another server."""

    def test_an_existing_topic_is_found(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog)
        catalog.put_group("g", {})
        for path, find in ((state.topic_path("t"), catalog.find_topic), (state.group_path("g"), catalog.find_group)):
            plane.lagging[path] = None
            assert find(path.rpartition("/")[2]) is not None

    def test_an_existing_topic_is_changed_and_deleted(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog)
        plane.lagging[state.topic_path("t")] = None
        assert catalog.alter_topic("t", wire.AlterTopic(partitions=3), brokers=ONE).partitions == 3
        plane.lagging[state.topic_path("t")] = None
        assert catalog.delete_topic("t", now_ms=0).partitions == 3
        catalog.put_group("g", {})
        plane.lagging[state.group_path("g")] = None
        catalog.delete_group("g")

    def test_a_deleted_topic_does_not_block_its_name(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog, partitions=2)
        catalog.put_group("g", {"mode": "stream"})
        before = [plane.get(path) for path in (state.topic_path("t"), state.group_path("g"))]
        catalog.delete_topic("t", now_ms=0)
        catalog.delete_group("g")
        plane.lagging = {node.path: node for node in before if node is not None}
        assert create(catalog, partitions=3)[1]
        plane.lagging = {node.path: node for node in before if node is not None}
        assert catalog.put_group("g", {"mode": "queue"})[1]

    def test_what_was_changed_back_is_changed_again(self, plane: Interrupted, catalog: Catalog) -> None:
        """Found by `make simulate-shell SEED=59270`: a pause was answered, and the group was not paused."""
        create(catalog)
        catalog.put_group("g", {})

        def lag(name: str, changes: list[Callable[[], object]]) -> None:
            """Carry out the changes; then read what the first of them wrote."""
            changes[0]()
            before = plane.get(name)
            changes[1]()
            plane.lagging = {name: before}

        group, topic = state.group_path("g"), state.topic_path("t")
        lag(group, [partial(catalog.pause_group, "g", paused=it, at_ms=1) for it in (True, False)])
        catalog.pause_group("g", paused=True, at_ms=2)
        plane.sync()
        assert catalog.group("g").pause.paused
        limits = [{"max_in_flight": it} for it in (5, 6)]
        lag(group, [partial(catalog.put_group, "g", it) for it in limits])
        catalog.put_group("g", limits[0])
        plane.sync()
        assert catalog.group("g").config.max_in_flight == 5
        alters = [wire.AlterTopic(config={"retention_ms": it}) for it in (5, 6)]
        lag(topic, [partial(catalog.alter_topic, "t", it, brokers=ONE) for it in alters])
        catalog.alter_topic("t", alters[0], brokers=ONE)
        plane.sync()
        assert catalog.topic("t").config.retention_ms == 5

    def test_a_topic_that_was_just_deleted_is_created(self, plane: Interrupted, catalog: Catalog) -> None:
        create(catalog)
        before = plane.get(state.topic_path("t"))
        catalog.delete_topic("t", now_ms=0)
        plane.lagging = {state.topic_path("t"): before}
        topic, created = create(catalog)
        assert created
        assert catalog.topics() == {"t": topic}

    def test_a_refusal_that_cannot_be_confirmed_is_reported_as_unavailable(
        self, plane: Interrupted, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def away() -> None:
            raise PlaneUnavailable("away")

        monkeypatch.setattr(plane, "sync", away)
        for refuse in (lambda: catalog.find_topic("t"), lambda: catalog.delete_topic("t", now_ms=0)):
            with pytest.raises(PlaneUnavailable):
                refuse()

    def test_waiting_calls_share_a_sync(self, plane: Interrupted, catalog: Catalog) -> None:
        gate = catalog._confirming = Gate(8)  # type: ignore[assignment]
        callers = [threading.Thread(target=catalog.confirm) for _ in range(8)]
        with gate.lock:
            for caller in callers:
                caller.start()
            assert gate.all_are_there.wait(60)
        for caller in callers:
            caller.join(60)
        assert plane.syncs == 1

    def test_a_sync_that_began_before_a_call_does_not_answer_it(
        self, plane: Interrupted, catalog: Catalog, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = catalog._confirming = Gate(2)  # type: ignore[assignment]
        late, sync = threading.Thread(target=catalog.confirm), plane.sync

        def meanwhile() -> None:
            if not late.is_alive():
                late.start()
                assert gate.all_are_there.wait(60)
            sync()

        monkeypatch.setattr(plane, "sync", meanwhile)
        catalog.confirm()
        late.join(60)
        assert plane.syncs == 2


class Gate:
    """A lock that counts the calls that acquire it."""

    def __init__(self, all_of_them: int) -> None:
        self.lock = threading.Lock()
        self.all_are_there = threading.Event()
        self._missing = all_of_them
        self._counting = threading.Lock()

    def __enter__(self) -> None:
        with self._counting:
            self._missing -= 1
            if self._missing == 0:
                self.all_are_there.set()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_the_ids_of_all_topics_are_those_of_their_nodes(catalog: Catalog) -> None:
    made = [catalog.create_topic(name, wire.CreateTopic(partitions=1), brokers=ONE)[0] for name in ("a", "b")]
    assert catalog.topic_ids() == {topic.topic_id for topic in made}
    assert catalog.strays() == set()
