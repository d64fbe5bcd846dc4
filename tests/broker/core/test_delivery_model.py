"""The fold against a model so simple that it is right: a dictionary with one entry a message."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from portalmq.broker.core.delivery import GroupDelivery
from portalmq.broker.core.fold import GroupFold
from portalmq.broker.core.records import Ack, Extend, Grant, Nack, ranges_of

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["append", "receive", "receive", "ack", "nack", "extend", "wait", "snapshot", "purge"]),
        st.integers(1, 12),
        st.integers(0, 60),
    ),
    max_size=60,
)


class Model:
    """Each message is fresh, leased until a time, free again from a time, or done."""

    def __init__(self) -> None:
        self.end = 0
        self.states: dict[int, tuple[str, int, int]] = {}  # offset -> (state, until, deliveries)

    def append(self, count: int) -> None:
        for offset in range(self.end, self.end + count):
            self.states[offset] = ("fresh", 0, 0)
        self.end += count

    def available(self, now: int) -> list[int]:
        return [
            offset
            for offset, (state, until, _) in sorted(self.states.items())
            if state == "fresh" or (state in {"leased", "free"} and until <= now)
        ]


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_the_fold_agrees_with_a_dictionary_of_messages(steps):
    group, model, now = GroupDelivery(GroupFold("g", 0, 0, [])), Model(), 0
    for verb, size, pick in steps:
        offset = pick % max(1, model.end)
        if verb == "append":
            model.append(size)
        elif verb == "wait":
            now += size * 7
        elif verb == "receive":
            receive(group, model, now, size)
        elif verb == "snapshot":
            group = GroupDelivery(group.snapshot())
        elif verb == "purge":
            group.purge(offset)
            for gone in range(offset):
                model.states[gone] = ("done", 0, 0)
        else:
            settle(group, model, verb, range(offset, min(model.end, offset + size)), now, size)
        check(group, model, now)


def receive(group: GroupDelivery, model: Model, now: int, size: int) -> None:
    plan = group.plan(now, size)
    ranges = [(span.start, span.end, span.deliveries + 1) for span in plan.returned]
    fresh_end = min(model.end, plan.fresh_from + plan.fresh_max)
    if fresh_end > plan.fresh_from:
        ranges.append((plan.fresh_from, fresh_end, 1))
    handed = [offset for start, end, _ in ranges for offset in range(start, end)]
    assert len(handed) <= size
    assert set(handed) <= set(model.available(now)), "only what is free is handed out"
    assert handed or not model.available(now), "something free is never withheld"
    if ranges:
        group.apply(Grant(tuple(ranges), max(group.next, fresh_end), now, now + 30))
    for offset in handed:
        model.states[offset] = ("leased", now + 30, model.states[offset][2] + 1)


def settle(group: GroupDelivery, model: Model, verb: str, offsets: range, now: int, size: int) -> None:
    leased = [offset for offset in offsets if model.states[offset][0] == "leased"]
    assert leased == [o for o in offsets if group.holds(o, model.states[o][2])]
    ranges = ranges_of(leased)
    if not ranges:
        return
    if verb == "ack":
        group.apply(Ack(ranges, now))
    elif verb == "nack":
        group.apply(Nack(tuple((start, end, now + size) for start, end in ranges), now))
    else:
        group.apply(Extend(ranges, now + 50, now))
    for offset in leased:
        deliveries = model.states[offset][2]
        model.states[offset] = {
            "ack": ("done", 0, 0),
            "nack": ("free", now + size, deliveries),
            "extend": ("leased", now + 50, deliveries),
        }[verb]


def check(group: GroupDelivery, model: Model, now: int) -> None:
    unfinished = {o: s for o, s in model.states.items() if s[0] in {"leased", "free"}}
    seen = {o: span for span in group.spans() for o in range(span.start, span.end)}
    assert seen.keys() == unfinished.keys()
    for offset, (state, until, deliveries) in unfinished.items():
        span = seen[offset]
        assert (span.leased, span.available_at_ms, span.deliveries) == (state == "leased", until, deliveries)
    assert group.outstanding == len(unfinished)
    waits = [until for _, until, _ in unfinished.values()]
    assert group.has_returned(now) == any(until <= now for until in waits)
