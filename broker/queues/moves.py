"""Moves what a group has ready in one topic to another topic.

    receive  ->  commit {ack, copies}  ->  outbox.py

Each message is acked for the group and its copy ordered by one record, so it is moved exactly once, whatever dies. A
message that was received and not committed comes back when its lease ends. With a rate the copies have delivery times,
so the rate holds over a crash too. The group may be paused.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from portalmq import wire
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


@dataclass(eq=False, repr=False)
class GroupMoves:
    _groups: Groups
    _receive: ReceiveHandler
    _commits: GroupCommits
    _settlement: Settlement
    _sizes: QueueSizes
    _clock: Clock

    def move(self, name: str, wanted: wire.MoveRequest, *, forward: bool = True) -> tuple[int, int]:
        """Return how many messages were ready, and how many were moved: at most `limit`, and fewer when that takes
        long. Raises InvalidRequest; after a part was moved no error is raised."""
        if wanted.to_topic == wanted.topic:
            raise InvalidRequest("to_topic is the topic itself")
        if wanted.rate_per_s is not None and wanted.limit * 1000 / wanted.rate_per_s > REDRIVE_MS_MAX:
            raise InvalidRequest(
                f"{wanted.limit} messages at {wanted.rate_per_s:g} a second take longer than"
                f" {REDRIVE_MS_MAX // wire.DAY_MS} days: raise rate_per_s, or move fewer"
            )
        self._groups.get_queue(name)
        self._check_acks_late(name)
        ready = self._sizes.look(name, wanted.topic, forward=forward).ready
        if wanted.dry_run:
            return ready, 0
        self._groups.topics.get_or_create(wanted.to_topic)
        moved, until = 0, time.monotonic() + MOVE_WITHIN_S
        while moved < wanted.limit and time.monotonic() < until:
            try:
                done = self._move_some(name, wanted, moved, forward)
            except PortalMQError:
                if moved:
                    break
                raise
            if not done:
                break
            moved += done
        return max(ready, moved), moved

    def _check_acks_late(self, name: str) -> None:
        group = self._groups.find_queue(name)
        if group is not None and group.config.delivery == "at_most_once":
            raise InvalidRequest(
                f"group {name!r} delivers at_most_once: its messages are acked before they could be moved. Use another"
                " group"
            )

    def _move_some(self, name: str, wanted: wire.MoveRequest, rank: int, forward: bool) -> int:
        self._check_acks_late(name)
        request = wire.ReceiveRequest(
            [wanted.topic],
            max_messages=min(MOVED_AT_ONCE, wanted.limit - rank),
            visibility_timeout_ms=LEASE_MS,
        )
        left = self._receive.receive(name, request, None, forward=forward, despite_pause=True)
        moved = 0
        try:
            while left:
                number = left[0].partition
                part = [message for message in left if message.partition == number]
                self._commit(name, wanted, part, rank + moved, forward)
                moved += len(part)
                left = [message for message in left if message.partition != number]
        except PortalMQError:
            with suppress(PortalMQError):  # else they come back when their leases end
                self._settlement.settle(
                    name, [message.receipt for message in left], SettleRequest("release", 0), forward=forward
                )
            if not moved:
                raise
        return moved

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
