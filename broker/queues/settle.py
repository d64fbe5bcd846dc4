"""Ack, nack, reject, release and extend: check receipts, and bring them to the leaders of their partitions.

The head of a receipt contains its topic and partition, signed with a key of the cluster. So any broker can check all
receipts of a call before it uses the first one. Ack and extend are idempotent, so both are repeated after an unknown
outcome. Nack, reject and release are not: another consumer may have the message by then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import NamedTuple

from portalmq.broker.cluster.routing import LocalWork
from portalmq.broker.cluster.rpc import Outcomes, TopicPartition, raise_if_all_failed
from portalmq.broker.cluster.rpc.queues import SETTLE, Settle, SettleShare, Verb
from portalmq.broker.core.queue.receipts import Lease, head_of, offsets_of, tag_of
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.writer import Pending
from portalmq.broker.partition.yielding import give_way, in_short_turns
from portalmq.broker.queues.group_partition import GroupPartition, ReceiptSpan
from portalmq.broker.queues.groups import Groups
from portalmq.control_plane.state import GroupState
from portalmq.errors import InvalidRequest, PortalMQError, Unavailable

# Receipts that are checked, or used by one record, before other greenlets run.
RECEIPTS_A_TURN = 500
# Acks of neighbours under one lease are usually one step, and count as fewer.
NEIGHBOURS_AS_ONE = 3
# Texts that are read before other greenlets may run.
TEXTS_A_STEP = 2_000

# True for a receipt that was valid, False for a stale one; an error where the leader cannot be asked.
Verdict = bool | PortalMQError


@dataclass(frozen=True, slots=True)
class SettleRequest:
    """What to do with the receipts. `time_ms` is the delay of a nack, or the new duration of an extended lease. A
    release is a nack of messages that no consumer has seen; a reject makes dead letters of them at once."""

    verb: Verb
    time_ms: int | None = None
    reason: str | None = None


ACK = SettleRequest("ack")


class BegunAcks(NamedTuple):
    """Acks that are appended, unless not `is_appended`: then `finish` tries those again that were refused.

    `finish` returns the verdicts, and does not wait when soft ones are committed; `hurry` lets these go to the disk
    now."""

    is_appended: bool
    is_committed: Callable[[], bool]
    hurry: Callable[[], None]
    finish: Callable[[], list[Verdict]]


@dataclass(slots=True)
class _SettleWork:
    """The work of one call: receipts by partition. `is_soft`: nothing waits for its acks until `hurry`."""

    group: GroupState
    settle_request: SettleRequest
    shares: dict[TopicPartition, list[ReceiptSpan]]
    groups: Groups
    is_soft: bool = False
    begun: dict[TopicPartition, tuple[list[bool], Callable[[], None]]] = field(default_factory=dict)
    # What is answered when the logs are committed up to the soft records.
    soft: list[tuple[Partition, Pending]] = field(default_factory=list)

    def begin(self, places: Sequence[TopicPartition]) -> Outcomes[list[bool]]:
        """Append the records of these partitions without a wait; return the refusals."""
        refused: Outcomes[list[bool]] = {}
        for place in in_short_turns(places):
            try:
                self.groups.check_same(self.group)  # receipts of a group that replaced it look the same
                self.begun[place] = self._apply(place)
            except PortalMQError as error:
                refused[place] = error
        return refused

    def is_committed(self) -> bool:
        return all(pending.done.is_set() and pending.error is None for _, pending in self.soft)

    def hurry(self) -> None:
        for partition, _ in self.soft:
            partition.hurry()

    def finish(self) -> Outcomes[list[bool]]:
        """Wait until the appended records are committed."""
        outcomes: Outcomes[list[bool]] = {}
        begun, self.begun = self.begun, {}
        for place, (verdicts, wait) in in_short_turns(begun.items()):
            try:
                wait()
            except PortalMQError as error:
                outcomes[place] = error
                continue
            outcomes[place] = verdicts
        return outcomes

    def here(self, places: Sequence[TopicPartition]) -> Outcomes[list[bool]]:
        return self.begin(places) | self.finish()

    def request(self, places: Sequence[TopicPartition]) -> Settle:
        shares = [SettleShare(*place, [each.of_lease() for each in self.shares[place]]) for place in places]
        request = self.settle_request
        return Settle(request.verb, self.group.name, self.group.group_id, shares, request.time_ms, request.reason)

    def _apply(self, place: TopicPartition) -> tuple[list[bool], Callable[[], None]]:
        """Append one record for each part of the receipts, with pauses for other greenlets."""
        shown = self.shares[place]
        verdicts = [True] * sum([len(each.offsets) for each in shown])
        waits: list[Callable[[], None]] = []
        delivery = None
        for part in _parts(shown, is_ack=self.settle_request.verb == "ack"):
            if waits:
                give_way()
            try:
                at = self.groups.at(self.group, place)
                if waits and at.delivery is not delivery:  # receipts of a new fold look the same
                    raise Unavailable("the group has changed: repeat", retry_after_s=0.1)
                delivery = at.delivery
                refused, wait = self._settle(at, part)
            except PortalMQError as error:
                raise _doubtful(error) if waits else error from None
            waits.append(wait)
            if self.is_soft:
                self.soft.append((at.partition, at.partition.settled(at.partition.replica.next_offset - 1)))
            for index in refused:
                verdicts[index] = False

        def wait_for_all() -> None:
            for wait in waits:
                wait()

        return verdicts, waits[0] if len(waits) == 1 else wait_for_all

    def _settle(self, at: GroupPartition, shown: list[ReceiptSpan]) -> tuple[list[int], Callable[[], None]]:
        """Return the indexes of refused receipts, and a function that waits until that is final."""
        config = self.group.config
        if self.settle_request.verb == "ack":
            return at.ack(shown, is_soft=self.is_soft)
        if self.settle_request.verb == "nack":
            return at.nack(shown, self.settle_request.time_ms, self.settle_request.reason, config)
        if self.settle_request.verb == "reject":
            return at.reject(shown, self.settle_request.reason)
        if self.settle_request.verb == "release":
            return at.release(shown, self.settle_request.time_ms or 0, self.settle_request.reason)
        return at.extend(shown, self.settle_request.time_ms or config.visibility_timeout_ms), _no_wait


def _parts(shown: list[ReceiptSpan], *, is_ack: bool) -> Iterator[list[ReceiptSpan]]:
    """Split the share of a partition into parts. Receipts are numbered by their index in the share, not in the request,
    as other brokers know only the share."""
    part: list[ReceiptSpan] = []
    size = first = 0
    for each in shown:
        places = range(first, first + len(each.offsets))
        first = places.stop
        numbered: list[tuple[int, int]] = []
        steps = len(places) // NEIGHBOURS_AS_ONE if is_ack and isinstance(each.offsets, range) else len(places)
        if size + steps < RECEIPTS_A_TURN:  # usually the whole share
            part.append(each._replace(indexes=places))
            size += steps
        else:
            numbered = sorted(zip(each.offsets, places, strict=True))
        while numbered:
            end = min(len(numbered), RECEIPTS_A_TURN - size)
            while end < len(numbered) and numbered[end][0] == numbered[end - 1][0]:
                end += 1  # both copies of a repeated receipt get the same verdict
            offsets, indexes = zip(*numbered[:end], strict=True)
            part.append(each._replace(indexes=list(indexes), offsets=list(offsets)))
            del numbered[:end]
            size += end
            if size >= RECEIPTS_A_TURN:
                yield part
                part, size = [], 0
    if part:
        yield part


class Settlement:
    """Acks, nacks, releases and extensions of clients, and those that other brokers forward."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._leaders = groups.leaders

    def settle(
        self, name: str, receipts: list[str], settle_request: SettleRequest = ACK, *, forward: bool = True
    ) -> list[Verdict]:
        """Settle, durably; return one verdict for each receipt, in order. Raises when nothing was done: InvalidRequest
        for a receipt of another group, NotLeader without `forward`, and the error of the partitions when all refuse."""
        group = self._groups.get_queue(name)
        work = _SettleWork(group, settle_request, self.checked(group, receipts), self._groups)
        if not forward:
            self._leaders.check_led_here(work.shares)
        repeatable = settle_request.verb in {"ack", "extend"}
        outcomes = self._run(work, list(work.shares), forward=forward, repeatable=repeatable)
        return _verdicts(work, outcomes, len(receipts))

    def begin_acks(self, name: str, receipts: list[str], *, forward: bool, is_soft: bool = False) -> BegunAcks:
        """Begin the acks of an ack-and-receive. On return, those for partitions led here are appended, and go to the
        disk together with the receive's records, soft ones a little later; the others are settled."""
        group = self._groups.get_queue(name)
        work = _SettleWork(group, ACK, self.checked(group, receipts), self._groups, is_soft)
        if not forward:
            self._leaders.check_led_here(work.shares)
        here = [place for place in work.shares if self._leaders.led_here(place)]
        elsewhere = [place for place in work.shares if place not in here]
        outcomes = self._run(work, elsewhere, forward=forward, repeatable=True) if elsewhere else {}
        for outcome in outcomes.values():
            if isinstance(outcome, PortalMQError):  # raised before the receive, whose messages a repeat would not get
                raise _doubtful(outcome)
        refused = work.begin(here)

        def finish() -> list[Verdict]:
            if not work.is_committed():
                work.hurry()
            done = outcomes | refused | work.finish()
            again = [place for place in here if isinstance(done[place], PortalMQError)]
            if again:  # no longer led here, or refused
                work.is_soft = False
                done |= self._run(work, again, forward=forward, repeatable=True)
            return _verdicts(work, done, len(receipts))

        return BegunAcks(not refused, lambda: not refused and work.is_committed(), work.hurry, finish)

    def _run(
        self, work: _SettleWork, places: Sequence[TopicPartition], *, forward: bool, repeatable: bool
    ) -> Outcomes[list[bool]]:
        leader_work = self._leaders.work(SETTLE, work.request, work.here)
        return self._leaders.run(places, leader_work, forward=forward, repeatable=repeatable)

    def local_settle(self, call: Settle) -> LocalWork[list[bool]]:
        """Settle receipts that another broker has checked, on partitions that this one leads."""
        group = self._groups.get_by_id(call.group, call.group_id)
        shares = {
            place: [ReceiptSpan(delivery, leader_epoch, [], offsets) for delivery, leader_epoch, offsets in share.shown]
            for place, share in call.by_place().items()
        }
        return _SettleWork(group, SettleRequest(call.verb, call.time_ms, call.reason), shares, self._groups).here

    # --- receipts ----------------------------------------------------------------------------------------------------

    def checked(self, group: GroupState, texts: list[str]) -> dict[TopicPartition, list[ReceiptSpan]]:
        """Return the receipts by partition and lease. Raises InvalidRequest when one of them is not the group's."""
        by_head: dict[str, tuple[Lease, list[ReceiptSpan]]] = {}
        by_place: dict[TopicPartition, list[list[ReceiptSpan]]] = {}
        index = 0
        for head, run in in_short_turns(_runs_by_head(texts)):
            found = by_head.get(head)
            if found is None:
                place, lease = self._checked_head(group, head, index)
                found = by_head[head] = (lease, [])
                by_place.setdefault(place, []).append(found[1])
            lease, spans = found
            places = range(index, index + len(run))
            spans.append(ReceiptSpan(lease.delivery, lease.leader_epoch, places, offsets_of(run, head, lease)))
            index = places.stop
        return {place: [_joined(spans) for spans in leases] for place, leases in by_place.items()}

    def _checked_head(self, group: GroupState, head: str, index: int) -> tuple[TopicPartition, Lease]:
        topic = self._groups.by_tag(tag_of(head))
        if topic is None:
            raise InvalidRequest(f"receipt {index} belongs to no topic that group {group.name!r} received from")
        lease = self._groups.receipt_signer(group, topic.state.topic_id).check(head)
        return TopicPartition(topic.name, topic.state.topic_id, lease.partition), lease


def _runs_by_head(texts: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the texts by their heads: receipts of one lease are usually adjacent."""
    for start in range(0, len(texts), TEXTS_A_STEP):
        for head, run in groupby(texts[start : start + TEXTS_A_STEP], head_of):
            yield head, list(run)


def _joined(spans: list[ReceiptSpan]) -> ReceiptSpan:
    """Return the receipts of one lease as one span."""
    if len(spans) == 1:
        return spans[0]
    indexes = [index for each in spans for index in each.indexes]
    return spans[0]._replace(indexes=indexes, offsets=[offset for each in spans for offset in each.offsets])


def _verdicts(work: _SettleWork, outcomes: Outcomes[list[bool]], size: int) -> list[Verdict]:
    raise_if_all_failed(outcomes.values())
    verdicts: list[Verdict] = [True] * size
    for place, shown in work.shares.items():
        outcome = outcomes[place]
        if isinstance(outcome, PortalMQError) or False in outcome:
            indexes = [index for each in shown for index in each.indexes]
            own: Sequence[Verdict] = [outcome] * len(indexes) if isinstance(outcome, PortalMQError) else outcome
            for index, verdict in zip(indexes, own, strict=True):
                verdicts[index] = verdict
    return verdicts


def _doubtful(error: PortalMQError) -> PortalMQError:
    """Return the error with an unknown outcome: other receipts of the call may have been used."""
    error.outcome = "unknown"
    return error


def _no_wait() -> None:
    """Return at once: an extension is logged without a wait."""
