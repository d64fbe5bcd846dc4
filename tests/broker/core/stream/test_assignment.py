"""The assignment of partitions to members: balanced, sticky, with few moves."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from portalmq.broker.core.stream.assignment import Partition, assign

TOPICS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 12), max_size=4)
MEMBERS = st.dictionaries(
    st.sampled_from([f"m{number}" for number in range(9)]), st.sets(st.sampled_from("abcd"), min_size=1), max_size=9
)


def loads(members: dict[str, set[str]], shares: dict[Partition, str]) -> dict[str, int]:
    return {member: sum(owner == member for owner in shares.values()) for member in members}


def all_of(topics: dict[str, int]) -> set[Partition]:
    return {(topic, number) for topic, count in topics.items() for number in range(count)}


def test_partitions_are_assigned_evenly() -> None:
    shares = assign({"a": {"t"}, "b": {"t"}, "c": {"t"}}, {"t": 8}, {})
    assert sorted(loads({"a": set(), "b": set(), "c": set()}, shares).values()) == [2, 3, 3]


def test_a_new_member_takes_its_share_and_the_others_keep_the_rest() -> None:
    before = assign({"a": {"t"}, "b": {"t"}}, {"t": 9}, {})
    after = assign({"a": {"t"}, "b": {"t"}, "c": {"t"}}, {"t": 9}, before)
    assert sum(after[partition] != before[partition] for partition in before) == 3
    assert set(loads({"a": set(), "b": set(), "c": set()}, after).values()) == {3}


def test_only_the_partitions_of_a_leaving_member_move() -> None:
    before = assign({"a": {"t"}, "b": {"t"}, "c": {"t"}}, {"t": 9}, {})
    after = assign({"a": {"t"}, "b": {"t"}}, {"t": 9}, before)
    assert all(after[partition] == owner for partition, owner in before.items() if owner != "c")


def test_topics_are_spread_over_the_members_too() -> None:
    shares = assign({"a": {"t", "u"}, "b": {"t", "u"}}, {"t": 2, "u": 2}, {})
    for member in "ab":
        assert {topic for (topic, _), owner in shares.items() if owner == member} == {"t", "u"}


def test_a_partition_already_moving_moves_rather_than_one_being_read() -> None:
    before: dict[Partition, str] = {("t", number): "a" for number in range(4)}
    after = assign({"a": {"t"}, "b": {"t"}}, {"t": 4}, before, moving=[("t", 0), ("t", 2)])
    assert {partition for partition, owner in after.items() if owner == "b"} == {("t", 0), ("t", 2)}


@given(MEMBERS, TOPICS, st.data())
def test_every_partition_has_one_eligible_member_and_no_move_improves_the_balance(
    members: dict[str, set[str]], topics: dict[str, int], data: st.DataObject
) -> None:
    anybody = st.sampled_from([*members, "gone"])
    current = data.draw(st.dictionaries(st.sampled_from(sorted(all_of({**topics, "a": 15}))), anybody, max_size=40))
    shares = assign(members, topics, current)
    readable = {partition for partition in all_of(topics) if any(partition[0] in read for read in members.values())}
    assert set(shares) == readable
    load = loads(members, shares)
    for (topic, _), owner in shares.items():
        assert topic in members[owner]
        for other, read in members.items():
            if topic in read:
                assert load[owner] <= load[other] + 1
    assert assign(members, topics, shares) == shares


@given(st.integers(1, 8), st.integers(0, 40), st.data())
def test_with_equal_subscriptions_the_number_of_moves_is_minimal(
    count: int, partitions: int, data: st.DataObject
) -> None:
    members = {f"m{number}": {"t"} for number in range(count)}
    holders = data.draw(st.lists(st.sampled_from(sorted(members)), min_size=partitions, max_size=partitions))
    current: dict[Partition, str] = {("t", number): holder for number, holder in enumerate(holders)}
    after = assign(members, {"t": partitions}, current)
    before = sorted(loads(members, current).values(), reverse=True)
    least, rest = divmod(partitions, count)
    quotas = [least + 1] * rest + [least] * (count - rest)
    needed = sum(max(0, has - quota) for has, quota in zip(before, quotas, strict=True))
    assert sum(after[partition] != current[partition] for partition in current) == needed


def test_a_thousand_members_and_ten_thousand_partitions_are_assigned_quickly() -> None:
    members = {f"m{number}": {"t", "u"} for number in range(1_000)}
    began = time.process_time()
    shares = assign(members, {"t": 5_000, "u": 5_000}, {("t", number): "m1" for number in range(5_000)})
    assert set(loads(members, shares).values()) == {10}
    assert time.process_time() - began < 5
