"""The membership of a stream group, and the events and actions of its decisions (membership.py)."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from portalmq.broker.core.replica.events import Outcome, SessionLost, Tick
from portalmq.broker.core.stream.assignment import Partition
from portalmq.errors import PortalMQError

__all__ = ["Outcome", "Partition", "SessionLost", "Tick"]

HEARTBEAT_MS_MAX = 3_000


class Member(msgspec.Struct, frozen=True):
    """A member. `since` is the generation in which this client joined under its id."""

    member_id: str
    topics: tuple[str, ...]
    session_timeout_ms: int
    since: int


class PartitionOwner(msgspec.Struct, frozen=True):
    """The owner of a partition from generation `since` on. If `leaving` is set, that member still has the partition;
    `owner` gets it after `leaving` has heartbeaten in a generation of at least `since`."""

    owner: str
    since: int
    leaving: str = ""


class SubscribedTopic(msgspec.Struct, frozen=True):
    """A topic. One that is deleted and created again has another id."""

    topic_id: str
    partitions: int


class GroupMembers(msgspec.Struct, frozen=True):
    """The group's state in the control plane. `coordinator` is (broker id, incarnation). Invariant: the owner and
    the leaving member of each partition are in `members`."""

    generation: int
    coordinator: tuple[int, int]
    members: Mapping[str, Member] = {}
    owners: Mapping[Partition, PartitionOwner] = {}
    topic_ids: Mapping[str, str] = {}

    def __post_init__(self) -> None:
        for partition, ownership in self.owners.items():
            assert ownership.owner in self.members, (partition, ownership)
            assert not ownership.leaving or ownership.leaving in self.members, (partition, ownership)
            assert ownership.owner != ownership.leaving, (partition, ownership)
            assert 0 < ownership.since <= self.generation, (partition, ownership)


# --- events ----------------------------------------------------------------------------------------------------------


class Loaded(msgspec.Struct, frozen=True):
    """The state in the control plane, read after a sync: the answer to ReadState. None if the group is gone."""

    membership: GroupMembers | None
    version: int


class Answered(msgspec.Struct, frozen=True):
    """The result of the last Propose; with APPLIED, the state's new version."""

    outcome: Outcome
    version: int = -1


class Join(msgspec.Struct, frozen=True):
    """A client joins under this member id. `token` comes back in AnswerMember or RefuseMember."""

    token: object
    member_id: str
    topics: tuple[str, ...]
    session_timeout_ms: int


class Heartbeat(msgspec.Struct, frozen=True):
    """A member is alive, and has released all partitions that the assignment of `generation` does not name."""

    token: object
    member_id: str
    generation: int


class Leave(msgspec.Struct, frozen=True):
    token: object
    member_id: str


class TopicsChanged(msgspec.Struct, frozen=True):
    """The existing topics among those that members read."""

    topics: Mapping[str, SubscribedTopic]


class Claimed(msgspec.Struct, frozen=True):
    """The claim is committed at the partition's leader; the member continues at `offset`."""

    partition: Partition
    member_id: str
    since: int
    offset: int


class ClaimRefused(msgspec.Struct, frozen=True):
    """The partition's leader has seen `generation`, which is higher."""

    partition: Partition
    since: int
    generation: int


class ClaimFailed(msgspec.Struct, frozen=True):
    """The claim may or may not have been applied. It is repeated."""

    partition: Partition
    since: int


class SeekRequested(msgspec.Struct, frozen=True):
    """A request to fence the topic's members for a seek. The answer has the generation to seek in; SeekDone must
    follow."""

    token: object
    topic: str


class SeekDone(msgspec.Struct, frozen=True):
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


class Propose(msgspec.Struct, frozen=True):
    """Compare-and-set the state at `version` (-1: create it), then send Answered."""

    membership: GroupMembers
    version: int


class ReadState(msgspec.Struct, frozen=True):
    """Read the state after a sync, then send Loaded."""


class ClaimPartition(msgspec.Struct, frozen=True):
    """Claim the partition for the member at its leader, then send the result."""

    partition: Partition
    member_id: str
    since: int


class Assigned(msgspec.Struct, frozen=True):
    """A partition of a member: the generation since which it has it (or of its last seek), and the offset to read
    from."""

    partition: Partition
    since: int
    offset: int


class AnswerMember(msgspec.Struct, frozen=True):
    """The member's assignment, and the time until its next heartbeat. For Leave and SeekRequested only the generation
    counts."""

    token: object
    member_id: str
    generation: int
    assignment: tuple[Assigned, ...] = ()
    heartbeat_interval_ms: int = HEARTBEAT_MS_MAX


class RefuseMember(msgspec.Struct, frozen=True):
    token: object
    error: PortalMQError


class Resigned(msgspec.Struct, frozen=True):
    """This broker no longer coordinates the group: no actions or answers follow."""

    coordinator: tuple[int, int] | None


Action = Propose | ReadState | ClaimPartition | AnswerMember | RefuseMember | Resigned
Intent = Join | Leave | SeekRequested
