"""What the controller decides: who leads, who gets a replica, what may be forgotten. Pure: `plan(view)` answers the
partitions that are to change, the controller's office (broker/cluster/controller_loop.py) has them applied by
compare-and-set.

    elections   a partition whose leader is gone, has started anew, stands on another store, or drains; or whom too few
                replicas reach, where another one is reached by enough
    cold        ones among replicas that have all started anew: their logs are compared first
    replicas    one with fewer than its topic wants, as brokers join
    balance     who leads many gives some to who leads few, when an operator asks for it
    live        who counts as there: registered, and not found gone by a probe
    strays      partitions of no topic, when they have been so for long
    tombstones  of deleted topics, when nobody has files of them any more

A broker alone elects itself when it starts. That is an election like any other: the leader epoch rises, so that
receipts, producers and followers of the time before are told apart from those after.
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

# A creation takes seconds at most, and is begun anew if its partitions go meanwhile: this is only so long to be kind.
STRAY_FOR_MS = 10 * 60_000
# How long a broker that is away may find, when it returns, that its files of a deleted topic are to be removed.
TOMBSTONE_MS = 7 * 24 * 3_600_000


# Who of the others has an answer of a broker and who has none, by the broker that was asked for.
Reach = Mapping[int, Mapping[int, bool]]
# How far a replica's log goes: (epoch of its last record, end). None: it is damaged, or lacks what it knew committed.
LogEnd = tuple[int, int] | None
# Passes on what it is given, and may let others run in between: the view must not change meanwhile.
Paced = Callable[[Iterable[Any]], Iterable[Any]]


@dataclass(frozen=True, slots=True)
class View:
    """What the controller decides on. `live` are the brokers that count as there, `waiting` the partitions whose cold
    election waits, `log_ends` what their replicas told otherwise. `reach` is what brokers told of each other, if any of
    them has no answer of a leader."""

    topics: Mapping[str, TopicState]
    partitions: Mapping[PartitionKey, Versioned[PartitionState]]
    live: Mapping[int, BrokerState]
    waiting: Collection[PartitionKey] = ()
    log_ends: Mapping[PartitionKey, Mapping[int, LogEnd]] = field(default_factory=dict)
    reach: Reach = field(default_factory=dict)


def plan(view: View, *, paced: Paced = iter) -> list[PartitionChange]:
    """The partitions that have to change. Empty when all is as it should be, and while nobody is live."""
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
    """The partitions of the view that need a leader, and whose replicas are to be asked first how far they go."""
    topics = {topic.topic_id for topic in view.topics.values()}
    return {
        key: held.value
        for key, held in paced(view.partitions.items())
        if key[0] in topics and is_cold(held.value, view.live)
    }


def cut_off(view: View) -> set[PartitionKey]:
    """The partitions of the view whose leader is there, and of whom too few replicas have an answer."""
    topics = {topic.topic_id: topic.config.min_insync_replicas for topic in view.topics.values()}
    return {
        key
        for key, held in view.partitions.items()
        if key[0] in topics and _is_cut_off(held.value, view.live, view.reach, topics[key[0]])
    }


def _is_cut_off(
    held: PartitionState, live: Mapping[int, BrokerState], reach: Reach, configured_min_insync: int | None
) -> bool:
    """Whether the leader can commit nothing, whoever joins it. Who was not asked, or cannot tell, is taken to reach it:
    one that is not in sync, too, as it may take the place of a member."""
    leader = held.leader
    if leader is None or leader not in reach or not _leads(held, live):
        return False
    follow = sum(
        reach[leader].get(broker_id, True) for broker_id in held.replicas if broker_id != leader and broker_id in live
    )
    return 1 + follow < min_insync(held, configured_min_insync)


def _out_of_reach(held: PartitionState, reach: Reach, configured_min_insync: int | None) -> set[int]:
    """Those in sync that must not lead instead of one who is cut off, since they may be so themselves, and partitions
    would go round. Who was not asked, or cannot tell, does not count as reaching them."""
    least = min_insync(held, configured_min_insync)
    return {
        broker_id
        for broker_id in held.isr
        if 1 + sum(reach.get(broker_id, {}).get(other, False) for other in held.replicas if other != broker_id) < least
    }


def is_cold(held: PartitionState, live: Mapping[int, BrokerState]) -> bool:
    """Whether a leader is needed, and all that could lead have started anew since they were counted in sync. What they
    hold is then what their disks kept, and one that forgot what it had fsynced must not lead those that did not."""
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
    """Leaders to move so that no live broker leads two partitions more than another that is in sync in one of them.

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
            # Whoever started anew has had the time to open its files: here it counts like the others.
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
    """A follower that ends takes its leave: it is in sync no more, where enough others are. Its leaders would find out
    by themselves, but wait for it until then."""
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
    """Who counts as there. `gone` are (id, incarnation) that a probe found gone, registered or not.

    While the control plane has only just come back (`in_grace`), that somebody is not registered proves nothing: who
    was known before it went away counts as there until a probe says otherwise.
    """
    known = {**known_before, **registered} if in_grace else registered
    return {broker_id: broker for broker_id, broker in known.items() if (broker_id, broker.incarnation) not in gone}


def old_strays(found: Iterable[str], first_seen_ms: dict[str, int], now_ms: int) -> list[str]:
    """Those of the `found` topic ids that were strays for long. `first_seen_ms` is kept up from call to call."""
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
    """Whether nobody has files of the deleted topic: all who are here have confirmed it, and all who ever had an id
    have, or the week is over. A broker that comes back still later sets its files aside, and destroys nothing."""
    missing = set(claimed) - set(confirmed)
    if missing & set(registered) or not set(registered) <= set(confirmed):
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
    """What the partition's state has to become while the brokers `live` are there; None when it is right as it is.

    `added` are brokers that are to hold a replica from now on. A leader is replaced when it is gone, has started anew
    since it was elected (it may have lost what it had promised to itself), stands on another store, or drains; and when
    too few replicas reach it, as one that is gone, if enough of them reach another.
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
    """A registration older than what the partition knows of was read before it. It proves nothing, above all not that
    the broker stands on another store and has lost what it had."""
    return {id: broker for id, broker in live.items() if broker.incarnation >= held.incarnations.get(id, 0)}


def _leads(held: PartitionState, live: Mapping[int, BrokerState]) -> bool:
    """Whether it needs no other leader. Of `live` and of its current registrations that is as true: the leader's is
    the one that it was elected with."""
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
    held: PartitionState,
    live: Mapping[int, BrokerState],
    *,
    configured_min_insync: int | None = None,
    led: Mapping[int | None, int] | None = None,
    log_ends: Mapping[int, LogEnd] | None = None,
) -> PartitionState:
    """The partition's state after an election among the `live` brokers; without a clean one it has no leader.

    All that are clean hold all that was acknowledged. One that has started anew since it was counted, may still be
    opening its files, and holds what its disk kept, wins only if there is no other, and one that drains only before
    that one; of the others who leads the fewest partitions (`led`), and of equal ones the first in the order of the
    replicas. Members that are gone leave the ISR, the old leader first, down to min_insync_replicas; those on another
    store leave it in any case.

    In a cold election `log_ends` are what the replicas told: the longest log of the highest epoch leads, those that are
    behind it leave the ISR down to min_insync_replicas until they have caught up, and a damaged one never leads.
    """
    live = _current(held, live)
    clean = [broker_id for broker_id in held.replicas if _is_clean(held, broker_id, live)]
    told = log_ends or {}

    def length(broker_id: int) -> tuple[int, int]:
        return told.get(broker_id) or (-1, -1)

    def rank(broker_id: int) -> tuple[int, int, bool, bool, int]:
        broker, (last_epoch, end) = live[broker_id], length(broker_id)
        started_anew = held.incarnations.get(broker_id) != broker.incarnation
        return -last_epoch, -end, started_anew, broker.draining, led.get(broker_id, 0) if led else 0

    leader = min((id for id in clean if told.get(id, ()) is not None), key=rank, default=None)
    if leader is None:
        return msgspec.structs.replace(held, leader=None, leader_epoch=held.leader_epoch + 1)
    least = min_insync(held, configured_min_insync)
    gone = [broker_id for broker_id in held.isr if broker_id not in live]
    gone.sort(key=lambda broker_id: broker_id == held.leader)  # the old leader stays last, if at all
    kept = {*clean, *gone[: max(0, least - len(clean))]}
    for broker_id in sorted(told.keys() & kept, key=length):
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
