"""The decisions of the controller: leaders, replicas, and what may be deleted. Pure: `plan(view)` returns the
partitions to change, and broker/cluster/controller_loop.py applies them by compare-and-set.

    elections   of a partition whose leader is gone, has restarted, has another store, or drains; or which too few
                replicas reach while enough reach another one
    cold        elections among replicas that have all restarted: their logs are compared first
    replicas    are added to partitions with fewer than their topic wants, as brokers join
    balance     moves leaders from brokers with many to brokers with few, when an operator asks for it
    live        are the brokers that are registered and not found gone by a probe
    strays      are partitions of no topic, when they have been so for long
    tombstones  of deleted topics are removed when no broker has files of them

A lone broker elects itself when it starts. That is an election like any other: the leader epoch rises, so that
receipts, producers and followers from before are distinguished from those after.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from portalmq.control_plane.assignment import add_replicas
from portalmq.control_plane.catalog import PartitionChange, Versioned
from portalmq.control_plane.mirror import PartitionKey
from portalmq.control_plane.state import BrokerState, PartitionState, Tombstone, TopicState, min_insync

# A creation takes seconds at most, and starts again if its partitions are removed: this only avoids needless work.
STRAY_FOR_MS = 10 * 60_000
# How long a broker may be away and still learn, at its return, that its files of a deleted topic are to be removed.
TOMBSTONE_MS = 7 * 24 * 3_600_000


# By broker: which of the others reach it, and which do not.
Reach = Mapping[int, Mapping[int, bool]]
# A log's (epoch of its last record, end). None: damaged, or without records that the replica knew to be committed.
LogEnd = tuple[int, int] | None
# Passes items on, and may let other greenlets run in between: the view must not change during that.
Paced = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class View:
    """The input of the controller's decisions. `live` are the live brokers, `waiting` the partitions whose cold
    election waits, `log_ends` what their replicas answered otherwise. `reach` is which brokers reach which, asked when
    some broker gets no answer from a leader."""

    topics: Mapping[str, TopicState]
    partitions: Mapping[PartitionKey, Versioned[PartitionState]]
    live: Mapping[int, BrokerState]
    waiting: Collection[PartitionKey] = ()
    log_ends: Mapping[PartitionKey, Mapping[int, LogEnd]] = field(default_factory=dict)
    reach: Reach = field(default_factory=dict)


def plan(view: View, *, paced: Paced = iter) -> list[PartitionChange]:
    """Return the partitions that have to change: none when all is well, or while no broker is live."""
    topics = {topic.topic_id: topic for topic in view.topics.values()}
    partitions = {key: held for key, held in view.partitions.items() if key[0] in topics}
    added = _added(topics, partitions, view.live)
    led = Counter(held.value.leader for held in paced(partitions.values()) if _leads(held.value, view.live))
    changes: list[PartitionChange] = []
    for (topic_id, number), held in paced(partitions.items()):
        if (topic_id, number) in view.waiting:
            continue
        wanted = decide(
            held.value,
            view.live,
            configured_min_insync=topics[topic_id].config.min_insync_replicas,
            added=added.get((topic_id, number), ()),
            led=led,
            log_ends=view.log_ends.get((topic_id, number)),
            reach=view.reach,
        )
        if wanted is not None:
            if wanted.leader != held.value.leader:
                led[wanted.leader] += 1
            changes.append(PartitionChange(topic_id, number, wanted, held.version))
    return changes


def cold_elections(view: View, *, paced: Paced = iter) -> dict[PartitionKey, PartitionState]:
    """Return the partitions that need a leader and whose replicas must first be asked for their log ends."""
    topics = {topic.topic_id for topic in view.topics.values()}
    return {
        key: held.value
        for key, held in paced(view.partitions.items())
        if key[0] in topics and is_cold(held.value, view.live)
    }


def cut_off(view: View) -> set[PartitionKey]:
    """Return the partitions with a live leader that too few replicas reach."""
    topics = {topic.topic_id: topic.config.min_insync_replicas for topic in view.topics.values()}
    return {
        key
        for key, held in view.partitions.items()
        if key[0] in topics and _is_cut_off(held.value, view.live, view.reach, topics[key[0]])
    }


def _is_cut_off(
    held: PartitionState, live: Mapping[int, BrokerState], reach: Reach, configured_min_insync: int | None
) -> bool:
    """Whether the leader can commit nothing. Replicas that were not asked, or cannot answer, are assumed to reach it;
    those out of sync count too, since they may replace a member."""
    leader = held.leader
    if leader is None or leader not in reach or not _leads(held, live):
        return False
    follow = sum(
        reach[leader].get(broker_id, True) for broker_id in held.replicas if broker_id != leader and broker_id in live
    )
    return 1 + follow < min_insync(held, configured_min_insync)


def _out_of_reach(held: PartitionState, reach: Reach, configured_min_insync: int | None) -> set[int]:
    """Return the in-sync replicas that must not replace a leader that is cut off, since they may be cut off too and the
    leadership would go round. Replicas that were not asked, or cannot answer, do not count as reaching them."""
    least = min_insync(held, configured_min_insync)
    return {
        broker_id
        for broker_id in held.isr
        if 1 + sum(reach.get(broker_id, {}).get(other, False) for other in held.replicas if other != broker_id) < least
    }


def is_cold(held: PartitionState, live: Mapping[int, BrokerState]) -> bool:
    """Whether a leader is needed and all candidates have restarted since they were counted in sync. They hold what
    their disks kept, and one that forgot fsynced records must not lead those that did not."""
    if len(held.isr) <= 1 or _leads(held, live):
        return False
    live = _current(held, live)
    clean = [broker_id for broker_id in held.isr if _is_clean(held, broker_id, live)]
    return bool(clean) and all(held.incarnations.get(broker_id) != live[broker_id].incarnation for broker_id in clean)


def _added(
    topics: Mapping[str, TopicState],
    partitions: Mapping[PartitionKey, Versioned[PartitionState]],
    live: Mapping[int, BrokerState],
) -> dict[PartitionKey, list[int]]:
    short = {
        key: topics[key[0]].replication_factor
        for key, held in partitions.items()
        if len(held.value.replicas) < topics[key[0]].replication_factor
    }
    staying = [broker_id for broker_id, broker in live.items() if not broker.draining]
    if not short or not staying:
        return {}
    return add_replicas({key: held.value.replicas for key, held in partitions.items()}, short, staying)


def rebalance(view: View) -> list[PartitionChange]:
    """Return leaders to move so that no live broker leads two partitions more than another in-sync replica does.

    Partitions that need an election are left to `plan`. A move is an election: the leader epoch rises."""
    topics = {topic.topic_id: topic for topic in view.topics.values()}
    states = {
        key: held.value
        for key, held in sorted(view.partitions.items())
        if key[0] in topics and _leads(held.value, view.live)
    }
    led = Counter(state.leader for state in states.values())
    moved: dict[PartitionKey, PartitionState] = {}
    while True:
        before = len(moved)
        for key in [key for key in states if key not in moved]:
            state = states[key]
            # A restarted broker has had the time to open its files: here it counts like the others.
            known = state.incarnations
            alike = {id: max(known.get(id, 0), view.live[id].incarnation) for id in state.isr if id in view.live}
            elected = elect(msgspec.structs.replace(state, incarnations=alike), view.live, led=led)
            leader = elected.leader
            if leader is not None and led[state.leader] - led[leader] >= 2:
                led[state.leader] -= 1
                led[leader] += 1
                incarnations = {**known, leader: view.live[leader].incarnation}
                moved[key] = msgspec.structs.replace(elected, isr=state.isr, incarnations=incarnations)
        if len(moved) == before:
            break
    return [PartitionChange(*key, state, view.partitions[key].version) for key, state in sorted(moved.items())]


def departures(view: View, broker_id: int) -> list[PartitionChange]:
    """Remove a broker that ends from the ISRs, where enough others are in sync. Its leaders would notice themselves,
    but would wait for it until then."""
    topics = {topic.topic_id: topic for topic in view.topics.values()}
    changes: list[PartitionChange] = []
    for (topic_id, number), held in view.partitions.items():
        state = held.value
        if broker_id not in state.isr or state.leader in (None, broker_id) or topic_id not in topics:
            continue
        if len(state.isr) > min_insync(state, topics[topic_id].config.min_insync_replicas):
            left = tuple(member for member in state.isr if member != broker_id)
            changes.append(PartitionChange(topic_id, number, msgspec.structs.replace(state, isr=left), held.version))
    return changes


def live_brokers(
    registered: Mapping[int, BrokerState],
    known_before: Mapping[int, BrokerState],
    gone: Collection[tuple[int, int]],
    *,
    in_grace: bool,
) -> dict[int, BrokerState]:
    """Return the live brokers. `gone` are (id, incarnation) that a probe found gone, registered or not.

    Just after the control plane has come back (`in_grace`) a missing registration proves nothing: a broker known before
    counts as live until a probe says otherwise.
    """
    known = {**known_before, **registered} if in_grace else registered
    return {broker_id: broker for broker_id, broker in known.items() if (broker_id, broker.incarnation) not in gone}


def old_strays(found: Iterable[str], first_seen_ms: dict[str, int], now_ms: int) -> list[str]:
    """Return those of the `found` topic ids that were strays for long. Updates `first_seen_ms` at every call."""
    strays = set(found)
    for topic_id in first_seen_ms.keys() - strays:
        del first_seen_ms[topic_id]
    return sorted(
        topic_id for topic_id in strays if now_ms - first_seen_ms.setdefault(topic_id, now_ms) >= STRAY_FOR_MS
    )


def may_be_forgotten(
    tombstone: Tombstone,
    confirmed: Collection[int],
    *,
    registered: Collection[int],
    claimed: Collection[int],
    now_ms: int,
) -> bool:
    """Whether no broker has files of the deleted topic: all registered brokers have confirmed it, and all that ever had
    an id have too, or the week is over. A broker that returns later sets its files aside, and destroys nothing."""
    missing = set(claimed) - set(confirmed)
    if not set(registered) <= set(confirmed):
        return False
    return not missing or now_ms - tombstone.deleted_at_ms > TOMBSTONE_MS


def decide(
    held: PartitionState,
    live: Mapping[int, BrokerState],
    *,
    configured_min_insync: int | None = None,
    added: Sequence[int] = (),
    led: Mapping[int | None, int] | None = None,
    log_ends: Mapping[int, LogEnd] | None = None,
    reach: Reach | None = None,
) -> PartitionState | None:
    """Return the state that the partition needs while the brokers `live` are there; None when it is right as it is.

    `added` are brokers that get a replica. A leader is replaced when it is gone, has restarted since it was elected (it
    may have lost what it had promised itself), has another store, or drains; and when too few replicas reach it, like
    one that is gone, if enough of them reach another.
    """
    if not reach and not added and _leads(held, live):
        return None
    live = _current(held, live)
    if reach and _is_cut_off(held, live, reach, configured_min_insync):
        barred = {held.leader, *_out_of_reach(held, reach, configured_min_insync)}
        fit = {id: broker for id, broker in live.items() if id not in barred}
        if elect(held, fit, configured_min_insync=configured_min_insync, led=led).leader is not None:
            live = fit
    wanted = held
    if added:
        wanted = msgspec.structs.replace(held, replicas=(*held.replicas, *added))
    if not _leads(held, live):
        elected = elect(wanted, live, configured_min_insync=configured_min_insync, led=led, log_ends=log_ends)
        if elected.leader != held.leader or (held.leader is not None and not _still_leads(held, live)):
            wanted = elected
    return None if wanted == held else wanted


def _current(held: PartitionState, live: Mapping[int, BrokerState]) -> Mapping[int, BrokerState]:
    """Return the registrations without those older than what the partition knows. An old one proves nothing, above all
    not that the broker has another store and has lost what it had."""
    return {id: broker for id, broker in live.items() if broker.incarnation >= held.incarnations.get(id, 0)}


def _leads(held: PartitionState, live: Mapping[int, BrokerState]) -> bool:
    """Whether the leader may stay. The answer is the same for `live` and for its current registrations, since the
    leader's is the one it was elected with."""
    return _still_leads(held, live) and held.leader is not None and not live[held.leader].draining


def _still_leads(held: PartitionState, live: Mapping[int, BrokerState]) -> bool:
    leader = held.leader
    return (
        leader is not None
        and _is_clean(held, leader, live)
        and held.incarnations.get(leader) == live[leader].incarnation
    )


def _is_clean(held: PartitionState, broker_id: int, live: Mapping[int, BrokerState]) -> bool:
    """Whether a broker is in sync, live, and has the store it was counted with. An emptied one would lead nothing."""
    counted = held.store_uuids.get(broker_id, "").partition("/")[0]
    return broker_id in held.isr and broker_id in live and counted == live[broker_id].store_uuid


def elect(
    held: PartitionState,
    live: Mapping[int, BrokerState],
    *,
    configured_min_insync: int | None = None,
    led: Mapping[int | None, int] | None = None,
    log_ends: Mapping[int, LogEnd] | None = None,
) -> PartitionState:
    """Return the partition's state after an election among the `live` brokers; without a clean one it has no leader.

    All clean replicas hold all that was acknowledged. One that has restarted since it was counted may still be opening
    its files, and holds what its disk kept: it wins only if there is no other. One that drains wins only before that
    one. Of the others the one that leads the fewest partitions (`led`) wins, then the first of the replicas. Members
    that are gone leave the ISR, the old leader first, down to min_insync_replicas; those with another store always
    leave it.

    In a cold election `log_ends` are the replicas' answers: the longest log of the highest epoch leads, those behind it
    leave the ISR down to min_insync_replicas until they have caught up, and a damaged one never leads.
    """
    live = _current(held, live)
    clean = [broker_id for broker_id in held.replicas if _is_clean(held, broker_id, live)]
    answers = log_ends or {}

    def length(broker_id: int) -> tuple[int, int]:
        return answers.get(broker_id) or (-1, -1)

    def rank(broker_id: int) -> tuple[int, int, bool, bool, int]:
        broker, (last_epoch, end) = live[broker_id], length(broker_id)
        started_anew = held.incarnations.get(broker_id) != broker.incarnation
        return -last_epoch, -end, started_anew, broker.draining, led.get(broker_id, 0) if led else 0

    leader = min((id for id in clean if answers.get(id, ()) is not None), key=rank, default=None)
    if leader is None:
        return msgspec.structs.replace(held, leader=None, leader_epoch=held.leader_epoch + 1)
    least = min_insync(held, configured_min_insync)
    gone = [broker_id for broker_id in held.isr if broker_id not in live]
    gone.sort(key=lambda broker_id: broker_id == held.leader)  # the old leader stays last, if at all
    kept = {*clean, *gone[: max(0, least - len(clean))]}
    for broker_id in sorted(answers.keys() & kept, key=length):
        if len(kept) > least and length(broker_id) < length(leader):
            kept.discard(broker_id)
    return msgspec.structs.replace(
        held,
        leader=leader,
        leader_epoch=held.leader_epoch + 1,
        isr=tuple(broker_id for broker_id in held.replicas if broker_id in kept),
        incarnations={**held.incarnations, leader: live[leader].incarnation},
    )


def elect_unclean(held: PartitionState, broker_id: int, incarnation: int, store_uuid: str) -> PartitionState:
    """Return the state after an election that an operator requests when no clean replica will come back: `broker_id`
    leads with what it has (a replica of `store_uuid`), and records that only others had are lost. The epoch is marked,
    so that the others may truncate what they have beyond it."""
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
