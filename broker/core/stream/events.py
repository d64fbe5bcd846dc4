"""What the membership of a stream group is, what its decisions (membership.py) are told, and what they ask for."""

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
    """`since` is the generation in which this client joined under its id."""

    member_id: str
    topics: tuple[str, ...]
    session_timeout_ms: int
    since: int


@dataclass(frozen=True, slots=True)
class PartitionOwner:
    """`owner` has the partition from generation `since` on; or is to have it when `leaving`, who has it still, has
    heartbeaten in a generation of at least `since`."""

    owner: str
    since: int
    leaving: str = ""


@dataclass(frozen=True, slots=True)
class SubscribedTopic:
    """A topic as it is known: one that is deleted and made anew has another id."""

    topic_id: str
    partitions: int


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """What stands in the control plane. `coordinator` is (broker id, incarnation).

    Invariant: the owner and the leaving member of each place are in `members`.
    """

    generation: int
    coordinator: tuple[int, int]
    members: Mapping[str, Member] = field(default_factory=dict)
    owners: Mapping[Partition, PartitionOwner] = field(default_factory=dict)
    topic_ids: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for partition, place in self.owners.items():
            assert place.owner in self.members, (partition, place)
            assert not place.leaving or place.leaving in self.members, (partition, place)
            assert place.owner != place.leaving, (partition, place)
            assert 0 < place.since <= self.generation, (partition, place)

    def holders(self) -> dict[Partition, str]:
        """Who may read each partition in this generation."""
        return {partition: place.leaving or place.owner for partition, place in self.owners.items()}


# --- told ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the control plane holds, read after a sync: the answer to Read. None when the group is gone."""

    membership: GroupMembers | None
    version: int


@dataclass(frozen=True, slots=True)
class Answered:
    """What became of the last Propose; with APPLIED the state's version now."""

    outcome: Outcome
    version: int = -1


@dataclass(frozen=True, slots=True)
class Join:
    """A client wants to be the member of this id. `token` comes back in Answer or Refuse."""

    token: object
    member_id: str
    topics: tuple[str, ...]
    session_timeout_ms: int


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """A member lives, and has let go of all that the assignment of `generation` does not name."""

    token: object
    member_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class Leave:
    token: object
    member_id: str


@dataclass(frozen=True, slots=True)
class TopicsChanged:
    """The topics that there are, as far as members read them."""

    topics: Mapping[str, SubscribedTopic]


@dataclass(frozen=True, slots=True)
class Claimed:
    """The claim is committed at the partition's leader; the member goes on at `offset`."""

    partition: Partition
    member_id: str
    since: int
    offset: int


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """The leader has seen `generation`, which is higher."""

    partition: Partition
    since: int
    generation: int


@dataclass(frozen=True, slots=True)
class ClaimFailed:
    """The claim may or may not have come to pass. It is tried again."""

    partition: Partition
    since: int


@dataclass(frozen=True, slots=True)
class SeekRequested:
    """Fence what is under way in this topic. Answered with the generation to seek in; SeekDone must follow."""

    token: object
    topic: str


@dataclass(frozen=True, slots=True)
class SeekDone:
    """The leaders have sought, or will not: the topic's partitions can be claimed again."""

    topic: str


# SessionLost: others may have taken over. Tick: time has passed; comes a few times a second.
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

# --- asked -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Propose:
    """Compare-and-set the state at `version` (-1: make it), and tell Answered."""

    membership: GroupMembers
    version: int


@dataclass(frozen=True, slots=True)
class ReadState:
    """Read the state after a sync, and tell Loaded."""


@dataclass(frozen=True, slots=True)
class ClaimPartition:
    """Claim the partition for the member at its leader, and tell what became of it."""

    partition: Partition
    member_id: str
    since: int


@dataclass(frozen=True, slots=True)
class Assigned:
    """A partition that a member is to read: since when it is his (or was sought last), and from which offset then."""

    partition: Partition
    since: int
    offset: int


@dataclass(frozen=True, slots=True)
class AnswerMember:
    """The member's assignment, and when it should come again. Of a Leave or SeekRequested the generation counts."""

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
    """This broker does not coordinate the group any more: nothing will be asked or answered from here on."""

    coordinator: tuple[int, int] | None


Action = Propose | ReadState | ClaimPartition | AnswerMember | RefuseMember | Resigned
Intent = Join | Leave | SeekRequested
