"""Restores a lost control plane from the brokers' data directories (`portalmq adopt`).

ZooKeeper holds the leaders, the ISRs and the topics. The messages are in the data directories, with all that is needed
to restore the rest: `identity.json` (cluster, broker, store), `brokers.json` (the other brokers), `schedules.jsonl`,
`groups.jsonl`, `topic.json` in each topic's folder, and in each replica its records with their leader epochs.

    new ISR = the replicas with the highest (epoch of the last record, end); no leader: the controller elects one

No acknowledged record is lost as long as the directories of all brokers are given. Of two logs, the one with the higher
last epoch was written by a later leader, which held every record committed before (only in-sync replicas are elected).
Within one epoch all logs are prefixes of the leader's. A committed record is on every member of the ISR of its time. So
the longest log of the highest epoch contains all committed records, and so does every log equal to it. Uncommitted
records may come back: no client has an outcome for them.

This needs every replica: a missing or damaged one could be the longest. So a broker in `brokers.json` whose directory
is not given stops the adoption. A damaged replica stops it too, unless committed records must be on others: fewer
replicas are damaged, or are `joining` and have not been in sync yet, than had to hold a record before it was
acknowledged, and as many whole ones hold the same. So do as many as that which are damaged or were begun again.
Otherwise an operator has to accept the loss explicitly.

The cluster's id is written last, and the directories stay locked until then. Before, its node says that an adoption is
under way, unless all topics are there already: a broker that starts then, or after an interrupted adoption, ends
without touching its files.

The new leader epoch is above every epoch that any replica has seen, so nothing from before is mistaken for current.
Producer ids continue far above those in the logs: a new producer must not get an old id, which would turn its messages
into repeats. They begin at the present time in microseconds at least, because a producer may have its id and no message
in any log: fewer than a million ids a second are given to brokers, a thousand to each that starts. Groups come back as
paused as they were, and a later change has a higher number. Their settings are those of the latest whole
`groups.jsonl`, unless the logs show another mode. The names of producers are only in ZooKeeper, and are not restored.

The settings of a topic are those of the `topic.json` that was written last. Where they differ, this is told.

Schedules are those of the latest whole `schedules.jsonl`. It may be older than the last change of a schedule, which may
have gone to another partition since. So none continues before its last tick in any log: each tick stays one message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from portalmq import wire
from portalmq.broker.cluster.exits import EX_CANTCREAT, StartupError
from portalmq.broker.cluster.replicas import BEGUN_AGAIN
from portalmq.broker.cluster.saved_copy import GROUPS, SCHEDULES, Saved
from portalmq.broker.schedules.timetable import moment_text
from portalmq.broker.storage.disk import BROKERS_FILE, read_brokers
from portalmq.broker.storage.errors import CorruptFile
from portalmq.broker.storage.files import write_atomically
from portalmq.contract.schedules import SCHEDULE_IDS_FROM
from portalmq.control_plane.assignment import first_for, place
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.cluster import ADOPTING
from portalmq.control_plane.locks import LockTable
from portalmq.control_plane.schedules import ScheduleState, ScheduleStore
from portalmq.control_plane.state import GroupState, PartitionState, PauseState, TopicState

log = logging.getLogger(__name__)

# Ids are allocated in blocks, and may be in use without being in a log yet.
PRODUCER_IDS_APART = 1_000_000
GENERATIONS_APART = 1_000
# A broker that is not given may have records of later epochs, and come back.
EPOCHS_APART = 1_000_000
DERIVED = -1


class NotAdopted(StartupError):
    """Refused without writing anything. The sentence gives the reason and the remedy."""

    def __init__(self, sentence: str, exit_code: int = EX_CANTCREAT) -> None:
        super().__init__(sentence, exit_code)


# --- the other brokers -----------------------------------------------------------------------------------------------


def remember_brokers(data_dir: Path, urls: Mapping[int, str]) -> None:
    """Save the cluster's brokers in the directory; brokers that are gone stay in the file."""
    before = known_brokers(data_dir)
    now = {**before, **urls}
    if now != before:
        write_atomically(data_dir / BROKERS_FILE, msgspec.json.encode(now) + b"\n")


def known_brokers(data_dir: Path) -> dict[int, str]:
    """Return the brokers in the file; none if it is damaged: it is written again."""
    try:
        return read_brokers(data_dir)
    except CorruptFile:
        return {}


# --- decisions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplicaFound:
    """A replica on a disk. `fault` says why its log may be incomplete, `joining` why it has not been in sync yet.
    `last_ticks`: (schedule id, tick). The groups in its log: `queues` with their last pause or resume, `streams` with
    their generation."""

    broker_id: int
    store_uuid: str = ""
    last_epoch: int = 0
    end: int = 0
    highest_epoch: int = 0
    fault: str = ""
    last_ticks: tuple[tuple[int, int], ...] = ()
    joining: str = ""
    queues: Mapping[str, PauseState] = field(default_factory=dict)
    streams: Mapping[str, int] = field(default_factory=dict)


def state_of(found: Collection[ReplicaFound]) -> PartitionState:
    """Return the state of a partition with these replicas, damaged ones excluded. An empty ISR: none can be trusted."""
    whole = sorted((each for each in found if not each.fault), key=lambda each: each.broker_id)
    newest = max(((each.last_epoch, each.end) for each in whole), default=(0, 0))
    return PartitionState(
        leader=None,
        leader_epoch=1 + max((each.highest_epoch for each in found), default=0),
        isr=tuple(each.broker_id for each in whole if (each.last_epoch, each.end) == newest),
        replicas=tuple(sorted(each.broker_id for each in found)),
        store_uuids={each.broker_id: each.store_uuid for each in whole},
        incarnations={},
    )


def is_older(state: PartitionState, found: Collection[ReplicaFound], given: Collection[int]) -> bool:
    """Return whether these replicas are of a later time than a state of their partition: they know a later epoch, or a
    whole one that counts as in sync has less than another; or is on another disk, where the directories of all in sync
    are `given`."""
    whole = {each.broker_id: each for each in found if not each.fault}
    newest = max(((each.last_epoch, each.end) for each in whole.values()), default=(0, 0))
    in_sync = [whole[broker_id] for broker_id in state.isr if broker_id in whole]
    knows_disks = set(state.isr) <= set(given)
    return any(each.highest_epoch > state.leader_epoch for each in found) or any(
        (each.last_epoch, each.end) != newest
        or (knows_disks and state.store_uuids.get(each.broker_id) != each.store_uuid)
        for each in in_sync
    )


@dataclass(frozen=True, slots=True, order=True)
class Description:
    """What a topic.json has, and when it was written; DERIVED where it is made of the names of the folders."""

    written_ns: int
    broker_id: int
    topic: TopicState = field(compare=False)


def topic_of(descriptions: Collection[Description]) -> TopicState:
    """Return the latest state of a topic: the one that was written last, with the most partitions of all, since
    partitions are only added."""
    count, latest = max(each.topic.partitions for each in descriptions), max(descriptions)
    first = count if latest.written_ns == DERIVED else latest.topic.first_partitions
    return msgspec.structs.replace(latest.topic, partitions=count, first_partitions=first)


@dataclass(slots=True)
class Adoption:
    """The contents of all directories together."""

    cluster_id: str = ""
    topics: dict[str, TopicState] = field(default_factory=dict)
    replicas: dict[tuple[str, int], list[ReplicaFound]] = field(default_factory=dict)
    brokers: dict[int, str] = field(default_factory=dict)
    missing: dict[int, str] = field(default_factory=dict)
    unlisted: list[str] = field(default_factory=list)  # why nobody lists the cluster's brokers
    undescribed: set[str] = field(default_factory=set)  # ids of topics whose settings are lost
    described: dict[str, list[Description]] = field(default_factory=dict)  # by topic id
    saved: Saved[ScheduleState] | None = None  # the latest copy of the schedules
    saved_groups: Saved[GroupState] | None = None  # and of the groups
    damaged: list[str] = field(default_factory=list)  # what is wrong with other copies
    next_producer_id: int = field(default_factory=lambda: time.time_ns() // 1_000)
    # No file has the fencing tokens of locks. A lock passes on less than once a millisecond, of any clock in the logs.
    last_token: int = field(default_factory=lambda: time.time_ns() // 1_000_000)

    def groups(self) -> dict[str, GroupState]:
        """Return the groups of the latest copy, and of the logs that are kept, with the last pause or resume of each. A
        group that only logs have has the default settings."""
        saved = {each.name: each for each in self.saved_groups.states} if self.saved_groups else {}
        pauses = {name: each.pause for name, each in saved.items() if each.config.mode == "queue"}
        streams, queues = set[str](), set[str]()
        for each in self._kept():
            streams.update(each.streams)
            queues.update(each.queues)
            for name, pause in each.queues.items():
                pauses[name] = max(pauses.get(name, pause), pause, key=lambda pause: pause.number)
        groups: dict[str, GroupState] = {}
        for name in saved.keys() | queues | streams:
            config = saved[name].config if name in saved else wire.GroupConfig()
            if name in queues and config.mode != "queue":
                config = wire.GroupConfig()
            elif name in streams - queues and config.mode != "stream":
                config = wire.GroupConfig(mode="stream")
            pause = pauses.get(name, PauseState()) if config.mode == "queue" else PauseState()
            groups[name] = GroupState(name, config, pause=pause)
        return groups

    def generations(self) -> dict[str, int]:
        """Return, by group, a generation above those that its members knew. Not every one is claimed in a log."""
        claimed: dict[str, int] = {}
        for each in [each for found in self.replicas.values() for each in found]:
            for name, generation in each.streams.items():
                claimed[name] = max(GENERATIONS_APART + generation, claimed.get(name, 0))
        return claimed

    def _kept(self) -> list[ReplicaFound]:
        """Return the replicas that are in sync from now on."""
        kept: list[ReplicaFound] = []
        for found in self.replicas.values():
            isr = state_of(found).isr
            kept += [each for each in found if each.broker_id in isr]
        return kept

    def partitions(self, topic: TopicState) -> list[PartitionState]:
        """Return the state of each partition. One that is in no directory, never opened or lost, begins empty."""
        placed = place(topic.partitions, topic.replication_factor, self.brokers, first=first_for(topic.name))
        states = [
            state_of(found) if (found := self.replicas.get((topic.topic_id, number))) else self._empty(placed[number])
            for number in range(topic.partitions)
        ]
        apart = EPOCHS_APART if self.missing or self.unlisted else 0
        return [msgspec.structs.replace(state, leader_epoch=state.leader_epoch + apart) for state in states]

    def _empty(self, replicas: list[int]) -> PartitionState:
        return PartitionState(
            leader=None,
            leader_epoch=1,
            isr=tuple(replicas),
            replicas=tuple(replicas),
            store_uuids={broker_id: self.brokers[broker_id] for broker_id in replicas},
            incarnations={},
        )

    def forget(self, topic_id: str) -> None:
        """Leave out a topic."""
        self.topics.pop(topic_id, None)
        self.described.pop(topic_id, None)
        for key in [key for key in self.replicas if key[0] == topic_id]:
            del self.replicas[key]

    def take_ids(self, ids: Iterable[int]) -> None:
        """Have new producers begin after these. A schedule's id is made of a producer id."""
        after = [each % SCHEDULE_IDS_FROM + PRODUCER_IDS_APART for each in ids]
        self.next_producer_id = max([self.next_producer_id, *after])

    def schedules(self) -> list[ScheduleState]:
        """Return the schedules of the latest copy, each to continue after its last tick in the logs that are kept."""
        last_ms: dict[int, int] = {}
        for schedule_id, tick_ms in [tick for each in self._kept() for tick in each.last_ticks]:
            last_ms[schedule_id] = max(tick_ms, last_ms.get(schedule_id, 0))
        return [
            msgspec.structs.replace(each, since_ms=max(each.since_ms, last_ms.get(each.schedule_id, 0)))
            for each in (self.saved.states if self.saved else ())
        ]

    def losses(self) -> list[str]:
        """Return the reasons why acknowledged messages may be missing; empty when none can be."""
        messages = [
            f"the data directory of broker {number} ({url}) is not among them" for number, url in self.missing.items()
        ]
        messages += [f"{fault}; no other one lists the brokers, and one may be missing" for fault in self.unlisted]
        for (topic_id, number), found in sorted(self.replicas.items()):
            topic = self.topics[topic_id]
            faults = "; ".join(each.fault for each in found if each.fault)
            if all(each.fault for each in found):
                messages.append(f"partition {number} of topic {topic.name!r} has no whole replica: {faults}")
            elif all(each.joining for each in found):
                messages.append(f"partition {number} of topic {topic.name!r} has no replica that was in sync already")
            elif _may_lack(found, topic, self._least_insync(topic)):
                told = faults or "they were begun again with empty disks"
                messages.append(
                    f"partition {number} of topic {topic.name!r} may lack what a damaged replica alone held: {told}"
                )
        return messages

    def _least_insync(self, topic: TopicState) -> list[int | None]:
        """Return the `min_insync_replicas` that may have been in force; None stands for a majority."""
        if topic.topic_id in self.undescribed:
            return [1]
        described = self.described.get(topic.topic_id, ())
        return [topic.config.min_insync_replicas, *(each.topic.config.min_insync_replicas for each in described)]

    def differences(self, kept: Collection[str]) -> list[str]:
        """Tell the topics whose settings differ between the directories, without those that keep their own."""
        return [
            f"topic {self.topics[topic_id].name}: its settings differ between the directories; those of broker"
            f" {max(described).broker_id} were written last, and are used"
            for topic_id, described in sorted(self.described.items())
            if topic_id not in kept and len({msgspec.json.encode(each.topic.config) for each in described}) > 1
        ]


def _may_lack(found: Collection[ReplicaFound], topic: TopicState, configured: Collection[int | None]) -> bool:
    """Return whether only a damaged replica may have held a committed record. The last ISR is unknown: equal whole
    replicas may all be behind, so there must be enough of them to have committed a record. What was begun again has
    lost what it held before."""

    def least(replicas: int) -> list[int]:
        return [min(replicas, each or replicas // 2 + 1) for each in configured]

    whole = [(each.last_epoch, each.end) for each in found if not each.fault]
    least_of_found = min(least(len(found)))
    if sum(bool(each.fault) or each.joining == BEGUN_AGAIN for each in found) >= least_of_found:
        return True
    return len(whole) < len(found) and (
        sum(bool(each.fault or each.joining) for each in found) >= least_of_found
        or whole.count(max(whole)) < max(least(max(len(found), topic.replication_factor)))
    )


# --- writing the control plane ---------------------------------------------------------------------------------------


def write_back(catalog: Catalog, adoption: Adoption, *, accept_loss: bool, replace_cluster: bool) -> list[str]:
    """Write the contents into the control plane; return sentences about each step. Existing nodes stay, except those
    that are older than the directories, or that an adoption wrote which found less. So an interrupted adoption can be
    repeated, with more directories too. Raises NotAdopted."""
    for topic_id in catalog.tombstones():  # it was deleted while a broker was away, whose files are removed later
        adoption.forget(topic_id)
    losses = adoption.losses()
    if losses and not accept_loss:
        raise NotAdopted(
            "messages that were acknowledged may be lost:\n  "
            + "\n  ".join(losses)
            + "\nName all data directories; or, when there are no others, repeat with --i-accept-data-loss"
        )
    _check_plane(catalog, adoption, replace_cluster=replace_cluster)
    is_fresh = _is_fresh(catalog, adoption)
    existing = _existing(catalog, adoption, is_fresh=is_fresh)
    if (
        catalog.find_cluster_id() != adoption.cluster_id
        or existing.keys() != adoption.topics.keys()
        or any(each.is_older for each in existing.values())
    ):
        catalog.begin_adoption(adoption.cluster_id)
    LockTable(catalog.plane).reserve_tokens(adoption.last_token)
    overwrites = is_fresh or any(each.has_older_settings for each in existing.values())
    about_schedules = _write_schedules(catalog, adoption, overwrites=overwrites)
    catalog.reserve_producer_ids(adoption.next_producer_id)
    for broker_id, store_uuid in sorted(adoption.brokers.items()):
        catalog.claim_broker_id(store_uuid, broker_id)
    groups, generations = adoption.groups(), adoption.generations()
    saved = {each.name for each in adoption.saved_groups.states} if adoption.saved_groups else set[str]()
    for name, group in sorted(groups.items()):
        generation = generations.get(name, GENERATIONS_APART)
        catalog.restore_group(name, group.config, group.pause, generation, overwrites=overwrites and name in saved)
    # Topics come last: until then they show, when an interrupted adoption is repeated, that the settings are older.
    topics = sorted(adoption.topics.values(), key=lambda topic: topic.name)
    written = [_write_topic(catalog, topic, adoption, existing.get(topic.topic_id)) for topic in topics]
    catalog.replace_cluster_id(adoption.cluster_id)
    messages = [f"cluster {adoption.cluster_id}, brokers {', '.join(map(str, sorted(adoption.brokers)))}", *written]
    messages += adoption.differences([key for key, each in existing.items() if not each.has_older_settings])
    if groups:
        copy = adoption.saved_groups
        when = f"as they were at {moment_text(copy.read_ms)}" if copy else f"defaults: no directory has a {GROUPS.file}"
        names = ", ".join(sorted(groups))
        messages.append(f"groups {names}: their positions and pauses are kept, their settings are {when}")
    return messages + about_schedules + [f"accepted: {loss}" for loss in losses]


def _check_plane(catalog: Catalog, adoption: Adoption, *, replace_cluster: bool) -> None:
    catalog.plane.sync()
    running = catalog.brokers()
    if running:
        raise NotAdopted(
            f"brokers {', '.join(map(str, running))} are registered: stop all brokers first, or, when they have just "
            "ended, wait for their sessions to end"
        )
    topics, found = catalog.topics(), (catalog.find_cluster_id() or "").removeprefix(ADOPTING) or None
    if found is not None and found != adoption.cluster_id:
        if topics:
            raise NotAdopted(
                f"ZooKeeper holds cluster {found} with {len(topics)} topics, and the directories are of cluster "
                f"{adoption.cluster_id}: adopt them under a chroot of their own (--zookeeper HOST:PORT/NAME), and copy"
            )
        if not replace_cluster:
            raise NotAdopted(
                f"ZooKeeper holds cluster {found}, which has no topics, and the directories are of cluster "
                f"{adoption.cluster_id}: with --replace-cluster it becomes theirs, and directories of {found} are "
                "refused from then on"
            )
    for topic in adoption.topics.values():
        other = topics.get(topic.name)
        if other is not None and other.topic_id != topic.topic_id:
            raise NotAdopted(
                f"ZooKeeper holds another topic {topic.name!r}, made since: move its messages elsewhere and delete it "
                "first, or adopt under another chroot"
            )


@dataclass(frozen=True, slots=True)
class _Existing:
    """A topic of the directories that the control plane has. `superseded` are the numbers of the partitions whose state
    the directories replace. `has_older_settings`: they replace its settings too."""

    topic: TopicState
    partitions: Mapping[int, PartitionState]
    superseded: Collection[int]
    has_older_settings: bool

    @property
    def is_older(self) -> bool:
        return bool(self.superseded) or self.has_older_settings


def _is_fresh(catalog: Catalog, adoption: Adoption) -> bool:
    """Return whether only adoptions have written the control plane, no broker has run since, and all that they found is
    here again: then this one knows as much as they did, or more."""
    claims = catalog.claims()
    return (
        bool(claims)
        and claims.keys() <= adoption.brokers.keys()
        and not any(held.value.incarnation for held in claims.values())
    )


def _existing(catalog: Catalog, adoption: Adoption, *, is_fresh: bool) -> dict[str, _Existing]:
    """Return the topics, by id, that the control plane has of those in the directories."""
    existing: dict[str, _Existing] = {}
    for topic in catalog.topics().values():
        wanted = adoption.topics.get(topic.topic_id)
        if wanted is None:
            continue
        states = {number: held.value for number, held in catalog.partitions(topic).items()}
        found = {number: adoption.replicas.get((topic.topic_id, number), []) for number in states}
        superseded = [
            number
            for number, state in states.items()
            if found[number]
            and (
                is_older(state, found[number], adoption.brokers)
                or (is_fresh and not _is_same(state, state_of(found[number])))
            )
        ]
        has_older_settings = (
            (is_fresh and wanted != topic)
            or wanted.partitions > topic.partitions
            or any(each.highest_epoch > state.leader_epoch for n, state in states.items() for each in found[n])
        )
        existing[topic.topic_id] = _Existing(topic, states, superseded, has_older_settings)
    return existing


def _is_same(state: PartitionState, wanted: PartitionState) -> bool:
    return (state.isr, state.replicas, state.store_uuids) == (wanted.isr, wanted.replicas, wanted.store_uuids)


def _write_topic(catalog: Catalog, topic: TopicState, adoption: Adoption, existing: _Existing | None) -> str:
    written = dict(enumerate(adoption.partitions(topic)))
    if existing is None:
        if not catalog.restore_topic(topic, list(written.values())):
            return f"topic {topic.name}: is there already"
    elif existing.is_older:
        if existing.has_older_settings:
            topic = msgspec.structs.replace(topic, partitions=max(topic.partitions, existing.topic.partitions))
        else:
            topic = existing.topic
        written = {
            number: _above(state, existing.partitions.get(number), adoption.brokers)
            for number, state in enumerate(adoption.partitions(topic))
            if number in existing.superseded or number not in existing.partitions
        }
        catalog.rewrite_topic(topic, written)
    else:
        return f"topic {topic.name}: is there already"
    lagging = sum(len(state.isr) < len(state.replicas) for state in written.values())
    return (
        f"topic {topic.name}: {topic.partitions} partitions"
        + (f", in {lagging} of them replicas that have to catch up" if lagging else "")
        + ("" if existing is None else ", in place of an older state")
    )


def _above(state: PartitionState, before: PartitionState | None, given: Collection[int]) -> PartitionState:
    """Return the state for the place of an earlier one: of a later epoch. Replicas whose directories are not `given`
    stay, out of sync."""
    if before is None:
        return state
    return msgspec.structs.replace(
        state,
        leader_epoch=max(state.leader_epoch, before.leader_epoch + 1),
        replicas=tuple(sorted({*state.replicas, *(set(before.replicas) - set(given))})),
    )


def _write_schedules(catalog: Catalog, adoption: Adoption, *, overwrites: bool) -> list[str]:
    if adoption.saved is None:
        return [*adoption.damaged, f"schedules: no directory has a whole {SCHEDULES.file}; create them again"]
    store = ScheduleStore(catalog.plane)
    schedules = adoption.schedules()
    for schedule in schedules:
        store.restore(schedule, overwrites=overwrites)
    return [*adoption.damaged, f"schedules: {len(schedules)}, as they were at {moment_text(adoption.saved.read_ms)}"]
