"""Offsets of stream groups, at any broker: commit them, list them, sum their lag.

Offsets are committed at the partitions' leaders, without the group's coordinator. The members, and the offsets of
partitions without a leader, are read from the control plane, where the coordinator stores both (checkpoints.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from portalmq import stream_wire as contract
from portalmq import wire
from portalmq.broker.cluster.routing import place_of
from portalmq.broker.cluster.rpc import TopicPartition, first_error
from portalmq.broker.cluster.rpc.streams import CommitShare, GroupPosition
from portalmq.broker.partition.clock import Clock
from portalmq.broker.queues.groups import Groups
from portalmq.broker.streams.stream_partitions import StreamPartitions, stream_group
from portalmq.control_plane.mirror import Mirror
from portalmq.control_plane.plane import PlaneState, PlaneUnavailable
from portalmq.control_plane.state import GroupState
from portalmq.control_plane.stream_groups import CheckpointState, RosterState, StreamGroups
from portalmq.errors import IllegalGeneration, InvalidRequest, PortalMQError

# The longest wait for a leader, before the checkpoint answers for its partitions.
POSITIONS_WITHIN_S = 2.0
KEPT_MAX = 10_000


@dataclass(eq=False, repr=False)
class Offsets:
    """Commits and lists offsets. `coordinated` returns the roster of a group that this broker coordinates."""

    _store: StreamGroups
    _groups: Groups
    _partitions: StreamPartitions
    _coordinated: Callable[[str], RosterState | None]
    _mirror: Mirror
    _clock: Clock

    def __post_init__(self) -> None:
        # The highest known generations of groups.
        self._reached: dict[str, int] = {}
        # The last state of requested groups in the control plane, for an outage of it.
        self._last: dict[str, tuple[RosterState | None, dict[str, CheckpointState]]] = {}

    # --- committing ---------------------------------------------------------------------------------------------------

    def commit(
        self, name: str, request: contract.CommitOffsetsRequest, *, forward: bool = True
    ) -> contract.OffsetResults:
        """Commit the next offsets to read. Raises IllegalGeneration, OffsetOutOfRange for the first refused one;
        `results` has the status of each."""
        group = stream_group(self._groups, name)
        self.check_reached(group, request.generation)
        shares = []
        for asked in request.offsets:
            place = self._groups.topics.known(asked.topic).place(asked.partition)
            shares.append(CommitShare(*place, asked.offset))
        if len({share.place for share in shares}) < len(shares):
            raise InvalidRequest("a partition is named twice in `offsets`")
        outcomes = self._partitions.commit(group, request.member_id, request.generation, shares, forward=forward)
        results = [
            contract.OffsetResult(share.topic, share.number, share.offset, _status(outcomes[share.place]))
            for share in shares
        ]
        error = first_error(outcomes.values())
        if error is not None:
            if len(shares) > 1:
                if any(result.status == "ok" for result in results) and error.outcome != "unknown":
                    error.outcome = "partial"
                error.extra["results"] = msgspec.to_builtins(results)
            raise error
        return contract.OffsetResults(results)

    def check_reached(self, group: GroupState, generation: int) -> None:
        """Raise IllegalGeneration for a generation that the group has not reached. The partition's leader refuses those
        that are too old."""
        if generation <= self._reached.get(group.group_id, 0) or self._store.plane.state is not PlaneState.CONNECTED:
            return
        try:
            held = self._store.roster(group.group_id, sure=True)
        except PlaneUnavailable:
            return
        if held is None:
            return
        reached = held.value.generation
        if len(self._reached) >= KEPT_MAX:
            self._reached.clear()
        self._reached[group.group_id] = reached
        if generation > reached:
            raise IllegalGeneration(
                f"group {group.name!r} is in generation {reached} and never was in {generation}: commit in the one that"
                " a join or a heartbeat has returned"
            )

    # --- listing ------------------------------------------------------------------------------------------------------

    def of(self, name: str) -> contract.GroupOffsets:
        """Return the group's offsets on every partition of its topics; from the last checkpoint where a leader cannot
        be asked."""
        group = stream_group(self._groups, name)
        return self._offsets(group, *self._held(group))

    def _held(self, group: GroupState) -> tuple[RosterState | None, dict[str, CheckpointState]]:
        """Return the group's roster and checkpoints from the control plane; the last known ones while it does not
        answer. Raises PlaneUnavailable when there are none."""
        own, last = self._coordinated(group.group_id), self._last.get(group.group_id)
        if own is not None:
            last = (own, last[1] if last else {})
        if last is not None and self._store.plane.state is not PlaneState.CONNECTED:
            return last
        try:
            held = self._store.roster(group.group_id)
            found = held.value if held else None, self._store.checkpoints(group.group_id)
        except PlaneUnavailable:
            if last is None:
                raise
            return last
        if len(self._last) >= KEPT_MAX:
            self._last.clear()
        self._last[group.group_id] = found
        return found

    def _offsets(
        self, group: GroupState, roster: RosterState | None, checkpoints: Mapping[str, CheckpointState]
    ) -> contract.GroupOffsets:
        places = self._places(roster, checkpoints)
        positions = self._partitions.positions(group.name, places, patience_s=POSITIONS_WITHIN_S)
        offsets = []
        for place in places:
            found = positions[place]
            if isinstance(found, PortalMQError):
                kept = checkpoints.get(place.topic_id)
                committed, high_watermark, lag = kept.offsets.get(place.number, (0, 0, 0)) if kept else (0, 0, 0)
                age_ms = max(0, self._clock.wall_ms() - kept.at_ms) if kept and lag else 0
                found = GroupPosition(committed, high_watermark, lag, age_ms)
            offset = contract.GroupOffset(
                place.topic, place.number, max(found.committed, 0), found.high_watermark, found.lag, found.lag_ms
            )
            offsets.append(offset)
        return contract.GroupOffsets(offsets)

    def _places(self, roster: RosterState | None, checkpoints: Mapping[str, CheckpointState]) -> list[TopicPartition]:
        """Return the partitions of all topics that the group reads, or has read."""
        names = {topic for member in roster.members for topic in member.topics} if roster else set()
        topics = {topic.name: topic for name in names if (topic := self._mirror.topics.get(name)) is not None}
        for topic_id in checkpoints:
            topic = self._mirror.topic_by_id(topic_id)
            if topic is not None:
                topics[topic.name] = topic
        return [place_of(topics[name], number) for name in sorted(topics) for number in range(topics[name].partitions)]

    def describe(self, name: str) -> wire.GroupDescription:
        """Return the group's members and its lag."""
        group = stream_group(self._groups, name)
        roster, checkpoints = self._held(group)
        offsets = self._offsets(group, roster, checkpoints).offsets
        lag = sum(offset.lag for offset in offsets)
        return wire.GroupDescription(
            group=name,
            mode=group.config.mode,
            members=[member.id for member in roster.members] if roster else [],
            ready=lag,
            in_flight=0,
            scheduled=0,
            dead=0,
            lag=lag,
            oldest_unacked_ms=max((offset.lag_ms for offset in offsets), default=0),
            config=group.config,
        )

    def describe_or(self, otherwise: wire.GroupDescription) -> wire.GroupDescription:
        """Return the group's description; `otherwise` when it cannot be read."""
        try:
            return self.describe(otherwise.group)
        except PortalMQError:
            return otherwise


def _status(outcome: bool | PortalMQError) -> str:
    return outcome.code if isinstance(outcome, PortalMQError) else "ok"
