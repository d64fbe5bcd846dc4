"""Calls about stream groups: shared offsets, claims, commits, seeks, positions, and what coordinators are asked."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from portalmq.broker.cluster.rpc import (
    BrokerCall,
    ForOne,
    ForPlacedShares,
    GroupNumbers,
    OnePartitionCall,
    PartitionCall,
    Placed,
    TopicPartition,
)
from portalmq.broker.storage.batch import Record
from portalmq.stream_wire import MemberAnswer, SeekAnswer

# "earliest", "latest", {"at": a time} or {"offset": an offset}
Start = str | dict[str, int]


class SharedOffsetCall(ForOne, msgspec.Struct, array_like=True):
    """Ask which message a queue with one shared offset is at. With `done`, an offset, end that message if it is the
    one."""

    group: str
    group_id: str
    topic: str
    topic_id: str
    number: int
    done: int | None = None


class Fronts(GroupNumbers):
    """Ask the same of several partitions. Those behind the first one with a message are not looked at."""


class SharedOffsetResult(msgspec.Struct, array_like=True):
    """`advanced`: the offset has moved. `message` is the (offset, timestamp_ms, record) that the queue is at; None when
    there is none, and when it was not asked for. The queue goes on at `offset`."""

    advanced: bool
    message: tuple[int, int, Record] | None = None
    offset: int = -1


class ClaimShare(Placed):
    member_id: str
    since: int


class ClaimCall(ForPlacedShares, msgspec.Struct, array_like=True):
    """Claim partitions for members. A group begins at `start` on partitions that it has not read."""

    group: str
    group_id: str
    start: Start
    shares: list[ClaimShare]


class CommitShare(Placed):
    offset: int


class StreamCommitCall(ForPlacedShares, msgspec.Struct, array_like=True):
    group: str
    group_id: str
    member_id: str
    generation: int
    shares: list[CommitShare]


class SeekCall(msgspec.Struct, array_like=True):
    """Set the group to another offset. With `generation` 0, only answer what would be done. A partition that has done
    the seek of this `seek_id` answers (committed, SOUGHT)."""

    group: str
    group_id: str
    to: Start
    generation: int
    places: list[TopicPartition]
    seek_id: bytes = b""

    def only(self, places: Sequence[TopicPartition]) -> SeekCall:
        return msgspec.structs.replace(self, places=list(places))


class GroupPositionsCall(msgspec.Struct, array_like=True):
    """`ages`: tell how old the first unread message is, too, which may mean to read it."""

    group: str
    places: list[TopicPartition]
    ages: bool = True

    def only(self, places: Sequence[TopicPartition]) -> GroupPositionsCall:
        return msgspec.structs.replace(self, places=list(places))


class GroupPosition(msgspec.Struct, array_like=True):
    """How far a group is on a partition; `committed` is -1 where it has not begun."""

    committed: int
    high_watermark: int
    lag: int
    lag_ms: int


class Coordinate(msgspec.Struct, array_like=True):
    """A request to a group's coordinator. `verb` is join, heartbeat, leave or seek."""

    group: str
    group_id: str
    verb: str
    member_id: str = ""
    topics: tuple[str, ...] = ()
    session_timeout_ms: int = 0
    generation: int = 0
    to: Start = ""
    numbers: tuple[int, ...] = ()
    seek_id: bytes = b""


TURN = OnePartitionCall("turn", SharedOffsetCall, SharedOffsetResult, timeout_s=15.0)
FRONTS = PartitionCall("fronts", Fronts, SharedOffsetResult, timeout_s=15.0)
CLAIM = PartitionCall("claim", ClaimCall, int, timeout_s=10.0)
COMMIT_OFFSETS = PartitionCall("commit_offsets", StreamCommitCall, bool, timeout_s=10.0)
SEEK = PartitionCall("seek", SeekCall, tuple[int, int], timeout_s=10.0)
OFFSETS = PartitionCall("offsets", GroupPositionsCall, GroupPosition, timeout_s=10.0)
COORDINATE = BrokerCall("coordinate", Coordinate, MemberAnswer, timeout_s=15.0)
COORDINATE_SEEK = BrokerCall("coordinate", Coordinate, SeekAnswer, timeout_s=15.0)
