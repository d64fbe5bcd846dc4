"""Calls about the brokers themselves: replicas' log ends, suspicions, who reaches whom, clocks, and rates."""

from __future__ import annotations

import msgspec

from portalmq.broker.cluster.rpc import BrokerCall
from portalmq.control_plane.state import PartitionState
from portalmq.wire import ReplicaDigest


class LogEndRequest(msgspec.Struct, frozen=True):
    """Ask for the log end of the broker's replica."""

    topic_id: str
    number: int


class LogEndsRequest(msgspec.Struct, frozen=True):
    """The same of many partitions."""

    partitions: list[LogEndRequest]


class ReplicaLogEnd(msgspec.Struct, frozen=True):
    """The records that a replica holds: up to `end`, the last of them of `last_epoch`.

    `fault`: the replica is damaged. `lossy`: it can be read, and lacks records that it knew to be committed.
    `set_aside` names the files in the partition's lost+found.
    """

    store_uuid: str
    incarnation: int
    last_epoch: int
    end: int
    high_watermark: int
    fault: str = ""
    lossy: str = ""
    set_aside: tuple[str, ...] = ()

    def is_whole(self, held: PartitionState, broker_id: int) -> bool:
        """Return True when this replica of `broker_id` is the one that was counted in sync, and can be trusted."""
        counted = broker_id in held.isr and held.store_uuids.get(broker_id) == self.store_uuid
        return counted and not self.fault and not self.lossy


class ReplicaLogEnds(msgspec.Struct, frozen=True):
    """In the order of the request; None for a replica that is not open yet."""

    standings: list[ReplicaLogEnd | None]


class DigestRequest(msgspec.Struct, frozen=True):
    """Ask for the digest of the broker's replica from `offset` to below `below`, `lists`: batch by batch; `files`: for
    a check of the file that holds `offset`, and of the small files beside it."""

    topic_id: str
    number: int
    offset: int
    below: int
    lists: bool = False
    files: bool = False


class Suspicion(msgspec.Struct, frozen=True):
    """Report to the controller that a broker does not answer."""

    broker_id: int
    incarnation: int
    refused: bool


class SuspicionNoted(msgspec.Struct, frozen=True):
    """The controller verifies with a probe of its own."""


class ReachRequest(msgspec.Struct, frozen=True):
    """Ask whether a broker answers. Sent before a controller, or a leader that others may miss, is replaced."""

    broker_id: int
    incarnation: int


class Reached(msgspec.Struct, frozen=True):
    answers: bool


class TimeRequest(msgspec.Struct, frozen=True):
    """Ask for the time of day of the broker's machine."""


class TimeAnswer(msgspec.Struct, frozen=True):
    """`up_ms`: for how long some broker was always up, as far as this one knows."""

    machine_ms: int
    up_ms: int = 0


class Rate(msgspec.Struct, array_like=True, frozen=True):
    """Messages and bytes a second, up to `second`; `lag` and `oldest_ms` are those of queue groups at that moment."""

    second: int
    published: float
    bytes_published: float
    delivered: float
    acked: float
    dead: float
    lag: int
    oldest_ms: int


class Registered(msgspec.Struct, array_like=True, frozen=True):
    """The brokers of the cluster from a second on, each with its incarnation."""

    second: int
    brokers: list[tuple[int, int]]


class ClusterMark(msgspec.Struct, array_like=True, frozen=True):
    """An event that a chart marks."""

    at_ms: int
    kind: str
    text: str
    broker_id: int


class GroupLagNow(msgspec.Struct, array_like=True, frozen=True):
    name: str
    lag: int
    in_flight: int
    dead: int
    oldest_ms: int


class TopicRate(msgspec.Struct, array_like=True, frozen=True):
    """Messages a second of a topic."""

    name: str
    published: float
    delivered: float
    acked: float


class RatesRequest(msgspec.Struct, frozen=True):
    """Ask for the rows after a second, or the minutes; the marks after a moment; the `top` groups and topics and those
    that are named; the lags of the group `series`."""

    after: int = 0
    minutes: bool = False
    marks_after_ms: int = 0
    top: int = 0
    groups: list[str] = []
    topics: list[str] = []
    series: str = ""


class RatesAnswer(msgspec.Struct, frozen=True):
    """Rows have no gaps since this incarnation of the broker began. `registered`: the brokers that it saw, lately."""

    broker_id: int
    rows: list[Rate]
    marks: list[ClusterMark]
    groups: list[GroupLagNow]
    topics: list[TopicRate]
    series: list[tuple[int, int]]
    led: int
    followed: int
    under_replicated: int
    disk_free_bytes: int
    disk_full: bool
    incarnation: int = 0
    registered: list[Registered] = []


STANDING = BrokerCall("standing", LogEndRequest, ReplicaLogEnd, timeout_s=5.0)
STANDINGS = BrokerCall("standings", LogEndsRequest, ReplicaLogEnds, timeout_s=1.0)
DIGEST = BrokerCall("digest", DigestRequest, ReplicaDigest, timeout_s=20.0)
SUSPECT = BrokerCall("suspect", Suspicion, SuspicionNoted, timeout_s=1.0)
REACH = BrokerCall("reach", ReachRequest, Reached, timeout_s=1.0)
RATES = BrokerCall("rates", RatesRequest, RatesAnswer, timeout_s=1.0)
TIME = BrokerCall("time", TimeRequest, TimeAnswer, timeout_s=1.0)
