"""Acks of receives that are answered before the acks are committed.

    receive, acks 1 --> answer: acks later        while the acks 1 are written, the consumer handles messages
    receive, acks 2 --> answer: acks later        and asks again: both acks may go to the disk together
    receive, acks 3 --> answer: 1 is acked, 3 later

So a consumer waits for no fsync, and is told of each ack once that is durable. One that it is not told of (it asks
another broker, or this one restarts or forgets it) is sent again by the consumer: acking twice does no harm. No answer
waits for acks of an earlier receive: their partition may be one that cannot commit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from portalmq.broker.queues.settle import BegunAcks, Verdict

# Receives of a consumer whose acks may be untold, and their acks; above half as many they do not gather.
RECEIVES_MAX = 16
ACKS_MAX = 2_000
# Consumers that have untold acks, and the acks of all of them; those that do not return are forgotten after some time.
CONSUMERS_MAX = 2_000
ALL_ACKS_MAX = 100_000
KEPT_S = 10.0


class PendingAck(NamedTuple):
    """The acks of one receive."""

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
    """The acks by consumer (the group's id, and a name) that are not told yet, the consumer that asked last at the end.
    Forgetting some does no harm."""

    def __init__(self) -> None:
        self._untold: OrderedDict[tuple[str, str], list[PendingAck]] = OrderedDict()
        self._size = 0

    def later(self, consumer: tuple[str, str], pending: PendingAck) -> Acked:
        """Leave these acks to a later receive, unless some were refused or there are too many: then wait for them. Tell
        of earlier ones that are committed."""
        acked = Acked(None, [], [])
        self.tell(consumer, acked)
        untold = [earlier for earlier in self._untold.get(consumer, ()) if earlier.at_s >= pending.at_s - KEPT_S]
        acks = len(pending.receipts) + _size_of(untold)
        if not pending.begun.is_appended or len(untold) >= RECEIVES_MAX or acks > ACKS_MAX:
            return self._now(consumer, pending, acked)
        self._keep(consumer, [*untold, pending])
        self._untold.move_to_end(consumer)
        while (
            len(self._untold) > CONSUMERS_MAX
            or self._size > ALL_ACKS_MAX
            or next(iter(self._untold.values()))[-1].at_s < pending.at_s - KEPT_S
        ):
            self._keep(next(iter(self._untold)), [])
        if len(untold) >= RECEIVES_MAX // 2 or acks > ACKS_MAX // 2:
            pending.begun.hurry()
        return acked

    def now(self, consumer: tuple[str, str], pending: PendingAck) -> Acked:
        """Wait for these acks, and tell of earlier ones that are committed by then."""
        return self._now(consumer, pending, Acked(None, [], []))

    def _now(self, consumer: tuple[str, str], pending: PendingAck, acked: Acked) -> Acked:
        for earlier in self._untold.get(consumer, ()):
            earlier.begun.hurry()
        acked = acked._replace(verdicts=pending.begun.finish())
        self.tell(consumer, acked)
        return acked

    def tell(self, consumer: tuple[str, str], acked: Acked) -> None:
        """Add the earlier acks of this consumer that are committed by now."""
        committed: list[PendingAck] = []
        left: list[PendingAck] = []
        for earlier in self._untold.get(consumer, ()):
            (committed if earlier.begun.is_committed() else left).append(earlier)
        self._keep(consumer, left)
        for earlier in committed:
            _tell(earlier, acked)

    def sweep(self, now_s: float) -> None:
        """Forget old acks: their consumer has sent them again, or does not return."""
        for consumer, untold in tuple(self._untold.items()):
            self._keep(consumer, [each for each in untold if each.at_s >= now_s - KEPT_S])

    def _keep(self, consumer: tuple[str, str], untold: list[PendingAck]) -> None:
        self._size += _size_of(untold) - _size_of(self._untold.get(consumer, []))
        if untold:
            self._untold[consumer] = untold
        else:
            self._untold.pop(consumer, None)


def _size_of(untold: Sequence[PendingAck]) -> int:
    return sum([len(each.receipts) for each in untold])


def _tell(pending: PendingAck, acked: Acked) -> None:
    verdicts = pending.begun.finish()
    if verdicts.count(True) < len(verdicts):
        acked.stale.extend(stale_of(pending.receipts, verdicts))
    acked.attempts.append(pending.attempt_id)


def stale_of(receipts: Sequence[str], verdicts: Sequence[Verdict]) -> list[str]:
    return [receipt for receipt, verdict in zip(receipts, verdicts, strict=True) if not verdict]
