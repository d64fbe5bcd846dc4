"""An unclean election, which an operator requests when no in-sync replica will come back.

The replica with the most records leads; records that only the others had are lost. The controller never does this by
itself, and no setting makes it. Each broker with a replica is asked for its log end (the call `standing`). The replica
with the highest (epoch of the last record, end) becomes leader, or the one that the operator names. The new epoch is
marked as unclean, which allows the others to truncate even what they knew to be committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from portalmq.broker.cluster.exits import EX_CANTCREAT, EX_UNAVAILABLE, EX_USAGE, StartupError
from portalmq.broker.cluster.rpc import PeerCaller
from portalmq.broker.cluster.rpc.brokers import STANDING, LogEndRequest, ReplicaLogEnd
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.controller import elect_unclean
from portalmq.control_plane.plane import Conflict
from portalmq.control_plane.state import BrokerState, PartitionState
from portalmq.errors import PartitionNotFound, PortalMQError

ATTEMPTS = 5


class LocalPartition(Protocol):
    """The part of a partition that is needed here. `fault` says why its files are damaged, `lost` what they lack."""

    fault: str
    lost: str
    replica: PartitionReplica


class LocalTopics(Protocol):
    """The replicas on this broker, open or kept closed, and what is in lost+found."""

    def local(self, topic_id: str, number: int) -> LocalPartition | None: ...
    def closed_log_end(self, topic_id: str, number: int) -> ReplicaLogEnd | None: ...
    def set_aside(self, topic_id: str, number: int) -> tuple[str, ...]: ...


def answer_log_end(topics: LocalTopics, asked: LogEndRequest) -> ReplicaLogEnd:
    """Serve the call `standing`."""
    log_end = own_log_end(topics, asked.topic_id, asked.number)
    if log_end is None:
        raise PartitionNotFound("no replica of this partition is open here")
    aside = topics.set_aside(asked.topic_id, asked.number)
    return msgspec.structs.replace(log_end, set_aside=aside)


def own_log_end(topics: LocalTopics, topic_id: str, number: int) -> ReplicaLogEnd | None:
    """Return the log end of this broker's replica; None while it is not open."""
    partition = topics.local(topic_id, number)
    return log_end_of(partition) if partition is not None else topics.closed_log_end(topic_id, number)


def log_end_of(partition: LocalPartition) -> ReplicaLogEnd:
    replica = partition.replica
    return ReplicaLogEnd(
        replica.store_uuid,
        replica.incarnation,
        replica.last_epoch,
        replica.durable_end,
        replica.high_watermark,
        "" if partition.fault == partition.lost else partition.fault,
        partition.lost,
    )


def is_whole_elsewhere(held: PartitionState, broker_id: int, ask: Callable[[int], ReplicaLogEnd]) -> bool | None:
    """Whether another member of the ISR says now that its replica is whole; None when there is no other member. Being
    in the ISR is not enough: the same cause may have damaged all members."""
    others = [member for member in held.isr if member != broker_id]
    for other in others:
        try:
            if ask(other).is_whole(held, other):
                return True
        except PortalMQError:
            continue
    return False if others else None


class NotElected(StartupError):
    """The election was not held, for the reason given. Nothing has changed."""


@dataclass(frozen=True, slots=True)
class Elected:
    """The new leader, and what the other replicas hold that answered."""

    broker_id: int
    leader_epoch: int
    log_ends: Mapping[int, ReplicaLogEnd]
    silent: Mapping[int, str]


def choose(held: PartitionState, log_ends: Mapping[int, ReplicaLogEnd], wanted: int | None = None) -> int:
    """Return the new leader. Raises NotElected when an ordinary election is enough, or no broker can lead."""
    for broker_id in held.isr:
        log_end = log_ends.get(broker_id)
        if log_end is not None and log_end.is_whole(held, broker_id):
            raise NotElected(
                f"broker {broker_id} is there, and holds all that was acknowledged: the controller elects it, and "
                "nothing needs to be lost. If it does not, look into the controller's log",
                EX_CANTCREAT,
            )
    usable = {broker_id: log_end for broker_id, log_end in log_ends.items() if not log_end.fault}
    if wanted is not None:
        if wanted not in usable:
            fault = log_ends[wanted].fault if wanted in log_ends else "it does not answer, or has no replica of it"
            raise NotElected(f"broker {wanted} cannot lead this partition: {fault}", EX_UNAVAILABLE)
        return wanted
    if not usable:
        raise NotElected(
            f"of brokers {list(held.replicas)} none is there with a replica that is whole: start one of them first"
            + _aside_of(log_ends),
            EX_UNAVAILABLE,
        )
    chosen = max(usable, key=lambda broker_id: (usable[broker_id].last_epoch, usable[broker_id].end, -broker_id))
    if not usable[chosen].end and _aside_of(log_ends):
        raise NotElected(
            f"broker {chosen} would lead, and its replica is empty{_aside_of(log_ends)}. To lose them none the less, "
            f"name it: --broker {chosen}",
            EX_CANTCREAT,
        )
    return chosen


def _aside_of(log_ends: Mapping[int, ReplicaLogEnd]) -> str:
    """Say where records of the partition may be that no replica holds."""
    places = [
        f"broker {broker_id}: {place}" for broker_id, held in sorted(log_ends.items()) for place in held.set_aside
    ]
    return "; set aside before, and perhaps of use, are " + ", ".join(places) if places else ""


def elect(catalog: Catalog, peers: PeerCaller, topic: str, number: int, *, wanted: int | None = None) -> Elected:
    """Hold the election. Raises NotElected, TopicNotFound."""
    state = catalog.topic(topic)
    for _ in range(ATTEMPTS):
        catalog.plane.sync()
        held = catalog.partition(state.topic_id, number)
        if held is None:
            raise NotElected(f"topic {topic!r} has partitions 0 to {state.partitions - 1}, no {number}", EX_USAGE)
        log_ends, silent = _ask(held.value, catalog.brokers(), peers, LogEndRequest(state.topic_id, number))
        chosen = choose(held.value, log_ends, wanted)
        log_end = log_ends[chosen]
        elected = elect_unclean(held.value, chosen, log_end.incarnation, log_end.store_uuid)
        try:
            catalog.set_partition(state.topic_id, number, elected, held.version)
        except Conflict:
            continue  # it has changed: perhaps it has a leader now
        return Elected(chosen, elected.leader_epoch, log_ends, silent)
    raise NotElected("the partition keeps changing: look who leads it, and repeat if need be", EX_UNAVAILABLE)


def _ask(
    held: PartitionState, brokers: Mapping[int, BrokerState], peers: PeerCaller, question: LogEndRequest
) -> tuple[dict[int, ReplicaLogEnd], dict[int, str]]:
    log_ends: dict[int, ReplicaLogEnd] = {}
    silent: dict[int, str] = {}
    for broker_id in held.replicas:
        if broker_id not in brokers:
            silent[broker_id] = "is not registered"
            continue
        try:
            log_ends[broker_id] = STANDING.ask(peers, broker_id, question)
        except PortalMQError as fault:
            silent[broker_id] = str(fault)
    return log_ends, silent
