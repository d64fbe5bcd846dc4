"""The settings of all groups: create, change, find and delete them.

The control plane holds the settings, and the mirror shows them. What this broker has just written or read counts before
the mirror shows it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import msgspec

from portalmq import wire
from portalmq.broker.cluster.capacity import Capacity
from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.mirror import Mirror
from portalmq.control_plane.state import GroupState, PauseState
from portalmq.errors import GroupModeMismatch, GroupNotFound, InvalidRequest, Unavailable

# The settings that this broker wrote count for this long; by then the mirror shows them.
OWN_WRITE_S = 2.0
# A group that is being deleted begins nowhere again for this long, unless it is gone before.
ENDING_S = 5.0
# Bound of the caches over groups, which come and go during a broker's life.
REMEMBERED_MAX = 10_000


class GroupRegistry:
    """The groups of the cluster, as this broker knows them."""

    def __init__(self, catalog: Catalog, mirror: Mirror, capacity: Capacity) -> None:
        self._capacity = capacity
        self._catalog = catalog
        self._mirror = mirror
        # The state that this broker wrote or read, what the mirror showed then, and until when the mirror may lag.
        self._own: dict[str, tuple[GroupState | None, GroupState | None, float]] = {}
        self._heard: dict[tuple[str, str], PauseState] = {}  # by name and group id: what the mirror may not have yet
        # Groups that this broker is deleting, and the ids of groups that any broker is ending (until when).
        self._deleting: set[str] = set()
        self._ending: dict[str, float] = {}

    def put(self, name: str, patch: dict[str, object], initial: dict[str, object] | None = None) -> bool:
        """Create the group with the settings of `patch` and `initial`, or change those of `patch`. Return True when it
        is new."""
        held = self._catalog.find_group(wire.check_name(name, "group"))
        self._check_deletes_not(name)
        self._check_stays(held)
        check_settings(patch, held)
        with self._making(held):
            group, created = self._catalog.put_group(name, patch, initial)
        self._remember(name, group)
        return created

    def _making(self, held: GroupState | None) -> AbstractContextManager[None]:
        return nullcontext() if held is not None else self._capacity.group(self.names)

    def find(self, name: str) -> GroupState | None:
        """Return the group from the mirror, or as this broker wrote it while the mirror lags; None for no group."""
        shown, own = self._mirror.groups.get(name), self._own.get(name)
        if own is not None:
            group, shown_then, until = own
            if time.monotonic() < until and shown == shown_then:
                shown = group
            else:
                del self._own[name]
        return self._with_pause(shown) if self._heard else shown

    def find_of(self, name: str, mode: str) -> GroupState | None:
        """Return the group as `find` does. A group of another mode may be an earlier one of the name: ask the control
        plane then."""
        group = self.find(name)
        if group is None or group.config.mode == mode:
            return group
        group = self._catalog.group_as_it_is(name)
        if group is not None:
            self._remember(name, group)
        return group

    def get(self, name: str, *, mode: str = "", group_id: str = "") -> GroupState:
        """Return the group. When this broker knows none, or one of another `mode` or `group_id`, ask the control plane.
        Raises GroupNotFound, and Unavailable for a group that is being deleted."""
        group = self.find(name)
        self._check_deletes_not(name)
        is_right = group is not None and mode in ("", group.config.mode) and group_id in ("", group.group_id)
        if group is not None and is_right and not self.is_ending(group):
            return group
        wire.check_name(name, "group")
        group = self._catalog.group_as_it_is(name)
        if group is None:
            raise GroupNotFound(f"there is no group {name!r}: its first receive or join creates it")
        self._remember(name, group)
        return group

    def ensure(self, name: str) -> GroupState:
        """Return the queue group; create it if it is missing. Raises GroupModeMismatch, and Unavailable for a group
        that is being deleted."""
        group = self.find_of(name, "queue")
        if group is None or self.is_ending(group):
            # Another broker may have deleted a group that the mirror still shows.
            wire.check_name(name, "group")
            self._check_deletes_not(name)
            with self._making(group):
                group = self._catalog.ensure_group(name)
            self._check_stays(group)
            self._remember(name, group)
        if group.config.mode != "queue":
            raise GroupModeMismatch(f"group {name!r} is a stream group: join it, or use another name for a queue group")
        return group

    def ensure_stream(self, name: str) -> GroupState:
        """Return the group; create a stream group if it is missing."""
        group = self.find_of(name, "stream")
        if group is None:
            self.put(name, {"mode": "stream"})
        return group or self.get(name)

    def get_same(self, name: str, group_id: str) -> GroupState:
        """Return the group of this id. Raises GroupNotFound, and Unavailable when another one has the name."""
        group = self.get(name, group_id=group_id)
        if group.group_id != group_id:
            raise Unavailable(f"group {name!r} was just deleted", retry_after_s=0.1)
        return group

    def get_by_id(self, name: str, group_id: str, *, mode: str = "") -> GroupState:
        """Return the group of this id. Raises InvalidRequest when a newer one has the name: receipts of both have the
        same delivery numbers."""
        group = self.get(name, mode=mode, group_id=group_id)
        if group.group_id != group_id:
            raise InvalidRequest(f"the call is for an earlier group {name!r}")
        return group

    def get_queue(self, name: str) -> GroupState:
        """Return a queue group. Raises GroupNotFound, GroupModeMismatch, Unavailable."""
        return check_queue(self.get(name, mode="queue"))

    def find_queue(self, name: str) -> GroupState | None:
        """Return a queue group, None for no group. Raises GroupModeMismatch."""
        group = self.find_of(name, "queue")
        return None if group is None else check_queue(group)

    def check_same(self, group: GroupState) -> None:
        """Raise Unavailable when the group was deleted since `group` was read."""
        now = self.find(group.name)
        if now is None or now.group_id != group.group_id or self.is_ending(now):
            raise Unavailable(f"group {group.name!r} was just deleted: repeat to create it again", retry_after_s=0.1)

    def set_paused(self, name: str, *, paused: bool, at_ms: int, reason: str = "", by: str = "") -> GroupState:
        """Note in the control plane that the queue group is paused or resumed; return it. Raises GroupNotFound,
        GroupModeMismatch, Unavailable."""
        self.get_queue(name)
        group = self._catalog.pause_group(name, paused=paused, at_ms=at_ms, reason=reason, by=by)
        self._remember(name, group)
        self.hear_of_pause(name, group.group_id, group.pause)
        return group

    def hear_of_pause(self, name: str, group_id: str, pause: PauseState) -> None:
        """Take that the group was paused, or resumed: it counts from now on, even while the mirror is behind."""
        known = self._heard.pop((name, group_id), pause)
        if len(self._heard) >= REMEMBERED_MAX:
            del self._heard[next(iter(self._heard))]
        self._heard[name, group_id] = pause if pause.number > known.number else known

    def _with_pause(self, group: GroupState | None) -> GroupState | None:
        """Return the group with the newest pause that this broker has heard of."""
        heard = None if group is None else self._heard.get((group.name, group.group_id))
        if group is None or heard is None:
            return group
        if heard.number > group.pause.number:
            return msgspec.structs.replace(group, pause=heard)
        if group is self._mirror.groups.get(group.name):
            del self._heard[group.name, group.group_id]
        return group

    def names(self) -> list[str]:
        names = self._mirror.groups.keys() | self._own.keys()
        return sorted(name for name in names if name not in self._deleting and self.find(name) is not None)

    def _remember(self, name: str, group: GroupState | None) -> None:
        now = time.monotonic()
        if len(self._own) >= REMEMBERED_MAX:
            self._own = {known: own for known, own in self._own.items() if own[2] > now}
        self._own[name] = (group, self._mirror.groups.get(name), now + OWN_WRITE_S)

    # --- deletion ----------------------------------------------------------------------------------------------------

    def is_ending(self, group: GroupState) -> bool:
        return group.name in self._deleting or self._ending.get(group.group_id, 0.0) > time.monotonic()

    def _check_stays(self, group: GroupState | None) -> None:
        if group is not None and self.is_ending(group):
            raise _is_being_deleted(group.name)

    def _check_deletes_not(self, name: str) -> None:
        if name in self._deleting:
            raise _is_being_deleted(name)

    def note_ending(self, group_id: str) -> None:
        """Refuse uses of a group that is being ended, for ENDING_S."""
        now = time.monotonic()
        self._ending = {known: until for known, until in self._ending.items() if until > now}
        self._ending[group_id] = now + ENDING_S

    @contextmanager
    def deleting(self, name: str) -> Iterator[GroupState]:
        """Hide the group on this broker while the block ends it at all leaders; delete it if that succeeds. Raises
        GroupNotFound."""
        group = self.get(name)
        self._deleting.add(name)
        try:
            yield group
            self._catalog.delete_group(name, group.group_id)
            self._remember(name, None)
        finally:
            self._deleting.discard(name)
            self._ending.pop(group.group_id, None)


def _is_being_deleted(name: str) -> Unavailable:
    return Unavailable(f"group {name!r} is being deleted: repeat to create it again", retry_after_s=0.1)


def check_queue(group: GroupState) -> GroupState:
    """Return the group. Raises GroupModeMismatch for a stream group."""
    if group.config.mode != "queue":
        raise GroupModeMismatch(
            f"group {group.name!r} is a stream group: it commits offsets, and has no leases, receipts or dead letters"
        )
    return group


KEY_LIMITS = ("max_in_flight_per_key", "rate_per_s_per_key")
LIMITS = ("max_in_flight", "rate_per_s", "rate_burst", *KEY_LIMITS, "rate_burst_per_key")


def check_settings(patch: dict[str, object], held: GroupState | None) -> None:
    """Raise InvalidRequest for settings of a queue group that conflict, or that it cannot change to."""
    start = patch.get("start")
    if isinstance(start, dict) and set(start) != {"at"}:
        raise InvalidRequest('start must be "earliest", "latest" or {"at": a time}')
    topic = patch.get("dead_letter_topic")
    if isinstance(topic, str) and topic:
        if topic == "{topic}":
            raise InvalidRequest("dead_letter_topic is the topic itself: its dead letters would be delivered again")
        wire.check_name(topic.replace("{topic}", "t"), "dead_letter_topic")
        if topic.startswith("__"):
            raise InvalidRequest("dead_letter_topic begins with __, which is reserved for internal topics")
    ordering = patch.get("ordering", held.config.ordering if held is not None else "none")
    mode = patch.get("mode", held.config.mode if held is not None else "queue")
    if mode == "stream" and ordering == "key":
        raise InvalidRequest("ordering 'key' is for queue groups: a stream group always reads a partition in order")
    if held is not None and held.config.mode == mode and ordering != held.config.ordering:
        raise InvalidRequest(
            f"group {held.name!r} keeps its ordering {held.config.ordering!r}: messages that it has passed cannot be"
            " reordered. Delete the group first, or use another name"
        )
    for_key, rate_for_key = (patch.get(name, getattr(held.config, name) if held else None) for name in KEY_LIMITS)
    if ordering == "key" and for_key not in (None, 1):
        if held is not None and "ordering" not in patch:
            raise InvalidRequest(
                f"group {held.name!r} exists with ordering 'key', which is one message of a key at a time: leave out"
                " max_in_flight_per_key, or use another name"
            )
        raise InvalidRequest("ordering 'key' is one message of a key at a time: leave out max_in_flight_per_key")
    is_keyed = ordering == "key" or for_key is not None or rate_for_key is not None
    if held is not None and held.config.mode == mode and is_keyed != held.config.is_keyed:
        raise InvalidRequest(
            f"group {held.name!r} was made with{'' if held.config.is_keyed else 'out'} {' or '.join(KEY_LIMITS)}:"
            " messages that it has passed cannot be found again. Delete the group first, or use another name"
        )
    limits = [name for name in LIMITS if patch.get(name) is not None]
    if mode == "stream" and limits:
        raise InvalidRequest(f"{limits[0]} is for queue groups: members of a stream group read at their own pace")
