"""A copy of the control plane's state as this process last read it, kept up to date by change notifications.

    notification --> note(path)  called by the plane on any routine: records the path, never blocks
    one reader ----> refresh()   reads the recorded paths in one round trip, and returns the changes

So a change of one partition costs one read of one node, and any number of changes between two refreshes cost one round
trip. A notification without a path, and a caller's check every half minute in case one was lost, make it read all:
hundreds of nodes in a handful of requests. Only changed nodes are decoded.

Invariants: `partitions` only has nodes of the topics in `topics`, and their versions never fall. A full read follows a
sync: when it finds a lower version, or a topic gone without a tombstone, the control plane was set back. The versions
of topics and groups (of one id), brokers' incarnations, and the controller's epoch never fall either: stale reads are
ignored. The nodes of one refresh need not be of one moment, so changes are made by compare-and-set.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

import msgspec

from portalmq.control_plane import state
from portalmq.control_plane.plane import ControlPlane, Node, PlaneError, PlaneUnavailable
from portalmq.control_plane.state import (
    BrokerState,
    ControllerState,
    GroupState,
    PartitionState,
    Tombstone,
    TopicState,
)
from portalmq.control_plane.tree import Versioned

log = logging.getLogger(__name__)

NOTES_MAX = 2_000
# Nodes are read in batches of this size: a plane that answers from memory would take long for more.
NODES_A_READ = 1_000

PartitionKey = tuple[str, int]
StateT = TypeVar("StateT", bound=msgspec.Struct)


class SetBack(PlaneError):
    """The control plane has lost state that was seen in it."""


@dataclass(slots=True)
class Changes:
    """The changes of a refresh: `topics` and `groups` by name, `partitions` by (topic id, number), each added, changed
    or removed. `everything`: all was read, so what is not named is unchanged."""

    brokers: bool = False
    controller: bool = False
    tombstones: bool = False
    topics: set[str] = field(default_factory=set)
    partitions: set[PartitionKey] = field(default_factory=set)
    groups: set[str] = field(default_factory=set)
    everything: bool = False

    def __bool__(self) -> bool:
        """False when nothing changed in a partial read."""
        return any(getattr(self, each.name) for each in fields(self))

    def add(self, later: Changes) -> None:
        """Include these changes too."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) | getattr(later, each.name))


class _Reading:
    """A read of several nodes after one sync. `found` when it is done, unless it failed by `fault`."""

    def __init__(self) -> None:
        self.paths: set[str] = set()
        self.found: dict[str, Node | None] | None = None
        self.fault: Exception | None = None


class Mirror:
    """A reader of the control plane's state. The plane's notification calls `on_noted` after each note: it must not
    block. Each refresh calls `new_pace`, and passes each long list to its result, which may let other routines run
    between two items; they find the invariants kept."""

    def __init__(
        self,
        plane: ControlPlane,
        *,
        on_noted: Callable[[], None] = lambda: None,
        new_pace: Callable[[], Callable[[Iterable[Any]], Iterable[Any]]] = lambda: iter,
    ) -> None:
        self.brokers: dict[int, BrokerState] = {}
        self.controller: Versioned[ControllerState] | None = None
        self.topics: dict[str, TopicState] = {}
        self.groups: dict[str, GroupState] = {}
        self.tombstones: dict[str, Tombstone] = {}
        self.partitions: dict[PartitionKey, Versioned[PartitionState]] = {}
        self.on_noted = on_noted
        self._new_pace = new_pace
        self._paced = new_pace()
        self._plane = plane
        self._noted: set[str | None] = {None}
        self._topics_by_id: dict[str, TopicState] = {}
        self._unreported = Changes()
        self._set_back: SetBack | None = None
        self._next_reading = _Reading()
        self._one_reading = threading.Lock()
        # The bytes of each named node, so that unchanged ones are not decoded again.
        self._bytes: dict[str, bytes] = {}
        self._versions: dict[str, int] = {}

    def note(self, path: str | None) -> None:
        """Record a path for the next refresh; None for everything."""
        if path is None or len(self._noted) >= NOTES_MAX:
            self._noted = {None}
        elif None not in self._noted:
            self._noted.add(path)
        self.on_noted()

    def refresh(self) -> Changes:
        """Read the recorded paths, and return the changes. One caller at a time.

        Raises PlaneUnavailable: the paths are kept, and the next call reports the changes found so far. Raises SetBack,
        from then on always.
        """
        if self._set_back is not None:
            raise self._set_back
        noted, self._noted = self._noted, set()
        changes = self._unreported
        self._paced = self._new_pace()
        try:
            if None in noted:
                self._read_everything(changes)
            else:
                self._read_noted([path for path in noted if path is not None], changes)
        except BaseException:
            self._noted |= noted
            raise
        self._unreported = Changes()
        return changes

    def reread(self, topic_id: str, number: int) -> Versioned[PartitionState] | None:
        """Return the partition's current node, read after a sync. The next refresh reports a change.

        Calls that wait for the same sync share it, and one read. Raises PlaneUnavailable, PlaneRefused.
        """
        path = state.partition_path(topic_id, number)
        node = self._read_after_sync(path)
        known = self.partitions.get((topic_id, number))
        if (node.version if node else None) != (known.version if known else None):
            self.note(path)
        if node is None:
            return None
        if known is not None and known.version == node.version:
            return known
        return Versioned(state.decode(node.data, PartitionState), node.version)

    def _read_after_sync(self, path: str) -> Node | None:
        reading = self._next_reading
        reading.paths.add(path)
        with self._one_reading:
            if reading is self._next_reading:  # the first of its callers
                self._next_reading = _Reading()  # whoever comes from now on needs a later sync
                paths = sorted(reading.paths)
                try:
                    self._plane.sync()
                    reading.found = dict(zip(paths, self._plane.get_many(paths), strict=True))
                except Exception as fault:  # noqa: BLE001 - each caller raises it
                    reading.fault = fault
        if reading.fault is not None:
            raise reading.fault
        if reading.found is None:
            raise PlaneUnavailable(f"{path} could not be read: the routine that read it was ended")
        return reading.found[path]

    def url_of(self, broker_id: int) -> str | None:
        """Return the broker's address; None when it is not registered."""
        broker = self.brokers.get(broker_id)
        return broker.url if broker else None

    def topic_by_id(self, topic_id: str) -> TopicState | None:
        return self._topics_by_id.get(topic_id)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _read_noted(self, paths: list[str], changes: Changes) -> None:
        wanted = [path for path in paths if self._is_ours(path)]
        if not wanted:
            return
        before = list(self._topics_by_id)
        partitions: dict[str, Node | None] = {}
        for path, node in self._paced(self._get_many(wanted).items()):
            if path.startswith(f"{state.PARTITIONS}/"):
                partitions[path] = node
            else:
                self._take(path, node, changes)
        gone = [topic_id for topic_id in before if topic_id not in self._topics_by_id]
        self._read_beside(partitions, gone, changes)

    def _read_everything(self, changes: Changes) -> None:
        changes.everything = True
        topics, partitions = dict(self._topics_by_id), dict(self.partitions)
        self._plane.sync()
        found = {state.CONTROLLER: self._plane.get(state.CONTROLLER)}
        # The order matters. A deletion creates the tombstone and removes the topic in one commit: with the tombstones
        # read last, a missing topic has its tombstone.
        for parent in (state.BROKERS, state.GROUPS, state.TOPICS, state.DELETED):
            nodes = self._paced(self._plane.get_children(parent))
            found.update((node.path, node) for node in nodes if self._is_ours(node.path))
        for path, node in self._paced(found.items()):
            self._take(path, node, changes)
        for path in self._paced(self._known()):
            if path not in found:
                self._take(path, None, changes)
        every = [
            state.partition_path(topic.topic_id, number)
            for topic in self._paced(self.topics.values())
            for number in range(topic.partitions)
        ]
        read = self._get_many(every)
        fallen = self._fallen(topics, partitions, read)
        if fallen:
            self._set_back = SetBack(fallen)
            raise self._set_back
        self._take_partitions(read, changes)

    def _fallen(
        self,
        topics: Mapping[str, TopicState],
        partitions: Mapping[PartitionKey, Versioned[PartitionState]],
        read: Mapping[str, Node | None],
    ) -> str:
        """Describe what `topics` and `partitions` have and the control plane has lost; "" when it lost nothing."""
        for topic_id, topic in self._paced(topics.items()):
            if topic_id not in self._topics_by_id and topic_id not in self.tombstones:
                return f"topic {topic.name!r} is gone from ZooKeeper, and nothing says that it was deleted"
        for (topic_id, number), known in self._paced(partitions.items()):
            node = read.get(state.partition_path(topic_id, number))
            if node is not None and node.version < known.version:
                return (
                    f"partition {number} of topic {topics[topic_id].name!r} is at change {node.version} in ZooKeeper, "
                    f"and was at {known.version} before"
                )
        return ""

    def _known(self) -> list[str]:
        return [
            *map(state.broker_path, self.brokers),
            *map(state.topic_path, self._paced(list(self.topics))),
            *map(state.group_path, self._paced(list(self.groups))),
            *map(state.tombstone_path, self._paced(list(self.tombstones))),
        ]

    def _read_beside(self, partitions: Mapping[str, Node | None], gone: list[str], changes: Changes) -> None:
        """Take `partitions`, and read the nodes that depend on changed topics: the partitions of a new or grown one,
        the tombstone of a removed one."""
        missing = [
            path
            for topic in (self.topics.get(name) for name in self._paced(changes.topics))
            if topic is not None
            for number in range(topic.partitions)
            if (topic.topic_id, number) not in self.partitions
            and (path := state.partition_path(topic.topic_id, number)) not in partitions
        ]
        paths = [*map(state.tombstone_path, gone), *missing]
        read = self._get_many(paths)
        for path in map(state.tombstone_path, gone):
            self._take(path, read.pop(path), changes)
        self._take_partitions({**partitions, **read}, changes)

    def _get_many(self, paths: list[str]) -> dict[str, Node | None]:
        found: dict[str, Node | None] = {}
        for first in self._paced(range(0, len(paths), NODES_A_READ)):
            some = paths[first : first + NODES_A_READ]
            found.update(zip(some, self._plane.get_many(some), strict=True))
        return found

    def _is_ours(self, path: str) -> bool:
        """True for the path of a mirrored node. Partitions of an unknown topic are read together with it."""
        match path.split("/")[1:]:
            case ["controller"] | ["topics" | "groups" | "deleted", _]:
                return True
            case ["brokers", "ids", number]:
                return number.isdigit()
            case ["partitions", _, number]:
                return number.isdigit()
        return False

    # --- updating the copy -------------------------------------------------------------------------------------------

    def _take(self, path: str, node: Node | None, changes: Changes) -> None:
        name = path.rpartition("/")[2]
        if path == state.CONTROLLER:
            held = self._decoded(path, node, ControllerState, self.controller.value if self.controller else None)
            if held is not None and self.controller is not None and held is self.controller.value:
                return
            controller = Versioned(held, node.version) if held is not None and node is not None else None
            changes.controller |= controller != self.controller
            self.controller = controller
        elif path.startswith(f"{state.BROKERS}/"):
            changes.brokers |= self._put(self.brokers, int(name), path, node, BrokerState)
        elif path.startswith(f"{state.TOPICS}/"):
            self._take_topic(name, path, node, changes)
        elif path.startswith(f"{state.GROUPS}/"):
            if self._put(self.groups, name, path, node, GroupState):
                changes.groups.add(name)
        elif path.startswith(f"{state.DELETED}/"):
            changes.tombstones |= self._put(self.tombstones, name, path, node, Tombstone)

    def _take_topic(self, name: str, path: str, node: Node | None, changes: Changes) -> None:
        before = self.topics.get(name)
        if not self._put(self.topics, name, path, node, TopicState):
            return
        changes.topics.add(name)
        topic = self.topics.get(name)
        if before is not None and (topic is None or topic.topic_id != before.topic_id):
            self._topics_by_id.pop(before.topic_id, None)
            gone = [key for key in self.partitions if key[0] == before.topic_id]
            for key in gone:
                del self.partitions[key]
            changes.partitions.update(gone)
        if topic is not None:
            self._topics_by_id[topic.topic_id] = topic

    def _take_partitions(self, found: Mapping[str, Node | None], changes: Changes) -> None:
        for path, node in self._paced(found.items()):
            _, topic_id, number = path.rsplit("/", 2)
            key = (topic_id, int(number))
            topic = self._topics_by_id.get(topic_id)
            if topic is None or key[1] >= topic.partitions:
                continue
            known = self.partitions.get(key)
            if node is None:
                if known is not None:
                    del self.partitions[key]
                    changes.partitions.add(key)
            elif known is None or node.version > known.version:
                held = self._decode(path, node, PartitionState)
                if held is not None:
                    self.partitions[key] = Versioned(held, node.version)
                    changes.partitions.add(key)

    def _put(self, known: dict[Any, Any], name: Any, path: str, node: Node | None, kind: type[msgspec.Struct]) -> bool:
        """Update the entry with this name. Return True when it changed."""
        before = known.get(name)
        now = self._decoded(path, node, kind, before)
        if now is None:
            known.pop(name, None)
        else:
            known[name] = now
        return bool(now != before)

    def _decoded(self, path: str, node: Node | None, kind: type[StateT], before: StateT | None) -> StateT | None:
        if node is None:
            self._bytes.pop(path, None)
            self._versions.pop(path, None)
            return None
        if before is not None and self._bytes.get(path) == node.data:
            self._versions[path] = max(node.version, self._versions.get(path, 0))
            return before
        held = self._decode(path, node, kind)
        if held is None or (before is not None and _is_older(held, node.version, before, self._versions.get(path, 0))):
            return before
        self._bytes[path] = node.data
        self._versions[path] = node.version
        return held

    def _decode(self, path: str, node: Node, kind: type[StateT]) -> StateT | None:
        """Decode a node; None for malformed content, written by hand or by a much newer broker."""
        try:
            return state.decode(node.data, kind)
        except (msgspec.DecodeError, AssertionError, TypeError, KeyError) as fault:
            log.critical("%s in the control plane cannot be read, and is skipped: %s", path, fault)
            return None


def _is_older(found: msgspec.Struct, version: int, known: msgspec.Struct, known_version: int) -> bool:
    """True for a read older than the known state. A node that was created again starts at version 0 again."""
    match found, known:
        case BrokerState(), BrokerState():
            return found.incarnation < known.incarnation
        case ControllerState(), ControllerState():
            return found.epoch < known.epoch
        case TopicState(), TopicState():
            return found.topic_id == known.topic_id and version < known_version
        case GroupState(), GroupState():
            return found.group_id == known.group_id and version < known_version
    return False
