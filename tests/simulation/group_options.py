"""The options of a run's groups, drawn from its seed. A quarter of the seeds have groups: those with remainder 3 modulo
4. Their options are drawn separately, so the other seeds are the same as without groups."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from portalmq.broker.core.queue.key_rates import UNLIMITED, KeyLimits

EVERY = 4
# Groups are paused, and scheduled messages moved, in the runs of these seeds: remainder 15.
PAUSED_EVERY = 16
EVENTS_FACTOR = 4
LIMITS_CHANGE_EVERY_MS = 3_000


@dataclass(frozen=True, slots=True)
class QueueGroup:
    name: str
    by_key: bool
    max_deliveries: int
    latest: bool
    at_most_once: bool
    has_dead_letters: bool
    limits: tuple[KeyLimits, ...] = (KeyLimits(),)  # of each key if by_key, in turn

    def limits_at(self, now_ms: int) -> KeyLimits:
        return self.limits[now_ms // LIMITS_CHANGE_EVERY_MS % len(self.limits)]

    @property
    def widest(self) -> int:
        return max(each.width for each in self.limits)

    @property
    def fastest(self) -> tuple[float, float] | None:
        """The greatest rate for each second and burst of a key; None if it has none at times."""
        rates = [each.rate_per_s for each in self.limits if each.rate_per_s is not None]
        if len(rates) < len(self.limits):
            return None
        return max(rates), max([1.0, *[each.burst or rate for each, rate in zip(self.limits, rates, strict=True)]])


@dataclass(frozen=True, slots=True)
class GroupOptions:
    queues: tuple[QueueGroup, ...]
    consumers: int
    members: int
    streams: int  # partitions of the stream group
    delayed: float
    priorities: float
    expiring: float
    keyed: float
    visibility_ms: int
    session_timeout_ms: int
    nack: float
    crash: float
    commit: float
    extend: float
    late: float  # receipts that are used again long after
    attempts: float
    skewed: bool  # clocks that are an hour apart from the beginning
    takeover: float  # how often a broker declares a live coordinator dead
    pauses: bool


def has_groups(seed: int) -> bool:
    return seed % EVERY == EVERY - 1


def draw_groups(seed: int) -> GroupOptions | None:
    if not has_groups(seed):
        return None
    random = Random(f"groups of {seed}")
    limits = _key_limits(Random(f"limits of {seed}"))

    def queue(name: str, *, by_key: bool) -> QueueGroup:
        return QueueGroup(
            name,
            by_key,
            max_deliveries=random.choice([1, 2, 3, 5, 1_000]),
            latest=random.random() < 0.2,
            at_most_once=random.random() < 0.15,
            has_dead_letters=random.random() < 0.8,
            limits=limits,
        )

    queues = random.choice([("any", "key"), ("any",), ("key",)])
    return GroupOptions(
        queues=tuple(queue(name, by_key=name == "key") for name in queues),
        consumers=random.choice([1, 2, 4]),
        members=random.choice([0, 1, 2, 3]),
        streams=random.choice([1, 2, 4]),
        delayed=random.choice([0.0, 0.1, 0.5]),
        priorities=random.choice([0.0, 0.0, 0.3]),
        expiring=random.choice([0.0, 0.1, 0.4]),
        keyed=random.choice([0.0, 0.5, 1.0, 1.0]),
        visibility_ms=random.choice([100, 500, 2_000]),
        session_timeout_ms=random.choice([600, 2_000]),
        nack=random.choice([0.0, 0.1, 0.4]),
        crash=random.choice([0.0, 0.1, 0.4]),
        commit=random.choice([0.0, 0.2, 0.5]),
        extend=random.choice([0.0, 0.1, 0.4]),
        skewed=random.random() < 0.3,
        late=random.choice([0.0, 0.1, 0.3]),
        attempts=random.choice([0.0, 0.5]),
        takeover=random.choice([0.0, 0.02, 0.2]),
        pauses=seed % PAUSED_EVERY == PAUSED_EVERY - 1,
    )


def _key_limits(random: Random) -> tuple[KeyLimits, ...]:
    """Half of the groups by key deliver one message of each at a time, in order, at any rate."""
    if random.random() < 0.5:
        return (KeyLimits(),)
    return tuple(
        KeyLimits(
            random.choice([1, 2, 3, UNLIMITED]),
            random.choice([None, 5.0, 20.0]),
            random.choice([None, 1.0, 3.0]),
        )
        for _ in range(random.choice([1, 1, 2, 3]))
    )
