"""Comparing the replicas of one partition up to the committed point.

    committed     the highest high watermark of the replicas: all of them have the same below, or will
    limit         of a replica: how far it can be compared; less than `committed` while it is behind
    start         where the last of their logs begins; what some have below that is going, and is not compared

Part by part each replica gives the SHA-256 of its verified batches. The rolling hash of a replica is that of all its
parts. Where parts differ, the batches are listed, and the first that differs is named; that replica is not compared any
further. Those that most replicas have count as right; among two nobody knows.

Unknown stays unknown: a replica that is behind, that cannot be asked, or that is compacted further than another one,
is neither the same nor different.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Literal, Protocol

import msgspec

from portalmq import wire
from portalmq.errors import PortalMQError

State = Literal["same", "differs", "damaged", "behind", "unknown"]
WRONG = frozenset({"differs", "damaged"})
# How long a replica may take to learn of the committed point, and how often it is asked.
CATCH_UP_S = 5.0
ASK_EVERY_S = 0.2
# After each part rest so many times as long as it took.
REST = 4
# BatchKind.BLANK: a control record that a compaction has emptied.
BLANK = 6


class ComparedReplica(Protocol):
    """A replica, wherever it is. Calls raise PortalMQError when it cannot be asked."""

    broker_id: int

    def digest(self, offset: int, below: int, *, batches: bool = False) -> wire.ReplicaDigest: ...

    def check_file(self, offset: int) -> wire.ReplicaDigest:
        """Check the file that holds `offset`, and return where the next one begins."""
        ...


class ReplicaFinding(msgspec.Struct):
    """What was found of a replica. `sha256` is its rolling hash from the start of the comparison to `compared_to`."""

    broker: int
    state: State = "same"
    log_start: int = 0
    compared_to: int = 0
    sha256: str = ""
    first_difference: int | None = None
    problem: str = ""


class PartitionFinding(msgspec.Struct):
    topic: str
    partition: int
    start: int = 0
    committed: int = 0
    replicas: list[ReplicaFinding] = []


class _Side:
    """One replica during the comparison. `is_open` until something ends it."""

    def __init__(self, replica: ComparedReplica, pause: Callable[[float], None]) -> None:
        self.replica = replica
        self.finding = ReplicaFinding(replica.broker_id)
        self.seen = wire.ReplicaDigest(replica.broker_id, 0, 0, 0, 0, 0)
        self.rolling = sha256()
        self.is_open = True
        self._pause = pause

    def ask(self, offset: int, below: int, *, batches: bool = False) -> wire.ReplicaDigest | None:
        """Return the digest; None, with the finding, if there is none."""
        return self._asked(lambda: self.replica.digest(offset, below, batches=batches))

    def check_files(self) -> None:
        """Check all files that there are now, one after the other."""
        found = self._asked(lambda: self.replica.check_file(0))
        until = 0 if found is None else found.end_offset
        while found is not None and found.next_offset < until:
            at = found.next_offset
            found = self._asked(lambda at=at: self.replica.check_file(at))  # type: ignore[misc]
            if found is not None and found.next_offset <= at:
                return

    def _asked(self, call: Callable[[], wire.ReplicaDigest]) -> wire.ReplicaDigest | None:
        began_s = time.monotonic()
        try:
            found = call()
        except PortalMQError as error:
            self.end("unknown", error.detail)
            return None
        self._pause(REST * (time.monotonic() - began_s))
        self.seen = found
        if found.fault:
            self.end("damaged", found.fault, found.next_offset)
            return None
        return found

    def end(self, state: State, problem: str, first_difference: int | None = None) -> None:
        self.is_open = False
        self.finding.state, self.finding.problem = state, problem
        self.finding.first_difference = first_difference if state in WRONG else None

    def limit(self, committed: int) -> int:
        return min(self.seen.end_offset, committed)

    def close(self, committed: int) -> ReplicaFinding:
        finding = self.finding
        finding.log_start = self.seen.log_start_offset
        if self.is_open:
            finding.sha256 = self.rolling.hexdigest()
            if finding.compared_to < committed:
                self.end("behind", f"it ends at {self.seen.end_offset}, {committed} is committed")
            elif committed <= finding.log_start < self.seen.end_offset:
                self.end("unknown", f"nothing says what is committed from its log start {finding.log_start} on")
        return finding


class ReplicaComparison:
    """The comparison of one partition, led by the broker `leader`. `pause` waits; without it nothing is running that
    changes."""

    def __init__(
        self,
        topic: str,
        number: int,
        replicas: Sequence[ComparedReplica],
        *,
        leader: int | None = None,
        pause: Callable[[float], None] | None = None,
    ) -> None:
        self._is_live = pause is not None
        self._pause = pause = pause or (lambda seconds: None)
        self._sides = [_Side(replica, pause) for replica in replicas]
        self._sides.sort(key=lambda side: (side.replica.broker_id != leader, side.replica.broker_id))
        self._leader = leader
        self._found = PartitionFinding(topic, number)

    def run(self) -> PartitionFinding:
        for side in self._sides:
            side.check_files()
        for side in self._open:
            side.ask(0, 0)
        committed = max([side.seen.high_watermark for side in self._sides], default=0)
        self._wait_for(committed)
        start = max([side.seen.log_start_offset for side in self._open], default=0)
        self._found.start, self._found.committed = start, committed
        offset = start
        for side in self._sides:
            side.finding.compared_to = start
        while (active := [side for side in self._open if side.limit(committed) > offset]) and offset < committed:
            offset = self._compare_part(active, offset, min(side.limit(committed) for side in active))
        self._check_starts()
        self._found.replicas = sorted([side.close(committed) for side in self._sides], key=lambda each: each.broker)
        return self._found

    @property
    def _open(self) -> list[_Side]:
        return [side for side in self._sides if side.is_open]

    def _wait_for(self, committed: int) -> None:
        """Give replicas the time of a fetch or two to get what is committed."""
        until_s = time.monotonic() + (CATCH_UP_S if self._is_live else 0.0)
        for side in self._open:
            while side.is_open and side.seen.high_watermark < committed and time.monotonic() < until_s:
                self._pause(ASK_EVERY_S)
                side.ask(0, 0)

    def _check_starts(self) -> None:
        """Find replicas that lack what the leader still has: others' log starts move a moment after its own."""
        for side in self._open:
            side.ask(0, 0)
        starts = {side.replica.broker_id: side.seen.log_start_offset for side in self._open}
        first = starts.get(-1 if self._leader is None else self._leader, min(starts.values(), default=0))
        for side in self._open:
            if (start := side.seen.log_start_offset) > first:
                side.end("unknown", f"it begins at {start}, and another at {first}: repeat in a moment")

    # --- a part ------------------------------------------------------------------------------------------------------

    def _compare_part(self, sides: list[_Side], offset: int, below: int) -> int:
        """Compare the next part, and return where it ends."""
        digests = self._digests(sides, offset, below)
        if not digests:
            return offset
        start = max(digest.log_start_offset for digest in digests.values())
        if start > offset:  # what was next was purged meanwhile
            for side in digests:
                side.finding.compared_to = start
            return start
        groups: dict[tuple[int, str], list[_Side]] = {}
        for side, digest in digests.items():
            groups.setdefault((digest.next_offset, digest.sha256), []).append(side)
        right = max(groups, key=lambda key: len(groups[key]))  # the leader's among equals, as it comes first
        for key, others in groups.items():
            for side in others if key != right else ():
                self._name_difference(side, groups[right], offset, max(right[0], key[0]))
                if not any(each.is_open for each in groups[right]):
                    return offset  # the others go on without them
        for side in groups[right]:
            if side.is_open:
                side.rolling.update(right[1].encode())
                side.finding.compared_to = right[0]
        if right[0] <= offset:
            for side in groups[right]:
                side.end("unknown", f"it gave nothing at offset {offset}")
        return right[0]

    def _digests(self, sides: list[_Side], offset: int, below: int) -> dict[_Side, wire.ReplicaDigest]:
        """Return the digests of the longest part that all of them give at once."""
        while True:
            digests = {side: found for side in sides if side.is_open and (found := side.ask(offset, below))}
            ends = {digest.next_offset for digest in digests.values()}
            if len(ends) < 2 or min(ends) >= below or any(each.log_start_offset > offset for each in digests.values()):
                return digests
            below = min(ends)

    def _name_difference(self, side: _Side, others: list[_Side], offset: int, below: int) -> None:
        """Find the first batch of `side` that is not that of `others`, which are alike."""
        others = [each for each in others if each.is_open]
        other = max(others, key=lambda each: each.seen.high_watermark)
        mine, theirs = side.ask(offset, below, batches=True), other.ask(offset, below, batches=True)
        whom = f"broker {other.replica.broker_id}"
        if mine is None:
            return
        if theirs is None:
            side.end("unknown", f"it differs from {whom} in [{offset}, {below}), which cannot be read there: repeat")
            return
        if max(mine.log_start_offset, theirs.log_start_offset) > offset:
            side.end("unknown", f"it differed from {whom} at offset {offset}, which was purged meanwhile: repeat")
            return
        pairs = [*zip(mine.batches, theirs.batches, strict=False)]
        found = next((pair for pair in pairs if pair[0] != pair[1]), None)
        if found is None:
            longer = max(mine.batches, theirs.batches, key=len)
            if len(longer) == len(pairs):  # the same by now: it was compacted, or truncated and copied, in between
                side.end("unknown", f"it changed at offset {offset} while it was read: repeat")
                return
            at, is_compaction = longer[len(pairs)].offset, False
        else:
            at, is_compaction = min(each.offset for each in found), _is_compaction(*found)
        if is_compaction and at < max(mine.compacted_upto, theirs.compacted_upto):
            side.end("unknown", f"at offset {at} it is compacted further, or less, than {whom}: repeat later")
        elif at >= side.seen.high_watermark:
            side.end("behind", _uncommitted(at, other))
        elif at >= other.seen.high_watermark:
            for each in others:
                each.end("behind", _uncommitted(at, side))
        else:
            side.end("differs", f"the batch at offset {at} is not that of {whom}", at)


def _uncommitted(at: int, other: _Side) -> str:
    whom = f"broker {other.replica.broker_id}"
    return f"from offset {at} on, which it does not count as committed, it differs from {whom}"


def _is_compaction(mine: wire.BatchDigest, theirs: wire.BatchDigest) -> bool:
    same_place = (mine.offset, mine.count) == (theirs.offset, theirs.count)
    return same_place and (mine.holes != theirs.holes or (mine.kind == BLANK) != (theirs.kind == BLANK))
