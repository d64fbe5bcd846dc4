"""Moves what a group has ready in one topic to another topic.

    receive  ->  commit {ack, copies}  ->  outbox.py

Each message is acked for the group and its copy ordered by one record, so it is moved exactly once, whatever dies. A
message that was received and not committed is given back, after a crash when its lease ends; no such lease counts as a
delivery. With a rate the copies have delivery times, so the rate holds over a crash too. The group may be paused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from portalmq import wire
from portalmq.broker.cluster.topic import Topic
from portalmq.broker.messages.produce import size_of
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.long_poll import LeasedMessage
from portalmq.broker.queues.commit import GroupCommits, OutputMessage
from portalmq.broker.queues.dead_letters import REDRIVE_MS_MAX
from portalmq.broker.queues.groups import Groups
from portalmq.broker.queues.queue_sizes import QueueSizes
from portalmq.broker.queues.receive import ReceiveHandler
from portalmq.broker.queues.settle import Settlement, SettleRequest
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, PortalMQError

# One call moves for this long, then answers what it has moved.
MOVE_WITHIN_S = 10.0
MOVED_AT_ONCE = 500
LEASE_MS = 60_000
# Names the lease of a move in the life of a message.
CONSUMER = "portalmq-move"
# A move that has met so many messages that the target refuses ends.
REFUSED_MAX = 10_000


@dataclass(slots=True)
class _Progress:
    """`held` are the receipts of messages that were received and not moved."""

    moved: int = 0
    refused: int = 0
    refusal: str | None = None
    held: dict[str, None] = field(default_factory=dict)


@dataclass(eq=False, repr=False)
class GroupMoves:
    _groups: Groups
    _receive: ReceiveHandler
    _commits: GroupCommits
    _settlement: Settlement
    _sizes: QueueSizes
    _clock: Clock

    def move(self, name: str, wanted: wire.MoveRequest, *, forward: bool = True) -> wire.Moved:
        """Move at most `limit` messages, and fewer when that takes long. Those that the target would refuse stay ready.
        Raises InvalidRequest; after a part was moved no error is raised."""
        if wanted.to_topic == wanted.topic:
            raise InvalidRequest("to_topic is the topic itself")
        if wanted.rate_per_s is not None and wanted.limit * 1000 / wanted.rate_per_s > REDRIVE_MS_MAX:
            raise InvalidRequest(
                f"{wanted.limit} messages at {wanted.rate_per_s:g} a second take longer than"
                f" {REDRIVE_MS_MAX // wire.DAY_MS} days: raise rate_per_s, or move fewer"
            )
        group = self._groups.get_queue(name)
        if group.config.delivery == "at_most_once":
            raise InvalidRequest(
                f"group {name!r} delivers at_most_once: its messages are acked before they could be moved. Use another"
                " group"
            )
        ready = self._sizes.look(name, wanted.topic, forward=forward).ready
        if wanted.dry_run:
            return wire.Moved(ready, 0)
        target = self._groups.topics.get_or_create(wanted.to_topic)
        done, until = _Progress(), time.monotonic() + MOVE_WITHIN_S
        try:
            while done.moved < wanted.limit and done.refused < REFUSED_MAX and time.monotonic() < until:
                if not self._move_some(name, wanted, target, done, forward):
                    break
        except PortalMQError:
            if not done.moved:
                raise
        finally:  # also when the greenlet is killed
            self._give_back(name, list(done.held), forward)
        return wire.Moved(max(ready, done.moved), done.moved, done.refused, done.refusal)

    def _move_some(self, name: str, wanted: wire.MoveRequest, target: Topic, done: _Progress, forward: bool) -> bool:
        """Receive once, and move what the target takes. Return whether anything was ready."""
        request = wire.ReceiveRequest(
            [wanted.topic],
            max_messages=min(MOVED_AT_ONCE, wanted.limit - done.moved),
            visibility_timeout_ms=LEASE_MS,
            consumer=CONSUMER,
        )
        found = self._receive.receive(name, request, None, forward=forward, is_move=True)
        done.held.update(dict.fromkeys(message.receipt for message in found))
        by_partition: dict[int, list[LeasedMessage]] = {}
        for message in found:
            refusal = _refusal(target, message)
            if refusal is None:
                by_partition.setdefault(message.partition, []).append(message)
            else:
                done.refused += 1
                done.refusal = done.refusal or refusal
        for part in by_partition.values():
            self._commit(name, wanted, part, done.moved, forward)
            for message in part:
                del done.held[message.receipt]
            done.moved += len(part)
        return bool(found)

    def _give_back(self, name: str, receipts: list[str], forward: bool) -> None:
        if receipts:
            with suppress(PortalMQError):  # else they come back when their leases end
                self._settlement.settle(name, receipts, SettleRequest("nack", 0, "not moved"), forward=forward)

    def _commit(
        self, name: str, wanted: wire.MoveRequest, messages: Sequence[LeasedMessage], rank: int, forward: bool
    ) -> None:
        now_ms, rate = self._clock.wall_ms(), wanted.rate_per_s
        outputs = []
        for index, message in enumerate(messages):
            delay_ms = 0 if rate is None else int((rank + index) * 1_000 / rate)
            outputs.append(OutputMessage(wanted.to_topic, _copy(message, delay_ms, now_ms)))
        receipts = [message.receipt for message in messages]
        self._commits.commit_receipts(name, receipts, outputs, forward=forward)


def _refusal(target: Topic, message: LeasedMessage) -> str | None:
    """Return why the topic does not take the message, None if it does."""
    try:
        size_of(target, [message.record], [f"{message.partition}-{message.offset}"])
    except PortalMQError as refused:
        return str(refused)
    return None


def _copy(message: LeasedMessage, delay_ms: int, now_ms: int) -> Record:
    record = message.record
    expires_at_ms = None if record.expires_at_ms is None else record.expires_at_ms + delay_ms
    origin = {wire.HEADER_COPY_OF: f"{message.topic}/{message.partition}-{message.offset}"}
    return Record(
        record.value,
        record.content_type,
        record.key,
        {**(record.headers or {}), **origin},
        now_ms + delay_ms if delay_ms else None,
        expires_at_ms,
        record.priority,
    )
