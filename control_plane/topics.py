"""Operations on the topics of the shared state and their partitions, for the Catalog.

A topic's own node is the last that its creation writes: until then its partitions belong to no topic (`strays`), and
the controller sweeps what a crash left of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec

from portalmq import wire
from portalmq.control_plane import state
from portalmq.control_plane.assignment import first_for, place
from portalmq.control_plane.cluster import ClusterNodes
from portalmq.control_plane.plane import (
    COMMIT_OPS_MAX,
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    Op,
    Set,
    VersionMismatch,
)
from portalmq.control_plane.state import BrokerState, PartitionState, Tombstone, TopicState
from portalmq.control_plane.tree import Versioned
from portalmq.errors import InvalidRequest, TopicExists, TopicNotFound, Unavailable


class TopicNodes(ClusterNodes):
    """Topics, their partitions, and what is left of those that are deleted."""

    def topics(self) -> dict[str, TopicState]:
        return self._all(state.TOPICS, TopicState)

    def find_topic(self, name: str) -> TopicState | None:
        """Return the topic; None only after a sync."""
        held = self._confirmed(state.topic_path(wire.check_name(name, "topic")), TopicState)
        return held.value if held else None

    def topic(self, name: str) -> TopicState:
        """Return the topic. Raises TopicNotFound."""
        topic = self.find_topic(name)
        if topic is None:
            raise TopicNotFound(f"there is no topic {name!r}")
        return topic

    def create_topic(
        self,
        name: str,
        request: wire.CreateTopic,
        *,
        brokers: Mapping[int, BrokerState],
        default_replication_factor: int = 3,
    ) -> tuple[TopicState, bool]:
        """Create the topic on the live `brokers`. Return it, and True when this call created it.

        With fewer brokers than the default replication factor it starts on all of them, and the controller adds
        replicas as brokers join. A topic that exists with equal values of the given fields is returned. Raises
        TopicExists when a field differs, InvalidRequest for wrong settings or for a given replication factor above the
        number of brokers.
        """
        wire.check_name(name, "topic")
        config = _topic_config(wire.TopicConfig(), request.config)
        tried: set[str] = set()

        def create() -> tuple[TopicState, bool]:
            held = self._read(state.topic_path(name), TopicState)
            if held is not None:
                existing = held.value
                if existing.topic_id not in tried:
                    _check_alike(existing, request)
                    self._check_newest(state.topic_path(name), held)
                return existing, existing.topic_id in tried
            partitions = request.partitions or 1
            factor = _replication_factor(request, config, len(brokers), default_replication_factor)
            topic = TopicState(name, self._unique(), partitions, partitions, factor, config)
            tried.add(topic.topic_id)
            self._write_topic(topic, self._new_partitions(topic, brokers, since=0))
            return topic, True

        return self._retry_conflicts(f"topic {name!r}", create)

    def restore_topic(self, topic: TopicState, partitions: Sequence[PartitionState]) -> bool:
        """Write a topic back as it was, with these partitions. Return False when it existed before.

        Raises TopicExists when another topic has its name.
        """
        tried = False

        def restore() -> bool:
            nonlocal tried
            existing, home = self.find_topic(topic.name), None
            if existing is None and (home := self._stop_creation(topic.topic_id)) is not None:
                existing = self.find_topic(topic.name)  # the attempt that was interrupted may have come just now
                if existing is None:
                    self._remove_partitions(topic.topic_id, home)
            if existing is not None:
                if existing.topic_id != topic.topic_id:
                    raise TopicExists(f"another topic is named {topic.name!r}")
                return tried
            tried = True
            self._write_topic(
                topic,
                [
                    Create(state.partition_path(topic.topic_id, number), state.encode(partition))
                    for number, partition in enumerate(partitions)
                ],
                home,
            )
            return True

        return self._retry_conflicts(f"topic {topic.name!r}", restore)

    def rewrite_topic(self, topic: TopicState, partitions: Mapping[int, PartitionState]) -> None:
        """Replace the settings of a topic, and the states of these partitions. The last of them changes together with
        the settings: until then an adoption that is repeated finds what it found. Raises TopicNotFound, TopicExists."""

        def rewrite() -> None:
            held = self._held(topic.name)
            if held.value.topic_id != topic.topic_id:
                raise TopicExists(f"another topic is named {topic.name!r}")
            before, ops = self.partitions(topic), list[Op]()
            for number, partition in partitions.items():
                path, data = state.partition_path(topic.topic_id, number), state.encode(partition)
                ops.append(Set(path, data, before[number].version) if number in before else Create(path, data))
            settings = Set(state.topic_path(topic.name), state.encode(topic), held.version)
            self._commit_in_parts(ops[:-1], last=[*ops[-1:], settings])

        self._retry_conflicts(f"topic {topic.name!r}", rewrite)

    def alter_topic(self, name: str, request: wire.AlterTopic, *, brokers: Mapping[int, BrokerState]) -> TopicState:
        """Change settings, add partitions. Raises TopicNotFound, and InvalidRequest for fewer partitions."""

        def alter() -> TopicState:
            held = self._held(name)
            topic = held.value
            partitions = request.partitions or topic.partitions
            if partitions < topic.partitions:
                raise InvalidRequest(
                    f"topic {name!r} has {topic.partitions} partitions, and their number can only grow: "
                    f"make a new topic with {partitions}, and copy"
                )
            home = self._home(topic)
            if self._read(state.topic_path(name), TopicState) != held:
                raise VersionMismatch(state.topic_path(name))  # the home may be as the topic's deletion left it
            altered = msgspec.structs.replace(
                topic, partitions=partitions, config=_topic_config(topic.config, request.config)
            )
            _check_min_insync(altered.config, altered.replication_factor)
            if altered == topic:
                self._check_newest(state.topic_path(name), held)
            else:
                # The version of the topic's node may be that of another topic, deleted and created meanwhile.
                is_same = Check(home.path, home.version)
                self._commit_in_parts(
                    [is_same, *self._new_partitions(altered, brokers, since=topic.partitions)],
                    guard=[is_same],
                    last=[Set(state.topic_path(name), state.encode(altered), held.version)],
                )
            return altered

        return self._retry_conflicts(f"topic {name!r}", alter)

    def delete_topic(self, name: str, *, now_ms: int) -> TopicState:
        """Remove the topic and leave a tombstone, the permission to remove its files. Raises TopicNotFound."""
        doomed: TopicState | None = None

        def delete() -> TopicState:
            nonlocal doomed
            if doomed is not None and self.plane.get(state.tombstone_path(doomed.topic_id)) is not None:
                return doomed  # an attempt whose outcome was unknown went through
            held = self._held(name)
            doomed = held.value
            tombstone, home = Tombstone(name, doomed.topic_id, doomed.partitions, now_ms), self._home(doomed)
            self.plane.commit(
                Set(home.path, home.data, home.version),
                Delete(state.topic_path(name), held.version),
                Create(state.tombstone_path(doomed.topic_id), state.encode(tombstone)),
            )
            return doomed

        topic = self._retry_conflicts(f"topic {name!r}", delete)
        with suppress(Unavailable):  # the topic is deleted; the controller sweeps what no topic owns
            self._remove_all(state.topic_partitions_path(topic.topic_id))
        return topic

    def _home(self, topic: TopicState) -> Node:
        """Return the node above the topic's partitions. Its version tells the topic from a later one of its name: the
        commit that deletes the topic changes it."""
        path = state.topic_partitions_path(topic.topic_id)
        held = self.plane.get(path)
        if held is None:
            raise NodeMissing(path)
        return held

    def tombstones(self) -> dict[str, Tombstone]:
        """Return the deleted topics whose files may still exist, by topic id."""
        return self._all(state.DELETED, Tombstone)

    def confirm_removed(self, topic_id: str, broker_id: int) -> None:
        """Record that this broker's disk holds nothing of the deleted topic."""
        try:
            self.plane.commit(Create(state.removed_path(topic_id, broker_id)))
        except NodeExists:
            return

    def confirmations(self, topic_id: str) -> frozenset[int]:
        """Return the brokers that have removed the deleted topic's files."""
        return frozenset(int(name) for name in self.plane.children(state.tombstone_path(topic_id)) if name.isdigit())

    def forget_tombstone(self, topic_id: str) -> None:
        """Remove the tombstone, after every broker has removed the topic's files."""
        self._remove_all(state.tombstone_path(topic_id))

    def strays(self) -> set[str]:
        """Return ids whose partitions no topic owns: a creation in progress, or what a crash left."""
        homes = set(self.plane.children(state.PARTITIONS))
        return homes - self.topic_ids() if homes else homes

    def sweep(self, strays: Iterable[str] | None = None) -> int:
        """Remove partitions that no topic owns (of those in `strays`, when given). Return the number of topics.

        A creation in progress fails at its last commit, and its caller starts it again.
        """
        found = self.strays()
        stopped: dict[str, int] = {}
        for topic_id in sorted(found if strays is None else found.intersection(strays)):
            version = self._retry_conflicts(topic_id, partial(self._stop_creation, topic_id))
            if version is not None:
                stopped[topic_id] = version
        for topic_id in self.topic_ids() if stopped else ():
            stopped.pop(topic_id, None)
        return sum(self._remove_stopped(topic_id, version) for topic_id, version in stopped.items())

    # --- partitions ---

    def partition(self, topic_id: str, partition: int) -> Versioned[PartitionState] | None:
        return self._read(state.partition_path(topic_id, partition), PartitionState)

    def partitions(self, topic: TopicState) -> dict[int, Versioned[PartitionState]]:
        """Return the state of each partition; one that is being removed is left out."""
        found = self.plane.get_many(
            [state.partition_path(topic.topic_id, number) for number in range(topic.partitions)]
        )
        return {
            number: Versioned(state.decode(node.data, PartitionState), node.version)
            for number, node in enumerate(found)
            if node is not None
        }

    def set_partition(self, topic_id: str, partition: int, value: PartitionState, version: int) -> int:
        """Compare-and-set the partition. Return the new version. Raises Conflict, OutcomeUnknown."""
        return self.plane.commit(Set(state.partition_path(topic_id, partition), state.encode(value), version))[0]

    # --- inside ---

    def _held(self, name: str) -> Versioned[TopicState]:
        held = self._read(state.topic_path(wire.check_name(name, "topic")), TopicState)
        if held is None:
            raise TopicNotFound(f"there is no topic {name!r}")
        return held

    def topic_ids(self) -> set[str]:
        """Return the ids of all topics. Decoding only the id is ten times as fast as decoding the topic."""
        return {state.topic_id_of(node.data) for node in self.plane.get_children(state.TOPICS)}

    def _new_partitions(self, topic: TopicState, brokers: Mapping[int, BrokerState], *, since: int) -> list[Op]:
        """Return the missing partitions from `since` on; an interrupted growth may have created some."""
        if topic.partitions == since:
            return []
        brokers = dict(brokers)  # as of now: the caller's may change with every answer of the control plane
        if not brokers:
            raise Unavailable("no broker is live to hold the new partitions")
        held = set(self.plane.children(state.topic_partitions_path(topic.topic_id)))
        staying = {number: broker for number, broker in brokers.items() if not broker.draining} or brokers
        placed = place(topic.partitions, topic.replication_factor, staying, first=first_for(topic.name))
        return [
            Create(state.partition_path(topic.topic_id, number), state.encode(_new_partition(placed[number], brokers)))
            for number in range(since, topic.partitions)
            if str(number) not in held
        ]

    def _commit_in_parts(self, ops: list[Op], *, guard: Sequence[Op] = (), last: Sequence[Op] = ()) -> None:
        """Commit `ops` in as many commits as needed: `guard` in each but the first, `last` in the final one, which
        makes them all visible."""
        room = COMMIT_OPS_MAX - len(guard) - len(last)
        before: Sequence[Op] = ()
        while len(ops) > room:
            self.plane.commit(*before, *ops[:room])
            ops, before = ops[room:], guard
        self.plane.commit(*before, *ops, *last)

    def _write_topic(self, topic: TopicState, partitions: list[Op], stopped: int | None = None) -> None:
        """Create the topic with these partitions. Its own node comes last: until then the partitions are invisible, and
        `sweep` may remove them. `stopped` is the version of the home of a creation that was stopped; without one it is
        made, and version 1 tells it from one that a later commit would create implicitly after a sweep."""
        home = state.topic_partitions_path(topic.topic_id)
        made = [Create(home), Set(home, topic.name.encode(), 0)] if stopped is None else [Check(home, stopped)]
        self._commit_in_parts(
            [*made, *partitions],
            guard=[Check(home, 1 if stopped is None else stopped)],
            last=[Create(state.topic_path(topic.name), state.encode(topic))],
        )

    def _stop_creation(self, topic_id: str) -> int | None:
        """Change the version that a creation in progress checks in its last commit, which now fails. Return the new
        one; None where nothing is there of the topic's partitions."""
        held = self.plane.get(state.topic_partitions_path(topic_id))
        return None if held is None else self.plane.commit(Set(held.path, held.data, held.version))[0]

    def _remove_stopped(self, topic_id: str, version: int) -> bool:
        """Remove the partitions of a creation that was stopped. Return False where another one has taken them over:
        an interrupted adoption that is repeated writes the same topic."""
        home = state.topic_partitions_path(topic_id)

        def remove() -> bool:
            held = self.plane.get(home)
            if held is None or held.version != version:
                return held is None
            self._remove_partitions(topic_id, version, last=[Delete(home, version)])
            return True

        return self._retry_conflicts(home, remove)

    def _remove_partitions(self, topic_id: str, version: int, last: Sequence[Op] = ()) -> None:
        """Remove the partitions of a topic whose home has this version. Each commit checks it: one that comes late must
        not remove what was written since."""
        home = state.topic_partitions_path(topic_id)
        is_same = Check(home, version)
        doomed: list[Op] = [Delete(node.path, node.version) for node in self.plane.get_children(home)]
        self._commit_in_parts([is_same, *doomed], guard=[is_same], last=last)

    def _remove_all(self, path: str) -> None:
        """Remove a node and its children."""

        def remove() -> None:
            self._remove([*self.plane.get_children(path), self.plane.get(path)])

        self._retry_conflicts(path, remove)

    def _remove(self, nodes: Sequence[Node | None]) -> None:
        doomed: list[Op] = [Delete(node.path, node.version) for node in nodes if node is not None]
        if doomed:
            self._commit_in_parts(doomed)


def _topic_config(config: wire.TopicConfig, patch: dict[str, Any]) -> wire.TopicConfig:
    """Return the patched config. A compacted topic drops no message for its age, unless the patch sets retention_ms."""
    patched = state.patched(config, patch)
    if patched.cleanup == config.cleanup or "retention_ms" in patch:
        return patched
    retention_ms = None
    if patched.cleanup == "delete":
        retention_ms = patched.retention_ms or wire.TopicConfig().retention_ms
    return msgspec.structs.replace(patched, retention_ms=retention_ms)


def _check_alike(topic: TopicState, request: wire.CreateTopic) -> None:
    """Raise TopicExists when a field of the request differs."""
    differing = {
        name: getattr(topic, name)
        for name in ("partitions", "replication_factor")
        if getattr(request, name) is not None and getattr(request, name) != getattr(topic, name)
    }
    asked = state.patched(topic.config, request.config)
    for name in request.config:
        if getattr(asked, name) != getattr(topic.config, name):
            differing[f"config.{name}"] = getattr(topic.config, name)
    if differing:
        now = ", ".join(f"{name} {msgspec.json.encode(value).decode()}" for name, value in differing.items())
        remedy = "Change them by PATCH, or with `portalmq topic alter`"
        if "replication_factor" in differing:
            remedy = "A topic keeps its replication_factor: leave it out, or use another name"
        raise TopicExists(f"topic {topic.name!r} exists with other settings (now {now}). {remedy}")


def _replication_factor(request: wire.CreateTopic, config: wire.TopicConfig, live: int, default: int) -> int:
    if request.replication_factor is not None and request.replication_factor > live:
        raise InvalidRequest(f"replication_factor {request.replication_factor} needs as many brokers; {live} live now")
    factor = request.replication_factor or default
    _check_min_insync(config, factor)
    return factor


def _check_min_insync(config: wire.TopicConfig, replication_factor: int) -> None:
    if config.min_insync_replicas is not None and config.min_insync_replicas > replication_factor:
        raise InvalidRequest(
            f"min_insync_replicas {config.min_insync_replicas} is more than the {replication_factor} replicas "
            f"of the topic: nothing could ever be acknowledged"
        )


def _new_partition(replicas: list[int], brokers: Mapping[int, BrokerState]) -> PartitionState:
    """Return an empty partition: all its replicas are equally empty, so all are in sync, and the first leads."""
    return PartitionState(
        leader=replicas[0],
        leader_epoch=1,
        isr=tuple(replicas),
        replicas=tuple(replicas),
        store_uuids={broker_id: brokers[broker_id].store_uuid for broker_id in replicas},
        incarnations={broker_id: brokers[broker_id].incarnation for broker_id in replicas},
    )
