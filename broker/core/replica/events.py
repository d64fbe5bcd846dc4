"""What a partition replica is told, and what it asks for. Numbers only: payload bytes never enter the core.

Told    PartitionStateChanged, BrokersChanged, LeaseRenewed, SessionLost, Tick     by the control plane and the clock
        AppendRequested, Appended, Truncated, LogReset                              by producers and the local disk
        FetchReceived, FollowerRefused, IsrAnswered                                 to a leader
        FetchReplied                                                                to a follower
Asked   Append, Refuse, AnswerDuplicate, ReplyFetch, ProposeIsr                     of a leader's shell
        Replicate, Truncate, ResetLog, SendFetch, Quarantine                        of a follower's
        RememberEpoch, HighWatermarkAdvanced, StepDown, Refresh                     of either

Actions are performed in their order. RememberEpoch is durable before the next one is begun.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from portalmq.broker.core.fold import ProducerFold
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.core.replica.stamp import Stamp
from portalmq.errors import PortalMQError

__all__ = ["Stamp"]

# --- what travels between a follower and its leader ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetch:
    """A follower asks for what follows its log.

    `durable_offset`: everything below is fsynced there, which is the acknowledgement. `last_epoch` is the leader epoch
    of the last record below `fetch_offset`, 0 without any. `number` rises with each new fetch of a replica; a reply
    echoes the whole fetch, and one that does not equal the current fetch is dropped.
    """

    broker_id: int
    incarnation: int
    store_uuid: str
    leader_epoch: int
    fetch_offset: int
    durable_offset: int
    last_epoch: int
    number: int = 0


@dataclass(frozen=True, slots=True)
class BatchHead:
    """What the core has to know of a batch that is replicated. `producers`: those of a STATE record, which replace what
    a replica that began above their batches could not know."""

    base_offset: int
    count: int
    leader_epoch: int
    appended_at_ms: int
    is_epoch_start: bool = False
    stamp: Stamp | None = None
    producers: tuple[ProducerFold, ...] | None = None

    @property
    def end_offset(self) -> int:
        return self.base_offset + self.count


@dataclass(frozen=True, slots=True)
class Records:
    """The logs match up to the fetch offset; what follows there, perhaps nothing, and the leader's high watermark."""

    batches: tuple[BatchHead, ...]
    high_watermark: int


@dataclass(frozen=True, slots=True)
class Diverging:
    """The logs do not match: the leader's records of `epoch`, or of none before it, end at `end` (KIP-320)."""

    epoch: int
    end: int


@dataclass(frozen=True, slots=True)
class BelowStart:
    """What is asked for is gone at the leader. Its log can be had from `offset` on, with the epochs begun below it."""

    offset: int
    epochs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Rejected:
    """No answer in this epoch: the follower (a lower one than `leader_epoch`) or this broker has to learn."""

    leader_epoch: int


Reply = Records | Diverging | BelowStart | Rejected

# --- told ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PartitionStateChanged:
    """The control plane's word on the partition, as it stood at `version`. `leader` is None while there is none.

    `refresh` is the number of the Refresh that this answers (read after a sync), 0 for what a watch brought.
    `unclean_epochs` are those that an operator began with a replica that was not in sync.
    """

    leader: int | None
    leader_epoch: int
    isr: frozenset[int]
    replicas: tuple[int, ...]
    min_insync_replicas: int
    version: int = 0
    store_uuids: Mapping[int, str] | None = None
    incarnations: Mapping[int, int] | None = None
    unclean_epochs: tuple[int, ...] = ()
    refresh: int = 0


@dataclass(frozen=True, slots=True)
class BrokersChanged:
    """(incarnation, store uuid) of each broker that is registered now."""

    brokers: Mapping[int, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class LeaseRenewed:
    """The control plane answered a request that was begun at `answered_ms`: the lease counts from there."""

    answered_ms: int


@dataclass(frozen=True, slots=True)
class LeaderAnswered:
    """The broker of a leader that this replica followed answered here at `at_ms`, and not later as far as is known."""

    at_ms: int


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The session with the control plane has ended: others may have been elected meanwhile."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Comes a few times a second."""


@dataclass(frozen=True, slots=True)
class AppendRequested:
    """Someone wants `count` offsets. `token` comes back in the answer; `is_control` marks our own records, which are
    taken as long as this replica leads, and those that hand messages out (`delivers`) only while its followers vouch
    for that. The batch's time is `not_before_ms` at the least."""

    token: object
    count: int
    stamp: Stamp | None = None
    is_control: bool = False
    not_before_ms: int = 0
    delivers: bool = False


@dataclass(frozen=True, slots=True)
class Appended:
    """The local COMMIT returned: everything below `end_offset` is fsynced here."""

    end_offset: int


@dataclass(frozen=True, slots=True)
class Truncated:
    """The log ends at `end_offset` now; `producers` is the fold over what is left. Told when a Truncate is done, and
    when the disk had no room for a transaction: nothing of it, nor of what was allotted after it, is in the log."""

    end_offset: int
    producers: Producers


@dataclass(frozen=True, slots=True)
class LogReset:
    """The log is empty now and begins at `offset`; `epochs` were begun below it."""

    offset: int
    epochs: tuple[tuple[int, int], ...]
    producers: Producers


@dataclass(frozen=True, slots=True)
class FetchReceived:
    """A follower's fetch, or word that it still stands. `token` comes back in ReplyFetch. It was said after
    `sent_after_ms` of this broker's clock; None where that is not known: then it counts as said just now."""

    token: object
    fetch: Fetch
    sent_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class FollowerRefused:
    """A broker whose fetch is overdue refuses connections: it is gone, not slow."""

    broker_id: int


class Outcome(Enum):
    """What became of a compare-and-set."""

    APPLIED = "applied"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class IsrAnswered:
    """The answer to a ProposeIsr against `version`; with APPLIED the `partition_state` as it stands now."""

    version: int
    outcome: Outcome
    partition_state: PartitionStateChanged | None = None


@dataclass(frozen=True, slots=True)
class FetchReplied:
    """The leader's answer to `fetch`."""

    fetch: Fetch
    reply: Reply


Event = (
    PartitionStateChanged
    | BrokersChanged
    | LeaseRenewed
    | LeaderAnswered
    | SessionLost
    | Tick
    | AppendRequested
    | Appended
    | Truncated
    | LogReset
    | FetchReceived
    | FollowerRefused
    | IsrAnswered
    | FetchReplied
)

# --- asked -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RememberEpoch:
    """Make it durable that this leader epoch was seen; only then go on."""

    leader_epoch: int


@dataclass(frozen=True, slots=True)
class Append:
    """Write the batch of `token` at `base_offset` under `leader_epoch`; a token of None is EPOCH_START."""

    token: object
    base_offset: int
    leader_epoch: int
    appended_at_ms: int


@dataclass(frozen=True, slots=True)
class Refuse:
    """Nothing of `token` was or will be applied; `error` says why."""

    token: object
    error: PortalMQError


@dataclass(frozen=True, slots=True)
class AnswerDuplicate:
    """The batch of `token` is in the log already: answer its first place, once that is below the high watermark."""

    token: object
    base_offset: int
    appended_at_ms: int


@dataclass(frozen=True, slots=True)
class ReplyFetch:
    """Answer the fetch of `token`. With a `reply` of None the logs match: send what follows `offset`, all of it
    durable here, when there is something; it may wait for that as long as this epoch lasts."""

    token: object
    offset: int
    reply: Reply | None


@dataclass(frozen=True, slots=True)
class ProposeIsr:
    """Compare-and-set the partition's state at `version`: `isr`, and store uuid and incarnation of who joins.

    `resigns`: a replica that has lost records takes itself out, and the leadership if it has that.
    """

    isr: frozenset[int]
    version: int
    store_uuids: Mapping[int, str]
    incarnations: Mapping[int, int]
    resigns: bool = False


@dataclass(frozen=True, slots=True)
class Replicate:
    """Append the batches of the reply to `fetch`, all of them, in one transaction."""

    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Truncate:
    """Drop everything from `to_offset` on, durably, and tell Truncated."""

    to_offset: int


@dataclass(frozen=True, slots=True)
class ResetLog:
    """All that this log holds is gone at the leader: begin anew at `offset`, and tell LogReset."""

    offset: int
    epochs: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SendFetch:
    """Ask the leader, now and until it is answered or replaced."""

    leader: int
    fetch: Fetch


@dataclass(frozen=True, slots=True)
class Quarantine:
    """This replica and its leader contradict each other below the high watermark: nothing more is done here."""

    reason: str


@dataclass(frozen=True, slots=True)
class HighWatermarkAdvanced:
    """Every offset below `high_watermark` is committed and readable."""

    high_watermark: int


@dataclass(frozen=True, slots=True)
class StepDown:
    """This replica leads no longer: whoever waits gets an unknown outcome."""

    leader: int | None


@dataclass(frozen=True, slots=True)
class Refresh:
    """Read the partition's state again, after a sync, and tell it with this number."""

    number: int


Action = (
    RememberEpoch
    | Append
    | Refuse
    | AnswerDuplicate
    | ReplyFetch
    | ProposeIsr
    | Replicate
    | Truncate
    | ResetLog
    | SendFetch
    | Quarantine
    | HighWatermarkAdvanced
    | StepDown
    | Refresh
)
