"""The search for messages that match a `where`: at most MATCH_WITHIN_S a leader, with pauses for other greenlets."""

from __future__ import annotations

import time

from portalmq import wire
from portalmq.broker.core.queue.predicate import Candidate
from portalmq.broker.partition.yielding import TimeSlice
from portalmq.broker.storage.batch import Record
from portalmq.errors import Unavailable

# The time limit of a leader to match a predicate.
MATCH_WITHIN_S = 5.0


class MatchBudget:
    """The time limit of one call's matching, over all of its partitions. `advice` ends the refusal."""

    def __init__(self, advice: str) -> None:
        self._until = time.monotonic() + MATCH_WITHIN_S
        self._turn = TimeSlice()
        self._advice = advice

    def spend(self) -> None:
        """Raise Unavailable when the time is over; yield to other greenlets now and then."""
        if time.monotonic() > self._until:
            raise Unavailable(
                f"matching `where` took longer than {MATCH_WITHIN_S:g} s, {self._advice}", retryable=False
            )
        self._turn.pause_if_over()


def candidate_of(record: Record, reason: str = "", deliveries: int = 0) -> Candidate:
    """Return the message as conditions see it."""
    is_json = wire.is_json_type(record.content_type)
    return Candidate(record.value, is_json, record.headers or {}, record.key, reason, deliveries)
