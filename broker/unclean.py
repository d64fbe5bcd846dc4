"""An unclean election: what an operator asks for by name when no replica that is in sync will come back.

The replica that holds most leads with what it has; what only the others had is lost. The controller never does this by
itself, and no setting makes it. Each broker that has a replica is asked for its standing (`standing` among the calls
between brokers); who leads is the one with the highest (epoch of the last record, end), or the one that is named. The
new epoch is marked as unclean, which allows the others to cut back even what they knew to be committed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec

from portalmq.broker.config import EX_CANTCREAT, EX_UNAVAILABLE, EX_USAGE, StartupError
from portalmq.broker.core.replica import PartitionReplica
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.controller import elect_unclean
from portalmq.control_plane.plane import Conflict
from portalmq.control_plane.state import BrokerState, PartitionState
from portalmq.errors import PartitionNotFound, PortalMQError

ASK_WITHIN_S = 5.0
ATTEMPTS = 5

T = TypeVar("T")


class StandingOf(msgspec.Struct, frozen=True):
    """What is your replica's standing?"""

    topic_id: str
    number: int


class Standing(msgspec.Struct, frozen=True):
    """What a replica holds: records up to `end`, the last of them of `last_epoch`. `fault`: it is damaged."""

    store_uuid: str
    incarnation: int
    last_epoch: int
    end: int
    high_watermark: int
    fault: str = ""


class LocalPartition(Protocol):
    """What is needed of a partition; `damage` says why its files are no good, if they are not."""

    damage: str
    replica: PartitionReplica


class LocalTopics(Protocol):
    """The partitions that are open on this broker."""

    def local(self, topic_id: str, number: int) -> LocalPartition | None: ...


class PeerCalls(Protocol):
    def call(self, broker_id: int, name: str, request: msgspec.Struct, kind: type[T], *, timeout_s: float) -> T: ...


def serve_standing(topics: LocalTopics, body: bytes) -> bytes:
    """The broker's side of the question."""
    asked = msgspec.msgpack.decode(body, type=StandingOf)
    partition = topics.local(asked.topic_id, asked.number)
    if partition is None:
        raise PartitionNotFound("no replica of this partition is open here")
    replica = partition.replica
    standing = Standing(
        replica.store_uuid,
        replica.incarnation,
        replica.last_epoch,
        replica.durable_end,
        replica.high_watermark,
        partition.damage,
    )
    return msgspec.msgpack.encode(standing)


class NotElected(StartupError):
    """Nothing was changed. The sentence says why."""


@dataclass(frozen=True, slots=True)
class Elected:
    """Who leads now, and what the others that were reached hold."""

    broker_id: int
    leader_epoch: int
    standings: Mapping[int, Standing]
    silent: Mapping[int, str]


def choose(held: PartitionState, standings: Mapping[int, Standing], wanted: int | None = None) -> int:
    """Who is to lead. Raises NotElected when an ordinary election will do, or nobody can."""
    for broker_id in held.isr:
        standing = standings.get(broker_id)
        if standing is not None and not standing.fault and held.store_uuids.get(broker_id) == standing.store_uuid:
            raise NotElected(
                f"broker {broker_id} is there, and holds all that was acknowledged: the controller elects it, and "
                "nothing needs to be lost. If it does not, look into the controller's log",
                EX_CANTCREAT,
            )
    whole = {broker_id: standing for broker_id, standing in standings.items() if not standing.fault}
    if wanted is not None and wanted not in whole:
        fault = standings[wanted].fault if wanted in standings else "it does not answer, or has no replica of it"
        raise NotElected(f"broker {wanted} cannot lead this partition: {fault}", EX_UNAVAILABLE)
    if not whole:
        raise NotElected(
            f"of brokers {list(held.replicas)} none is there with a replica that is whole: start one of them first",
            EX_UNAVAILABLE,
        )
    if wanted is not None:
        return wanted
    return max(whole, key=lambda broker_id: (whole[broker_id].last_epoch, whole[broker_id].end, -broker_id))


def elect(catalog: Catalog, peers: PeerCalls, topic: str, number: int, *, wanted: int | None = None) -> Elected:
    """Hold the election. Raises NotElected, TopicNotFound."""
    state = catalog.topic(topic)
    for _ in range(ATTEMPTS):
        catalog.plane.sync()
        held = catalog.partition(state.topic_id, number)
        if held is None:
            raise NotElected(f"topic {topic!r} has partitions 0 to {state.partitions - 1}, no {number}", EX_USAGE)
        standings, silent = _ask(held.value, catalog.brokers(), peers, StandingOf(state.topic_id, number))
        chosen = choose(held.value, standings, wanted)
        standing = standings[chosen]
        elected = elect_unclean(held.value, chosen, standing.incarnation, standing.store_uuid)
        try:
            catalog.set_partition(state.topic_id, number, elected, held.version)
        except Conflict:
            continue  # somebody changed it meanwhile: perhaps it has a leader now
        return Elected(chosen, elected.leader_epoch, standings, silent)
    raise NotElected("the partition keeps changing: look who leads it, and repeat if need be", EX_UNAVAILABLE)


def _ask(
    held: PartitionState, brokers: Mapping[int, BrokerState], peers: PeerCalls, question: StandingOf
) -> tuple[dict[int, Standing], dict[int, str]]:
    standings: dict[int, Standing] = {}
    silent: dict[int, str] = {}
    for broker_id in held.replicas:
        if broker_id not in brokers:
            silent[broker_id] = "is not registered"
            continue
        try:
            standings[broker_id] = peers.call(broker_id, "standing", question, Standing, timeout_s=ASK_WITHIN_S)
        except PortalMQError as fault:
            silent[broker_id] = str(fault)
    return standings, silent
