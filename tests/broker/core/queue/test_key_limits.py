"""At most N messages of a key in flight, without an order: the selection against a model."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.supply import ListSupply, granted, offsets_of

from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_rates import KeyLimits
from portalmq.broker.core.queue.records import Ack, Nack, ranges_of
from portalmq.broker.core.queue.selection import Selection, has_turn, read_keys, select

LEASE_MS = 30
COMMITTED = 1 << 60


def new_group() -> GroupDelivery:
    return GroupDelivery(GroupFold("g", 0, 0, []))


def choose(group: GroupDelivery, supply: ListSupply, now: int, width: int, most: int = 1_000) -> Selection:
    while not read_keys(group, supply, now, limits=KeyLimits(width)):
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
    )


def receive(group: GroupDelivery, supply: ListSupply, now: int, width: int, most: int = 1_000) -> list[int]:
    choice = choose(group, supply, now, width, most)
    granted(group, choice, now, now + LEASE_MS)
    return offsets_of(choice)


def keyed(*keys: int) -> ListSupply:
    supply = ListSupply(by_key=True)
    for key in keys:
        supply.add(key=key)
    return supply


def test_as_many_of_a_key_as_the_width_are_delivered() -> None:
    group, supply = new_group(), keyed(1, 1, 1, 1, 2, 0, 0)
    assert receive(group, supply, 0, 2) == [0, 1, 4, 5, 6]
    assert not has_turn(group, 0, COMMITTED, KeyLimits(2))
    group.apply(Ack(((1, 2),), 0))
    assert has_turn(group, 0, COMMITTED, KeyLimits(2))
    assert receive(group, supply, 0, 2) == [2]


def test_a_wider_limit_frees_what_is_held_and_a_narrower_one_waits() -> None:
    group, supply = new_group(), keyed(1, 1, 1, 1, 1)
    assert receive(group, supply, 0, 1) == [0]
    assert has_turn(group, 0, COMMITTED, KeyLimits(3))
    assert receive(group, supply, 0, 3) == [1, 2]
    group.apply(Ack(((0, 2),), 1))
    assert not has_turn(group, 1, COMMITTED, KeyLimits(1))
    assert receive(group, supply, 1, 1) == []
    group.apply(Ack(((2, 3),), 2))
    assert receive(group, supply, 2, 1) == [3]


def test_a_retry_keeps_the_place_of_its_message() -> None:
    group, supply = new_group(), keyed(1, 1, 1)
    assert receive(group, supply, 0, 2) == [0, 1]
    group.apply(Nack(((0, 1, 500),), 0, None))
    assert receive(group, supply, 10, 2) == []
    assert receive(group, supply, 500, 2) == [0, 1], "the lease of 1 has ended too"


def test_a_delayed_message_waits_for_a_place() -> None:
    group, supply = new_group(), ListSupply(by_key=True)
    supply.add(key=1, deliver_at_ms=5)
    supply.add(3, key=1)
    assert receive(group, supply, 0, 2) == [1, 2]
    assert receive(group, supply, 6, 2) == [], "it is the first of its key, and two are in flight"
    group.apply(Ack(((1, 2),), 7))
    assert receive(group, supply, 7, 2) == [0]


VERBS = ("receive",) * 4 + ("ack", "ack", "nack", "wait", "wait", "append", "width", "snapshot", "forget")


@pytest.mark.parametrize("width", [1, 2, 3])
@given(steps=st.lists(st.tuples(st.sampled_from(VERBS), st.integers(1, 6), st.integers(0, 60)), max_size=70))
def test_all_that_may_be_delivered_is_and_never_more(width: int, steps: list[tuple[str, int, int]]) -> None:
    """The model has each message's key, when it is free, and whether it is done. Of a key's unfinished messages the
    first `width` may be delivered, unless as many are in flight."""
    group, supply, now = new_group(), ListSupply(by_key=True), 0
    free_at: dict[int, int] = {}
    leases: dict[int, int] = {}
    deliveries: Counter[int] = Counter()
    done: set[int] = set()

    def expected() -> list[int]:
        found: list[int] = []
        for key in {message.key for message in supply.messages}:
            left = [message.offset for message in supply.messages if message.key == key and message.offset not in done]
            running = [offset for offset in left if leases.get(offset, 0) > now]
            window = left if key == 0 else left[:width]
            may = [each for each in window if each not in running and free_at.get(each, 0) <= now]
            found += may if key == 0 else may[: max(0, width - len(running))]
        return sorted(found)

    for verb, number, place in steps:
        running = sorted(offset for offset, until in leases.items() if until > now)
        some = sorted({running[(place + each) % len(running)] for each in range(min(number, len(running)))})
        match verb:
            case "append":
                for each in range(number):
                    supply.add(key=(place + each * number) % 4)
            case "receive":
                wanted = expected()
                choice = choose(group, supply, now, width)
                found = offsets_of(choice)
                if (
                    sorted(found) != wanted
                ):  # what was delivered twice may have to come alone, perhaps with the next one
                    assert set(found) < set(wanted)
                    assert all(deliveries[each] > 1 for each in set(wanted).difference(found)) or choice.alone
                granted(group, choice, now, now + LEASE_MS)
                leases.update(dict.fromkeys(found, now + LEASE_MS))
                deliveries.update(found)
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
            case "width":
                width = 1 + place % 4
            case "snapshot":
                group = GroupDelivery(group.snapshot())
            case "forget":
                group.keys = None
