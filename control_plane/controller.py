"""Who leads: a pure decision, and its application by compare-and-set.

A broker alone elects itself when it starts. That is an election like any other: the leader epoch rises, so that
receipts, producers and followers of the time before are told apart from those after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from portalmq.control_plane import state
from portalmq.control_plane.catalog import ATTEMPTS, Catalog, Versioned
from portalmq.control_plane.plane import COMMIT_OPS_MAX, Conflict, Set
from portalmq.control_plane.state import BrokerState, PartitionState, TopicState
from portalmq.errors import Unavailable


def elect(held: PartitionState, live: Mapping[int, BrokerState]) -> PartitionState:
    """The partition's state after an election among the `live` brokers; without a clean one it has no leader.

    Clean is a replica in sync that still has the data directory it was counted with: an emptied one would lead a
    partition of nothing, and what was acknowledged would be gone. First in the order of the replicas wins.
    """
    clean = (
        broker_id
        for broker_id in held.replicas
        if broker_id in held.isr and broker_id in live and held.store_uuids.get(broker_id) == live[broker_id].store_uuid
    )
    leader = next(clean, None)
    incarnations = dict(held.incarnations)
    if leader is not None:
        incarnations[leader] = live[leader].incarnation
    return msgspec.structs.replace(held, leader=leader, leader_epoch=held.leader_epoch + 1, incarnations=incarnations)


@dataclass(slots=True)
class Takeover:
    """What a broker found when it took over: how many partitions it leads, and which have no leader now."""

    led: int = 0
    leaderless: list[tuple[str, int]] = field(default_factory=list)


def take_over(catalog: Catalog, broker_id: int, broker: BrokerState) -> Takeover:
    """Elect the only broker there is for every partition of every topic.

    Raises Unavailable when someone else keeps changing the partitions meanwhile.
    """
    found = Takeover()
    catalog.sweep()
    pending = [(topic, number) for topic in catalog.topics().values() for number in range(topic.partitions)]
    while pending:
        for (topic, number), elected in _elect_some(catalog, pending[:COMMIT_OPS_MAX], {broker_id: broker}):
            if elected.leader is None:
                found.leaderless.append((topic.name, number))
            else:
                found.led += 1
        pending = pending[COMMIT_OPS_MAX:]
    return found


def _elect_some(
    catalog: Catalog, partitions: list[tuple[TopicState, int]], live: Mapping[int, BrokerState]
) -> list[tuple[tuple[TopicState, int], PartitionState]]:
    """Elections in one commit. A partition that is being removed is left out."""
    for _ in range(ATTEMPTS):
        found = [(of, catalog.partition(of[0].topic_id, of[1])) for of in partitions]
        elections = [(of, held, elect(held.value, live)) for of, held in found if held is not None]
        try:
            catalog.plane.commit(*(_election(of, held, elected) for of, held, elected in elections))
        except Conflict:
            continue
        return [(of, elected) for of, _, elected in elections]
    raise Unavailable("the partitions are being changed by someone else: is another broker on this control plane?")


def _election(of: tuple[TopicState, int], held: Versioned[PartitionState], elected: PartitionState) -> Set:
    topic, number = of
    return Set(state.partition_path(topic.topic_id, number), state.encode(elected), held.version)
