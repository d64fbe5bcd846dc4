"""The controller's decisions: what changes, and what does not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from portalmq.control_plane.assignment import add_replicas
from portalmq.control_plane.catalog import PartitionChange, Versioned
from portalmq.control_plane.controller import (
    STRAY_FOR_MS,
    TOMBSTONE_MS,
    Reach,
    View,
    cold_elections,
    decide,
    departures,
    elect,
    elect_unclean,
    live_brokers,
    may_be_forgotten,
    old_strays,
    plan,
    rebalance,
)
from portalmq.control_plane.state import BrokerState, PartitionState, Tombstone, TopicState, min_insync
from portalmq.wire import TopicConfig


def broker(number: int, **fields: Any) -> BrokerState:
    return BrokerState(**{"url": f"http://b{number}", "incarnation": 1, "store_uuid": f"store-{number}", **fields})


def live(*numbers: int, **changed: BrokerState) -> dict[int, BrokerState]:
    return {**{number: broker(number) for number in numbers}, **{int(name[1:]): b for name, b in changed.items()}}


def partition(leader: int | None = 1, *, isr: tuple[int, ...] = (1, 2, 3), **fields: Any) -> PartitionState:
    replicas = fields.pop("replicas", (1, 2, 3))
    return PartitionState(
        **{
            "leader": leader,
            "leader_epoch": 5,
            "isr": isr,
            "replicas": replicas,
            "store_uuids": {number: f"store-{number}" for number in replicas},
            "incarnations": dict.fromkeys(replicas, 1),
            **fields,
        }
    )


def topic(name: str = "t", partitions: int = 1, factor: int = 3, **config: Any) -> TopicState:
    return TopicState(name, f"id-{name}", partitions, partitions, factor, TopicConfig(**config))


def planned(
    partitions: list[PartitionState], brokers: Mapping[int, BrokerState], of: TopicState | None = None
) -> list[PartitionChange]:
    of = of or topic(partitions=len(partitions))
    held = {(of.topic_id, number): Versioned(state, 40 + number) for number, state in enumerate(partitions)}
    return plan(View({of.name: of}, held, brokers))


def reach(**heard: str) -> dict[int, dict[int, bool]]:
    """reach(b1="2 -3"): broker 2 has an answer of broker 1, broker 3 has none."""
    return {int(name[1:]): {abs(int(word)): int(word) > 0 for word in told.split()} for name, told in heard.items()}


class TestLeadersThatTooFewReach:
    """The controller reaches these leaders; their in-sync replicas may not."""

    def decided(self, held: PartitionState, told: Reach, *there: int, **fields: Any) -> tuple[int | None, int]:
        wanted = decide(held, live(*(there or (1, 2, 3))), reach=told, **fields) or held
        return wanted.leader, wanted.leader_epoch

    def test_a_replica_that_enough_reach_leads_instead(self) -> None:
        told = reach(b1="-2 -3", b2="3 -1", b3="2 -1")
        assert self.decided(partition(), told) == (2, 6)
        wanted = decide(partition(), live(1, 2, 3), reach=told)
        assert wanted is not None
        assert wanted.isr == (2, 3), "the old leader leaves: it may be unable to fetch too"
        assert decide(wanted, live(1, 2, 3), reach=told) is None, "a second pass changes nothing"

    def test_a_leader_that_enough_reach_stays(self) -> None:
        assert self.decided(partition(), reach(b1="2 -3", b2="1 3", b3="1 2")) == (1, 5)
        assert self.decided(partition(), reach(b1="-2 -3", b2="1 3"), configured_min_insync=1) == (1, 5), (
            "it continues alone"
        )

    def test_replicas_that_cannot_answer_move_nothing(self) -> None:
        assert self.decided(partition(), reach(b1="-2", b2="1 3", b3="1 2")) == (1, 5)
        assert self.decided(partition(), reach(b1="-2 -3")) == (1, 5), "no broker reported that it reaches the others"
        assert self.decided(partition(), {}) == (1, 5)

    def test_a_replica_that_too_few_reach_is_not_elected(self) -> None:
        assert self.decided(partition(), reach(b1="-2 -3", b2="-1 -3", b3="-1 -2")) == (1, 5)
        assert self.decided(partition(), reach(b1="-2 -3", b2="-1 -3", b3="-1 2")) == (3, 6)

    def test_a_replica_that_fell_behind_counts_as_it_may_take_a_members_place(self) -> None:
        held, told = partition(isr=(1, 2)), reach(b1="-2 -3", b2="-1 3")
        assert self.decided(held, told) == (2, 6)
        wanted = decide(held, live(1, 2, 3), reach=told)
        assert wanted is not None
        assert wanted.isr == (1, 2), "until then the floor holds"
        assert decide(wanted, live(1, 2, 3), reach=told) is None
        assert self.decided(held, reach(b1="-2 3", b2="-1 3")) == (1, 5)

    def test_a_dead_broker_reaches_no_leader(self) -> None:
        told = reach(b1="-3", b3="1")
        assert self.decided(partition(), told, 1, 3) == (3, 6)
        wanted = decide(partition(), live(1, 3), reach=told)
        assert wanted is not None
        assert wanted.isr == (2, 3), "below the floor only the old leader leaves"

    @given(st.lists(st.booleans(), min_size=12, max_size=12), st.integers(1, 4))
    def test_links_that_stay_as_they_are_move_a_partition_once(self, links: list[bool], least: int) -> None:
        pairs = [(to, by) for to in range(1, 5) for by in range(1, 5) if to != by]
        told: dict[int, dict[int, bool]] = {}
        for (to, by), heard in zip(pairs, links, strict=True):
            told.setdefault(to, {})[by] = heard
        held = partition(isr=(1, 2, 3, 4), replicas=(1, 2, 3, 4))
        moved = decide(held, live(1, 2, 3, 4), reach=told, configured_min_insync=least)
        if moved is not None:
            assert 1 + sum(told[1].values()) < least
            assert decide(moved, live(1, 2, 3, 4), reach=told, configured_min_insync=least) is None


class TestElections:
    def test_nothing_changes_while_the_leader_is_there(self) -> None:
        assert planned([partition()], live(1, 2, 3)) == []
        assert planned([partition(isr=(1, 2))], live(1, 2, 3)) == [], "only the leader adds members to the ISR"

    def test_a_leader_that_is_gone_is_replaced_and_leaves_the_isr(self) -> None:
        (change,) = planned([partition()], live(2, 3))
        assert (change.topic_id, change.number, change.version) == ("id-t", 0, 40)
        assert (change.state.leader, change.state.leader_epoch, change.state.isr) == (2, 6, (2, 3))

    def test_a_dead_follower_is_left_to_the_leader(self) -> None:
        assert planned([partition()], live(1, 2)) == []

    def test_a_restarted_leader_is_reelected_when_no_other_can_lead(self) -> None:
        (change,) = planned([partition(isr=(1,))], live(2, 3, b1=broker(1, incarnation=2)))
        assert (change.state.leader, change.state.leader_epoch, change.state.incarnations[1]) == (1, 6, 2)

    def test_a_broker_that_is_opening_its_files_leads_only_when_no_other_can(self) -> None:
        (change,) = planned([partition()], live(2, 3, b1=broker(1, incarnation=2)))
        assert (change.state.leader, change.state.isr) == (2, (1, 2, 3))

    def test_a_leader_with_another_data_directory_is_replaced_and_leaves_the_isr(self) -> None:
        (change,) = planned([partition()], live(2, 3, b1=broker(1, store_uuid="emptied")))
        assert (change.state.leader, change.state.isr) == (2, (2, 3))

    def test_a_rebuilt_replica_belongs_to_its_data_directory(self) -> None:
        rebuilt = partition(store_uuids={1: "store-1/2", 2: "store-2", 3: "store-3"})
        assert planned([rebuilt], live(1, 2, 3)) == []

    def test_without_a_clean_replica_there_is_no_leader_once_and_nothing_more(self) -> None:
        (change,) = planned([partition(isr=(1,))], live(2, 3))
        assert (change.state.leader, change.state.leader_epoch, change.state.isr) == (None, 6, (1,))
        assert planned([change.state], live(2, 3)) == []

    def test_a_clean_replica_that_returns_is_elected(self) -> None:
        offline = partition(None, isr=(1,))
        (change,) = planned([offline], live(2, b1=broker(1, incarnation=3)))
        assert (change.state.leader, change.state.isr, change.state.incarnations[1]) == (1, (1,), 3)

    def test_a_clean_replica_replaces_a_leader_that_resigned(self) -> None:
        (change,) = planned([partition(None, isr=(2, 3))], live(1, 2, 3))
        assert change.state.leader == 2

    def test_without_live_brokers_no_leader_is_elected(self) -> None:
        (change,) = planned([partition()], {})
        assert change.state.leader is None
        assert planned([change.state], {}) == []

    def test_the_isr_keeps_its_floor_and_the_old_leader_goes_first(self) -> None:
        (change,) = planned([partition()], live(3))
        assert change.state.isr == (2, 3), "two are needed to commit: 2 is dead, complete, and stays electable"
        (change,) = planned([partition()], live(3), topic(min_insync_replicas=3))
        assert change.state.isr == (1, 2, 3)
        (change,) = planned([partition()], live(3), topic(min_insync_replicas=1))
        assert change.state.isr == (3,)

    def test_partitions_of_a_dead_leader_are_spread_over_the_others(self) -> None:
        changes = planned([partition() for _ in range(10)], live(2, 3))
        assert Counter(change.state.leader for change in changes) == {2: 5, 3: 5}

    def test_brokers_that_lead_less_get_more(self) -> None:
        changes = planned([partition(2)] * 4 + [partition(1)] * 4, live(2, 3))
        assert Counter(change.state.leader for change in changes) == {3: 4}

    def test_partitions_without_a_topic_are_left_alone(self) -> None:
        assert plan(View({}, {("stray", 0): Versioned(partition(), 0)}, live(2, 3))) == []

    def test_every_partition_is_a_step_between_which_others_may_run(self) -> None:
        steps = 0

        def paced(items: Iterable[Any]) -> Iterator[Any]:
            nonlocal steps
            for item in items:
                steps += 1
                yield item

        of = topic(partitions=5)
        view = View(
            {of.name: of}, {(of.topic_id, number): Versioned(partition(), 0) for number in range(5)}, live(2, 3)
        )
        assert cold_elections(view, paced=paced) == {}
        assert steps == 5
        assert plan(view, paced=paced) == plan(view)
        assert steps == 5 + 2 * 5


class TestDraining:
    def test_a_draining_leader_becomes_a_follower_of_another(self) -> None:
        (change,) = planned([partition()], live(2, 3, b1=broker(1, draining=True)))
        assert (change.state.leader, change.state.isr) == (2, (1, 2, 3))

    def test_a_draining_leader_stays_when_no_other_can_lead(self) -> None:
        draining = broker(1, draining=True)
        assert planned([partition(isr=(1,))], live(2, 3, b1=draining)) == []
        assert planned([partition()], live(b1=draining)) == []
        assert planned([partition()], live(b1=draining, b2=broker(2, draining=True))) == []

    def test_a_draining_replica_is_elected_when_no_other_can_lead(self) -> None:
        (change,) = planned([partition(2)], live(b1=broker(1, draining=True)))
        assert change.state.leader == 1

    def test_a_draining_broker_gets_no_replicas(self) -> None:
        assert planned([partition(isr=(1,), replicas=(1,))], live(1, b2=broker(2, draining=True))) == []


class TestDepartures:
    def departed(self, held: PartitionState, broker_id: int, **config: Any) -> list[tuple[int, ...]]:
        of = topic(**config)
        view = View({"t": of}, {(of.topic_id, 0): Versioned(held, 7)}, {})
        changes = departures(view, broker_id)
        assert all((change.version, change.state.leader) == (7, held.leader) for change in changes)
        assert all(change.state.leader_epoch == held.leader_epoch for change in changes)
        return [change.state.isr for change in changes]

    def test_a_follower_that_shuts_down_leaves_the_isr(self) -> None:
        assert self.departed(partition(), 2) == [(1, 3)]

    def test_a_follower_that_shuts_down_stays_in_the_isr_where_it_is_needed(self) -> None:
        assert self.departed(partition(isr=(1, 2)), 2) == []
        assert self.departed(partition(), 2, min_insync_replicas=3) == []
        assert self.departed(partition(isr=(1, 2)), 2, min_insync_replicas=1) == [(1,)]

    def test_a_leader_or_an_out_of_sync_replica_does_not_leave_the_isr(self) -> None:
        assert self.departed(partition(), 1) == []
        assert self.departed(partition(isr=(1, 3)), 2) == []
        assert self.departed(partition(None), 2) == []


class TestReplicas:
    def test_new_replicas_are_added_as_brokers_join_and_are_not_in_sync(self) -> None:
        (change,) = planned([partition(isr=(1,), replicas=(1,))], live(1, 2))
        assert (change.state.replicas, change.state.isr, change.state.leader_epoch) == ((1, 2), (1,), 5)
        assert change.state.store_uuids == {1: "store-1"}
        assert min_insync(change.state, None) == 1

    def test_replicas_never_exceed_the_topics_factor(self) -> None:
        assert planned([partition(isr=(1,), replicas=(1,))], live(1, 2, 3), topic(factor=1)) == []
        (change,) = planned([partition(isr=(1,), replicas=(1,))], live(1, 2, 3, 4), topic(factor=2))
        assert len(change.state.replicas) == 2

    def test_a_replica_whose_broker_is_away_is_not_replaced(self) -> None:
        assert planned([partition()], live(1, 2, 4)) == []

    def test_an_election_and_a_new_replica_come_in_one_change(self) -> None:
        (change,) = planned([partition(isr=(1, 2), replicas=(1, 2))], live(2, 3))
        assert (change.state.leader, change.state.replicas, change.state.isr) == (2, (1, 2, 3), (1, 2))

    @given(
        st.dictionaries(st.integers(0, 30), st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True)),
        st.sets(st.integers(1, 8), min_size=1),
        st.integers(1, 5),
    )
    def test_added_replicas_fit_and_are_spread(self, placed: Any, brokers: set[int], factor: int) -> None:
        added = add_replicas(placed, dict.fromkeys(placed, factor), brokers)
        for key, replicas in placed.items():
            more = added.get(key, [])
            assert set(more) <= brokers - set(replicas)
            assert len(set(more)) == len(more)
            free = len(brokers - set(replicas))
            assert len(more) == max(0, min(factor - len(replicas), free))

    def test_a_broker_that_joins_gets_its_share(self) -> None:
        placed = {number: [1 + number % 2] for number in range(12)}
        added = add_replicas(placed, dict.fromkeys(placed, 2), [1, 2, 3])
        load = Counter(number for key in placed for number in [*placed[key], *added[key]])
        assert load == {1: 8, 2: 8, 3: 8}

    def test_followers_of_one_leader_are_spread(self) -> None:
        placed = {number: [1] for number in range(8)}
        added = add_replicas(placed, dict.fromkeys(placed, 3), [1, 2, 3, 4, 5])
        assert len({tuple(sorted(more)) for more in added.values()}) > 1
        assert Counter(number for more in added.values() for number in more) == {2: 4, 3: 4, 4: 4, 5: 4}


class TestLiveBrokers:
    REGISTERED: Mapping[int, BrokerState] = live(1, 2)

    def test_registered_brokers_live_unless_a_probe_found_them_gone(self) -> None:
        assert live_brokers(self.REGISTERED, {}, (), in_grace=False).keys() == {1, 2}
        assert live_brokers(self.REGISTERED, {}, {(2, 1)}, in_grace=False).keys() == {1}

    def test_a_later_incarnation_of_a_dead_broker_lives(self) -> None:
        assert live_brokers(live(1, b2=broker(2, incarnation=2)), {}, {(2, 1)}, in_grace=False).keys() == {1, 2}

    def test_a_broker_known_before_counts_only_in_the_grace_and_until_a_probe_fails(self) -> None:
        before = live(2, 3, 4)
        assert live_brokers(self.REGISTERED, before, (), in_grace=False).keys() == {1, 2}
        assert live_brokers(self.REGISTERED, before, {(4, 1)}, in_grace=True).keys() == {1, 2, 3}

    def test_the_current_registration_counts_and_not_the_earlier_one(self) -> None:
        anew = live(b2=broker(2, incarnation=2))
        assert live_brokers(anew, live(2), (), in_grace=True) == anew


class TestStrays:
    def test_only_old_strays_are_returned(self) -> None:
        seen: dict[str, int] = {}
        assert old_strays(["a"], seen, 1_000) == []
        assert old_strays(["a", "b"], seen, 1_000 + STRAY_FOR_MS - 1) == []
        assert old_strays(["a", "b"], seen, 1_000 + STRAY_FOR_MS) == ["a"]

    def test_a_stray_that_became_a_topic_starts_its_age_again(self) -> None:
        seen: dict[str, int] = {}
        old_strays(["a"], seen, 0)
        assert old_strays([], seen, STRAY_FOR_MS) == []
        assert seen == {}
        assert old_strays(["a"], seen, STRAY_FOR_MS + 1) == []


class TestTombstones:
    STONE = Tombstone("t", "id", 1, 1_000)

    @pytest.mark.parametrize(
        ("confirmed", "registered", "claimed", "age_ms", "may"),
        [
            ({1, 2}, {1, 2}, {1, 2}, 0, True),
            ({1}, {1, 2}, {1, 2}, 2 * TOMBSTONE_MS, False),
            ({1}, {1}, {1, 2}, 0, False),
            ({1}, {1}, {1, 2}, TOMBSTONE_MS + 1, True),
            ({1, 9}, {1}, {1}, 0, True),
            ({1}, {1, 2}, {1}, 2 * TOMBSTONE_MS, False),
        ],
    )
    def test_a_tombstone_is_removed_when_no_broker_has_files(
        self, confirmed: set[int], registered: set[int], claimed: set[int], age_ms: int, may: bool
    ) -> None:
        assert (
            may_be_forgotten(
                self.STONE, confirmed, registered=registered, claimed=claimed, now_ms=self.STONE.deleted_at_ms + age_ms
            )
            is may
        )


class TestUncleanElections:
    def test_an_unclean_leader_leads_alone_and_its_epoch_is_marked(self) -> None:
        held = partition(None, isr=(1,))
        elected = elect_unclean(held, 3, 9, "store-3/1")
        assert (elected.leader, elected.leader_epoch, elected.isr, elected.unclean) == (3, 6, (3,), (6,))
        assert planned([elected], live(b3=broker(3, incarnation=9))) == []


brokers_states = st.dictionaries(
    st.integers(1, 4),
    st.builds(
        BrokerState,
        st.just("http://b"),
        st.integers(1, 2),
        st.sampled_from(["store", "emptied"]),
        st.booleans(),
    ),
)


@st.composite
def partitions(draw: st.DrawFn) -> PartitionState:
    replicas = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4, unique=True)))
    isr = tuple(draw(st.lists(st.sampled_from(replicas), unique=True)))
    leader = draw(st.none() | st.sampled_from(isr)) if isr else None
    return PartitionState(leader, 5, isr, replicas, dict.fromkeys(replicas, "store"), dict.fromkeys(replicas, 1))


class TestAnyInput:
    @given(partitions(), brokers_states, st.none() | st.integers(1, 4))
    def test_a_decision_is_safe_and_is_made_once(
        self, held: PartitionState, brokers: dict[int, BrokerState], configured: int | None
    ) -> None:
        wanted = decide(held, brokers, configured_min_insync=configured)
        if wanted is None:
            return
        assert wanted.leader_epoch == held.leader_epoch + 1
        assert set(wanted.isr) <= set(held.isr), "an election adds no member"
        if wanted.leader is not None:
            assert wanted.leader in held.isr
            assert brokers[wanted.leader].store_uuid == held.store_uuids[wanted.leader]
            clean = [number for number in held.isr if number in brokers and brokers[number].store_uuid == "store"]
            assert len(wanted.isr) >= min(min_insync(held, configured), len(clean))
            assert set(clean) <= set(wanted.isr)
        assert decide(wanted, brokers, configured_min_insync=configured) is None, "a second pass changes nothing"

    @given(partitions(), brokers_states)
    def test_with_a_clean_replica_there_is_a_leader(
        self, held: PartitionState, brokers: dict[int, BrokerState]
    ) -> None:
        clean = [number for number in held.isr if number in brokers and brokers[number].store_uuid == "store"]
        after = decide(held, brokers) or held
        assert (after.leader in clean) if clean else (after.leader is None)

    @given(partitions(), brokers_states)
    def test_every_controller_elects_the_same_leader(
        self, held: PartitionState, brokers: dict[int, BrokerState]
    ) -> None:
        turned = msgspec.json.decode(msgspec.json.encode(held), type=PartitionState)
        assert elect(held, brokers) == elect(turned, dict(reversed(brokers.items())))


class TestRebalance:
    def moved(self, leaders: list[int | None], brokers: Mapping[int, BrokerState], **fields: Any) -> list[int | None]:
        """Return the leader of each partition after one pass."""
        of = topic(partitions=len(leaders))
        held = {
            (of.topic_id, number): Versioned(partition(leader, **fields), number)
            for number, leader in enumerate(leaders)
        }
        after = dict(enumerate(leaders))
        for change in rebalance(View({of.name: of}, held, brokers)):
            assert change.state.leader_epoch == 6
            assert change.state.leader in change.state.isr
            assert change.version == change.number
            after[change.number] = change.state.leader
        return list(after.values())

    def test_a_broker_that_is_back_leads_its_share_again(self) -> None:
        after = self.moved([2, 2, 2, 3, 3, 3], live(1, 2, 3))
        assert Counter(after) == {1: 2, 2: 2, 3: 2}

    def test_a_restarted_broker_that_is_in_sync_takes_its_share(self) -> None:
        assert set(self.moved([2, 2, 2], live(2, 3, b1=broker(1, incarnation=2)))) == {1, 2, 3}

    def test_an_even_spread_stays(self) -> None:
        assert self.moved([1, 2, 3, 1], live(1, 2, 3)) == [1, 2, 3, 1]

    def test_a_broker_that_is_out_of_sync_drains_or_is_gone_never_leads(self) -> None:
        assert self.moved([2, 2, 2, 2], live(1, 2, 3), isr=(2,)) == [2, 2, 2, 2]
        assert set(self.moved([2, 2, 2, 2], live(2, 3, b1=broker(1, draining=True)))) == {2, 3}
        assert set(self.moved([2, 2, 2, 2], live(2, 3))) == {2, 3}

    def test_a_partition_that_needs_an_election_is_not_moved(self) -> None:
        assert self.moved([None, 1, 1], live(2, 3)) == [None, 1, 1]

    @given(st.lists(st.sampled_from([1, 2, 3]), max_size=12))
    def test_a_pass_spreads_leaders_evenly_and_a_second_one_moves_nothing(self, leaders: list[int]) -> None:
        after = self.moved(list(leaders), live(1, 2, 3))
        count = Counter(after)
        assert max((count[number] for number in (1, 2, 3)), default=0) - min(count[number] for number in (1, 2, 3)) <= 1
        assert self.moved(after, live(1, 2, 3)) == after
