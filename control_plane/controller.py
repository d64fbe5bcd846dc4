"""Who leads: a pure decision, and its application by compare-and-set.

A broker alone elects itself when it starts. That is an election like any other: the leader epoch rises, so that
receipts, producers and followers of the time before are told apart from those after.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from portalmq.control_plane import state
from portalmq.control_plane.catalog import ATTEMPTS, Catalog, Versioned
from portalmq.control_plane.plane import COMMIT_OPS_MAX, Conflict, Set
from portalmq.control_plane.state import BrokerState, PartitionState, TopicState, min_insync
from portalmq.errors import Unavailable


def decide(
    held: PartitionState,
    live: Mapping[int, BrokerState],
    *,
    configured_min_insync: int | None = None,
    added: Sequence[int] = (),
) -> PartitionState | None:
    """What the partition's state has to become while the brokers `live` are there; None when it is right as it is.

    `added` are brokers that are to hold a replica from now on. A leader is replaced when it is gone, has started anew
    since it was elected (it may have lost what it had promised to itself), stands on another store, or drains.
    """
    wanted = held
    if added:
        wanted = msgspec.structs.replace(held, replicas=(*held.replicas, *added))
    if not _leads(held, live):
        elected = elect(wanted, live, configured_min_insync=configured_min_insync)
        if elected.leader != held.leader or (held.leader is not None and not _still_leads(held, live)):
            wanted = elected
    return None if wanted == held else wanted


def _leads(held: PartitionState, live: Mapping[int, BrokerState]) -> bool:
    return _still_leads(held, live) and held.leader is not None and not live[held.leader].draining


def _still_leads(held: PartitionState, live: Mapping[int, BrokerState]) -> bool:
    leader = held.leader
    return (
        leader is not None
        and _is_clean(held, leader, live)
        and held.incarnations.get(leader) == live[leader].incarnation
    )


def _is_clean(held: PartitionState, broker_id: int, live: Mapping[int, BrokerState]) -> bool:
    """In sync, there, and on the store it was counted with: an emptied one would lead a partition of nothing."""
    counted = held.store_uuids.get(broker_id, "").partition("/")[0]
    return broker_id in held.isr and broker_id in live and counted == live[broker_id].store_uuid


def elect(
    held: PartitionState, live: Mapping[int, BrokerState], *, configured_min_insync: int | None = None
) -> PartitionState:
    """The partition's state after an election among the `live` brokers; without a clean one it has no leader.

    First in the order of the replicas wins, one that drains only if there is no other. Members that are gone leave the
    ISR, the old leader first, down to min_insync_replicas; those on another store leave it in any case.
    """
    clean = [broker_id for broker_id in held.replicas if _is_clean(held, broker_id, live)]
    leader = next((broker_id for broker_id in clean if not live[broker_id].draining), next(iter(clean), None))
    if leader is None:
        return msgspec.structs.replace(held, leader=None, leader_epoch=held.leader_epoch + 1)
    gone = [broker_id for broker_id in held.isr if broker_id not in live]
    room = max(0, min_insync(held, configured_min_insync) - len(clean))
    gone.sort(key=lambda broker_id: broker_id == held.leader)  # the old leader stays last, if at all
    kept = {*clean, *gone[:room]}
    return msgspec.structs.replace(
        held,
        leader=leader,
        leader_epoch=held.leader_epoch + 1,
        isr=tuple(broker_id for broker_id in held.replicas if broker_id in kept),
        incarnations={**held.incarnations, leader: live[leader].incarnation},
    )


def elect_unclean(held: PartitionState, broker_id: int, incarnation: int, store_uuid: str) -> PartitionState:
    """What an operator asks for by name when no clean replica will come back: `broker_id` leads with what it has (a
    replica of `store_uuid`), and all that only others had is lost. The epoch is marked, so that those may cut what they
    hold beyond it."""
    epoch = held.leader_epoch + 1
    return msgspec.structs.replace(
        held,
        leader=broker_id,
        leader_epoch=epoch,
        isr=(broker_id,),
        store_uuids={**held.store_uuids, broker_id: store_uuid},
        incarnations={**held.incarnations, broker_id: incarnation},
        unclean=(*held.unclean, epoch),
    )


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
