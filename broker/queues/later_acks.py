"""Acks of receives that are answered before the acks are committed.

    receive, acks 1 --> answer: acks later        while the acks 1 are written, the consumer handles messages
    receive, acks 2 --> answer: acks later        and asks again: both acks may go to the disk together
    receive, acks 3 --> answer: 1 is acked, 3 later

So a consumer waits for no fsync, and is told of each ack once that is durable. One that it is not told of (it asks
another broker, or this one restarts) is sent again by the consumer: acking twice does no harm.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import NamedTuple

from portalmq.broker.queues.settle import BegunAcks, Verdict
from portalmq.errors import PortalMQError

# Receives of a consumer whose acks may be untold, and their acks; above half as many they are not put off.
RECEIVES_MAX = 16
ACKS_MAX = 2_000
# Consumers that have untold acks; those that do not return are forgotten after some time.
CONSUMERS_MAX = 2_000
KEPT_S = 10.0


class PendingAck(NamedTuple):
    """The acks of one receive, which are appended."""

    attempt_id: str
    receipts: list[str]
    begun: BegunAcks
    at_s: float


class Acked(NamedTuple):
    """The acks of a receive: its verdicts, None when a later receive tells them; and what is known by now of earlier
    receives: attempts whose acks are committed, and stale receipts."""

    verdicts: list[Verdict] | None
    attempts: list[str]
    stale: list[str]


class LaterAcks:
    """The acks by consumer (the group's id, and a name) that are not told yet. Forgetting some does no harm."""

    def __init__(self) -> None:
        self._untold: OrderedDict[tuple[str, str], deque[PendingAck]] = OrderedDict()

    def later(self, consumer: tuple[str, str], pending: PendingAck) -> Acked:
        """Leave these acks to a later receive, and tell of earlier ones."""
        untold = self._untold.get(consumer)
        if untold is None:
            untold = self._untold[consumer] = deque()
        untold.append(pending)
        self._untold.move_to_end(consumer)
        oldest = next(iter(self._untold.values()))
        if len(self._untold) > CONSUMERS_MAX or oldest[-1].at_s < pending.at_s - KEPT_S:
            self._untold.popitem(last=False)
        acked = Acked(None, [], [])
        acks = sum([len(each.receipts) for each in untold])
        while len(untold) > 1 and (len(untold) > RECEIVES_MAX or acks > ACKS_MAX or untold[0].begun.is_committed()):
            told = untold.popleft()
            acks -= len(told.receipts)
            _tell(told, acked)
        if len(untold) > RECEIVES_MAX // 2 or acks > ACKS_MAX // 2:
            pending.begun.hurry()
        return acked

    def now(self, consumer: tuple[str, str], pending: PendingAck) -> Acked:
        """Wait for these acks and all earlier ones."""
        verdicts = pending.begun.finish()
        acked = Acked(verdicts, [], [])
        untold = self._untold.pop(consumer, None)
        while untold:  # another receive of this consumer may tell of some meanwhile
            _tell(untold.popleft(), acked)
        return acked


def _tell(pending: PendingAck, acked: Acked) -> None:
    try:
        verdicts = pending.begun.finish()
    except PortalMQError:
        return
    if verdicts.count(True) < len(verdicts):
        if any(isinstance(verdict, PortalMQError) for verdict in verdicts):
            return
        acked.stale.extend(stale_of(pending.receipts, verdicts))
    acked.attempts.append(pending.attempt_id)


def stale_of(receipts: Sequence[str], verdicts: Sequence[Verdict]) -> list[str]:
    return [receipt for receipt, verdict in zip(receipts, verdicts, strict=True) if not verdict]
