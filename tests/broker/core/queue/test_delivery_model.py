"""The fold and the selection against a simple model: a dictionary with one entry a message.

I12: a message is exactly one of scheduled, ready, leased, acked, dead, expired; acked, dead and expired are final until
a redrive; at most one live lease.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from support.supply import ListSupply, Message, chosen, granted, offsets_of

from portalmq.broker.core.fold import HELD_MS, GroupFold
from portalmq.broker.core.queue.delivery import EXPIRIES_BEFORE_ALONE, GroupDelivery
from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.records import Ack, Dead, Drop, Extend, Nack, Redrive, ranges_of

LEASE_MS = 30
MAX_DELIVERIES = 2
VERBS = (
    *("append", "priority", "delay", "expire"),
    *("receive",) * 4,
    *("ack", "ack", "nack", "extend"),
    *("wait",) * 3,
    *("snapshot", "purge", "give_up", "redrive", "drop", "ack_unseen", "cancel", "sweep"),
)
STEPS = st.lists(
    st.tuples(
        st.sampled_from(VERBS),
        st.integers(1, 8),
        st.integers(0, 60),
    ),
    min_size=40,
    max_size=80,
)


@dataclass
class State:
    """`name` is fresh, leased, free (returned, ready at `until`), held, done, dead or gone."""

    name: str = "fresh"
    until: int = 0
    deliveries: int = 0
    expiries: int = 0


class Model:
    def __init__(self, *, by_key: bool) -> None:
        self.by_key = by_key
        self.states: dict[int, State] = {}
        self.messages: dict[int, Message] = {}
        self.cancelled: set[int] = set()
        # The number of the last lease of each message. It rises across a redrive too.
        self.leases: dict[int, int] = {}

    def add(self, messages: list[Message]) -> None:
        for message in messages:
            self.states[message.offset] = State()
            self.messages[message.offset] = message

    def expect(self, now: int, size: int) -> list[int]:
        """Return the offsets that a receive gets, in order. It changes nothing."""
        handed: list[int] = []
        keys: set[int] = set()
        for offset in self._candidates(now):
            state, message = self.states[offset], self.messages[offset]
            if len(handed) == size:
                break
            if self.has_expired(offset, now):
                continue
            if self.by_key and message.key and not self._has_turn(offset, keys, now):
                continue
            if state.name != "fresh":
                expiries = state.expiries + (state.name == "leased")
                last = state.deliveries + 1 >= MAX_DELIVERIES
                if expiries >= EXPIRIES_BEFORE_ALONE or (expiries and last):
                    if not handed:
                        return [offset]
                    continue
            handed.append(offset)
            keys.add(message.key)
        return handed

    def _candidates(self, now: int) -> list[int]:
        found: list[tuple[int, int, int, int]] = []
        for offset, state in self.states.items():
            lane, due, _ = self.messages[offset].spot
            rank = 0 if self.by_key else -(lane % DELAYED)
            is_back = state.name in {"leased", "free"} and state.until <= now and state.deliveries < MAX_DELIVERIES
            if is_back or state.name == "held":
                found.append((rank, 0, 0, offset))
            elif state.name == "fresh" and offset not in self.cancelled and lane >= DELAYED and due <= now:
                found.append((rank, 100 - lane if self.by_key else 1, due, offset))
            elif state.name == "fresh" and lane < DELAYED:
                found.append((rank, 200, 0, offset))
        return [offset for *_, offset in sorted(found)]

    def has_expired(self, offset: int, now: int) -> bool:
        expires = self.messages[offset].expires_at_ms
        return expires is not None and expires <= now

    def _has_turn(self, offset: int, keys: set[int], now: int) -> bool:
        key = self.messages[offset].key
        others = {
            o: s
            for o, s in self.states.items()
            if o != offset and self.messages[o].key == key and s.name in {"leased", "free", "held"}
        }
        if self.states[offset].name == "fresh":
            return not others and key not in keys
        is_out = any(s.name == "leased" and s.until > now for s in others.values())
        return key not in keys and not is_out and all(o > offset for o in others)


@settings(max_examples=300, deadline=None)
@given(STEPS, st.booleans())
def test_the_fold_agrees_with_a_dictionary_of_messages(steps, by_key):
    group, supply, model = GroupDelivery(GroupFold("g", 0, 0, [])), ListSupply(by_key=by_key), Model(by_key=by_key)
    now = 1_000
    for verb, size, pick in steps:
        end = len(supply.messages)
        offset = pick % max(1, end)
        targets = range(offset, min(end, offset + size))
        if verb == "wait":
            now += size * 7
        elif verb == "snapshot":
            group = GroupDelivery(group.snapshot())
        elif verb == "cancel":
            waiting = [o for o, s in model.states.items() if s.name == "fresh" and supply.messages[o].spot[1] > now]
            model.cancelled |= set(waiting[: size // 2])
        elif verb in {"append", "priority", "delay", "expire"}:
            more = {
                "append": {"key": pick % 3},
                "priority": {"priority": pick % 32, "key": pick % 2},
                "delay": {"deliver_at_ms": now + pick, "priority": size % 2, "key": pick % 3},
                "expire": {"expires_at_ms": now + pick},
            }[verb]
            model.add(supply.add(size, appended_at_ms=now, **more))
        elif verb == "receive":
            receive(group, supply, model, now, size)
        elif verb == "sweep":
            receive(group, supply, model, now, 0)
        else:
            change(group, model, verb, targets, now, size)
        check(group, model, now)


def receive(group: GroupDelivery, supply: ListSupply, model: Model, now: int, size: int) -> None:
    expected = model.expect(now, size) if size else []
    cancelled = frozenset(model.cancelled)
    choice = chosen(group, supply, now, size, max_deliveries=MAX_DELIVERIES, cancelled=cancelled)
    handed = offsets_of(choice)
    assert handed == expected
    granted(group, choice, now, now + LEASE_MS)
    for offset in handed:
        state = model.states[offset]
        expiries = state.expiries + (state.name == "leased")
        model.states[offset] = State("leased", now + LEASE_MS, state.deliveries + 1, expiries)
        lease = group.earlier(offset) + state.deliveries + 1
        assert lease > model.leases.get(offset, 0)
        assert not group.holds(offset, lease - 1), "an earlier delivery no longer counts"
        assert group.ackable([offset], lease - 1)[0] == [False]
        model.leases[offset] = lease
    for offset in (o for start, end, _ in choice.held for o in range(start, end)):
        assert model.by_key
        assert model.states[offset].name == "fresh"
        model.states[offset] = State("held")
    for offset in (o for start, end in choice.gone for o in range(start, end)):
        assert model.has_expired(offset, now)
        assert model.states[offset].name in {"leased", "free", "held"}
        model.states[offset] = State("gone")
    for offset, state in model.states.items():
        if state.name == "fresh" and group.has_passed(model.messages[offset].spot):
            assert model.has_expired(offset, now) or offset in model.cancelled, "only these are skipped"
            model.states[offset] = State("gone")


def change(group: GroupDelivery, model: Model, verb: str, targets: range, now: int, size: int) -> None:
    leased = [o for o in targets if model.states[o].name == "leased"]
    assert leased == [o for o in targets if group.holds(o, model.leases.get(o, 0))]
    dead = [o for o, state in model.states.items() if state.name == "dead"][:size]
    if verb == "purge":
        group.purge(targets.start)
        for offset in range(targets.start):
            model.states[offset] = State("done")
    elif verb == "ack" and leased:
        group.apply(Ack(ranges_of(leased), now), 1)
        _set(model, leased, State("done"))
    elif verb == "ack_unseen":
        unseen = [o for o in targets if model.states[o].name == "fresh"]
        group.apply(Ack((), now, tuple(model.messages[o].spot for o in unseen)), 1)
        _set(model, unseen, State("done"))
    elif verb == "nack" and leased:
        group.apply(Nack(tuple((start, end, now + size) for start, end in ranges_of(leased)), now), 1)
        for offset in leased:
            state = model.states[offset]
            model.states[offset] = State("free", now + size, state.deliveries, state.expiries)
    elif verb == "extend":
        kept = [o for o in leased if not model.by_key or model.states[o].until > now]
        assert kept == [o for o in leased if group.may_extend(o, model.leases[o], now, by_key=model.by_key)]
        if kept:
            group.apply(Extend(ranges_of(kept), now + 50, now), 1)
        for offset in kept:
            model.states[offset].until = now + 50
    elif verb == "give_up":
        overdue = group.overdue(now, MAX_DELIVERIES, size)
        found = [o for start, end, _ in overdue for o in range(start, end)]
        waiting = [
            o
            for o, s in model.states.items()
            if s.name in {"leased", "free"} and s.until <= now and s.deliveries >= MAX_DELIVERIES
        ]
        assert set(found) <= set(waiting)
        assert len(found) == min(size, len(waiting))
        if found:
            group.apply(Dead(tuple(overdue), now, "x"), 1)
            _set(model, found, State("dead"))
            assert group.ackable(found, 1_000)[0] == [False] * len(found), "a dead message's receipts are stale"
    elif verb == "redrive" and dead:
        group.apply(Redrive(tuple((start, end, now) for start, end in ranges_of(dead)), now), 1)
        _set(model, dead, State("free", now))
    elif verb == "drop" and dead:
        group.apply(Drop(ranges_of(dead), now), 1)
        _set(model, dead, State("done"))


def _set(model: Model, offsets: list[int], state: State) -> None:
    for offset in offsets:
        model.states[offset] = State(state.name, state.until)


def check(group: GroupDelivery, model: Model, now: int) -> None:
    unfinished = {o: s for o, s in model.states.items() if s.name in {"leased", "free", "held"}}
    seen = {o: span for span in group.spans() for o in range(span.start, span.end)}
    assert seen.keys() == unfinished.keys()
    for offset, state in unfinished.items():
        span = seen[offset]
        until = HELD_MS if state.name == "held" else state.until
        assert (span.leased, span.available_at_ms, span.deliveries) == (state.name == "leased", until, state.deliveries)
    assert group.outstanding == len(unfinished)
    assert group.held == sum(state.name == "held" for state in unfinished.values())
    dead = {o for each in group.dead for o in range(each.start, each.end)}
    assert dead == {o for o, s in model.states.items() if s.name == "dead"}
    for offset, state in model.states.items():
        if state.name == "fresh":
            assert not group.has_passed(model.messages[offset].spot)
            assert not group.is_ahead(offset)
    waits = [s.until for s in unfinished.values() if s.name != "held"]
    assert group.has_returned(now) == any(until <= now for until in waits)
