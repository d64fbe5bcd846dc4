"""Protocol bugs, planted one at a time: a simulator that does not find them proves nothing.

Each mutant patches about one line's worth of behaviour; several are bugs that the core had until a seed found them. The
number is a seed that found it once. hunt.py searches for others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec.structs import replace
from simulation.disk import Disk
from simulation.membership import Membership
from simulation.node import Node
from simulation.replica_shell import ReplicaShell
from simulation.world import World

from portalmq.broker.core.replica import events as core
from portalmq.broker.core.replica.follower import FollowingReplica
from portalmq.broker.core.replica.isr import IsrTracker
from portalmq.broker.core.replica.leader import LeadingReplica
from portalmq.broker.core.replica.producers import Producers
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.core.replica.state import ReplicaState
from portalmq.broker.partition.folding import GroupsFold
from portalmq.control_plane import controller
from portalmq.control_plane.state import PartitionState

Patch = tuple[Any, str, Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    seed: int
    patches: tuple[Patch, ...]
    has_groups: bool = False


MUTANTS: dict[str, Mutant] = {}

# Bugs that take several rare faults at once: fewer than one of 2,000 runs with groups finds them. Each is found by a
# scenario in tests/broker/core.
_LEADING, _DELIVERY = "replica/test_replica_leading.py", "queue/test_delivery.py"
RARE = {
    "takes a fetch that lay on the way for news": (
        _LEADING,
        "test_a_delayed_fetch_vouches_for_the_time_after_which_it_was_sent",
    ),
    "takes a fetch that was answered for one that waits": (
        "replica/test_isr.py",
        "test_requests_of_its_broker_renew_a_fetch_while_it_waits_and_no_longer",
    ),
    "answers acks while an earlier leader may hand out": (
        _LEADING,
        "test_a_successor_answers_no_ack_while_its_predecessor_may_deliver",
    ),
    "prolongs a lease when it is another's turn": (
        _DELIVERY,
        "test_an_ended_lease_is_not_extended_in_order_by_key",
    ),
    "takes an ack for done whose grant is lost": (
        _DELIVERY,
        "test_an_ack_of_a_delayed_message_whose_grant_was_lost_is_recorded",
    ),
}


def mutant(name: str, seed: int, *targets: tuple[Any, str], has_groups: bool = False) -> Callable[[Any], Any]:
    """The decorated function replaces each target; it gets the original as its first argument."""

    def register(function: Any) -> Any:
        def replacement(original: Any) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                return function(original, *args, **named)

            return property(call) if isinstance(original, property) else call

        patches = tuple((owner, target, replacement(_original(owner, target))) for owner, target in targets)
        MUTANTS[name] = Mutant(name, seed, patches, has_groups)
        return function

    return register


def _original(owner: Any, name: str) -> Any:
    return owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)


# --- followers -------------------------------------------------------------------------------------------------------


@mutant("truncates to its high watermark", 4, (FollowingReplica, "_on_records"))
def _(original: Any, self: Any, fetch: core.Fetch, reply: core.Records) -> Any:
    if self.highest_epoch > getattr(self, "cut_in", 0):
        self.cut_in = self.highest_epoch
        if self.high_watermark < self.next_offset:
            self._reshaping = True
            return [core.Truncate(self.high_watermark)]
    return original(self, fetch, reply)


@mutant("acknowledges before its fsync", 0, (FollowingReplica, "_on_records"))
def _(original: Any, self: Any, fetch: core.Fetch, reply: core.Records) -> Any:
    actions = original(self, fetch, reply)
    durable, self.durable_end = self.durable_end, self.next_offset
    actions += self._next_fetch()
    self.durable_end = durable
    return actions


@mutant("accepts a late diverging reply", 48, (FollowingReplica, "_on_fetch_replied"))
def _(original: Any, self: Any, event: core.FetchReplied, now_ms: int) -> Any:
    if isinstance(event.reply, core.Diverging) and self.fetch is not None:
        self.fetch = event.fetch
    return original(self, event, now_ms)


@mutant("cuts to the leader's end alone", 3, (FollowingReplica, "_on_diverging"))
def _(original: Any, self: Any, reply: core.Diverging) -> Any:
    self._reshaping = True
    return [core.Truncate(min(reply.end, self.next_offset))]


@mutant("takes answers of an epoch that is over", 1254, (ReplicaState, "_learn_epoch"))
def _(original: Any, self: Any, epoch: int) -> Any:
    fetch = self.fetch
    actions = original(self, epoch)
    self.fetch = fetch
    return actions


@mutant("forgets its epoch in a crash", 521, (Node, "crash"))
def _(original: Any, self: Any, **how: Any) -> None:
    original(self, **how)
    self.disk.highest_epoch = 0


@mutant("acts before its epoch is remembered", 0, (ReplicaShell, "_perform"))
def _(original: Any, self: Any, action: core.Action) -> None:
    if isinstance(action, core.RememberEpoch):
        self.soon(50, self._remembered, action.leader_epoch)
    else:
        original(self, action)


# --- leaders ---------------------------------------------------------------------------------------------------------


@mutant(
    "answers fetches of any epoch, and commits before its own begins",
    0,
    (LeadingReplica, "_on_fetch_received"),
    (LeadingReplica, "_advance_high_watermark"),
)
def _(original: Any, self: Any, event: Any, *now: int) -> Any:
    """Without one of the two the other still holds: acknowledgements of an older epoch end below the start."""
    if not isinstance(event, core.FetchReceived):
        start, self.in_sync.epoch_start = self.in_sync.epoch_start, -1
        actions = original(self, event)
        self.in_sync.epoch_start = start
        return actions
    if self.leading:
        event = replace(event, fetch=replace(event.fetch, leader_epoch=self.state.leader_epoch))
    return original(self, event, *now)


@mutant("follows a state of a lower epoch", 1, (PartitionReplica, "_on_state_changed"))
def _(original: Any, self: Any, state: core.PartitionStateChanged, *more: Any) -> Any:
    self.highest_epoch, self.state = (
        min(self.highest_epoch, state.leader_epoch),
        self.state and replace(self.state, version=min(self.state.version, state.version)),
    )
    return original(self, state, *more)


@mutant("follows an older state of its epoch", 185, (PartitionReplica, "_on_state_changed"))
def _(original: Any, self: Any, state: core.PartitionStateChanged, *more: Any) -> Any:
    if self.state is not None and state.leader_epoch == self.highest_epoch:
        self.state = replace(self.state, version=min(self.state.version, state.version))
    return original(self, state, *more)


@mutant("does not compare logs", 9, (LeadingReplica, "_on_fetch_received"))
def _(original: Any, self: Any, event: core.FetchReceived, now_ms: int) -> Any:
    blind = replace(event, fetch=replace(event.fetch, last_epoch=self.last_epoch))
    return original(self, blind if event.fetch.fetch_offset <= self.durable_end else event, now_ms)


@mutant("counts itself before its fsync", 2, (LeadingReplica, "_advance_high_watermark"))
def _(original: Any, self: Any, now_ms: int) -> Any:
    durable, self.durable_end = self.durable_end, self.next_offset
    actions = original(self, now_ms)
    self.durable_end = durable
    return actions


@mutant("goes on in an epoch of which it lost records", 15, (PartitionReplica, "_on_truncated"))
def _(original: Any, self: Any, event: core.Truncated, *more: Any) -> Any:
    return original(self, core.Truncated(event.end_offset, event.producers), *more)


@mutant("continues an epoch in a log that was opened again", 7, (LeadingReplica, "_begin_leading"))
def _(original: Any, self: Any, state: core.PartitionStateChanged, *more: Any) -> Any:
    self._continues_epoch = state.leader_epoch
    return original(self, state, *more)


@mutant("sends records before the start of its epoch", 7, (ReplicaState, "sendable_end"))
def _(original: Any, self: Any) -> int:
    return self.next_offset


@mutant("commits before its epoch's start", 0, (LeadingReplica, "_advance_high_watermark"))
def _(original: Any, self: Any, now_ms: int) -> Any:
    start, self.in_sync.epoch_start = self.in_sync.epoch_start, -1
    actions = original(self, now_ms)
    self.in_sync.epoch_start = start
    return actions


@mutant("counts a removal before it stands", 0, (IsrTracker, "maximal"))
def _(original: Any, self: Any) -> Any:
    return self.state.isr if self.proposed is None else self.proposed


@mutant("counts a joiner only when it stands", 0, (IsrTracker, "maximal"))
def _(original: Any, self: Any) -> Any:
    return self.state.isr


@mutant("commits with too few in sync", 3, (IsrTracker, "committed_end"))
def _(original: Any, self: Any, *more: Any) -> int:
    state = self.state
    self.state = replace(state, min_insync_replicas=0)
    end = original(self, *more)
    self.state = state
    return end


@mutant("commits with all but one", 4, (IsrTracker, "committed_end"))
def _(original: Any, self: Any, *more: Any) -> int:
    others = sorted(self.maximal - {self.broker_id})
    if len(others) < 2:
        return original(self, *more)
    state = self.state
    self.state = replace(state, isr=state.isr - {others[-1]}, min_insync_replicas=0)
    end = original(self, *more)
    self.state = state
    return end


@mutant(
    "lets a replica join without the epoch's start",
    0,
    (IsrTracker, "_may_join"),
    (LeadingReplica, "_holds_epoch_start"),
)
def _(original: Any, self: Any, *more: Any) -> bool:
    if isinstance(self, PartitionReplica):
        return True
    start, self.epoch_start = self.epoch_start, -1
    may = original(self, *more)
    self.epoch_start = start
    return may


@mutant("lets a replica join below the high watermark", 16, (IsrTracker, "_may_join"))
def _(original: Any, self: Any, replica: int, high_watermark: int, *more: Any) -> bool:
    return original(self, replica, 0, *more)


@mutant("lets a replica join that would leave at once", 387, (IsrTracker, "_may_join"))
def _(original: Any, self: Any, replica: int, high_watermark: int, brokers: Any, now_ms: int) -> bool:
    known = self._followers.get(replica)
    caught_up_ms = known.caught_up_ms if known else 0
    if known is not None:
        known.caught_up_ms = known.fetched_ms
    may = original(self, replica, high_watermark, brokers, now_ms)
    if known is not None:
        known.caught_up_ms = caught_up_ms
    return may


@mutant("lets any life of a replica join", 4, (IsrTracker, "_may_join"))
def _(original: Any, self: Any, replica: int, high_watermark: int, brokers: Any, now_ms: int) -> bool:
    known = self._followers.get(replica)
    believed = {replica: (known.incarnation, known.store_uuid.partition("/")[0])} if known else {}
    return original(self, replica, high_watermark, believed, now_ms)


@mutant("counts what an earlier life of a replica had", 106, (IsrTracker, "fetched"))
def _(original: Any, self: Any, fetch: core.Fetch, *more: Any) -> bool:
    known = self._followers.get(fetch.broker_id)
    fetch = replace(fetch, incarnation=max(fetch.incarnation, known.incarnation) if known else fetch.incarnation)
    if known is not None:
        known.store_uuid = fetch.store_uuid
        known.incarnation = fetch.incarnation
    return original(self, fetch, *more)


@mutant("shrinks the ISR below the floor", 0, (IsrTracker, "wanted"))
def _(original: Any, self: Any, *more: Any) -> Any:
    state = self.state
    self.state = replace(state, min_insync_replicas=1)
    wanted = original(self, *more)
    self.state = state
    return wanted


@mutant("takes an unknown outcome for a failure", 579, (PartitionReplica, "_on_isr_answered"))
def _(original: Any, self: Any, event: core.IsrAnswered, now_ms: int, wall_ms: int) -> Any:
    if event.outcome is core.Outcome.UNKNOWN and self._proposal is not None and self.in_sync is not None:
        self._proposal = self.in_sync.proposed = None
        return []
    return original(self, event, now_ms, wall_ms)


@mutant("leads with what an earlier life was elected to", 7, (LeadingReplica, "_begin_leading"))
def _(original: Any, self: Any, state: core.PartitionStateChanged, now_ms: int, wall_ms: int) -> Any:
    return original(self, replace(state, incarnations={}), now_ms, wall_ms)


@mutant("keeps to the ISR that it has lost", 41, (FollowingReplica, "_must_resign"))
def _(original: Any, self: Any, state: core.PartitionStateChanged) -> bool:
    return False


@mutant("hands out as long as the control plane answers", 2667, (ReplicaState, "may_deliver"), has_groups=True)
def _(original: Any, self: Any, now_ms: int) -> bool:
    return self.may_serve(now_ms)


@mutant("takes a fetch that lay on the way for news", 9115, (IsrTracker, "fetched"), has_groups=True)
def _(original: Any, self: Any, fetch: core.Fetch, leader_end: int, now_ms: int, sent: Any = None, *more: Any) -> bool:
    return original(self, fetch, leader_end, now_ms, now_ms, *more)


@mutant("takes a fetch that was answered for one that waits", 0, (IsrTracker, "fetch_ended"), has_groups=True)
def _(original: Any, self: Any, broker_id: int, poll: core.Poll) -> None:
    pass


@mutant("answers acks while an earlier leader may hand out", 2851, (ReplicaState, "may_settle"), has_groups=True)
def _(original: Any, self: Any, now_ms: int) -> bool:
    return True


# --- answers to clients ---------------------------------------------------------------------------------------------


@mutant("answers a duplicate before it is committed", 0, (ReplicaShell, "_answer_duplicate"))
def _(original: Any, self: Any, submission: Any, base: int) -> None:
    submission.base, submission.repeats = base, True
    self._finish(submission)


@mutant("remembers producers in memory only", 3, (Disk, "producers"))
def _(original: Any, self: Any) -> Producers:
    return Producers([])


@mutant("does not fence producers", 9, (Producers, "find_duplicate"))
def _(original: Any, self: Any, stamp: core.Stamp, count: int) -> Any:
    known = self._by_id.get(stamp.producer_id)
    if known is not None and stamp.producer_epoch < known.epoch:
        return None
    return original(self, stamp, count)


@mutant("hands out what is not committed", 0, (ReplicaShell, "read"))
def _(original: Any, self: Any, offset: int) -> Any:
    if original(self, offset) is None:
        return None
    first = self.disk.index_from(offset)
    return self.disk.batches[first : first + 20]


@mutant("answers who waits when the offset is another's", 5, (ReplicaShell, "_on_step_down"))
def _(original: Any, self: Any, leader: int | None) -> None:
    pass


# --- the control plane -----------------------------------------------------------------------------------------------


@mutant("lets its log begin where no record says so", 2, (ReplicaShell, "droppable"))
def _(original: Any, self: ReplicaShell) -> int:
    committed = [batch.base for batch in self.disk.batches if batch.end <= self.replica.high_watermark]
    return max(committed, default=0)


@mutant("elects the same leader in the same epoch", 7, (controller, "elect"))
def _(original: Any, held: PartitionState, *more: Any, **named: Any) -> PartitionState:
    elected = original(held, *more, **named)
    if elected.leader != held.leader:
        return elected
    return msgspec.structs.replace(elected, leader_epoch=held.leader_epoch)


@mutant("elects who is not in sync", 0, (controller, "_is_clean"))
def _(original: Any, held: PartitionState, broker_id: int, live: Any) -> bool:
    return broker_id in live and broker_id in held.replicas


@mutant("compares no logs after a power cut", 75, (controller, "is_cold"))
def _(original: Any, held: PartitionState, live: Any) -> bool:
    return False


@mutant("gives the number of a lost lease once more", 739, (GroupsFold, "go_on_after"), has_groups=True)
def _(original: Any, self: GroupsFold, before: GroupsFold) -> None:
    pass


@mutant("hands over to one that has just started anew", 3584, (controller, "elect"))
def _(original: Any, held: PartitionState, live: Any, **named: Any) -> PartitionState:
    if named.get("log_ends"):
        return original(held, live, **named)
    alike = {member: live[member].incarnation for member in held.isr if member in live}
    elected = original(msgspec.structs.replace(held, incarnations={**held.incarnations, **alike}), live, **named)
    known = {member: incarnation for member, incarnation in alike.items() if member == elected.leader}
    return msgspec.structs.replace(elected, incarnations={**held.incarnations, **known})


@mutant("empties the ISR of all but the new leader", 0, (controller, "elect"))
def _(original: Any, held: PartitionState, *more: Any, **named: Any) -> PartitionState:
    elected = original(held, *more, **named)
    return msgspec.structs.replace(elected, isr=(elected.leader,)) if elected.leader is not None else elected


@mutant("takes a new disk for the old one", 17, (World, "replace_disk"))
def _(original: Any, self: World, node: Node) -> None:
    store_uuid = node.disk.store_uuid
    original(self, node)
    node.disk.store_uuid = store_uuid


@mutant("lets a deposed controller write", 16, (Membership, "check_controller"))
def _(original: Any, self: Membership, found: Any, epoch: int) -> None:
    pass


@mutant("writes whatever version stands", 17, (Membership, "check_version"))
def _(original: Any, self: Membership, found: Any, version: int) -> None:
    pass
