"""What clients did and were told, and the rules that this must fulfil: a checker without a simulation.

It is given facts with their times, in nanoseconds; `fail(rule, why)` is called with a rule that does not hold.

    I2   one value at an offset           I12  no delivery after an ack, no two leases at a time in one epoch
    I3   what was acknowledged stays      I13  nothing that nobody sent; the outputs of a commit call all or none
    I5   nothing uncommitted is read      I15  nothing that was refused
    I9   once, at the first offset        I16  no answer from a replica that was deposed long ago
    I10, I11  one owner of a partition in a generation, offsets that never fall, no older generation's commit
    locks     fencing tokens rise, no lock is granted while another holds it
    limits    no more messages of the group, or of a key, are leased than the widest limit that was asked for
    pause     nothing new is delivered while the group is paused
"""

from __future__ import annotations

from base64 import urlsafe_b64decode
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Any, NamedTuple

from simulation.shell.limits import Limits

_LEASE = Struct(">II")
_LEASE_AT = 22
DEDUP_WINDOW_MS = 86_400_000  # of every topic
# A deadline is in whole milliseconds, that of a GRANT and that of an EXTEND: the leader's clock leaves out the rest.
DEADLINE_NS = 1_000_000

Where = tuple[str, int]  # topic and partition


def lease_of(receipt: str) -> tuple[int, int]:
    """Return the number of the lease in a receipt, and the leader epoch (core/queue/receipts.py)."""
    number, epoch = _LEASE.unpack_from(urlsafe_b64decode(receipt[:60]), _LEASE_AT)
    return int(number), int(epoch)


@dataclass(slots=True)
class Sent:
    """A value, which one producer sends once. `call` names the commit call that it is an output of."""

    where: Where | None
    is_once: bool
    call: str = ""
    refused: bool = False
    offset: int | None = None
    acked_ns: int = 0


@dataclass(slots=True)
class Call:
    """A commit call."""

    outputs: tuple[bytes, ...]
    acked: bool = False
    refused: bool = False
    is_lost: bool = False  # the topic of its outputs was only in a control plane that was lost


class Delivered(NamedTuple):
    """A message as one receive got it. The lease began between `began_ns` and `got_ns`."""

    where: Where
    offset: int
    value: bytes
    receipt: str
    attempt: str
    began_ns: int
    got_ns: int
    visibility_ns: int
    deadline_ms: int = 0  # as the leader wrote it into the GRANT


@dataclass(slots=True)
class Lease:
    """It runs until `until_ns` at least, unless its client has ended it. Without the last EXTENDs it runs until
    `least_ns` at least."""

    delivered: Delivered
    number: int
    epoch: int
    until_ns: int
    least_ns: int
    released: bool = False


@dataclass(slots=True)
class Granted:
    owner: str
    token: int
    began_ns: int
    got_ns: int
    ttl_ns: int
    released: bool = False


@dataclass(slots=True)
class Place:
    """A partition."""

    values: dict[int, bytes] = field(default_factory=dict)  # what clients saw at an offset
    watermark: int = 0
    purged: int = 0
    compacted: int = 0
    committed: int = 0
    committed_ns: int = 0
    owners: dict[int, str] = field(default_factory=dict)  # of a generation
    claimed: tuple[int, int, str] = (0, 0, "")  # the newest generation, when it was known, its owner
    epochs: tuple[tuple[int, int], ...] = ()  # see `leads`


class History:
    def __init__(self, fail: Callable[[str, str], None], *, compacts: bool = False) -> None:
        self._fail = fail
        self.compacts = compacts
        self.places: dict[Where, Place] = {}
        self.sent: dict[bytes, Sent] = {}
        self.calls: dict[str, Call] = {}
        self._acked: dict[tuple[Where, int], int] = {}  # when the ack of a message was answered
        self._leases: dict[tuple[Where, int], Lease] = {}
        self._by_receipt: dict[str, Lease] = {}
        self._lost_grants: set[tuple[Where, int, int, int]] = set()  # offset, epoch and deadline
        self._lost_extend_ns: dict[tuple[Where, int, int], int] = {}  # offset and epoch: when the last one was refused
        # The offset of the GRANT of a lease, and when it was appended, by its message, epoch and number.
        self._grants: dict[tuple[Where, int, int, int], tuple[int, int]] = {}
        self._calls_of: dict[frozenset[str], str] = {}
        self._locks: dict[str, Granted] = {}
        self._locks_lost_ns = -1
        self._tokens: dict[str, int] = {}  # the greatest from before
        self.windows_end = False  # most clocks were set ahead by a dedup window
        self._clocks_ms = 0  # how wrong most clocks were at least
        # Messages whose time to live ended after a delivery, on a clock that was set ahead.
        self._outdated: set[tuple[Where, int]] = set()
        self._redrives: Counter[tuple[Where, int]] = Counter()  # records that redrive a message, committed or not
        self.limits: Limits | None = None
        self.partitions = 1  # the fewest of the topic
        self._out: dict[Where, set[int]] = {}  # messages whose latest lease may run
        # Since when the group is paused for sure.
        self.paused_ns: int | None = None

    @property
    def has_delivered(self) -> bool:
        """Whether any message was delivered: the group is in a log then."""
        return bool(self._by_receipt)

    def place(self, where: Where) -> Place:
        return self.places.setdefault(where, Place())

    # --- producers ---------------------------------------------------------------------------------------------------

    def sends(self, values: Iterable[bytes], where: Where | None, *, is_once: bool, call: str = "") -> None:
        for value in values:
            self.sent[value] = Sent(where, is_once, call)

    def refused(self, values: Iterable[bytes]) -> None:
        """A 4xx, and no try of the request has an unknown outcome."""
        for value in values:
            self.sent[value].refused = True

    def acked(self, values: Sequence[bytes], where: Where, base_offset: int, now_ns: int) -> None:
        for offset, value in enumerate(values, base_offset):
            sent = self.sent[value]
            sent.offset, sent.acked_ns = offset, now_ns
            self._reads(where, offset, value)

    # --- readers -----------------------------------------------------------------------------------------------------

    def _reads(self, where: Where, offset: int, value: bytes) -> None:
        if value not in self.sent:
            self._fail("I13", f"{where}/{offset} has {value[:30]!r}, which nobody sent")
        known = self.place(where).values.setdefault(offset, value)
        if known != value:
            self._fail("I2", f"{where}/{offset} is {value[:20]!r} and was {known[:20]!r}")

    def read(self, where: Where, messages: Iterable[tuple[int, bytes]]) -> None:
        place = self.place(where)
        for offset, value in messages:
            self._reads(where, offset, value)
            if offset >= place.watermark:
                self._fail("I5", f"{where}/{offset} was read, and only {place.watermark} are committed")

    def browsed(
        self, where: Where, first: int, messages: Sequence[tuple[int, bytes]], began_ns: int, lease_ns: int
    ) -> None:
        """A page from offset `first` on, without an upper limit: it has what was acknowledged a lease before."""
        place = self.place(where)
        self.read(where, messages)
        due = place.values.get(first)
        sent = self.sent[due] if due is not None else None
        if sent is None or first < place.purged or self.compacts or sent.offset != first or sent.where != where:
            return
        if sent.acked_ns + lease_ns < began_ns and (not messages or messages[0][0] != first):
            self._fail("I16", f"{where}/{first} was acknowledged long ago, and is not in a page that begins there")

    # --- consumers ---------------------------------------------------------------------------------------------------

    def delivered(self, message: Delivered) -> None:
        key = message.where, message.offset
        self._reads(message.where, message.offset, message.value)
        if message.offset >= self.place(message.where).watermark:
            self._fail("I5", f"{key} was delivered, and only {self.place(message.where).watermark} are committed")
        acked_ns = self._acked.get(key)
        if acked_ns is not None and acked_ns < message.began_ns:
            self._fail("I12", f"{key} is delivered again after its ack")
        is_new = message.receipt not in self._by_receipt
        number, epoch = lease_of(message.receipt)
        # An earlier copy of the request may have been answered, to nobody.
        _, granted_ns = self._grants.get((*key, epoch, number), (0, message.began_ns))
        if is_new and self.paused_ns is not None and self.paused_ns < min(message.began_ns, granted_ns):
            self._fail("pause", f"{key} is delivered to {message.attempt} while the group is paused")
        held = self._leases.get(key)
        if held is not None and held.epoch == epoch and not held.released:
            before = held.delivered
            # An answer may come late, when the next lease was told already.
            is_other = before.attempt != message.attempt and number > held.number
            if is_other and message.got_ns < held.until_ns:
                self._fail("I12", f"{key} is leased to {message.attempt} while {before.attempt} has it")
            if before.attempt != message.attempt and number == held.number:
                self._fail("I12", f"{message.attempt} is given the lease of {before.attempt} on {key}")
        until_ns = min(message.began_ns, granted_ns) + message.visibility_ns - DEADLINE_NS
        lease = Lease(message, number, epoch, until_ns, until_ns)
        if held is not None and held.epoch == epoch and held.delivered.attempt == message.attempt:
            # A repeat gets the lease as it is.
            lease.until_ns = min(lease.until_ns, held.until_ns)
            lease.least_ns = min(lease.least_ns, held.least_ns)
        lease.released = (*key, epoch, message.deadline_ms) in self._lost_grants
        if is_new and self.limits is not None and message.got_ns < lease.until_ns:
            self._check_limits(self.limits, message, epoch)
        # A repeat of a receive has other receipts for the same leases when its messages don't end together any more.
        told = held if held is not None and (held.epoch, held.number) == (epoch, number) else lease
        self._by_receipt.setdefault(message.receipt, told)
        if held is None or (held.epoch, held.number) < (epoch, number):
            self._leases[key] = lease

    def _check_limits(self, limits: Limits, message: Delivered, epoch: int) -> None:
        """A leader counts the leases that it knows of, those that it granted and those of its log."""
        where, out = message.where, list[bytes]()
        place = self.place(where)
        offsets = self._out.setdefault(where, set())
        for offset in sorted(offsets):
            lease = self._leases[where, offset]
            is_gone = (
                offset < place.purged or self._is_replaced(limits, place, offset) or (where, offset) in self._acked
            )
            if is_gone or lease.released or lease.until_ns <= message.got_ns:
                offsets.discard(offset)
            elif lease.epoch == epoch and offset != message.offset:
                out.append(lease.delivered.value)
        offsets.add(message.offset)
        broken = limits.broken(self.partitions, message.value, out)
        if broken:
            self._fail("limits", f"{where}/{message.offset} is delivered to {message.attempt}: {broken}")

    def receipts(self) -> list[str]:
        """Return the receipts of the messages that are out."""
        return [lease.delivered.receipt for lease in self._leases.values()]

    @staticmethod
    def _is_replaced(limits: Limits, place: Place, offset: int) -> bool:
        """Whether compaction has removed a message, which is done then (docs/COMPACTION.md)."""
        key = limits.keys.get(place.values.get(offset, b""))
        later = [value for at, value in place.values.items() if offset < at < place.compacted]
        return key is not None and any(limits.keys.get(value) == key for value in later)

    def is_done(self, message: Delivered) -> bool:
        return (message.where, message.offset) in self._acked

    def is_with_another(self, message: Delivered, now_ns: int) -> bool:
        """Whether somebody else has the message now, for sure."""
        lease = self._leases.get((message.where, message.offset))
        if lease is None or lease.released or now_ns >= lease.until_ns or self.is_done(message):
            return False
        return lease.delivered.attempt != message.attempt and message.got_ns < lease.delivered.began_ns

    def releases(self, receipts: Iterable[str]) -> None:
        """A client is about to end or to change these leases."""
        for receipt in receipts:
            if receipt in self._by_receipt:
                self._by_receipt[receipt].released = True

    def ends(self, messages: Iterable[tuple[Where, int]], holder: str | None) -> None:
        """A client is about to end the leases of these, whoever has them, or those of a holder alone."""
        for key in messages:
            lease = self._leases.get(key)
            if lease is not None and (holder is None or lease.delivered.attempt.startswith(f"{holder}:")):
                lease.released = True

    def ended(self, messages: Iterable[tuple[Where, int]], holder: str | None, now_ns: int) -> None:
        """These were answered as done. Nobody but the holder had one all the time, if there is a holder."""
        for key in messages:
            lease = self._leases.get(key)
            if holder is None or lease is None or lease.released or now_ns >= lease.until_ns or key in self._acked:
                continue
            if not lease.delivered.attempt.startswith(f"{holder}:"):
                self._fail("I12", f"{key} is acked for {holder!r} while {lease.delivered.attempt} has it")

    def accepted(self, receipts: Iterable[str], began_ns: int, now_ns: int) -> None:
        """These were answered as valid: none of them is older than a lease that runs, unless a fail-over has lost that
        one: then an older receipt is valid until the message is leased again (QUEUES.md, delivery modes). Any is valid
        of a message that was purged, or whose time to live ended, which a clock that was set ahead lets end in a
        lease."""
        for receipt in receipts:
            mine = self._by_receipt[receipt].delivered
            if (mine.where, mine.offset) in self._outdated or mine.offset < self.place(mine.where).purged:
                continue
            lease = self._leases[mine.where, mine.offset]
            other = lease.delivered
            is_older = mine.attempt != other.attempt and mine.got_ns < other.began_ns and other.got_ns < began_ns
            if is_older and not lease.released and now_ns < lease.until_ns and not self._is_lost(lease):
                self._fail("I12", f"{mine.attempt} changes the lease of {other.attempt} on {mine.where}/{mine.offset}")

    def extends(self, receipts: Iterable[str], until_ns: int) -> None:
        """A client is about to let these leases end at that time, or a little later."""
        for receipt in receipts:
            lease = self._by_receipt[receipt]
            lease.least_ns = min(lease.least_ns, until_ns - DEADLINE_NS)
            lease.until_ns = min(lease.until_ns, until_ns - DEADLINE_NS)

    def extended(self, receipts: Iterable[str], began_ns: int, until_ns: int) -> None:
        """These were answered as valid. An EXTEND that was refused since the call began may be theirs."""
        for receipt in receipts:
            lease = self._by_receipt[receipt]
            key = lease.delivered.where, lease.delivered.offset
            if self._leases[key] is lease and self._lost_extend_ns.get((*key, lease.epoch), -1) < began_ns:
                lease.until_ns = until_ns - DEADLINE_NS

    def grants(self, where: Where, offset: int, epoch: int, number: int, at: int, now_ns: int) -> None:
        """A leader appends the GRANT of a lease at an offset of its log."""
        self._grants[where, offset, epoch, number] = at, now_ns

    def outdates(self, where: Where, offset: int) -> None:
        """A leader appends a GRANT that gives up a message after a delivery, while a clock is ahead."""
        self._outdated.add((where, offset))

    def lost_outdated(self, where: Where, offset: int) -> None:
        """A disk refuses that GRANT."""
        self._outdated.discard((where, offset))

    def set_clocks(self, wrong_ms: Iterable[int]) -> None:
        """A clock was set. So much is each of them wrong now."""
        each_ms = sorted(wrong_ms)
        self._clocks_ms = min(self._clocks_ms, each_ms[len(each_ms) // 2])
        self.windows_end |= each_ms[(len(each_ms) - 1) // 2] - self._clocks_ms >= DEDUP_WINDOW_MS

    def redrives(self, where: Where, offset: int) -> None:
        """A leader appends a record that redrives a dead message."""
        self._redrives[where, offset] += 1

    def leads(self, where: Where, epochs: Sequence[tuple[int, int]]) -> None:
        """A leader has committed its EPOCH_START, or is the only replica. Its log has these epochs and first offsets,
        its own last. It settles nothing before (rule 4), and all later leaders have its log up to there."""
        place = self.place(where)
        if not place.epochs or place.epochs[-1][0] < epochs[-1][0]:
            place.epochs = tuple(epochs)

    def _is_lost(self, lease: Lease) -> bool:
        """Whether the log of a later leader has another record, or none, in place of the lease's GRANT."""
        message = lease.delivered
        epochs = self.place(message.where).epochs
        at, _ = self._grants.get((message.where, message.offset, lease.epoch, lease.number), (None, 0))
        if at is None or not epochs or epochs[-1][0] <= lease.epoch:
            return False
        return max((epoch for epoch, start in epochs if start <= at), default=lease.epoch) != lease.epoch

    def lost_grant(self, where: Where, offset: int, epoch: int, deadline_ms: int) -> None:
        """A leader's disk had no room for the GRANT, or EXTEND, of this lease: it is lost as by a fail-over, before or
        after its client is told of it."""
        self._lost_grants.add((where, offset, epoch, deadline_ms))
        lease = self._leases.get((where, offset))
        if lease is not None and lease.epoch == epoch:
            lease.released |= lease.delivered.deadline_ms == deadline_ms

    def lost_extend(self, where: Where, offset: int, epoch: int, deadline_ms: int, now_ns: int) -> None:
        """A leader's disk had no room for this EXTEND. It was answered without a wait for the disk, so its client may
        know it (docs/QUEUES.md, "Delivery modes"): the lease runs as the records before it say. The GRANT holds."""
        self.lost_grant(where, offset, epoch, deadline_ms)
        self._lost_extend_ns[where, offset, epoch] = now_ns
        lease = self._leases.get((where, offset))
        if lease is not None and lease.epoch == epoch:
            lease.until_ns = min(lease.until_ns, lease.least_ns)

    def done(self, receipts: Iterable[str], now_ns: int) -> None:
        """The acks of these were answered."""
        for receipt in receipts:
            message = self._by_receipt[receipt].delivered
            self._acked.setdefault((message.where, message.offset), now_ns)

    # --- commit calls ------------------------------------------------------------------------------------------------

    def calls_commit(
        self, name: str, outputs: Sequence[bytes], where: Where | None, receipts: Iterable[str] = ()
    ) -> tuple[str, Sequence[bytes]]:
        """Return the call that commits these receipts: the first one with them, since the same input has the same
        outputs, and a repeat gets the first answer."""
        name = self._calls_of.setdefault(frozenset(receipts) or frozenset([name]), name)
        if name not in self.calls:
            self.calls[name] = Call(tuple(outputs))
            self.sends(outputs, where, is_once=True, call=name)
        return name, self.calls[name].outputs

    def commit_refused(self, name: str) -> None:
        if self.calls[name].acked:
            self._fail("I15", f"commit {name} was answered, and is refused now")
        self.calls[name].refused = True

    def commit_acked(self, name: str) -> None:
        if self.calls[name].refused:
            self._fail("I15", f"commit {name} was refused, and is accepted now")
        self.calls[name].acked = True

    def forget_outputs(self) -> None:
        """ZooKeeper has lost the topic of all outputs so far, which no disk had."""
        for call in self.calls.values():
            call.is_lost = True

    # --- stream groups -----------------------------------------------------------------------------------------------

    def assigned(self, member: str, generation: int, assigned: Mapping[Where, int], began_ns: int, now_ns: int) -> None:
        """A member was told what it owns, and where it begins to read. No seek was made."""
        for where, offset in assigned.items():
            place = self.place(where)
            other = place.owners.setdefault(generation, member)
            if other != member:
                self._fail("I11", f"{where} has two owners in generation {generation}: {other} and {member}")
            if generation > place.claimed[0]:
                place.claimed = (generation, now_ns, member)
            if offset > place.watermark:
                self._fail("I11", f"{member} begins at {where}/{offset}, beyond {place.watermark}")

    def commits(self, where: Where, offset: int) -> None:
        """A member is about to commit."""
        if offset > self.place(where).watermark:
            self._fail("I11", f"{where}/{offset} is to be committed, beyond the high watermark")

    def committed(self, member: str, generation: int, where: Where, offset: int, began_ns: int, now_ns: int) -> None:
        """A commit was answered with ok."""
        place = self.place(where)
        claimed, known_ns, owner = place.claimed
        if claimed > generation and owner != member and known_ns < began_ns:
            self._fail("I10", f"{member} of generation {generation} commits {where} after {owner} of {claimed}")
        if place.committed > offset and place.committed_ns < began_ns:
            self._fail("I11", f"{where} is committed at {offset} after {place.committed}")
        if offset > place.committed:
            place.committed, place.committed_ns = offset, now_ns

    def found_committed(self, where: Where, offset: int, began_ns: int) -> None:
        """The group's offset was read."""
        place = self.place(where)
        if offset > place.watermark:
            self._fail("I11", f"{where}/{offset} is committed, beyond the high watermark {place.watermark}")
        if offset < place.committed and place.committed_ns < began_ns:
            self._fail("I11", f"the offset of {where} fell from {place.committed} to {offset}")

    # --- locks -------------------------------------------------------------------------------------------------------

    def forget_locks(self, now_ns: int) -> None:
        """ZooKeeper has lost them. Tokens go on rising. What was granted before may be told later."""
        for name, granted in self._locks.items():
            self._tokens[name] = max(granted.token, self._tokens.get(name, 0))
        self._locks.clear()
        self._locks_lost_ns = now_ns

    def locked(self, name: str, granted: Granted) -> None:
        if granted.began_ns < self._locks_lost_ns:
            self._tokens[name] = max(granted.token, self._tokens.get(name, 0))
            return
        if granted.token <= (last := self._tokens.get(name, 0)):
            self._fail("lock", f"the token of {name} was {last} before ZooKeeper lost it, and is {granted.token}")
        before = self._locks.get(name)
        if before is not None:
            least = before.token + (granted.owner != before.owner)  # the same owner may ask again
            if before.got_ns < granted.began_ns and granted.token < least:
                self._fail("lock", f"the token of {name} was {before.token}, and is {granted.token}")
            ends_ns = before.began_ns + before.ttl_ns
            if granted.owner != before.owner and not before.released and granted.got_ns < ends_ns:
                self._fail("lock", f"{granted.owner} has {name} while {before.owner} holds it")
            # A release without an answer may arrive later, and ends what the same owner was granted under the token.
            granted.released |= before.released and (granted.owner, granted.token) == (before.owner, before.token)
        self._locks[name] = granted

    def renewed(self, name: str, token: int, began_ns: int) -> None:
        held = self._locks.get(name)
        if held is not None and held.token == token:
            held.began_ns = began_ns
        elif held is not None and held.token > token and held.got_ns < began_ns:
            self._fail("lock", f"{name} was renewed with token {token} after {held.token} was granted")

    def unlocks(self, name: str, token: int) -> None:
        held = self._locks.get(name)
        if held is not None and held.token == token:
            held.released = True

    # --- the end -----------------------------------------------------------------------------------------------------

    def stored(
        self, logs: Mapping[Where, tuple[int, Mapping[int, bytes]]], letters: Sequence[tuple[Where, int, bytes]] = ()
    ) -> None:
        """The logs in the end: the first offset, and the values by offset. The dead letters are copies of messages at
        these places, and are not among the logs."""
        found: dict[bytes, list[tuple[Where, int]]] = {}
        for where, (_, values) in logs.items():
            for offset, value in values.items():
                self._reads(where, offset, value)
                found.setdefault(value, []).append((where, offset))
        for where, offset, value in letters:
            self._reads(where, offset, value)
        for place, copies in Counter((where, offset) for where, offset, _ in letters).items():
            if copies > 1 + self._redrives[place] and not self.windows_end:
                self._fail("I13", f"{place} is a dead letter {copies} times, after {self._redrives[place]} redrives")
        for value, places in found.items():
            sent = self.sent.get(value)
            if sent is None:
                continue
            if sent.refused:
                self._fail("I15", f"{value[:20]!r} was refused, and is at {places}")
            if sent.is_once and len(places) > 1 and not (sent.call and self.windows_end):
                self._fail("I9", f"{value[:20]!r} is at {places}")
        self._compare_calls(found)
        if not self.compacts:
            self._compare_acked(found, logs)

    def _compare_calls(self, found: Mapping[bytes, Any]) -> None:
        for name, call in self.calls.items():
            there = sum(value in found for value in call.outputs)
            if call.refused and there:
                self._fail("I15", f"commit {name} was refused, and {there} of its outputs are there")
            if there not in (0, len(call.outputs)):
                self._fail("I13", f"commit {name}: {there} of {len(call.outputs)} outputs are there")
            if call.acked and call.outputs and not there and not call.is_lost:
                self._fail("I3", f"commit {name} was answered, and its outputs are not there")

    def _compare_acked(self, found: Mapping[bytes, Any], logs: Mapping[Where, Any]) -> None:
        for value, sent in self.sent.items():
            if sent.offset is None or sent.where not in logs:
                continue
            is_kept = sent.offset >= max(logs[sent.where][0], self.place(sent.where).purged)
            if is_kept and (sent.where, sent.offset) not in found.get(value, ()):
                where = f"{sent.where}/{sent.offset}"
                self._fail("I3", f"{value[:20]!r} was acknowledged at {where}, and is at {found.get(value)}")
