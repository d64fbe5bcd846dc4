"""Calls about the brokers themselves: replicas' log ends, suspicions, who reaches whom, and clocks."""

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
    machine_ms: int


STANDING = BrokerCall("standing", LogEndRequest, ReplicaLogEnd, timeout_s=5.0)
STANDINGS = BrokerCall("standings", LogEndsRequest, ReplicaLogEnds, timeout_s=1.0)
DIGEST = BrokerCall("digest", DigestRequest, ReplicaDigest, timeout_s=20.0)
SUSPECT = BrokerCall("suspect", Suspicion, SuspicionNoted, timeout_s=1.0)
REACH = BrokerCall("reach", ReachRequest, Reached, timeout_s=1.0)
TIME = BrokerCall("time", TimeRequest, TimeAnswer, timeout_s=1.0)
