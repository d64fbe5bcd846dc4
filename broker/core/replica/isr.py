"""The in-sync replicas: a leader's tracker of its followers, for one leader epoch.

Two decisions are made here. The first is the high watermark: it advances to what is fsynced on every member of the
*maximal* ISR (the recorded ISR and a proposed one together, while a compare-and-set is in flight). The second is the
ISR to propose:

- a member leaves when it has not been caught up for `replica_lag_ms`, or its fetch is overdue and its port refuses
  connections;
- a replica joins when it fetches in this epoch with the registered incarnation and store, and holds everything
  committed and the start of this epoch;
- the ISR never shrinks below `min_insync_replicas`: below that nothing could be committed anyway, so a dead member
  stays, complete and electable, until another takes its place in one compare-and-set (instead of KIP-966's eligible
  leader replicas);
- only a replica that lost records (its store changed) leaves below that floor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from portalmq.broker.core.replica.events import Fetch, PartitionStateChanged, Poll

OVERDUE_MS = 500
NEVER_MS = -(1 << 62)


def store_of(store_uuid: str) -> str:
    """Return the data directory's part of a replica's store uuid. A replica that was rebuilt there has "/" and a number
    appended."""
    return store_uuid.partition("/")[0]


@lru_cache(1_024)
def life_of(incarnation: int, store_uuid: str) -> tuple[int, int]:
    """Return a number pair that rises whenever a replica may have lost what it acknowledged before."""
    return incarnation, int(store_uuid.partition("/")[2] or 0)


class Follower(msgspec.Struct):
    """The state of a follower in this epoch. `durable_end` is -1 before its first matching fetch.

    `heard_ms` is the time of its last fetch, from which the lease counts; `vouched_ms` a time at which it certainly
    still followed this leader. `fetched_ms` and `caught_up_ms` measure its lag, and exclude the time in which this
    process was paused. `in_step`: it has what the log had at its previous fetch. `poll` renews its fetch while that
    waits.
    """

    incarnation: int
    store_uuid: str
    fetched_ms: int
    caught_up_ms: int
    heard_ms: int = NEVER_MS
    vouched_ms: int = NEVER_MS
    durable_end: int = -1
    leader_end_then: int = 1 << 62
    in_step: bool = False
    refused: bool = False
    poll: Poll | None = None

    def fetched(self, durable_offset: int, leader_end: int, at_ms: int, sent_after_ms: int | None) -> None:
        """Take a fetch that came at `at_ms`, when the leader's log ended at `leader_end`, or was renewed then."""
        self.in_step = durable_offset >= min(leader_end, self.leader_end_then)
        if durable_offset >= leader_end:
            self.caught_up_ms = max(self.caught_up_ms, at_ms)
        elif durable_offset >= self.leader_end_then:
            self.caught_up_ms = max(self.caught_up_ms, self.fetched_ms)
        self.durable_end = max(self.durable_end, durable_offset)
        self.leader_end_then = leader_end
        self.fetched_ms = max(self.fetched_ms, at_ms)
        self.heard_ms = at_ms
        self.vouched_ms = max(self.vouched_ms, at_ms if sent_after_ms is None else sent_after_ms)
        self.refused = False


class _ReplicaSets(msgspec.Struct, frozen=True):
    """Sets derived from one partition state and one proposal: the other members of the maximal ISR, and the replicas
    outside it. Cached, since nearly every call reads them and they change with elections only."""

    state: PartitionStateChanged
    proposed: frozenset[int] | None
    others: tuple[int, ...]
    outside: tuple[int, ...]


class IsrTracker:
    """The followers of one leader in one epoch. Invariant: the leader itself is in every ISR it proposes."""

    def __init__(
        self, broker_id: int, state: PartitionStateChanged, epoch_start: int, now_ms: int, lag_ms: int
    ) -> None:
        self.broker_id = broker_id
        self.state = state
        self.epoch_start = epoch_start
        self.lag_ms = lag_ms
        self.proposed: frozenset[int] | None = None
        self.began_ms = now_ms
        self._followers: dict[int, Follower] = {}
        self._leader_end = 0
        self._ticked_ms = now_ms
        self._cached_sets: _ReplicaSets | None = None

    # --- inputs ------------------------------------------------------------------------------------------------------

    def on_partition_state(self, state: PartitionStateChanged) -> None:
        """Take the control plane's state at a later version, or after a compare-and-set was resolved; no proposal is in
        flight then. Members that left without a proposal of this leader may have lost their logs: they join again by
        what they fetch from now on, or by a fetch of a later life that waits already, since no other may come."""
        kept = self.state.isr if self.proposed is None else self.state.isr & self.proposed
        for member in kept - state.isr:
            known, recorded = self._followers.get(member), self._life_in_sync(member)
            if known is None:
                continue
            is_later = recorded[0] >= 0 and recorded < life_of(known.incarnation, known.store_uuid)
            if not is_later or known.poll is None:
                known.durable_end, known.in_step, known.poll = -1, False, None
        self.state = state
        self.proposed = None

    def fetched(
        self,
        fetch: Fetch,
        leader_end: int,
        now_ms: int,
        sent_after_ms: int | None = None,
        poll: Poll | None = None,
    ) -> bool:
        """Take a fetch of this epoch whose log matches ours. Return False for one from an earlier life of the replica:
        it is late, and says nothing of the replica as it is now."""
        self._leader_end = leader_end
        known = self._follower(fetch.broker_id)
        life = life_of(fetch.incarnation, fetch.store_uuid)
        if known is not None and life < life_of(known.incarnation, known.store_uuid):
            return False
        if life < self._life_in_sync(fetch.broker_id):
            return False
        if known is None or (known.incarnation, known.store_uuid) != (fetch.incarnation, fetch.store_uuid):
            caught_up_ms = known.caught_up_ms if known else self.began_ms
            known = Follower(fetch.incarnation, fetch.store_uuid, now_ms, caught_up_ms)
            self._followers[fetch.broker_id] = known
        known.fetched(fetch.durable_offset, leader_end, now_ms, sent_after_ms)
        known.poll = poll
        return True

    def fetch_ended(self, broker_id: int, poll: Poll) -> None:
        """Take that a fetch no longer waits: what `poll` says from now on is not about it."""
        known = self._follower(broker_id)
        if known is not None and known.poll is poll:
            known.poll = None

    def _follower(self, broker_id: int) -> Follower | None:
        """Return what is known of a follower, its waiting fetch renewed by its broker's last request."""
        known = self._followers.get(broker_id)
        if known is not None and known.poll is not None and known.poll.heard_ms > known.heard_ms:
            known.fetched(known.durable_end, self._leader_end, known.poll.heard_ms, known.poll.sent_after_ms)
        return known

    def _life_in_sync(self, broker_id: int) -> tuple[int, int]:
        """Return the life in which the replica was last recorded in sync."""
        incarnation = (self.state.incarnations or {}).get(broker_id, -1)
        return life_of(incarnation, (self.state.store_uuids or {}).get(broker_id, ""))

    def refused(self, broker_id: int, now_ms: int) -> None:
        """Take that a broker's port refuses connections."""
        known = self._follower(broker_id)
        if known is None:
            known = self._followers[broker_id] = Follower(-1, "", self.began_ms, self.began_ms)
        if now_ms - known.fetched_ms >= OVERDUE_MS:
            known.refused = True

    def ticked(self, now_ms: int) -> None:
        """Exclude a pause of this process from the followers' lag: no fetch could arrive during it."""
        paused_ms = now_ms - self._ticked_ms - 2 * OVERDUE_MS
        if paused_ms > 0:
            self.began_ms += paused_ms
            for known in filter(None, map(self._follower, self._followers)):
                known.fetched_ms = min(now_ms, known.fetched_ms + paused_ms)
                known.caught_up_ms = min(now_ms, known.caught_up_ms + paused_ms)
        self._ticked_ms = now_ms

    # --- queries -----------------------------------------------------------------------------------------------------

    @property
    def maximal(self) -> frozenset[int]:
        """The recorded and the proposed ISR: any ISR that the control plane may hold now is a subset."""
        return self.state.isr if self.proposed is None else self.state.isr | self.proposed

    def _replica_sets(self) -> _ReplicaSets:
        sets = self._cached_sets
        if sets is None or sets.state is not self.state or sets.proposed is not self.proposed:
            maximal = self.maximal
            others = tuple(sorted(maximal - {self.broker_id}))
            outside = tuple([replica for replica in self.state.replicas if replica not in maximal])
            sets = self._cached_sets = _ReplicaSets(self.state, self.proposed, others, outside)
        return sets

    def committed_end(self, own_durable_end: int, brokers: Mapping[int, tuple[int, str]], now_ms: int) -> int:
        """Return the end of what is fsynced on the whole maximal ISR; -1 while that is not known, or too few are in
        sync.

        A replica that keeps in step and may join is waited for as well. A leader alone, whose high watermark follows
        its own disk, would otherwise stay one batch ahead of it for ever (Kafka's leaders wait likewise).
        """
        if len(self.state.isr) < self.state.min_insync_replicas:
            return -1
        self._leader_end = own_durable_end
        end, sets = own_durable_end, self._replica_sets()
        for member in sets.others:
            known = self._follower(member)
            end = min(end, known.durable_end if known else -1)
        for replica in sets.outside:
            if self._joins(replica, brokers, now_ms):
                end = min(end, self._followers[replica].durable_end)
        return end

    def holders(self, offset: int) -> frozenset[int]:
        """Return the followers that have reported `offset` as fsynced in this epoch."""
        return frozenset([broker_id for broker_id, known in self._followers.items() if known.durable_end > offset])

    def live_members(self, now_ms: int) -> int:
        """Return how many members of the ISR fetched within the lag, the leader included."""
        return sum(
            [member == self.broker_id or now_ms - self._fetched_ms(member) <= self.lag_ms for member in self.state.isr]
        )

    def heard_from_all_ms(self) -> int | None:
        """Return the earliest of the other members' last fetches in this epoch; None without another member."""
        others = self._replica_sets().others
        if not others:
            return None
        return min([known.heard_ms if (known := self._follower(member)) else NEVER_MS for member in others])

    def vouched_by_all_ms(self) -> int | None:
        """Return a time at which every other member certainly followed this leader; None without another member."""
        others = self._replica_sets().others
        if not others:
            return None
        return min([known.vouched_ms if (known := self._follower(member)) else NEVER_MS for member in others])

    def overdue(self, now_ms: int) -> list[int]:
        """Return the members whose fetch is overdue: their ports are probed."""
        return sorted(
            [
                member
                for member in self.state.isr
                if member != self.broker_id and now_ms - self._fetched_ms(member) >= OVERDUE_MS
            ]
        )

    def _fetched_ms(self, member: int) -> int:
        known = self._follower(member)
        return known.fetched_ms if known else self.began_ms

    # --- the ISR to propose ------------------------------------------------------------------------------------------

    def is_settled(self, now_ms: int) -> bool:
        """Return whether a quick check shows that the recorded ISR needs no change: it holds all replicas, with their
        recorded lives and in step. Then `wanted` equals the ISR and `renewed` is empty."""
        sets = self._replica_sets()
        if sets.outside or self.proposed is not None:
            return False
        stores, incarnations = self.state.store_uuids or {}, self.state.incarnations or {}
        for member in sets.others:
            known = self._follower(member)
            if (
                known is None
                or known.refused
                or now_ms - known.caught_up_ms > self.lag_ms
                or known.store_uuid != stores.get(member, known.store_uuid)
                or known.incarnation != incarnations.get(member, known.incarnation)
            ):
                return False
        return True

    def wanted(self, high_watermark: int, brokers: Mapping[int, tuple[int, str]], now_ms: int) -> frozenset[int]:
        """Return the ISR to propose; the recorded one if nothing changes."""
        lossy = {member for member in self.state.isr if self._is_lossy(member)}
        wanted = set(self.state.isr) - lossy
        wanted |= {
            replica
            for replica in self.state.replicas
            if replica not in self.state.isr and self._may_join(replica, high_watermark, brokers, now_ms)
        }
        for member in sorted(self.state.isr - lossy, key=self._fetched_ms):
            if len(wanted) > self.state.min_insync_replicas and self._is_out(member, now_ms):
                wanted.discard(member)
        return frozenset(wanted)

    def renewed(self, high_watermark: int, brokers: Mapping[int, tuple[int, str]], now_ms: int) -> frozenset[int]:
        """Return the members that restarted since they were recorded and hold everything committed. Recording their new
        incarnation makes them electable."""
        counted = self.state.incarnations or {}
        return frozenset(
            member
            for member in self.state.isr - {self.broker_id}
            if (known := self._follower(member)) is not None
            and known.incarnation > counted.get(member, known.incarnation)
            and not self._is_lossy(member)
            and self._may_join(member, high_watermark, brokers, now_ms)
        )

    def joiner(self, broker_id: int) -> tuple[int, str]:
        """Return the (incarnation, store uuid) that a replica fetched with."""
        known = self._followers[broker_id]
        return known.incarnation, known.store_uuid

    def _is_lossy(self, member: int) -> bool:
        known = self._followers.get(member)
        if member == self.broker_id or known is None or not known.store_uuid:
            return False
        return known.store_uuid != (self.state.store_uuids or {}).get(member, known.store_uuid)

    def _is_out(self, member: int, now_ms: int) -> bool:
        if member == self.broker_id:
            return False
        known = self._follower(member)
        caught_up_ms = known.caught_up_ms if known else self.began_ms
        return now_ms - caught_up_ms > self.lag_ms or (known is not None and known.refused)

    def _may_join(self, replica: int, high_watermark: int, brokers: Mapping[int, tuple[int, str]], now_ms: int) -> bool:
        known = self._follower(replica)
        return (
            known is not None
            and not self._is_out(replica, now_ms)  # else it would join and leave for ever
            and brokers.get(replica) == (known.incarnation, store_of(known.store_uuid))
            and known.durable_end >= high_watermark
            and known.durable_end > self.epoch_start
        )

    def _joins(self, replica: int, brokers: Mapping[int, tuple[int, str]], now_ms: int) -> bool:
        known = self._follower(replica)
        return (
            known is not None
            and known.in_step
            and now_ms - known.fetched_ms < OVERDUE_MS
            and self._may_join(replica, known.durable_end, brokers, now_ms)
        )
