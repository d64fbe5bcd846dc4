"""The limits of a group on one partition: how many more messages it may be given now.

    in flight   exact, by the leases in the fold: so a new leader continues with what the log tells it
    rate        a bucket of tokens, one a delivery, filled by the leader's clock; a new leader begins with a full one

A limit of the group is shared out between the partitions of a topic, at least one message each: each leader decides for
itself, and together they keep the limit. With fewer messages than partitions, the limit is one for each partition.
"""

from __future__ import annotations

from typing import NamedTuple

from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_rates import UNLIMITED, KeyLimits
from portalmq.wire import GroupConfig

TOKEN_MS = 1_000.0


class GroupLimits(NamedTuple):
    """The share of one partition. `burst` is the most tokens of the bucket; None: no such limit."""

    in_flight_max: int | None = None
    rate_per_s: float | None = None
    burst: float = 1.0


def limits_of(
    max_in_flight: int | None, rate_per_s: float | None, rate_burst: int | None, partitions: int, number: int
) -> GroupLimits:
    """Return the share of partition `number` of a topic with so many."""
    in_flight_max = None
    if max_in_flight is not None:
        in_flight_max = max(1, max_in_flight // partitions + (number < max_in_flight % partitions))
    if rate_per_s is None:
        return GroupLimits(in_flight_max)
    share = rate_per_s / partitions
    burst = share if rate_burst is None else rate_burst / partitions
    return GroupLimits(in_flight_max, share, max(1.0, burst))


def key_limits_of(config: GroupConfig) -> KeyLimits:
    """Return the limits of each key of a group that has some. A key is in one partition, so nothing is shared out."""
    width = 1 if config.ordering == "key" else config.max_in_flight_per_key or UNLIMITED
    return KeyLimits(width, config.rate_per_s_per_key, config.rate_burst_per_key)


class Allowance:
    """What a group may be given on this partition. Invariant: 0 <= tokens <= burst."""

    def __init__(self) -> None:
        self._limits = GroupLimits()
        self._tokens = 0.0
        self._at_ms = 0

    def set(self, limits: GroupLimits, now_ms: int) -> None:
        """Take the limits that hold from now on. A rate that is new, or a leader's first one, has a full bucket."""
        if limits == self._limits:
            return
        self._fill(now_ms)
        had_rate = self._limits.rate_per_s is not None
        self._limits = limits
        self._tokens = min(self._tokens, limits.burst) if had_rate else limits.burst

    def messages(self, delivery: GroupDelivery, now_ms: int) -> int:
        """Return how many messages may be delivered now."""
        allowed = UNLIMITED
        if self._limits.in_flight_max is not None:
            allowed = max(0, self._limits.in_flight_max - delivery.in_flight(now_ms))
        if self._limits.rate_per_s is not None:
            self._fill(now_ms)
            allowed = min(allowed, int(self._tokens))
        return allowed

    def took(self, messages: int, now_ms: int) -> None:
        """Note that so many messages were delivered."""
        if self._limits.rate_per_s is not None:
            self._fill(now_ms)
            self._tokens = max(0.0, self._tokens - messages)

    def token_in_ms(self, now_ms: int) -> int | None:
        """Return in how many milliseconds a message may be delivered, None if the rate does not keep one back."""
        rate = self._limits.rate_per_s
        if rate is None:
            return None
        self._fill(now_ms)
        missing = 1.0 - self._tokens
        return None if missing <= 0 else int(missing / rate * TOKEN_MS) + 1

    def _fill(self, now_ms: int) -> None:
        rate = self._limits.rate_per_s
        if rate is not None and now_ms > self._at_ms:
            self._tokens = min(self._limits.burst, self._tokens + (now_ms - self._at_ms) / TOKEN_MS * rate)
        self._at_ms = max(self._at_ms, now_ms)
