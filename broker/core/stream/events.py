"""The membership of a stream group, and the events and actions of its decisions (membership.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from portalmq.broker.core.replica.events import Outcome, SessionLost, Tick
from portalmq.broker.core.stream.assignment import Partition
from portalmq.errors import PortalMQError

__all__ = ["Outcome", "Partition", "SessionLost", "Tick"]

HEARTBEAT_MS_MAX = 3_000


@dataclass(frozen=True, slots=True)
class Member:
    """A member. `since` is the generation in which this client joined under its id."""

    member_id: str
    topics: tuple[str, ...]
    session_timeout_ms: int
    since: int


@dataclass(frozen=True, slots=True)
class PartitionOwner:
    """The owner of a partition from generation `since` on. If `leaving` is set, that member still has the partition;
    `owner` gets it after `leaving` has heartbeaten in a generation of at least `since`."""

    owner: str
    since: int
    leaving: str = ""


@dataclass(frozen=True, slots=True)
class SubscribedTopic:
    """A topic. One that is deleted and created again has another id."""

    topic_id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The group's state in the control plane. `coordinator` is (broker id, incarnation). Invariant: the owner and
    the leaving member of each partition are in `members`."""

    generation: int
    coordinator: tuple[int, int]
    members: Mapping[str, Member] = field(default_factory=dict)
    owners: Mapping[Partition, PartitionOwner] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for partition, ownership in self.owners.items():
            assert ownership.owner in self.members, (partition, ownership)
            assert not ownership.leaving or ownership.leaving in self.members, (partition, ownership)
            assert ownership.owner != ownership.leaving, (partition, ownership)
            assert 0 < ownership.since <= self.generation, (partition, ownership)


# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """The state in the control plane, read after a sync: the answer to ReadState. None if the group is gone."""

    membership: GroupMembers | None
    version: int


@dataclass(frozen=True, slots=True)
class Answered:
    """The result of the last Propose; with APPLIED, the state's new version."""

    outcome: Outcome
    version: int = -1


@dataclass(frozen=True, slots=True)
class Join:
    """A client joins under this member id. `token` comes back in AnswerMember or RefuseMember."""

    token: object
    member_id: str
    topics: tuple[str, ...]
    session_timeout_ms: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member is alive, and has released all partitions that the assignment of `generation` does not name."""

    token: object
    member_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Leave:
    token: object
    member_id: str


@dataclass(frozen=True, slots=True)
class TopicsChanged:
    """The existing topics among those that members read."""

    topics: Mapping[str, SubscribedTopic]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The claim is committed at the partition's leader; the member continues at `offset`."""

    partition: Partition
    member_id: str
    since: int
    offset: int


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """The partition's leader has seen `generation`, which is higher."""

    partition: Partition
    since: int
    generation: int


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """The claim may or may not have been applied. It is repeated."""

    partition: Partition
    since: int


@dataclass(frozen=True, slots=True)
class SeekRequested:
    """A request to fence the topic's members for a seek. The answer has the generation to seek in; SeekDone must
    follow."""

    token: object
    topic: str


@dataclass(frozen=True, slots=True)
class SeekDone:
    """The seek is done or abandoned: the topic's partitions can be claimed again."""

    topic: str


# SessionLost: another broker may have taken over. Tick: time passed; sent a few times a second.
Event = (
    Loaded
    | Answered
    | Join
    | Heartbeat
    | Leave
    | TopicsChanged
    | Claimed
    | ClaimRefused
    | ClaimFailed
    | SeekRequested
    | SeekDone
    | SessionLost
    | Tick
)

# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Propose:
    """Compare-and-set the state at `version` (-1: create it), then send Answered."""

    membership: GroupMembers
    version: int


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the state after a sync, then send Loaded."""


@dataclass(frozen=True, slots=True)
class ClaimPartition:
    """Claim the partition for the member at its leader, then send the result."""

    partition: Partition
    member_id: str
    since: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """A partition of a member: the generation since which it has it (or of its last seek), and the offset to read
    from."""

    partition: Partition
    since: int
    offset: int


@dataclass(frozen=True, slots=True)
class AnswerMember:
    """The member's assignment, and the time until its next heartbeat. For Leave and SeekRequested only the generation
    counts."""

    token: object
    member_id: str
    generation: int
    assignment: tuple[Assigned, ...] = ()
    heartbeat_interval_ms: int = HEARTBEAT_MS_MAX


@dataclass(frozen=True, slots=True)
class RefuseMember:
    token: object
    error: PortalMQError


@dataclass(frozen=True, slots=True)
class Resigned:
    """This broker no longer coordinates the group: no actions or answers follow."""

    coordinator: tuple[int, int] | None


Action = Propose | ReadState | ClaimPartition | AnswerMember | RefuseMember | Resigned
Intent = Join | Leave | SeekRequested
