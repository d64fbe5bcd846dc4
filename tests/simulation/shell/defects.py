"""Defects that the shell once had, or might have, put in one at a time: a simulation that does not find them proves
nothing.

Each is a change of the product's text. `plant` fails where the text is not there any more.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from portalmq.broker.cluster import replica_opener, unclean_election
from portalmq.broker.cluster.clock_agreement import ClockAgreement
from portalmq.broker.core.fold import SpanFold
from portalmq.broker.core.queue.delivery import GroupDelivery
from portalmq.broker.core.queue.key_order import KeyQueues
from portalmq.broker.core.queue.limits import Allowance
from portalmq.broker.partition.appending import AppendingPartition
from portalmq.broker.partition.isr_updates import IsrUpdates
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.retention import Retention
from portalmq.broker.server.adoption import Adoption
from portalmq.broker.storage import recovery, segment, state, wal
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.state import StateFile


class Edit(NamedTuple):
    owner: Any
    name: str
    now: str
    then: str


DEFECTS: dict[str, tuple[Edit, ...]] = {
    "one wrong clock decides what is old": (
        Edit(ClockAgreement, "compare", "self._clock.agreed_ms = ", "_ = "),
        Edit(ClockAgreement, "compare", "self._note(own, is_split=agreed is None)", "pass"),
        Edit(Retention, "_age_ms", "wall_ms(), oldest_ms)", "wall_ms(), oldest_ms) and clock.wall_ms()"),
        Edit(Retention, "retain", "min(age_ms, now_ms) - group_expiry_ms", "age_ms - group_expiry_ms"),
    ),
    "a roll that fails half way leaves its file": (
        Edit(segment.Segment, "create", "_remove_again(creating, path, folder)", "creating.unlink(missing_ok=True)"),
        Edit(recovery, "_is_stray", "if len(segments) < 2:", "if True:"),
    ),
    "a replica is set aside on the word of the ISR on paper": (
        Edit(unclean_election, "is_whole_elsewhere", "    for other in others:", "    for other in ():"),
        Edit(unclean_election, "is_whole_elsewhere", "False if others", "True if others"),
    ),
    "an adoption leaves out what a damaged replica alone held": (
        Edit(Adoption, "losses", "_may_lack(found, topic, self._least_insync(topic))", "False"),
    ),
    "an older receipt ends a later epoch's lease": (
        Edit(SpanFold, "is_later", "self.leader_epoch in (0, leader_epoch)", "True"),
    ),
    "a repeated receive is given what others hold": (
        Edit(GroupDelivery, "replay", "and (span.leader_epoch, span.lease) == (leader_epoch, lease)", ""),
    ),
    "a refused commit call is accepted later": (
        Edit(GroupDelivery, "ackable", "good = not span.is_later", "good = not span.leased or not span.is_later"),
    ),
    "a damaged file of epochs forgets the others": (
        Edit(EpochFile, "save", "self._mend(known | higher, fault)", "self._mend(higher, fault)"),
        Edit(EpochFile, "repair", "self._replace(known)", "self._replace({key: known[key]})"),
    ),
    "a damaged state file forgets the epoch": (
        Edit(StateFile, "_start_over", "if not self._knows_epoch:", "if True:"),
        Edit(StateFile, "_start_over", "max(self._highest_epoch, self._readable_epoch())", "-1"),
    ),
    "a leader elected by its own reading does not wait": (
        Edit(IsrUpdates, "_tell", "partition.step(LeaderAnswered", "(lambda _: None)(LeaderAnswered"),
    ),
    "a leader serves before its epoch is on disk": (
        Edit(Partition, "_begin_to_serve", " or self.action_queue.remembering:", ":"),
        Edit(AppendingPartition, "_submit", "if self.action_queue.remembering is not None:", "if False:"),
    ),
    "a log that is read elsewhere is synced without its lost pages": (
        Edit(wal, "make_durable", '_write_again(Path(f"{connection.filename}-wal"))', "sync_wal(connection)"),
    ),
    "a group has more in flight than its limit": (
        Edit(Allowance, "messages", "max(0, self._limits.in_flight_max - delivery.in_flight(now_ms))", "UNLIMITED"),
    ),
    "a key has more in flight than its limit": (
        Edit(KeyQueues, "set_limits", "self.width = limits.width", "self.width = limits.width + 2"),
    ),
}  # fmt: skip


def plant(name: str) -> None:
    """Put a defect back, in this process."""
    for (owner, function), source in changed(name).items():
        found: dict[str, Any] = {}
        exec("from __future__ import annotations\n" + source, _code(owner, function).__globals__, found)
        for user in (owner, *_USERS.get(function, ())):
            setattr(user, function, found[function])


def changed(name: str) -> dict[tuple[Any, str], str]:
    """Return the text of each function that a defect changes."""
    sources: dict[tuple[Any, str], str] = {}
    for owner, function, now, then in DEFECTS[name]:
        source = sources.get((owner, function)) or textwrap.dedent(inspect.getsource(_code(owner, function)))
        assert now in source, f"{function} does not contain {now!r} any more"
        sources[owner, function] = source.replace(now, then)
    return sources


def _code(owner: Any, name: str) -> Callable[..., Any]:
    held = vars(owner)[name]
    code: Callable[..., Any] = getattr(held, "__func__", held)
    return code


# Modules that have imported a function by its name.
_USERS = {"is_whole_elsewhere": (replica_opener,), "make_durable": (segment, state)}
