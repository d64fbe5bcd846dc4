"""How often messages of a key are delivered: the buckets alone, and the selection against a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Set
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.supply import ListSupply, granted, offsets_of

from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.queue import key_rates
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_rates import UNLIMITED, KeyLimits, KeyRates
from portalmq.broker.core.queue.limits import key_limits_of
from portalmq.broker.core.queue.records import Ack, Nack, ranges_of
from portalmq.broker.core.queue.selection import Selection, has_turn, read_keys, select
from portalmq.wire import GroupConfig

LEASE_MS = 30
COMMITTED = 1 << 60


def rates(rate_per_s: float | None, burst: float | None = None, now_ms: int = 0) -> KeyRates:
    made = KeyRates()
    made.set(rate_per_s, burst, now_ms)
    return made


def tokens(buckets: KeyRates, *times: int, key: int = 1) -> list[int]:
    return [buckets.tokens(key, at) for at in times]


# --- the buckets -----------------------------------------------------------------------------------------------------


def test_a_bucket_begins_full_and_is_filled_by_the_clock() -> None:
    buckets = rates(2, 3, 1_000)
    assert tokens(buckets, 1_000) == [3]
    for _ in range(3):
        buckets.took(1, 1_000)
    assert tokens(buckets, 1_000, 1_499, 1_500, 1_999, 2_000, 2_500, 90_000) == [0, 0, 1, 1, 2, 3, 3]
    assert tokens(buckets, 1_000, key=2) == [3], "each key has its own"


def test_without_a_burst_a_bucket_holds_the_tokens_of_a_second_and_at_least_one() -> None:
    assert [rates(rate).tokens(1, 0) for rate in (0.01, 1, 2.5, 1_000_000)] == [1, 1, 2, 1_000_000]


def test_without_a_rate_or_a_key_there_is_no_limit() -> None:
    assert rates(None).tokens(1, 0) == UNLIMITED
    assert rates(None, 5).has_limit is False
    buckets = rates(1, 1)
    buckets.took(0, 0)
    assert tokens(buckets, 0, key=0) == [UNLIMITED]
    assert len(buckets) == 0


def test_used_tokens_stay_used_when_the_limit_changes() -> None:
    buckets = rates(1, 4)
    for _ in range(3):
        buckets.took(1, 0)
    buckets.set(10, 4, 0)
    assert tokens(buckets, 0, 100, 300) == [1, 2, 4]
    buckets.set(10, 2, 0)
    assert tokens(buckets, 0, 100, 200, 300) == [0, 0, 1, 2]
    buckets.set(None, None, 0)
    assert tokens(buckets, 0) == [UNLIMITED]
    buckets.set(1, 1, 0)
    assert tokens(buckets, 0) == [1]


def test_a_clock_that_goes_back_gives_no_token() -> None:
    buckets = rates(1, 1)
    buckets.took(1, 5_000)
    assert tokens(buckets, 5_000, 100, 5_999, 6_000) == [0, 0, 0, 1]


def test_very_many_keys_take_bounded_memory_and_the_oldest_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_rates, "KEYS_MAX", 100)
    buckets = rates(0.001, 1)
    for key in range(1, 151):
        buckets.took(key, 0)
        assert len(buckets) <= 100
    assert [buckets.tokens(key, 0) for key in (1, 50, 52, 150)] == [1, 1, 0, 0]


def test_keys_with_full_buckets_are_forgotten() -> None:
    buckets = rates(1, 1)
    for key in range(1, 1_001):
        buckets.took(key, 0)
    for key in range(2_001, 2_601):
        buckets.took(key, 1_000)
    assert len(buckets) == 600


def test_keys_wait_for_their_token_in_the_order_of_time() -> None:
    buckets = rates(1, 2)
    for key, deliveries in ((1, 2), (2, 3), (3, 1)):
        for _ in range(deliveries):
            buckets.took(key, 0)
    assert buckets.next_at_ms() is None
    for key in (2, 1, 3, 1):
        buckets.wait(key, 0)
    assert list(buckets.due(0)) == [3], "it has one"
    assert (buckets.next_at_ms() or 0) in range(1_000, 1_003)
    assert list(buckets.due(1_002)) == [1]
    assert list(buckets.due(1_500)) == []
    assert list(buckets.due(2_002)) == [2]
    assert buckets.next_at_ms() is None


def test_a_key_does_not_wait_for_more_tokens_than_it_may_have() -> None:
    buckets = rates(1, 2)
    buckets.took(1, 0)
    buckets.wait(1, 0, 3)
    assert buckets.next_at_ms() is None
    buckets.wait(1, 0, 2)
    assert (buckets.next_at_ms() or 0) in range(1_000, 1_003)


@pytest.mark.parametrize("rate", [0.000_01, 0.3, 7, 999.9, 1_000_000])
def test_a_key_that_waited_has_a_token(rate: float) -> None:
    for now_ms in (0, 1_790_000_000_123):
        buckets = rates(rate, 1, now_ms)
        buckets.took(1, now_ms)
        buckets.wait(1, now_ms)
        at_ms = buckets.next_at_ms()
        assert at_ms is not None
        assert list(buckets.due(at_ms)) == [1]
        assert buckets.tokens(1, at_ms) == 1


def test_a_lifted_limit_keeps_nothing_back_and_takes_no_token() -> None:
    buckets = rates(1, 1)
    buckets.took(1, 0)
    buckets.wait(1, 0)
    buckets.is_lifted = True
    assert tokens(buckets, 0) == [UNLIMITED]
    assert list(buckets.due(0)) == [1]
    buckets.took(1, 0)
    buckets.is_lifted = False
    assert tokens(buckets, 999, 1_000) == [0, 1]


def test_the_limits_of_a_key_are_those_of_the_group() -> None:
    assert key_limits_of(GroupConfig(ordering="key", rate_per_s_per_key=3)) == KeyLimits(1, 3, None)
    assert key_limits_of(GroupConfig(max_in_flight_per_key=5)) == KeyLimits(5, None, None)
    settings = GroupConfig(rate_per_s_per_key=3, rate_burst_per_key=2)
    assert key_limits_of(settings) == KeyLimits(UNLIMITED, 3, 2)
    assert settings.is_keyed
    assert not GroupConfig(rate_burst_per_key=2).is_keyed


# --- the selection ---------------------------------------------------------------------------------------------------


def new_group() -> GroupDelivery:
    return GroupDelivery(GroupFold("g", 0, 0, []))


def choose(
    group: GroupDelivery,
    supply: ListSupply,
    now: int,
    limits: KeyLimits,
    most: int = 1_000,
    *,
    lifts_rates: bool = False,
) -> Selection:
    while not read_keys(group, supply, now, limits=limits):
        pass
    return select(
        group,
        supply,
        now_ms=now,
        wall_ms=now,
        due_by_ms=now,
        max_messages=most,
        max_deliveries=1_000,
        by_key=True,
        committed=COMMITTED,
        lifts_rates=lifts_rates,
    )


def receive(
    group: GroupDelivery, supply: ListSupply, now: int, limits: KeyLimits, most: int = 1_000, *, is_move: bool = False
) -> list[int]:
    choice = choose(group, supply, now, limits, most, lifts_rates=is_move)
    granted(group, choice, now, now + LEASE_MS)
    return offsets_of(choice)


def keyed(*keys: int) -> ListSupply:
    supply = ListSupply(by_key=True)
    for key in keys:
        supply.add(key=key)
    return supply


RATED = KeyLimits(UNLIMITED, 100.0, 2)  # a token each 10 ms


def test_a_busy_key_does_not_keep_the_others_back() -> None:
    group, supply = new_group(), keyed(1, 1, 1, 1, 1, 2, 0, 0, 0)
    assert receive(group, supply, 0, RATED) == [0, 1, 5, 6, 7, 8]
    assert not has_turn(group, 0, COMMITTED, RATED)
    assert has_turn(group, 11, COMMITTED, RATED)
    assert receive(group, supply, 11, RATED) == [2]
    group.apply(Ack(((5, 9),), 20))
    assert receive(group, supply, 60, RATED, 1) == [0], "its lease has ended"
    assert receive(group, supply, 60, RATED) == [1], "the older first, and a redelivery needs a token too"


def test_messages_that_are_left_behind_keep_their_tokens() -> None:
    group, supply = new_group(), keyed(1, 1, 1, 1)
    assert receive(group, supply, 0, RATED, 1) == [0]
    assert receive(group, supply, 0, RATED) == [1]
    assert receive(group, supply, 0, RATED) == []
    assert receive(group, supply, 20, RATED, 1) == [2]
    assert has_turn(group, 20, COMMITTED, RATED)
    assert receive(group, supply, 20, RATED) == [3]


def test_a_move_passes_the_rate_and_takes_no_token() -> None:
    group, supply = new_group(), keyed(1, 1, 1, 1, 1, 1)
    assert receive(group, supply, 0, RATED) == [0, 1]
    assert receive(group, supply, 0, RATED, 2, is_move=True) == [2, 3]
    assert receive(group, supply, 0, RATED) == []
    assert receive(group, supply, 0, RATED, is_move=True) == [4, 5]
    supply.add(2, key=1)
    assert receive(group, supply, 11, RATED) == [6]


def test_the_order_of_keys_goes_with_a_rate() -> None:
    limits = KeyLimits(1, 100.0, 1)
    group, supply = new_group(), keyed(1, 1, 2)
    assert receive(group, supply, 0, limits) == [0, 2]
    group.apply(Ack(((0, 1),), 1))
    assert not has_turn(group, 1, COMMITTED, limits)
    assert group.keys is not None
    assert (group.keys.rates.next_at_ms() or 0) in range(10, 13)
    assert receive(group, supply, 12, limits) == [1]


def test_a_rate_that_is_taken_away_frees_what_waits() -> None:
    group, supply = new_group(), keyed(1, 1, 1, 1)
    assert receive(group, supply, 0, RATED) == [0, 1]
    assert has_turn(group, 0, COMMITTED, KeyLimits(UNLIMITED))
    assert receive(group, supply, 0, KeyLimits(UNLIMITED)) == [2, 3]


def test_a_new_leader_begins_with_full_buckets() -> None:
    group, supply = new_group(), keyed(1, 1, 1, 1, 1)
    assert receive(group, supply, 0, RATED) == [0, 1]
    after = GroupDelivery(group.snapshot())
    after.take_over(0)
    assert receive(after, supply, 0, RATED) == [2, 3]
    assert receive(after, supply, 0, RATED) == []


class Bucket:
    """The model's: tokens as a fraction."""

    def __init__(self, burst: int) -> None:
        self.tokens, self.at = Fraction(burst), 0

    def fill(self, now: int, token_ms: int, burst: int) -> Fraction:
        self.tokens = min(Fraction(burst), self.tokens + Fraction(now - self.at, token_ms))
        self.at = now
        return self.tokens


VERBS = ("receive",) * 5 + ("some", "ack", "ack", "nack", "wait", "wait", "append", "append", "delayed", "snapshot")


@pytest.mark.parametrize("width", [1, 2, UNLIMITED])
@pytest.mark.parametrize(("token_ms", "burst"), [(10, 1), (10, 3), (100, 2), (1, 1)])
@given(steps=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(1, 6), st.integers(0, 60)), max_size=60))
def test_all_that_a_rate_allows_is_delivered_and_never_more(
    token_ms: int, burst: int, width: int, steps: list[tuple[str, int, int]]
) -> None:
    """The model has each message's key, when it is free, whether it is done, and each key's tokens."""
    limits = KeyLimits(width, 1_000 / token_ms, burst)
    group, supply, now = new_group(), ListSupply(by_key=True), 0
    free_at: dict[int, int] = {}
    leases: dict[int, int] = {}
    deliveries: Counter[int] = Counter()
    done: set[int] = set()
    buckets: dict[int, Bucket] = {}

    passed: set[int] = set()  # what a selection has seen: delivered or held

    def window(key: int) -> list[int]:
        of_key = [m for m in supply.messages if m.key == key and m.offset not in done]
        left = [m.offset for m in of_key if (m.deliver_at_ms or 0) <= now or m.offset in passed]
        running = [offset for offset in left if leases.get(offset, 0) > now]
        first = sorted(left)[:width] if key else left
        return [each for each in first if each not in running and free_at.get(each, 0) <= now]

    def expected(kept_back: Set[int] = frozenset()) -> set[int]:
        found: set[int] = set()
        for key in {message.key for message in supply.messages}:
            may = [each for each in window(key) if each not in kept_back]
            if key:
                running = sum(until > now for offset, until in leases.items() if supply.messages[offset].key == key)
                tokens = buckets.setdefault(key, Bucket(burst)).fill(now, token_ms, burst)
                may = may[: max(0, min(width - running, int(tokens)))]
            found.update(may)
        return found

    def take(choice: Selection) -> None:
        granted(group, choice, now, now + LEASE_MS)
        for offset in offsets_of(choice):
            deliveries[offset] += 1  # after two it may be delivered alone
            leases[offset] = now + LEASE_MS
            key = supply.messages[offset].key
            if key:
                buckets[key].tokens -= 1
                assert buckets[key].tokens >= 0
        running = Counter(supply.messages[each].key for each, until in leases.items() if until > now)
        assert all(count <= width for key, count in running.items() if key)
        passed.update(offsets_of(choice))
        passed.update(offset for start, end, _ in choice.held for offset in range(start, end))

    for verb, number, place in steps:
        running = sorted(offset for offset, until in leases.items() if until > now)
        some = sorted({running[(place + each) % len(running)] for each in range(min(number, len(running)))})
        match verb:
            case "append":
                for each in range(number):
                    supply.add(key=(place + each * number) % 4)
            case "delayed":
                supply.add(key=place % 3, deliver_at_ms=now + place)
            case "receive":
                wanted = expected()
                choice = choose(group, supply, now, limits)
                found = set(offsets_of(choice))
                if all(message.deliver_at_ms is None for message in supply.messages):
                    # After two deliveries a message may be kept back, to be delivered alone; another one of its key
                    # takes the token.
                    others = expected({each for each, count in deliveries.items() if count > 1} - found)
                    assert found <= others
                    assert choice.alone or found == others
                take(choice)
                if found == wanted:
                    waiting = has_turn(group, now, COMMITTED, limits)
                    assert waiting == bool(expected() & passed)
                    assert group.keys is not None
                    due = group.keys.rates.next_at_ms()
                    late = [key for key in buckets if set(window(key)) & passed and buckets[key].tokens < 1]
                    for key in late if width == UNLIMITED else ():
                        assert due is not None
                        assert due <= now + (1 - buckets[key].tokens) * token_ms + 2
            case "some":
                expected()  # fills the buckets
                take(choose(group, supply, now, limits, number))
            case "ack" if some:
                group.apply(Ack(ranges_of(some), now), offset=1_000_000)
                done.update(some)
                for offset in some:
                    del leases[offset]
            case "nack" if some:
                group.apply(Nack(tuple((*each, now + place) for each in ranges_of(some)), now, None))
                for offset in some:
                    del leases[offset]
                    free_at[offset] = now + place
            case "wait":
                now += place
            case "snapshot":  # and the same keys' buckets: a new leader of the same group
                kept = group.keys
                group = GroupDelivery(group.snapshot())
                if kept is not None:
                    buckets = {}


def test_the_same_limit_again_leaves_waits_as_they_are():
    rates = KeyRates()
    rates.set(1.0, 1.0, 0)
    rates.took(7, 0)
    rates.wait(7, 0)
    at_ms = rates.next_at_ms()
    rates.set(1.0, 1.0, 10)
    assert rates.next_at_ms() == at_ms


def test_without_a_limit_no_key_waits():
    rates = KeyRates()
    rates.took(7, 0)
    rates.wait(7, 0)
    assert rates.next_at_ms() is None
