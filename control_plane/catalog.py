"""Typed operations on the shared state in the control plane, each change by compare-and-set (see `tree`).

Nothing is cached. Callers that need speed keep a copy (see `mirror`), and read again after a change notification.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import msgspec

from portalmq import wire
from portalmq.control_plane import state
from portalmq.control_plane.cluster import BrokerIdTaken, ControllerFenced, PartitionChange
from portalmq.control_plane.plane import ControlPlane, Create, Delete, Set
from portalmq.control_plane.state import GroupState
from portalmq.control_plane.stream_groups import RosterState, StreamGroups
from portalmq.control_plane.topics import TopicNodes
from portalmq.control_plane.tree import ATTEMPTS, Versioned
from portalmq.errors import Fenced, GroupModeMismatch, GroupNotFound, Unavailable

__all__ = ["ATTEMPTS", "BrokerIdTaken", "Catalog", "ControllerFenced", "PartitionChange", "Versioned"]

PRODUCER_ID_BLOCK = 1_000


class Catalog(TopicNodes):
    """Brokers, topics, partitions, groups and producers. `random_bytes` makes ids and keys; a simulation passes its
    own."""

    def __init__(self, plane: ControlPlane, *, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        super().__init__(plane, random_bytes=random_bytes)
        # Unused ids of the block that this process took. Those left when it ends are never used.
        self._producer_ids = range(0)

    # --- groups ---

    def groups(self) -> dict[str, GroupState]:
        return self._all(state.GROUPS, GroupState)

    def find_group(self, name: str) -> GroupState | None:
        """Return the group; None only after a sync."""
        held = self._confirmed(state.group_path(wire.check_name(name, "group")), GroupState)
        return held.value if held else None

    def group_as_it_is(self, name: str) -> GroupState | None:
        """Return the group's current state, read after a sync."""
        self.confirm()
        held = self._read(state.group_path(wire.check_name(name, "group")), GroupState)
        return held.value if held else None

    def group(self, name: str) -> GroupState:
        """Return the group. Raises GroupNotFound."""
        group = self.find_group(name)
        if group is None:
            raise GroupNotFound(f"there is no group {name!r}")
        return group

    def ensure_group(self, name: str) -> GroupState:
        """Return the group, created with the default settings when it is missing."""
        return self.find_group(name) or self.put_group(name, {})[0]

    def restore_group(
        self,
        name: str,
        config: wire.GroupConfig,
        pause: state.PauseState,
        generation: int | None = None,
        *,
        overwrites: bool = False,
    ) -> None:
        """Write a group back, with these settings where it is missing, or `overwrites`, and with this pause or resume
        unless there is a later one. The members of a stream group join in a later `generation`."""

        def restore() -> GroupState:
            path = state.group_path(name)
            held = self._read(path, GroupState)
            group = held.value if held else GroupState(name, config, self._unique())
            if overwrites:
                group = msgspec.structs.replace(group, config=config)
            if group.pause.number < pause.number:
                group = msgspec.structs.replace(group, pause=pause)
            if held is None or group != held.value:
                self._write(path, group, held)
            return group

        group = self._retry_conflicts(f"group {name!r}", restore)
        if generation is not None and group.config.mode == "stream":
            rosters = StreamGroups(self.plane)
            held = rosters.roster(group.group_id)
            if held is None or held.value.generation < generation:
                roster = RosterState(generation, coordinator=(-1, -1))
                rosters.set_roster(name, group.group_id, roster, -1 if held is None else held.version)

    def put_group(
        self, name: str, patch: dict[str, Any], initial: dict[str, Any] | None = None
    ) -> tuple[GroupState, bool]:
        """Create the group, or change the settings that `patch` names. Return it, and True when this call created it.
        `initial` has further settings for a group that is created.

        Raises GroupModeMismatch for another mode (a group keeps its own), InvalidRequest for wrong settings.
        """

        def put() -> tuple[GroupState, bool]:
            path = state.group_path(wire.check_name(name, "group"))
            held = self._read(path, GroupState)
            if held is None:
                config = state.patched(wire.GroupConfig(), {**(initial or {}), **patch})
                group = GroupState(name, config, self._unique())
                self.plane.commit(Create(path, state.encode(group)))
                return group, True
            group = msgspec.structs.replace(held.value, config=state.patched(held.value.config, patch))
            if group.config.mode != held.value.config.mode:
                raise GroupModeMismatch(
                    f"group {name!r} works in {held.value.config.mode} mode and keeps it: "
                    f"delete it first, or take another name"
                )
            if group == held.value:
                self._check_newest(path, held)
            else:
                self.plane.commit(Set(path, state.encode(group), held.version))
            return group, False

        return self._retry_conflicts(f"group {name!r}", put)

    def pause_group(self, name: str, *, paused: bool, at_ms: int, reason: str = "", by: str = "") -> GroupState:
        """Note that the group is paused, or resumed, and return it. A pause of a paused group changes nothing. Raises
        GroupNotFound."""

        def pause() -> GroupState:
            path = state.group_path(wire.check_name(name, "group"))
            held = self._read(path, GroupState)
            if held is None:
                raise GroupNotFound(f"there is no group {name!r}")
            last = held.value.pause
            if paused and last.paused:
                self._check_newest(path, held)
                return held.value
            # above the numbers of an earlier group of this name too
            change = state.PauseState(max(last.number + 1, at_ms), paused, at_ms, reason, by)
            group = msgspec.structs.replace(held.value, pause=change)
            self.plane.commit(Set(path, state.encode(group), held.version))
            return group

        return self._retry_conflicts(f"group {name!r}", pause)

    def delete_group(self, name: str, group_id: str | None = None) -> None:
        """Delete the group: the one of this id, if it is given. Raises GroupNotFound; Unavailable where another group
        has the name now."""
        tried: str | None = None

        def delete() -> None:
            nonlocal tried
            held = self._read(state.group_path(wire.check_name(name, "group")), GroupState)
            if tried is not None and (held is None or held.value.group_id != tried):
                return  # an attempt whose outcome was unknown went through
            if held is None:
                raise GroupNotFound(f"there is no group {name!r}")
            if group_id is not None and held.value.group_id != group_id:
                raise Unavailable(f"group {name!r} was deleted, and created again: repeat to delete the new one too")
            tried = held.value.group_id
            streams = StreamGroups(self.plane).removal(held.value.group_id) if held.value.group_id else []
            self._commit_in_parts(streams, last=[Delete(state.group_path(name), held.version)])

        self._retry_conflicts(f"group {name!r}", delete)

    # --- producers ---

    def next_producer(self, name: str | None, *, instance: str = "", renews: bool = False) -> wire.ProducerIdentity:
        """Return an identity for an idempotent producer: a fresh id; with a name, always the same id, the next epoch.

        `instance` is the calling process. With `renews` it had the name before: raises Fenced when another instance
        has taken the name since.
        """
        if name is None:
            return wire.ProducerIdentity(id=self._next_producer_id(), epoch=0)
        path = state.producer_path(wire.check_name(name, "producer"))

        def take_over() -> wire.ProducerIdentity:
            held = self._read(path, state.ProducerState)
            if held is None:
                identity = state.ProducerState(self._next_producer_id(), 0, instance)
            elif renews and held.value.instance != instance:
                raise Fenced(f"another instance of producer {name!r} has taken over: stop this one")
            else:
                identity = state.ProducerState(held.value.id, held.value.epoch + 1, instance)
            self._write(path, identity, held)
            return wire.ProducerIdentity(id=identity.id, epoch=identity.epoch)

        return self._retry_conflicts(f"producer {name!r}", take_over)

    def named_producers(self) -> list[state.ProducerState]:
        return list(self._all(state.PRODUCERS, state.ProducerState).values())

    def reserve_producer_ids(self, below: int) -> None:
        """Never issue an id below this one again."""

        def reserve() -> None:
            held = self._read(state.PRODUCER_IDS, state.ProducerIds)
            if held is None or held.value.next < below:
                self._write(state.PRODUCER_IDS, state.ProducerIds(below), held)

        self._retry_conflicts("producer ids", reserve)

    def producer_ids_below(self) -> int:
        """Return, after a sync, a bound that every issued id is below."""
        self.confirm()
        held = self._read(state.PRODUCER_IDS, state.ProducerIds)
        return held.value.next if held else 1

    def _next_producer_id(self) -> int:
        if not self._producer_ids:
            self._producer_ids = self._retry_conflicts("producer ids", self._take_producer_ids)
        taken, self._producer_ids = self._producer_ids[0], self._producer_ids[1:]
        return taken

    def _take_producer_ids(self) -> range:
        held = self._read(state.PRODUCER_IDS, state.ProducerIds)
        first = held.value.next if held else 1
        self._write(state.PRODUCER_IDS, state.ProducerIds(first + PRODUCER_ID_BLOCK), held)
        return range(first, first + PRODUCER_ID_BLOCK)
