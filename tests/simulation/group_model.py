"""A model of a queue group and a stream group, message by message. It takes the committed log record by record; a
record with a forbidden effect violates I11, I12 or I13.

A record is a decision of a leader that had exactly the log before it, so the log alone shows whether it was right.

                 +--- passed over: expired, cancelled, or finished ahead
    fresh -------+--- out (leased, back, or held) ---+--- acked
                                 ^                   +--- expired
                                 +------ redriven ------- dead --- dropped
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from simulation.content import Control, Mail
from simulation.group_options import QueueGroup

from portalmq.broker.core.queue.lanes import DELAYED
from portalmq.broker.core.queue.records import (
    Ack,
    Claim,
    Commit,
    CommitOffset,
    Dead,
    Drop,
    Extend,
    Grant,
    LanePosition,
    Nack,
    Pause,
    Redrive,
    Seek,
)

if TYPE_CHECKING:
    from simulation.disk import Batch
    from simulation.queue_groups import Receipt

Fail = Callable[..., None]


@dataclass(slots=True)
class Letter:
    """A message of the committed log."""

    mail: Mail
    appended_at_ms: int
    uid: int

    def is_delayed(self, offset: int) -> bool:
        return self.mail.spot(offset, self.appended_at_ms)[0] >= DELAYED


@dataclass(slots=True)
class Lease:
    leader_epoch: int
    deadline_ms: int
    deliveries: int
    holder: str


class QueueModel:
    def __init__(self, config: QueueGroup, letters: dict[int, Letter], cancelled: set[int], fail: Fail) -> None:
        self.config = config
        self.letters = letters
        self.cancelled = cancelled
        self.fail = fail
        self.start = -1
        self.state: dict[int, str] = {}
        self.leases: dict[int, Lease] = {}
        self.delivered: set[int] = set()  # by any leader, committed or not
        self.receipts: set[Receipt] = set()
        self.calls: set[str] = set()
        self.refused_calls: set[str] = set()
        self.call_of: dict[int, str] = {}  # message -> the call that committed it, "" for one without outputs
        self.redriven: set[int] = set()
        self.pause = (0, False)
        self.finals: set[int] = set()  # acked or expired for good by the last record
        self._fresh: dict[int, list[tuple[int, int]]] = {}
        self._cursors: dict[int, tuple[int, int]] = {}

    @property
    def has_begun(self) -> bool:
        return self.start >= 0

    def begin(self, start: int) -> None:
        if self.has_begun:
            self.fail("I12", "{} begins at {} and again at {}", self.config.name, self.start, start)
        self.start = start
        for offset, letter in self.letters.items():
            self.born(offset, letter)

    def spot(self, offset: int, letter: Letter) -> LanePosition:
        return letter.mail.spot(offset, letter.appended_at_ms)

    def born(self, offset: int, letter: Letter) -> None:
        """A message was committed."""
        if not self.has_begun or offset < self.start:
            return
        lane, due_ms, _ = self.spot(offset, letter)
        if (due_ms, offset) < self._cursors.get(lane, (0, 0)):
            self.fail("I12", "{}: message {} is behind the cursor {} of lane {}, and is never delivered",
                      self.config.name, offset, self._cursors[lane], lane)  # fmt: skip
        insort(self._fresh.setdefault(lane, []), (due_ms, offset))

    def is_done(self, offset: int) -> bool:
        state = self.state.get(offset, "fresh")
        return state not in ("fresh", "out") or (state == "fresh" and offset in self.cancelled)

    # --- records -----------------------------------------------------------------------------------------------------

    def take(self, control: Control, batch: Batch) -> None:
        record: Any = control.record
        self.finals = set()
        match record:
            case Grant():
                self._take_grant(record, control, batch.head.leader_epoch)
            case Ack():
                self._take_acked(record)
            case Commit():
                self._take_acked(record)
                self._take_outputs(record)
            case Nack():
                for offset in self._each(record.ranges, "out", "nack"):
                    self.leases.pop(offset, None)
            case Extend():
                for offset in self._each(record.ranges, "out", "extend"):
                    if offset in self.leases:
                        self.leases[offset].deadline_ms = record.deadline_ms
            case Dead():
                for start, end, deliveries in record.ranges:
                    for offset in self._each([(start, end)], "out", "dead"):
                        self.state[offset] = "dead"
                        self.leases.pop(offset, None)
                    if deliveries < self.config.max_deliveries:
                        self.fail("I12", "{}: [{},{}) is dead after {} deliveries", self.config.name, start, end,
                                  deliveries)  # fmt: skip
            case Redrive():
                for offset in self._each(record.ranges, "dead", "redrive"):
                    self.state[offset] = "out"
                    self.redriven.add(offset)
            case Drop():
                for offset in self._each(record.ranges, "dead", "drop"):
                    self.state[offset] = "dropped"
            case Pause():
                self.pause = max(self.pause, (record.number, record.paused))

    def _each(self, ranges: Any, expected: str, what: str) -> list[int]:
        found = []
        for start, end, *_ in ranges:
            for offset in range(start, end):
                if offset in self.letters:
                    if self.state.get(offset, "fresh") != expected:
                        self.fail("I12", "{}: {} of message {}, which is {}", self.config.name, what, offset,
                                  self.state.get(offset, "fresh"))  # fmt: skip
                    found.append(offset)
        return found

    def _take_grant(self, grant: Grant, control: Control, leader_epoch: int) -> None:
        name, wall_ms = self.config.name, control.wall_ms
        granted: set[int] = set()
        if self.pause[1] and grant.ranges:
            self.fail("I12", "{}: {} are delivered, and it is paused", name, grant.ranges)
        holder, has_name, _ = (grant.attempt_id or "").partition(":")
        holder = holder if has_name else ""
        for start, end, deliveries in grant.ranges:
            for offset in range(start, end):
                if offset not in self.letters:
                    self.fail("I12", "{}: {} is delivered and is no message", name, offset)
                state = self.state.get(offset, "fresh")
                lease = self.leases.get(offset)
                if state not in ("fresh", "out"):
                    self.fail("I12", "{}: message {} is delivered, and is {}", name, offset, state)
                if lease and lease.leader_epoch == leader_epoch and lease.deadline_ms > grant.granted_at_ms:
                    self.fail("I12", "{}: message {} is delivered under a live lease", name, offset)
                if state == "fresh":
                    self._check_due(offset, wall_ms)
                    if offset in self.cancelled and self.letters[offset].is_delayed(offset):
                        self.fail("I12", "{}: message {} is delivered, and was cancelled", name, offset)
                self.state[offset] = "out"
                self.leases[offset] = Lease(leader_epoch, grant.deadline_ms, deliveries, holder)
                granted.add(offset)
        for start, end, _ in grant.held:
            for offset in range(start, end):
                if self.state.get(offset, "fresh") != "fresh" or not self.config.by_key:
                    self.fail("I12", "{}: message {} is held, and is {}", name, offset, self.state.get(offset))
                self._check_due(offset, wall_ms)
                self.state[offset] = "out"
        for offset in self._each(grant.gone, "out", "end"):
            self.state[offset] = "expired"
            self.finals.add(offset)
            self.leases.pop(offset, None)
            if not self.letters[offset].mail.has_expired(wall_ms) and offset not in self.redriven:
                self.fail("I12", "{}: message {} is dead-lettered, and has not expired", name, offset)
        self._move(0, (0, grant.next), wall_ms)
        for lane, due_ms, offset in grant.cursors:
            self._move(lane, (due_ms, offset), wall_ms)

    def _check_due(self, offset: int, wall_ms: int) -> None:
        """No message is delivered before its time by the clock of the leader that delivered it first. Where clocks were
        set back, the log's time, which never decreases, counts."""
        letter = self.letters[offset]
        due_ms = letter.mail.deliver_at_ms
        if due_ms is not None and due_ms > max(wall_ms, letter.appended_at_ms):
            self.fail("I12", "{}: message {} comes {} ms early", self.config.name, offset, due_ms - wall_ms)

    def _move(self, lane: int, cursor: tuple[int, int], wall_ms: int) -> None:
        """Every message that the cursor passes is accounted for."""
        self._cursors[lane] = max(cursor, self._cursors.get(lane, (0, 0)))
        fresh = self._fresh.get(lane, [])
        passed = bisect_left(fresh, cursor)
        for due_ms, offset in fresh[:passed]:
            if offset not in self.state and offset not in self.cancelled:
                if not self.letters[offset].mail.has_expired(wall_ms):
                    self.fail("I12", "{}: message {} (lane {}, due {}) is passed over by {}", self.config.name, offset,
                              lane, due_ms, cursor)  # fmt: skip
                self.state[offset] = "expired"
        del fresh[:passed]

    def _take_acked(self, record: Ack | Commit) -> None:
        for offset in self._each(record.ranges, "out", "ack"):
            self._acked(offset)
        for spot in record.ahead:
            offset = spot[2]
            if offset not in self.letters or self.spot(offset, self.letters[offset]) != spot:
                self.fail("I12", "{}: {} is acked, and there is no message", self.config.name, spot)
            known = self.state.get(offset, "fresh")
            if known != "fresh" and not (known == "acked" and isinstance(record, Ack)):
                self.fail("I12", "{}: {} is done ahead, and is {}", self.config.name, offset, known)
            self._acked(offset)

    def _acked(self, offset: int) -> None:
        self.finals.add(offset)
        if offset not in self.delivered:
            self.fail("I12", "{}: message {} is acked, and was never delivered", self.config.name, offset)
        self.state[offset] = "acked"
        self.leases.pop(offset, None)

    def _take_outputs(self, commit: Commit) -> None:
        call = commit.outputs[0].record.partition("/")[0] if commit.outputs else ""
        if call and call in self.calls:
            self.fail("I13", "{}: call {} is committed twice", self.config.name, call)
        if call in self.refused_calls:
            self.fail("I15", "{}: call {} was refused, and is committed", self.config.name, call)
        self.calls.add(call)
        done = [at for start, end in commit.ranges for at in range(start, end)] + [at for _, _, at in commit.ahead]
        self.call_of.update(dict.fromkeys(done, call))


@dataclass(slots=True)
class StreamModel:
    name: str
    fail: Fail
    letters: dict[int, Letter]
    dropped_below: Callable[[], int]
    committed: int = -1
    generation: int = 0
    member: str = ""
    owners: dict[int, str] = field(default_factory=dict)  # generation -> member
    fetched: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)
    calls: set[str] = field(default_factory=set)
    inputs_of: dict[str, list[int]] = field(default_factory=dict)  # call -> messages
    transformed: dict[int, str] = field(default_factory=dict)  # message -> the call that published for it
    refused: set[str] = field(default_factory=set)

    def take(self, control: Control) -> None:
        record: Any = control.record
        match record:
            case Claim():
                if record.generation < self.generation:
                    self.fail("I11", "{}: {} claims in generation {} after {}", self.name, record.member,
                              record.generation, self.generation)  # fmt: skip
                if self.owners.setdefault(record.generation, record.member) != record.member:
                    self.fail("I11", "{}: {} and {} own it in generation {}", self.name, record.member,
                              self.owners[record.generation], record.generation)  # fmt: skip
                self.member, self.generation = record.member, record.generation
                if self.committed < 0:
                    self.committed = record.start
            case CommitOffset():
                self._take_commit(record, control)
            case Commit():
                self._take_commit(record, control)
                if record.outputs:
                    self._take_outputs(record.outputs[0].record.partition("/")[0])
            case Seek():
                if record.generation < self.generation:
                    self.fail("I11", "{}: sought in generation {} after {}", self.name, record.generation,
                              self.generation)  # fmt: skip
                if record.generation in self.owners:
                    self.fail("I15", "{}: a seek of generation {} comes after its claim", self.name, record.generation)
                self.generation, self.committed = record.generation, record.offset
                self.transformed = {at: call for at, call in self.transformed.items() if at < record.offset}

    def refuse(self, call: str) -> None:
        self.refused.add(call)
        if call in self.calls:
            self.fail("I13", "{}: {} is refused, and has been committed", self.name, call)

    def _take_outputs(self, call: str) -> None:
        if call in self.calls:
            self.fail("I13", "{}: {} is committed twice", self.name, call)
        if call in self.refused:
            self.fail("I15", "{}: {} is committed, and was refused before", self.name, call)
        self.calls.add(call)
        for offset in self.inputs_of.get(call, ()):
            if offset in self.transformed:
                self.fail("I13", "{}: {} publishes for message {}, as {} has", self.name, call, offset,
                          self.transformed[offset])  # fmt: skip
            self.transformed[offset] = call

    def _take_commit(self, commit: CommitOffset | Commit, control: Control) -> None:
        if commit.member != self.member or commit.generation < self.generation:
            self.fail("I11", "{}: {} of generation {} commits, {} owns it since {}", self.name, commit.member,
                      commit.generation, self.member, self.generation)  # fmt: skip
        if commit.offset < self.committed or commit.offset > control.high_watermark:
            self.fail("I11", "{}: {} is committed after {}, the log is readable to {}", self.name, commit.offset,
                      self.committed, control.high_watermark)  # fmt: skip
        for offset in self.letters:
            if self.committed <= offset < commit.offset:
                if offset not in self.fetched and offset >= self.dropped_below():
                    self.fail("I11", "{}: {} is committed over message {}, which no member read", self.name,
                              commit.offset, offset)  # fmt: skip
                self.passed.add(offset)
        self.committed = commit.offset
