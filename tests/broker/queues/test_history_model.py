"""The life of messages and the past of groups, over random histories with restarts, against what was seen at the time.

Each step notes what the broker answers at that moment. Later the past must be the same, however much happened since,
and the life of each message, cut at that moment, must lead to the state that it had. A follower, which knows less of
the log, tells the beginning of the same life.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.domain import Fixture, HandClock, records, running
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition import history
from portalmq.broker.queues import group_past, moves
from portalmq.broker.queues.settle import SettleRequest
from portalmq.broker.storage import reading
from portalmq.errors import MessageNotFound, OffsetOutOfRange, PortalMQError

STEPS = 45
SEEDS = 20
GROUPS = ("g", "keyed")
LEASE_MS = 1_000
TTL_MS = 700

# What a list of unfinished messages says of each, the number of dead ones, and whether the group is paused.
Seen = tuple[dict[int, tuple[str, int]], int, bool]


class Story:
    """One history on one partition, and what was seen of it."""

    def __init__(self, root: Path, seed: int) -> None:
        self.random = random.Random(seed)
        self.root = root
        self.clock = HandClock()
        self.held: dict[str, list[Any]] = {group: [] for group in GROUPS}
        self.seen: dict[tuple[str, int], Seen] = {}
        # (at_ms, event, group, more) of each message, as the callers know it
        self.known: dict[int, list[tuple[Any, ...]]] = {}
        self.expiring: dict[int, int] = {}
        self.purged_ms = 0
        self.paused = dict.fromkeys(GROUPS, False)
        self._running = ExitStack()
        self.fixture = self._start()
        self.broker.create_topic("t", wire.CreateTopic(partitions=1))
        settings: dict[str, object] = {"max_deliveries": 2, "visibility_timeout_ms": LEASE_MS}
        self.broker.put_group("g", settings | {"retry_backoff_ms": [0, 300]})
        self.broker.put_group("keyed", settings | {"ordering": "key", "dead_letter_topic": ""})

    def _start(self) -> Fixture:
        return self._running.enter_context(running(self.root, self.clock))

    @property
    def broker(self) -> Any:
        return self.fixture.broker

    @property
    def partition(self) -> Any:
        return self.broker.topics.known("t").local[0]

    def close(self) -> None:
        self._running.close()

    # --- steps -------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        verb = self.random.choice(
            ["produce", "produce", "receive", "receive", "receive", "ack", "nack", "nack", "extend", "wait", "wait"]
            + ["move", "redrive", "drop", "cancel", "reschedule", "pause", "restart", "purge"]
        )
        getattr(self, verb)(self.random.choice(GROUPS))
        self.look()

    def note(self, offset: int, *event: Any) -> None:
        """Note what a call did to a message. Those that the broker appends, as copies, are not followed."""
        if offset in self.known:
            self.known[offset].append((self.clock.wall_ms(), *event))

    def produce(self, group: str) -> None:
        more: dict[str, Any] = {"key": self.random.choice([None, b"a", b"b"])}
        kind = self.random.choice(["plain", "plain", "priority", "delay", "ttl"])
        if kind == "priority":
            more["priority"] = self.random.randint(1, 3)
        if kind == "delay":
            more["deliver_at_ms"] = self.clock.wall_ms() + self.random.randint(1, 2_000)
        if kind == "ttl":
            more["expires_at_ms"] = self.clock.wall_ms() + TTL_MS
        values = ["v"] * self.random.randint(1, 4)
        for result in self.broker.produce("t", ProduceRequest(records(*values, **more))):
            self.known[result.offset] = [(self.clock.wall_ms(), "appended", None)]
            if kind == "delay":
                self.known[result.offset].append((self.clock.wall_ms(), "scheduled", None, more["deliver_at_ms"]))
            if kind == "ttl":
                self.expiring[result.offset] = more["expires_at_ms"]

    def receive(self, group: str) -> None:
        if self.paused[group] and self.random.random() < 0.5:
            self.pause(group)
        consumer = self.random.choice(["ann", "bob"])
        request = wire.ReceiveRequest(["t"], max_messages=self.random.randint(1, 5), wait_ms=0, consumer=consumer)
        for message in self.broker.receive_handler.receive(group, request, None):
            self.held[group].append(message)
            more = (consumer, message.delivery_count, message.lease_expires_at_ms)
            self.note(message.offset, "delivered", group, *more)

    def move(self, group: str) -> None:
        """Move some messages to another topic. Those that had their last delivery are given up, and expired ones are
        passed over."""
        now_ms = self.clock.wall_ms()
        before = {
            each.stored.offset: each.deliveries
            for each in self._unfinished(group)
            if each.deliveries < 2 and self.expiring.get(each.stored.offset, now_ms + 1) > now_ms
        }
        moved = self.broker.group_moves.move(group, wire.MoveRequest("t", "elsewhere", limit=self.random.randint(1, 3)))
        done = before.keys() - {each.stored.offset for each in self._unfinished(group)}
        assert len(done) == moved.moved
        for offset in done:
            lease = (moves.CONSUMER, before[offset], self.clock.now_ms() + moves.LEASE_MS)
            self.note(offset, "delivered", group, *lease)
            self.note(offset, "acked", group)

    def _settle(self, group: str, request: SettleRequest) -> list[Any]:
        """Settle some messages, with receipts that may be stale. Return those whose receipt counted."""
        held = self.held[group]
        taken = self.random.sample(held, min(len(held), self.random.randint(1, 3)))
        if not taken:
            return []
        verdicts = self.broker.settlement.settle(group, [message.receipt for message in taken], request)
        return [message for message, good in zip(taken, verdicts, strict=True) if good]

    def ack(self, group: str) -> None:
        unfinished = {each.stored.offset for each in self._unfinished(group)}
        for message in self._settle(group, SettleRequest("ack")):
            if message.offset in unfinished:  # to ack a finished message changes nothing
                self.note(message.offset, "acked", group)

    def nack(self, group: str) -> None:
        delay_ms = self.random.choice([0, 0, 500])
        for message in self._settle(group, SettleRequest("nack", delay_ms, "no")):
            self.note(message.offset, "nacked or dead", group)

    def extend(self, group: str) -> None:
        for message in self._settle(group, SettleRequest("extend", 2 * LEASE_MS)):
            until_ms = self.clock.now_ms() + 2 * LEASE_MS
            self.note(message.offset, "extended", group, until_ms)

    def redrive(self, group: str) -> None:
        self.broker.dead_letters.redrive(group, "t", ids=None, where=None, rate_per_s=None, dry_run=False)

    def drop(self, group: str) -> None:
        if self.random.random() < 0.3:
            self.broker.dead_letters.drop(group, "t", ids=None)

    def cancel(self, group: str) -> None:
        waiting = self.broker.scheduled_messages.page("t", limit=1).messages
        for stored in waiting:
            self.broker.scheduled_messages.cancel("t", 0, stored.offset)
            self.note(stored.offset, "cancelled", None)

    def reschedule(self, group: str) -> None:
        for stored in self.broker.scheduled_messages.page("t", limit=1).messages:
            due_ms = self.clock.wall_ms() + 1_000
            self.broker.scheduled_messages.move("t", 0, stored.offset, due_ms)
            self.note(stored.offset, "rescheduled", None, due_ms)
        eventually(lambda: not self.partition.groups.outbox)  # the copies have the time of their append

    def pause(self, group: str) -> None:
        if group not in self.partition.delivery:
            return  # no log would know it
        self.paused[group] = not self.paused[group]
        self.broker.group_admin.pause(group, paused=self.paused[group], reason="why")

    def purge(self, group: str) -> None:
        if self.random.random() < 0.1:
            self.broker.browser.purge("t", partition=None, before_offset=None)
            self.purged_ms = self.clock.wall_ms()

    def wait(self, group: str) -> None:
        self.clock.advance(self.random.choice([1, 200, LEASE_MS, 3_000]))

    def restart(self, group: str) -> None:
        if self.random.random() < 0.5:
            self.close()
            self.fixture = self._start()

    def look(self) -> None:
        """Note what the broker says now, and let time pass, so that nothing later has the same time."""
        for group in GROUPS:
            if group in self.partition.delivery:
                self.seen[group, self.clock.wall_ms()] = self.present(group)
        self.clock.advance(1)

    # --- what is there, and what was ----------------------------------------------------------------------------------

    def present(self, group: str) -> Seen:
        listed = {each.stored.offset: (each.state, each.deliveries) for each in self._unfinished(group)}
        described = self.broker.describe_group(group)
        return listed, described.dead, described.paused is not None

    def _unfinished(self, group: str) -> list[Any]:
        return list(self.broker.unfinished.messages(group, "t"))

    def past(self, group: str, at_ms: int) -> Seen:
        listed = self.broker.group_past.messages(group, "t", at_ms)
        counts = self.broker.group_past.describe(group, at_ms)
        found = {each.stored.offset: (each.state, each.deliveries) for each in listed}
        states = Counter(state for state, _ in found.values())
        if not self.expiring:  # an expired message is counted until the group passes it, and listed no more
            assert counts.ready == states["ready"]
        assert (counts.in_flight, counts.scheduled) == (states["in_flight"], states["scheduled"])
        return found, counts.dead, counts.paused is not None

    def life(self, offset: int) -> list[Any]:
        found: list[Any] = self.broker.message_traces.trace("t", 0, offset).events
        return found


def state_after(events: list[Any], group: str, at_ms: int) -> tuple[str, int] | None:
    """Return what a list of unfinished messages says of a message with these events at that time; None for done."""
    state, deliveries, until_ms = "ready", 0, 0
    for event in events:
        if event.at_ms > at_ms or event.group not in (None, group):
            continue
        match event.event:
            case "scheduled":
                state, until_ms = "scheduled", event.until_ms
            case "delivered":
                state, deliveries, until_ms = "in_flight", event.delivery_count, event.until_ms
            case "extended":
                state, until_ms = "in_flight", event.until_ms
            case "nacked":
                state, until_ms = "scheduled", event.until_ms or 0
            case "redriven":
                state, deliveries, until_ms = "scheduled", 0, event.until_ms or 0
            case "acked" | "dead" | "dropped" | "cancelled" | "rescheduled" | "purged":
                state = "done"
    if state in {"scheduled", "in_flight"} and until_ms <= at_ms:
        state = "ready"
    return None if state == "done" else (state, deliveries)


def check_past(story: Story) -> None:
    for (group, at_ms), seen in story.seen.items():
        # a purge may have removed what was unfinished then
        with suppress(OffsetOutOfRange) if at_ms < story.purged_ms else nullcontext():
            assert story.past(group, at_ms) == seen, (group, at_ms)


def check_lives(story: Story) -> None:
    for offset, known in story.known.items():
        try:
            events = story.life(offset)
        except MessageNotFound:
            assert story.purged_ms
            continue
        check_known(events, known)
        check_expiries(events)
        for (group, at_ms), (listed, *_) in story.seen.items():
            expires_ms = story.expiring.get(offset, 1 << 62)
            began = known[0][0]
            if began <= at_ms < expires_ms:
                assert state_after(events, group, at_ms) == listed.get(offset), (offset, group, at_ms, events)


def check_known(events: list[Any], known: list[tuple[Any, ...]]) -> None:
    """Check that the events are those that the callers know, and others that no caller causes."""
    told: list[tuple[Any, ...]] = []
    for event in events:
        match event.event:
            case "delivered":
                more = (event.consumer, event.delivery_count, event.until_ms)
                told.append((event.at_ms, "delivered", event.group, *more))
            case "scheduled" | "extended" | "rescheduled":
                told.append((event.at_ms, event.event, event.group, event.until_ms))
            case "nacked":
                assert event.reason == "no"
                told.append((event.at_ms, "nacked or dead", event.group))
            case "dead" if event.reason == "no":
                told.append((event.at_ms, "nacked or dead", event.group))
            case "appended" | "acked" | "cancelled":
                told.append((event.at_ms, event.event, event.group))
            case _:
                assert event.event in {"expired", "dead", "copied", "redriven", "dropped", "purged", "ttl_expired"}
    assert told == known


def check_expiries(events: list[Any]) -> None:
    """Check that exactly those leases expired whose deadline passed before anything else happened to them."""
    for group in GROUPS:
        deadline_ms: int | None = None
        for event in events:
            if event.event == "purged":
                deadline_ms = None
            if event.group != group:
                continue
            if event.event == "expired":
                assert event.at_ms == deadline_ms
                deadline_ms = None
            elif event.event in {"delivered", "extended"}:
                assert event.event == "extended" or deadline_ms is None
                deadline_ms = event.until_ms
            else:
                assert deadline_ms is None or event.at_ms < deadline_ms
                deadline_ms = None


def check_follower(story: Story) -> None:
    """Check that a replica that knows less tells what the leader told when it knew no more."""
    partition = story.partition
    for offset in list(story.known)[:: max(1, len(story.known) // 4)]:
        try:
            whole = history.trace(partition, offset).biography.events
        except MessageNotFound:
            continue
        for end in range(offset + 1, partition.high_watermark + 1, 7):
            follower = SimpleNamespace(
                **{name: getattr(partition, name) for name in ("log", "reader", "host", "groups", "replica")},
                high_watermark=end,
                serves=False,
            )
            found = history.trace(follower, offset)  # type: ignore[arg-type]
            assert (found.as_of.is_leader, found.as_of.offset) == (False, end)
            told = found.biography.events
            assert told == whole[: len(told)]
            assert all(event.offset is None or event.offset >= end for event in whole[len(told) :])


def told_by_every_cut(story: Story) -> None:
    """Check that the past does not depend on which moments were asked for before."""
    moments = list(story.seen)
    story.random.shuffle(moments)
    for group, at_ms in moments[:10]:
        kept = story.broker.group_past
        fresh = group_past.GroupPast(story.broker.group_admin, story.broker.groups, story.broker.peers, story.clock)
        answers = []
        for asked in (kept, fresh):
            try:
                answers.append(asked.describe(group, at_ms))
            except PortalMQError as refused:
                answers.append(refused.code)
        assert answers[0] == answers[1]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_past_is_what_was_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(history, "BLOCK_OFFSETS", 16)
    monkeypatch.setattr(reading, "SCAN_OFFSETS", 8)
    story = Story(tmp_path, seed)
    try:
        for _ in range(STEPS):
            story.step()
        check_past(story)
        check_lives(story)
        check_follower(story)
        told_by_every_cut(story)
        story.restart("g")
        check_past(story)
    finally:
        story.close()
