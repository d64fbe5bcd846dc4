"""Limits of a group: messages in flight, by the leases in the fold, and deliveries a second."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.supply import ListSupply, chosen, granted, offsets_of

from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.limits import UNLIMITED, Allowance, GroupLimits, limits_of
from portalmq.broker.core.queue.records import Ack, Dead, Extend, Nack, ranges_of

LEASE_MS = 30


def new_group() -> GroupDelivery:
    return GroupDelivery(GroupFold("g", 0, 0, []))


# --- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "partitions", "shares"),
    [(10, 1, [10]), (10, 3, [4, 3, 3]), (3, 3, [1, 1, 1]), (1, 3, [1, 1, 1]), (8, 5, [2, 2, 2, 1, 1])],
)
def test_partitions_share_a_limit_and_each_has_at_least_one(limit: int, partitions: int, shares: list[int]) -> None:
    found = [limits_of(limit, None, None, partitions, number).in_flight_max for number in range(partitions)]
    assert found == shares


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_shares_add_up_to_the_limit(limit: int, partitions: int) -> None:
    found = [limits_of(limit, None, None, partitions, number).in_flight_max or 0 for number in range(partitions)]
    assert sum(found) == max(limit, partitions)


def test_partitions_share_a_rate_and_its_burst() -> None:
    assert limits_of(None, 10, None, 4, 0) == GroupLimits(None, 2.5, 2.5)
    assert limits_of(None, 10, 20, 4, 3) == GroupLimits(None, 2.5, 5.0)
    assert limits_of(None, 0.5, None, 1, 0) == GroupLimits(None, 0.5, 1.0), "a bucket holds at least one"


# --- rates -----------------------------------------------------------------------------------------------------------


def allowance(limits: GroupLimits, now_ms: int = 0) -> Allowance:
    made = Allowance()
    made.set(limits, now_ms)
    return made


def test_without_limits_all_are_allowed() -> None:
    assert Allowance().messages(new_group(), 0) == UNLIMITED
    assert Allowance().token_in_ms(0) is None


def test_a_bucket_begins_full_and_fills_with_time() -> None:
    group, limit = new_group(), allowance(GroupLimits(None, 2.0, 3.0), 1_000)
    assert limit.messages(group, 1_000) == 3
    limit.took(3, 1_000)
    assert limit.messages(group, 1_000) == 0
    assert limit.token_in_ms(1_000) == 501
    assert limit.messages(group, 1_499) == 0
    assert limit.messages(group, 1_501) == 1
    assert limit.token_in_ms(1_501) is None
    assert limit.messages(group, 60_000) == 3, "no more than its burst"


def test_a_clock_that_stands_or_goes_back_gives_nothing() -> None:
    group, limit = new_group(), allowance(GroupLimits(None, 1.0, 1.0), 5_000)
    limit.took(1, 5_000)
    assert [limit.messages(group, at) for at in (5_000, 100, 5_999, 6_000)] == [0, 0, 0, 1]


def test_a_changed_rate_keeps_the_tokens() -> None:
    group, limit = new_group(), allowance(GroupLimits(None, 10.0, 10.0))
    limit.took(9, 0)
    limit.set(GroupLimits(None, 100.0, 100.0), 0)
    assert limit.messages(group, 0) == 1, "no second burst"
    limit.set(GroupLimits(None, 1.0, 1.0), 1_000)
    assert limit.messages(group, 1_000) == 1
    limit.set(GroupLimits(), 1_000)
    assert limit.messages(group, 1_000) == UNLIMITED


@given(
    rate=st.floats(0.1, 1_000),
    burst=st.floats(1, 100),
    steps=st.lists(st.tuples(st.integers(0, 500), st.integers(0, 50)), max_size=60),
)
def test_no_window_has_more_than_the_burst_and_its_rate(
    rate: float, burst: float, steps: list[tuple[int, int]]
) -> None:
    group, limit = new_group(), allowance(GroupLimits(None, rate, burst))
    now, taken = 0, []
    for wait_ms, wanted in steps:
        now += wait_ms
        number = min(wanted, limit.messages(group, now))
        limit.took(number, now)
        taken.append((now, number))
        if limit.messages(group, now) == 0:
            in_ms = limit.token_in_ms(now)
            assert in_ms is not None
            assert in_ms > 0
    for first, (start, _) in enumerate(taken):
        for last in range(first, len(taken)):
            window = sum(number for _, number in taken[first : last + 1])
            assert window <= burst + rate * (taken[last][0] - start) / 1_000 + 1e-6


def test_after_the_wait_a_token_is_there() -> None:
    for rate in (0.3, 1.0, 7.0, 333.0, 1_000_000.0):
        group, limit = new_group(), allowance(GroupLimits(None, rate, 1.0))
        limit.took(1, 0)
        in_ms = limit.token_in_ms(0)
        assert in_ms is not None
        assert limit.messages(group, in_ms) == 1


# --- in flight -------------------------------------------------------------------------------------------------------


def receive(group: GroupDelivery, supply: ListSupply, now: int, limit: Allowance, most: int = 100) -> list[int]:
    allowed = min(most, limit.messages(group, now))
    if allowed <= 0:
        return []
    choice = chosen(group, supply, now, allowed)
    granted(group, choice, now, now + LEASE_MS)
    return offsets_of(choice)


def test_acks_nacks_dead_letters_and_ends_of_leases_free_places() -> None:
    group, supply, limit = new_group(), ListSupply(), allowance(GroupLimits(3))
    supply.add(20)
    assert receive(group, supply, 0, limit) == [0, 1, 2]
    assert receive(group, supply, 0, limit) == []
    group.apply(Ack(((1, 2),), 1))
    assert receive(group, supply, 1, limit) == [3]
    group.apply(Nack(((0, 1, 1_000),), 1, None))
    assert receive(group, supply, 1, limit) == [4]
    group.apply(Dead(((2, 3, 1),), 1, "", ""))
    assert receive(group, supply, 1, limit) == [5]
    assert receive(group, supply, 30, limit) == []
    assert receive(group, supply, 31, limit) == [3, 4, 5], "their leases have ended, they take their own places again"
    group.apply(Extend(((3, 6),), 500, 40))
    assert receive(group, supply, 100, limit) == []


def test_a_new_leader_counts_the_leases_that_its_log_tells() -> None:
    group, supply, limit = new_group(), ListSupply(), allowance(GroupLimits(5))
    supply.add(20)
    receive(group, supply, 0, limit, 3)
    after = GroupDelivery(group.snapshot())
    after.take_over(10)
    assert after.in_flight(10) == 3
    assert receive(after, supply, 10, allowance(GroupLimits(5), 10)) == [3, 4]


VERBS = ("receive",) * 4 + ("ack", "ack", "nack", "extend", "dead", "wait", "wait", "snapshot")


@given(
    limit=st.integers(1, 6),
    steps=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(1, 8), st.integers(0, 60)), max_size=80),
)
def test_in_flight_is_what_a_model_counts_and_never_more_than_the_limit(
    limit: int, steps: list[tuple[str, int, int]]
) -> None:
    """The model has the end of the lease of each leased message, and no more."""
    group, supply, allowed = new_group(), ListSupply(), allowance(GroupLimits(limit))
    supply.add(200)
    leases: dict[int, int] = {}
    now = 0
    for verb, number, place in steps:
        running = sorted(offset for offset, until in leases.items() if until > now)
        some = [running[(place + each) % len(running)] for each in range(min(number, len(running)))]
        ranges = ranges_of(sorted(set(some)))
        match verb:
            case "receive":
                for offset in receive(group, supply, now, allowed, number):
                    leases[offset] = now + LEASE_MS
            case "ack" | "dead" | "nack" if ranges:
                if verb == "ack":
                    group.apply(Ack(ranges, now))
                elif verb == "dead":
                    group.apply(Dead(tuple((start, end, 1) for start, end in ranges), now, "", ""))
                else:
                    group.apply(Nack(tuple((start, end, now + place) for start, end in ranges), now, None))
                for offset in some:
                    leases.pop(offset, None)
            case "extend" if ranges:
                group.apply(Extend(ranges, now + 2 * LEASE_MS, now))
                leases.update(dict.fromkeys(some, now + 2 * LEASE_MS))
            case "wait":
                now += place
            case "snapshot":
                group = GroupDelivery(group.snapshot())
        running = [offset for offset, until in leases.items() if until > now]
        assert group.in_flight(now) == len(running) <= limit
