"""The events of a partition replica, and the actions it returns. Numbers only: payload bytes never enter the core.

Events   PartitionStateChanged, BrokersChanged, LeaseRenewed, SessionLost, Tick     from the control plane and the clock
         AppendRequested, EpochNeeded, Appended, Truncated, LogReset                 from producers and the local disk
         FetchReceived, FollowerRefused, IsrAnswered                                 to a leader
         FetchReplied, LeaderAnswered                                                to a follower
Actions  Append, Refuse, AnswerDuplicate, ReplyFetch, ProposeIsr                     of a leader
         Replicate, Truncate, ResetLog, SendFetch, Quarantine                        of a follower
         RememberEpoch, HighWatermarkAdvanced, StepDown, Refresh                     of either

Actions are performed in order. RememberEpoch is durable before the next one begins.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

import msgspec

from portalmq.broker.core.fold import ProducerFold
from portalmq.broker.core.replica.producers import Producers, Stamp
from portalmq.errors import PortalMQError

__all__ = ["Stamp"]

# --- between a follower and its leader -------------------------------------------------------------------------------


class Fetch(msgspec.Struct, frozen=True):
    """A follower's request for the records after its log.

    Everything below `durable_offset` is fsynced on the follower: that is the acknowledgement. `last_epoch` is the
    leader epoch of the last record below `fetch_offset`, 0 without any. `number` rises with each new fetch of a
    replica. A reply echoes the fetch; one that does not equal the current fetch is dropped.
    """

    broker_id: int
    incarnation: int
    store_uuid: str
    leader_epoch: int
    fetch_offset: int
    durable_offset: int
    last_epoch: int
    number: int = 0


class Poll(msgspec.Struct):
    """The last request of a follower's broker to this one, shared by all its fetches that wait here: each of them is
    still current. It came at `heard_ms`, and was sent after `sent_after_ms`, as in FetchReceived.

    It is the one input of the core that does not pass `step`: a thousand partitions would be told five times a second.
    """

    heard_ms: int
    sent_after_ms: int | None


class BatchHead(msgspec.Struct, frozen=True):
    """The properties of a replicated batch that the core needs. `producers` are those of a STATE record; they replace
    what a replica that began above their batches cannot know."""

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


class Records(msgspec.Struct, frozen=True):
    """The logs match up to the fetch offset: the batches that follow there, possibly none, and the leader's high
    watermark."""

    batches: tuple[BatchHead, ...]
    high_watermark: int


class Diverging(msgspec.Struct, frozen=True):
    """The logs do not match: the leader's records of `epoch`, or of none before it, end at `end` (KIP-320)."""

    epoch: int
    end: int


class BelowStart(msgspec.Struct, frozen=True):
    """The leader no longer has the requested records. Its log is available from `offset` on, with the epochs begun
    below it."""

    offset: int
    epochs: tuple[tuple[int, int], ...]


class Rejected(msgspec.Struct, frozen=True):
    """No answer in this epoch: the follower is in a lower epoch than `leader_epoch`, or this broker has to learn of a
    higher one."""

    leader_epoch: int


Reply = Records | Diverging | BelowStart | Rejected

# --- events ----------------------------------------------------------------------------------------------------------


class PartitionStateChanged(msgspec.Struct, frozen=True):
    """The partition's state in the control plane at `version`. `leader` is None while there is none.

    `refresh` is the number of the Refresh that this answers (read after a sync), 0 if a watch delivered it.
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


class BrokersChanged(msgspec.Struct, frozen=True):
    """(incarnation, store uuid) of each registered broker."""

    brokers: Mapping[int, tuple[int, str]]


class LeaseRenewed(msgspec.Struct, frozen=True):
    """The control plane answered a request sent at `answered_ms`: the lease counts from there."""

    answered_ms: int


class LeaderAnswered(msgspec.Struct, frozen=True):
    """The broker of a leader that this replica followed last answered at `at_ms`, as far as this broker knows."""

    at_ms: int


class SessionLost(msgspec.Struct, frozen=True):
    """The session with the control plane ended: another broker may have been elected."""


class Tick(msgspec.Struct, frozen=True):
    """Time passed. Sent a few times a second."""


class AppendRequested(msgspec.Struct, frozen=True):
    """A request for `count` offsets. `token` comes back in the answer.

    `is_control` marks records of the broker itself, which are accepted as long as this replica leads. Those that
    deliver messages (`delivers`) are accepted only while the followers vouch for this leader. The batch's timestamp is
    at least `not_before_ms`.
    """

    token: object
    count: int
    stamp: Stamp | None = None
    is_control: bool = False
    not_before_ms: int = 0
    delivers: bool = False


class EpochNeeded(msgspec.Struct, frozen=True):
    """A leader takes a snapshot of its log, to append it: its epoch begins before, if it has not begun."""


class Appended(msgspec.Struct, frozen=True):
    """The local COMMIT returned: everything below `end_offset` is fsynced on this replica."""

    end_offset: int


class Truncated(msgspec.Struct, frozen=True):
    """The log now ends at `end_offset`; `producers` is the fold over the rest. Sent when a Truncate is done, and
    when the disk had no room for a transaction: then neither its batches nor those allotted after it are in the log.
    Followers may have records below `sent_end` all the same."""

    end_offset: int
    producers: Producers
    sent_end: int = 0


class LogReset(msgspec.Struct, frozen=True):
    """The log is empty and begins at `offset`; `epochs` began below it."""

    offset: int
    epochs: tuple[tuple[int, int], ...]
    producers: Producers


class FetchReceived(msgspec.Struct, frozen=True):
    """A follower's fetch. `token` comes back in ReplyFetch.

    The follower sent it after `sent_after_ms` of this broker's clock. None means that this is not known, and it counts
    as sent now. While the fetch waits, until `fetch_ended`, later requests renew it by its `poll`.
    """

    token: object
    fetch: Fetch
    sent_after_ms: int | None = None
    poll: Poll | None = None


class FollowerRefused(msgspec.Struct, frozen=True):
    """A broker whose fetch is overdue refuses connections: it is gone, not slow."""

    broker_id: int


class Outcome(Enum):
    """The result of a compare-and-set."""

    APPLIED = "applied"
    CONFLICT = "conflict"
    UNKNOWN = "unknown"


class IsrAnswered(msgspec.Struct, frozen=True):
    """The answer to a ProposeIsr at `version`; with APPLIED, the new `partition_state`."""

    version: int
    outcome: Outcome
    partition_state: PartitionStateChanged | None = None


class FetchReplied(msgspec.Struct, frozen=True):
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
    | EpochNeeded
    | Appended
    | Truncated
    | LogReset
    | FetchReceived
    | FollowerRefused
    | IsrAnswered
    | FetchReplied
)

# --- actions ---------------------------------------------------------------------------------------------------------


class RememberEpoch(msgspec.Struct, frozen=True):
    """Store durably that this leader epoch was seen, before the next action."""

    leader_epoch: int


class Append(msgspec.Struct, frozen=True):
    """Write the batch of `token` at `base_offset` under `leader_epoch`. A token of None means EPOCH_START."""

    token: object
    base_offset: int
    leader_epoch: int
    appended_at_ms: int


class Refuse(msgspec.Struct, frozen=True):
    """Nothing of `token` was or will be applied; `error` is the reason."""

    token: object
    error: PortalMQError


class AnswerDuplicate(msgspec.Struct, frozen=True):
    """The batch of `token` is in the log already: answer with its first offset, once that is below the high
    watermark."""

    token: object
    base_offset: int
    appended_at_ms: int


class ReplyFetch(msgspec.Struct, frozen=True):
    """Answer the fetch of `token`. A `reply` of None means that the logs match: send the durable batches from `offset`
    on. The answer may wait for some as long as this epoch lasts."""

    token: object
    offset: int
    reply: Reply | None


class ProposeIsr(msgspec.Struct, frozen=True):
    """Compare-and-set the partition's state at `version`: `isr`, and the store uuid and incarnation of joining
    replicas. `resigns`: a replica that lost records removes itself, and gives up leadership if it has it."""

    isr: frozenset[int]
    version: int
    store_uuids: Mapping[int, str]
    incarnations: Mapping[int, int]
    resigns: bool = False


class Replicate(msgspec.Struct, frozen=True):
    """Append all batches of the reply to `fetch` in one transaction."""

    fetch: Fetch


class Truncate(msgspec.Struct, frozen=True):
    """Remove everything from `to_offset` on, durably, then send Truncated."""

    to_offset: int


class ResetLog(msgspec.Struct, frozen=True):
    """The leader no longer has any of this log: start again at `offset`, then send LogReset."""

    offset: int
    epochs: tuple[tuple[int, int], ...]


class SendFetch(msgspec.Struct, frozen=True):
    """Send the fetch to the leader, and repeat it until it is answered or replaced."""

    leader: int
    fetch: Fetch


class Quarantine(msgspec.Struct, frozen=True):
    """This replica and its leader contradict each other below the high watermark: this replica stops."""

    reason: str


class HighWatermarkAdvanced(msgspec.Struct, frozen=True):
    """Every offset below `high_watermark` is committed and readable."""

    high_watermark: int


class StepDown(msgspec.Struct, frozen=True):
    """This replica no longer leads: waiting requests get an unknown outcome."""

    leader: int | None


class Refresh(msgspec.Struct, frozen=True):
    """Read the partition's state again after a sync, and send it with this number."""

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
