"""Bodies about queue groups. A setting of a group is a field of GroupConfig."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from portalmq.contract.decoding import prepare, structs_of
from portalmq.contract.limits import VISIBILITY_TIMEOUT_MS_MAX
from portalmq.contract.numbers import NonNegative, Positive


class QueueCounts(msgspec.Struct):
    """The numbers of messages of a topic that a queue group has not finished, by state, and of its dead letters."""

    ready: int
    in_flight: int
    scheduled: int
    dead: int
    oldest_unacked_ms: int


# Where a group begins on a topic: {"at": Unix ms} is the first message appended at that time or later.
GroupStart = Literal["earliest", "latest"] | dict[Literal["at"], NonNegative]
RATE_PER_S_MAX = 1_000_000


class GroupConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    # `queue`: consumers share messages under leases; `stream`: they share partitions. Fixed when the group is made
    mode: Literal["queue", "stream"] = "queue"
    # where the group begins on a topic: `earliest`, `latest`, or `{"at": "2026-01-31T12:00:00Z"}` (or Unix ms). The
    # first receive from a topic fixes it; partitions that are added later are read from their beginning
    start: GroupStart = "earliest"
    # how often a message may be delivered
    delivery: Literal["at_least_once", "at_most_once", "exactly_once"] = "at_least_once"
    # how long a lease lasts, unless a receive says otherwise
    visibility_timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=VISIBILITY_TIMEOUT_MS_MAX)] = 30_000
    max_deliveries: Positive = 5  # deliveries without an ack after which a message becomes a dead letter
    # how long a nacked message waits after its first, second, … delivery; the last value holds for all later ones.
    # `delay_ms` of a nack takes precedence. A lease that expires returns its message at once
    retry_backoff_ms: Annotated[tuple[NonNegative, ...], msgspec.Meta(min_length=1, max_length=100)] = (0,)
    dead_letter_topic: str = "{topic}.dlq"  # where copies of dead letters go; `""` for nowhere
    # `key`: one message of a key at a time, in order. Fixed when the group is made
    ordering: Literal["none", "key"] = "none"
    # most messages leased at a time; partitions of a topic share it, at least one each. `null` for no limit
    max_in_flight: Positive | None = None
    # most messages of a key that are leased, or wait for a retry, at a time. Whether a group has limits for each key is
    # fixed when it is made; with one, priorities do not count
    max_in_flight_per_key: Positive | None = None
    # most deliveries a second, redeliveries included; partitions of a topic share it. `null` for no limit
    rate_per_s: Annotated[float, msgspec.Meta(gt=0, le=RATE_PER_S_MAX)] | None = None
    # how many deliveries may come at once after a pause, with `rate_per_s`; by default those of a second
    rate_burst: Positive | None = None
    # most deliveries a second of the messages of a key, redeliveries included. Whether a group has limits for each key
    # is fixed when it is made; with one, priorities do not count
    rate_per_s_per_key: Annotated[float, msgspec.Meta(gt=0, le=RATE_PER_S_MAX)] | None = None
    # how many deliveries of a key may come at once after a pause, with `rate_per_s_per_key`; by default those of a
    # second
    rate_burst_per_key: Positive | None = None

    @property
    def is_keyed(self) -> bool:
        """True if a message may have to wait because of its key."""
        return self.ordering == "key" or self.max_in_flight_per_key is not None or self.rate_per_s_per_key is not None


class PauseRequest(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True):
    reason: Annotated[str, msgspec.Meta(max_length=1_000)] = ""  # shown with the group's state
    by: Annotated[str, msgspec.Meta(max_length=200)] = ""  # who asks


class Paused(msgspec.Struct, frozen=True):
    """A group delivers nothing since then, and why; `by` is who asked, as they call themselves."""

    since_ms: int
    reason: str = ""
    by: str = ""


class GroupDescription(msgspec.Struct):
    """The state of a group. The counts are messages, `oldest_unacked_ms` is the age of the oldest unacked one."""

    group: str
    mode: str
    members: list[str]
    ready: int
    in_flight: int
    scheduled: int
    dead: int
    lag: int
    oldest_unacked_ms: int
    config: GroupConfig
    paused: Paused | None = None


prepare(*structs_of(__name__))
