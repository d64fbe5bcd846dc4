"""Bad histories: each rule of the simulated shell's checkers finds a run that breaks it, and lets a good one be."""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from simulation.shell.checker import Checker, Known, leaps
from simulation.shell.defects import DEFECTS, changed
from simulation.shell.history import DEDUP_WINDOW_MS as DAY_MS
from simulation.shell.history import Delivered, Granted, History
from simulation.shell.limits import Limits
from simulation.shell.loop import Process
from support.log_files import IDENTITY

from portalmq.broker.core.fold import PartitionFold
from portalmq.broker.server.adoption import ReplicaFound
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.schema import LogIdentity
from portalmq.broker.storage.state import StateFile
from portalmq.control_plane.plane import Check, Node, Set
from portalmq.control_plane.state import CONTROLLER_EPOCH, PARTITIONS, PartitionState, encode

P = ("t", 0)
KEY = ("id", 0)
S = 1_000_000_000


class Broken(Exception):
    """The rule that a checker named."""


def fail(rule: str, why: str, cause: object = None) -> None:
    raise Broken(rule)


def receipt(epoch: int, number: int = 0, count: int = 0) -> str:
    head = bytes(18) + count.to_bytes(4) + number.to_bytes(4) + epoch.to_bytes(4) + number.to_bytes(15)
    return urlsafe_b64encode(head + bytes(3)).decode()


def history(**options: Any) -> History:
    it = History(fail, **options)
    it.sends([b"a", b"b", b"c"], P, is_once=True)
    it.place(P).watermark = 10
    it.acked([b"a"], P, 0, 1 * S)
    return it


def got(
    at_s: float, *, offset: int = 0, value: bytes = b"a", attempt: str = "x", epoch: int = 1, number: int = 0
) -> Delivered:
    began_ns = int(at_s * S)
    return Delivered(P, offset, value, receipt(epoch, number), attempt, began_ns, began_ns + S // 10, 2 * S)


def stored(it: History, values: dict[int, bytes], start: int = 0, **more: Any) -> None:
    it.stored({P: (start, values)}, **more)


def twice_leased(it: History) -> None:
    it.delivered(got(5))
    it.delivered(got(6, attempt="y", number=1))


def anothers_lease(it: History) -> None:
    it.delivered(got(5))
    it.delivered(got(6, attempt="y"))


def anothers_lease_split(it: History) -> None:
    it.delivered(got(5))
    it.delivered(got(6, attempt="y")._replace(receipt=receipt(1, count=3)))


def taken_by_offset(it: History) -> None:
    it.delivered(got(5, attempt="x:1"))
    it.ends([(P, 0)], "y")
    it.ended([(P, 0)], "y", 6 * S)


def extended_lease(it: History) -> None:
    it.delivered(got(5))
    it.extends([receipt(1)], 8 * S)
    it.extended([receipt(1)], 6 * S, 8 * S)
    it.delivered(got(7.5, attempt="y", number=1))


def lease_extended_once_for_sure(it: History) -> None:
    it.delivered(got(5))
    it.extends([receipt(1)], 8 * S)
    it.extended([receipt(1)], 6 * S, 8 * S)
    it.extends([receipt(1)], 9 * S)  # without an answer
    it.delivered(got(7.5, attempt="y", number=1))


def older_receipt(it: History) -> None:
    it.delivered(got(5))
    it.delivered(got(6, attempt="y", epoch=2, number=1))
    it.accepted([receipt(1)], int(6.5 * S), int(6.6 * S))


def kept_grant(it: History) -> None:
    """The next leader has the GRANT at offset 7, for its epoch begins above."""
    it.delivered(got(5))
    it.delivered(got(7.5, attempt="y", number=1))
    it.grants(P, 0, 1, 1, 7, int(7.5 * S))
    it.leads(P, [(1, 0), (2, 8)])
    it.accepted([receipt(1)], int(8.5 * S), int(8.6 * S))


def regranted(it: History) -> None:
    """The fail-over has lost a GRANT, and the next leader has leased the message again."""
    it.delivered(got(5))
    it.delivered(got(7.5, attempt="y", number=1))
    it.grants(P, 0, 1, 1, 7, int(7.5 * S))
    it.leads(P, [(1, 0), (2, 7)])
    it.grants(P, 0, 2, 1, 8, 8 * S)
    it.delivered(got(8, attempt="z", epoch=2, number=1))
    it.accepted([receipt(1)], int(8.5 * S), int(8.6 * S))


def after_its_ack(it: History) -> None:
    it.delivered(got(5))
    it.done([receipt(1)], 6 * S)
    it.delivered(got(7, attempt="y", number=1))


def refused_commit(it: History) -> None:
    it.calls_commit("c", [b"o"], None)
    it.commit_refused("c")
    stored(it, {0: b"a", 1: b"o"})


def refused_and_accepted(it: History) -> None:
    it.calls_commit("c", [b"o"], None, [receipt(1)])
    it.commit_refused("c")
    name, outputs = it.calls_commit("d", [b"p"], None, [receipt(1)])
    assert (name, outputs) == ("c", (b"o",))
    it.commit_acked(name)


def accepted_and_refused(it: History) -> None:
    it.calls_commit("c", [b"o"], None)
    it.commit_acked("c")
    it.commit_refused("c")


def half_a_commit(it: History) -> None:
    it.calls_commit("c", [b"o", b"p"], None)
    stored(it, {0: b"a", 1: b"o"})


def lost_outputs(it: History) -> None:
    it.calls_commit("c", [b"o"], None)
    it.commit_acked("c")
    stored(it, {0: b"a"})


def refused_value(it: History) -> None:
    it.refused([b"b"])
    stored(it, {0: b"a", 1: b"b"})


def two_owners(it: History) -> None:
    it.assigned("m1", 3, {P: 0}, 0, S)
    it.assigned("m2", 3, {P: 0}, 2 * S, 3 * S)


def older_generation(it: History) -> None:
    it.assigned("m1", 3, {P: 0}, 0, S)
    it.assigned("m2", 4, {P: 0}, 2 * S, 3 * S)
    it.committed("m1", 3, P, 5, 4 * S, 5 * S)


def offset_that_falls(it: History) -> None:
    it.committed("m1", 3, P, 5, 1 * S, 2 * S)
    it.found_committed(P, 4, 3 * S)


def lower_commit(it: History) -> None:
    it.committed("m1", 3, P, 5, 1 * S, 2 * S)
    it.committed("m1", 3, P, 4, 3 * S, 4 * S)


def token_that_falls(it: History) -> None:
    it.locked("l", Granted("a", 5, 0, S, S))
    it.locked("l", Granted("b", 5, 3 * S, 4 * S, S))


def two_holders(it: History) -> None:
    it.locked("l", Granted("a", 5, 0, S // 2, S))
    it.locked("l", Granted("b", 6, S // 4, S // 2, S))


def outlived_renewal(it: History) -> None:
    it.locked("l", Granted("a", 5, 0, S, S))
    it.locked("l", Granted("b", 6, 3 * S, 4 * S, S))
    it.renewed("l", 5, 5 * S)


def delivered_in_a_pause(it: History) -> None:
    it.paused_ns = 4 * S
    it.delivered(got(5))


def dead_twice(it: History) -> None:
    it.stored({P: (0, {0: b"a"})}, [(P, 0, b"a"), (P, 0, b"a")])


def another_letter(it: History) -> None:
    it.stored({P: (0, {0: b"a"})}, [(P, 0, b"b")])


def limited(in_flight: int | None, per_key: int | None) -> History:
    """A group with two leased messages of one key."""
    it = history()
    it.limits = Limits(in_flight=in_flight, per_key=per_key, keys={b"a": b"k", b"b": b"k", b"c": b"other"})
    it.delivered(got(5))
    it.delivered(got(5, offset=1, value=b"b", attempt="y", number=1))
    return it


BAD: dict[str, tuple[str, Callable[[History], None]]] = {
    "another value at an offset": ("I2", lambda it: it.delivered(got(5, value=b"b"))),
    "an acknowledged message is lost": ("I3", lambda it: stored(it, {1: b"b"})),
    "an acknowledged message is elsewhere": ("I3", lambda it: stored(it, {4: b"a"})),
    "outputs of an answered commit are lost": ("I3", lost_outputs),
    "a delivery above the high watermark": ("I5", lambda it: it.delivered(got(5, offset=10, value=b"b"))),
    "a read above the high watermark": ("I5", lambda it: it.browsed(P, 10, [(10, b"b")], 2 * S, S)),
    "stored twice": ("I9", lambda it: stored(it, {0: b"a", 1: b"b", 2: b"b"})),
    "an older generation commits": ("I10", older_generation),
    "two owners in a generation": ("I11", two_owners),
    "an offset that falls": ("I11", offset_that_falls),
    "a commit below a commit": ("I11", lower_commit),
    "a start beyond the high watermark": ("I11", lambda it: it.assigned("m", 1, {P: 11}, 0, S)),
    "a commit beyond the high watermark": ("I11", lambda it: it.commits(P, 11)),
    "two leases at a time": ("I12", twice_leased),
    "another's lease": ("I12", anothers_lease),
    "another's lease, by another receipt": ("I12", anothers_lease_split),
    "an ack for a holder takes another's message": ("I12", taken_by_offset),
    "a lease that was extended": ("I12", extended_lease),
    "a lease that was extended, and may be again": ("I12", lease_extended_once_for_sure),
    "an older receipt counts": ("I12", older_receipt),
    "an older receipt counts after a fail-over": ("I12", kept_grant),
    "an older receipt counts after another lease": ("I12", regranted),
    "delivered after its ack": ("I12", after_its_ack),
    "nobody sent it": ("I13", lambda it: stored(it, {0: b"a", 1: b"phantom"})),
    "half of a commit": ("I13", half_a_commit),
    "a delivery while the group is paused": ("pause", delivered_in_a_pause),
    "a dead letter twice": ("I13", dead_twice),
    "a dead letter of another value": ("I2", another_letter),
    "a refused message is there": ("I15", refused_value),
    "a refused commit is there": ("I15", refused_commit),
    "a refused commit is accepted": ("I15", refused_and_accepted),
    "an accepted commit is refused": ("I15", accepted_and_refused),
    "an old answer": ("I16", lambda it: it.browsed(P, 0, [], 5 * S, S)),
    "more are out than the group may have": ("limits", lambda it: limited(in_flight=1, per_key=None)),
    "more are out than a key may have": ("limits", lambda it: limited(in_flight=None, per_key=1)),
    "a fencing token again": ("lock", token_that_falls),
    "two holders of a lock": ("lock", two_holders),
    "a renewal after the next grant": ("lock", outlived_renewal),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_history_is_found(name: str) -> None:
    rule, play = BAD[name]
    with pytest.raises(Broken, match=f"^{rule}$"):
        play(history())


def test_leases_within_the_limits_are_let_be() -> None:
    it = limited(in_flight=2, per_key=2)
    it.releases([receipt(1)])
    it.delivered(got(6, offset=2, value=b"c", attempt="z", number=2))
    it.delivered(got(6.5, offset=2, value=b"c", attempt="z", number=2))  # the same attempt again
    it.delivered(got(9, attempt="w", number=3))  # the leases before are over


@pytest.mark.parametrize("is_replaced", [True, False])
def test_a_message_that_was_compacted_away_counts_in_no_limit(is_replaced: bool) -> None:
    it = history()
    it.limits = Limits(in_flight=1, per_key=1, keys={b"a": b"k", b"b": b"k", b"c": b"k" if is_replaced else b"other"})
    it.delivered(got(5))
    it.read(P, [(1, b"c")])
    it.place(P).compacted = 2
    with nullcontext() if is_replaced else pytest.raises(Broken, match="limits"):
        it.delivered(got(5, offset=2, value=b"b", attempt="y", number=1))


def test_a_good_history_is_let_be() -> None:
    it = history()
    it.delivered(got(5))
    it.delivered(got(5.5))  # the same attempt again
    it.releases([receipt(1)])
    it.delivered(got(6, attempt="y", number=1))
    it.delivered(got(6.5, attempt="z", epoch=2, number=2))  # a fail-over lost the grant
    it.accepted([receipt(2, 2)], 7 * S, 7 * S)
    it.done([receipt(2, 2)], 7 * S)
    it.browsed(P, 0, [(0, b"a")], 5 * S, S)
    it.browsed(P, 1, [], 5 * S, S)
    it.calls_commit("c", [b"o", b"p"], None)
    it.commit_acked("c")
    it.assigned("m1", 3, {P: 0}, 0, S)
    it.committed("m1", 3, P, 5, 1 * S, 2 * S)
    it.assigned("m2", 4, {P: 5}, 2 * S, 3 * S)
    it.found_committed(P, 5, 4 * S)
    it.locked("l", Granted("a", 5, 0, S, S))
    it.locked("l", Granted("b", 6, 3 * S, 4 * S, S))
    it.stored({P: (0, {0: b"a", 1: b"o", 2: b"p"})}, [(P, 0, b"a"), (P, 2, b"p")])


@pytest.mark.parametrize("epochs", [[(1, 0), (2, 7)], [(1, 0), (2, 3), (4, 9)]])
def test_an_older_receipt_may_count_after_a_fail_over_that_lost_the_grant(epochs: list[tuple[int, int]]) -> None:
    it = history()
    it.leads(P, [(1, 0)])
    it.delivered(got(5))
    it.delivered(got(7.5, attempt="y", number=1))
    it.grants(P, 0, 1, 1, 7, int(7.5 * S))
    it.leads(P, epochs)
    it.leads(P, [(1, 0)])  # the former leader does not know of it yet
    it.accepted([receipt(1)], int(8.5 * S), int(8.6 * S))


@pytest.mark.parametrize("behind", [False, True])
def test_outputs_may_be_there_twice_when_most_clocks_were_set_ahead_by_a_window(behind: bool) -> None:
    it = history()
    it.calls_commit("c", [b"o"], None)
    stored = {P: (0, {0: b"a", 1: b"o", 2: b"o"})}, [(P, 0, b"a"), (P, 0, b"a")]
    with pytest.raises(Broken):
        it.stored(*stored)
    it.set_clocks([-DAY_MS if behind else 0, 0, -DAY_MS if behind else DAY_MS])
    with pytest.raises(Broken):
        it.stored(*stored)
    it.set_clocks([0 if behind else DAY_MS, 0, DAY_MS])
    it.stored(*stored)


def test_a_lease_runs_from_the_first_copy_of_its_request() -> None:
    it = history()
    it.grants(P, 0, 1, 0, 7, 4 * S)
    it.delivered(got(5))
    it.delivered(got(6.1, attempt="y", number=1))


def test_a_lease_from_before_the_pause_may_be_told_in_it() -> None:
    it = history()
    it.paused_ns = 4 * S
    it.grants(P, 0, 1, 0, 7, 3 * S)
    it.delivered(got(5))


def test_a_lock_granted_before_zookeeper_lost_it_is_told_later() -> None:
    it = history()
    it.forget_locks(6 * S)
    it.locked("lock", Granted("x", 1, 5 * S, 7 * S, S))
    it.locked("lock", Granted("y", 9, 8 * S, 9 * S, S))
    with pytest.raises(Broken, match="lock"):
        it.locked("lock", Granted("x", 9, 10 * S, 11 * S, S))


@pytest.mark.parametrize("told_s", [4, 7])
def test_tokens_rise_though_zookeeper_lost_the_locks(told_s: int) -> None:
    it = history()
    if told_s < 6:
        it.locked("lock", Granted("x", 4, 3 * S, told_s * S, S))
    it.forget_locks(6 * S)
    if told_s > 6:
        it.locked("lock", Granted("x", 4, 3 * S, told_s * S, S))
    with pytest.raises(Broken, match="lock"):
        it.locked("lock", Granted("y", 4, 8 * S, 9 * S, S))


def test_two_receipts_of_one_lease_release_it() -> None:
    it = history()
    it.delivered(got(5))
    it.delivered(got(5.2)._replace(receipt=receipt(1, count=3)))
    it.releases([receipt(1, count=3)])
    it.delivered(got(6, attempt="y", number=1))


def test_any_receipt_of_a_purged_message_may_count() -> None:
    it = history()
    it.delivered(got(5))
    it.delivered(got(7.5, attempt="y", number=1))
    it.place(P).purged = 1
    it.accepted([receipt(1)], 8 * S, 8 * S)


@pytest.mark.parametrize("is_refused", [True, False])
def test_any_receipt_of_an_outdated_message_counts(is_refused: bool) -> None:
    it = history()
    it.delivered(got(5))
    it.delivered(got(7.5, attempt="y", number=1))
    it.outdates(P, 0)
    if is_refused:
        it.lost_outdated(P, 0)
    with pytest.raises(Broken) if is_refused else nullcontext():
        it.accepted([receipt(1)], 8 * S, 8 * S)


@pytest.mark.parametrize("is_told_before", [True, False])
def test_a_lease_whose_grant_the_disk_refused_may_be_given_to_others(is_told_before: bool) -> None:
    it = history()
    if is_told_before:
        it.delivered(got(5))
    it.lost_grant(P, 0, 1, 0)
    it.delivered(got(5))
    it.delivered(got(6, attempt="y", number=1)._replace(deadline_ms=1))
    with pytest.raises(Broken, match="I12"):
        it.delivered(got(6.5, attempt="z", number=2))


@pytest.mark.parametrize("is_told_before", [True, False])
def test_a_lease_whose_extend_the_disk_refused_lasts_as_its_grant_says(is_told_before: bool) -> None:
    def lost() -> History:
        it = history()
        it.delivered(got(5)._replace(deadline_ms=7_000))
        it.extends([receipt(1)], 9 * S)
        if is_told_before:
            it.extended([receipt(1)], 6 * S, 9 * S)
        it.lost_extend(P, 0, 1, 9_000, int(6.2 * S))
        if not is_told_before:
            it.extended([receipt(1)], 6 * S, 9 * S)
        return it

    lost().delivered(got(7, attempt="y", number=1))
    with pytest.raises(Broken, match="I12"):
        lost().delivered(got(6.5, attempt="y", number=1))
    it = lost()
    it.extends([receipt(1)], int(9.5 * S))
    it.extended([receipt(1)], int(6.5 * S), int(9.5 * S))
    with pytest.raises(Broken, match="I12"):
        it.delivered(got(9, attempt="y", number=1))


@pytest.mark.parametrize(("early_ns", "is_whole"), [(900_000, False), (1_100_000, True)])
def test_a_deadline_leaves_out_less_than_a_millisecond(early_ns: int, is_whole: bool) -> None:
    it = history()
    it.delivered(got(5))
    it.extends([receipt(1)], 8 * S)
    it.extended([receipt(1)], 6 * S, 8 * S)
    other = got(7.5, attempt="y", number=1)._replace(got_ns=8 * S - early_ns)
    with pytest.raises(Broken, match="I12") if is_whole else nullcontext():
        it.delivered(other)


# --- the rules of replicas -------------------------------------------------------------------------------------------


def checker() -> Checker:
    """Three brokers, of which 1 leads the partition and all are in sync, with ten records."""
    world: Any = SimpleNamespace(
        options=SimpleNamespace(compacts=False, partitions=1, replication=3),
        zookeeper=SimpleNamespace(on_changed=[], on_commit=[]),
        fail=fail,
        note=lambda *_: None,
        loop=SimpleNamespace(now_ns=0),
        reached={"acked": 0},
        machines={number: SimpleNamespace(has_lost_writes=False, store_uuid=f"store-{number}") for number in (1, 2, 3)},
    )
    it = Checker(world)
    it.partitions[KEY] = known = Known("t", 2, state())
    known.watermark = 10
    for number in (1, 2, 3):
        known.of(number).end = 10
        known.of(number).watermark = 10
    it.history.place(P).watermark = 10
    return it


def state(**changes: Any) -> PartitionState:
    given: dict[str, Any] = {"leader": 1, "leader_epoch": 5, "isr": (1, 2, 3), **changes}
    stores = {number: f"store-{number}" for number in (1, 2, 3)}
    return PartitionState(replicas=(1, 2, 3), store_uuids=stores, incarnations={}, **given)


def process(number: int = 1) -> Process:
    return Process(f"b{number}.1", number)


def replica(**changes: Any) -> Any:
    it: dict[str, Any] = {"end": 10, "high_watermark": 10, "highest_epoch": 5, "epochs": [(1, 0), (5, 4)], **changes}
    in_sync = SimpleNamespace(
        state=SimpleNamespace(leader_epoch=5, min_insync_replicas=2, replicas=(1, 2, 3)),
        maximal=frozenset(it.get("maximal", (1, 2, 3))),
        epoch_start=5,
    )
    core = SimpleNamespace(
        in_sync=in_sync, **{name: it[name] for name in ("high_watermark", "highest_epoch", "epochs")}
    )
    return SimpleNamespace(
        topic="t", topic_id=KEY[0], number=KEY[1], store_uuid="store-1", replica=core,
        state_file=SimpleNamespace(path=Path("b1/state.sqlite")),
        action_queue=SimpleNamespace(remembering=it.get("remembering")),
        log=SimpleNamespace(end_offset=it["end"]), start=SimpleNamespace(offset=it.get("start", 0)),
    )  # fmt: skip


def batch(crc: int) -> Any:
    return SimpleNamespace(base_offset=10, leader_epoch=5, crc=crc, holes=0, kind=0)


def forgotten_epoch(it: Checker) -> None:
    it.acts(process(), replica(), 6)
    it.opened(process(), replica())


def test_what_a_damaged_file_of_epochs_had_may_be_forgotten_until_it_is_whole() -> None:
    it = checker()
    it.damaged_epochs(1)
    it.acts(process(), replica(), 6)
    it.opened(process(), replica())  # before anybody has read the damage
    it.acts(process(), replica(), 6)
    it.opened(process(), replica())
    it._without_epochs.clear()
    it.opened(process(), replica())
    it.acts(process(), replica(), 6)
    with pytest.raises(Broken, match="I1"):
        it.opened(process(), replica())


def forgotten_at_work(it: Checker) -> None:
    it.stepped(process(), replica())
    it.stepped(process(), replica(highest_epoch=4))


def two_leaders(it: Checker) -> None:
    it.stepped(process(), replica())
    it.stepped(process(2), replica())


def other_records(it: Checker) -> None:
    it.appended(1, KEY, [batch(1)], 11)
    it.appended(2, KEY, [batch(2)], 11)


def acknowledged_early(it: Checker) -> None:
    it.partitions[KEY].most[1] = 11
    it.history.sends([b"a"], P, is_once=True)
    it.acked([b"a"], 0, 10)


def falling_watermark(it: Checker) -> None:
    it.stepped(process(), replica())
    it.stepped(process(), replica(high_watermark=9))


def saved_without_its_epoch(it: Checker) -> None:
    it.acts(process(), replica(), 6)
    it.saved_anew(process(), StateFile(Path("b1"), identity=LogIdentity("cluster", "t", *KEY)))


def adopted_without_all(it: Checker) -> None:
    it.partitions[KEY].state = None
    it.partitions[KEY].held[3].end = 9
    it._tree_changed(f"{PARTITIONS}/id/0", Node(f"{PARTITIONS}/id/0", encode(state()), 0))


def last_whole_copy(it: Checker) -> None:
    it.partitions[KEY].lossy |= {1, 2, 3}
    it.set_aside(1, KEY)


def election(*guards: Any) -> tuple[list[Any], dict[str, Node]]:
    path = f"{PARTITIONS}/id/0"
    return [Set(path, encode(state(leader=2, leader_epoch=6)), 3), *guards], {path: Node(path, encode(state()), 3)}


BAD_REPLICAS: dict[str, tuple[str, Callable[[Checker], None]]] = {
    "an epoch that falls": ("I1", lambda it: it.changed(KEY, state(), state(leader_epoch=4))),
    "another leader in an epoch": ("I1", lambda it: it.changed(KEY, state(), state(leader=2))),
    "two processes lead in an epoch": ("I1", two_leaders),
    "an epoch forgotten over a restart": ("I1", forgotten_epoch),
    "an epoch forgotten at work": ("I1", forgotten_at_work),
    "an epoch forgotten in a file that is saved again": ("I1", saved_without_its_epoch),
    "other records of an epoch": ("I2", other_records),
    "a log shorter than what was fsynced": ("I3", lambda it: it.opened(process(), replica(end=9))),
    "acknowledged with one copy": ("I4", acknowledged_early),
    "a high watermark that falls": ("I5", falling_watermark),
    "a high watermark beyond a member": ("I5", lambda it: it.stepped(process(), replica(end=11, high_watermark=11))),
    "an ISR that its leader does not count": ("I6", lambda it: it.stepped(process(), replica(maximal=(1, 2)))),
    "an ISR below the floor": ("I6", lambda it: it.changed(KEY, state(isr=(1, 2)), state(isr=(1,)))),
    "served before its epoch is on disk": (
        "I1",
        lambda it: it.begins_to_serve(process(), replica(remembering=object())),
    ),
    "adopted without all": ("I7", adopted_without_all),
    "joined without all": ("I7", lambda it: it.changed(KEY, state(isr=(1, 2)), joined(it))),
    "cut below the high watermark": ("I8", lambda it: it.cut(2, KEY, 9)),
    "epochs out of order": ("I8", lambda it: it.stepped(process(), replica(epochs=[(2, 4), (5, 4)]))),
    "elected by a former controller": ("I10", lambda it: it.committing(*election())),
    "removed without a purge": ("I14", lambda it: it.stepped(process(), replica(start=1))),
    "a whole copy set aside": ("I14", lambda it: it.set_aside(1, KEY)),
    "the last whole copy set aside": ("I17", last_whole_copy),
}


def joined(it: Checker) -> PartitionState:
    it.partitions[KEY].held[3].end = 9
    return state()


def test_an_adoption_may_find_more_than_a_broker_had_fsynced() -> None:
    """Seed 66733: the broker ended for a failed fsync, and its records outlived it."""
    it = checker()
    it.partitions[KEY].held[3].end = 9
    it.read_by_adoption({KEY: [ReplicaFound(3, end=10)]})
    it.changed(KEY, state(isr=(1, 2)), state())


@pytest.mark.parametrize("name", BAD_REPLICAS)
def test_a_bad_replica_is_found(name: str) -> None:
    rule, play = BAD_REPLICAS[name]
    with pytest.raises(Broken, match=f"^{rule}$"):
        play(checker())


def test_a_leader_whose_epoch_is_not_on_disk_leads_nothing() -> None:
    it = checker()
    it.stepped(process(), replica(maximal=(1, 2), remembering=object()))


def test_good_replicas_are_let_be() -> None:
    it = checker()
    it.opened(process(), replica())
    it.stepped(process(), replica())
    it.changed(KEY, state(), state(leader=2, leader_epoch=6, isr=(2, 3)))
    it.changed(KEY, state(isr=(1, 2)), state())
    it.appended(1, KEY, [batch(1)], 11)
    it.appended(2, KEY, [batch(1)], 11)
    it.history.sends([b"a"], P, is_once=True)
    it.acked([b"a"], 0, 10)
    it.cut(2, KEY, 10)
    it.committing(*election(Check(CONTROLLER_EPOCH, 3)))
    it.partitions[KEY].lossy.add(3)
    it.set_aside(3, KEY)
    it.opened(process(3), replica(end=0))


def test_a_member_whose_log_was_damaged_while_it_joined_may_set_it_aside() -> None:
    it = checker()
    it.partitions[KEY].lossy.add(3)
    it.partitions[KEY].beheaded.add(3)
    it.changed(KEY, state(isr=(1, 2)), state())
    it.set_aside(3, KEY)


@pytest.mark.parametrize("name", DEFECTS)
def test_the_text_that_a_defect_replaces_is_in_the_product(name: str) -> None:
    assert changed(name)


def test_a_log_leaps_where_its_time_was_put_ahead_by_a_window():
    """Found by `make simulate-shell SEED=63981`: its outputs were forgotten then."""
    for stamps, expected in ([1, 5, DAY_MS], False), ([1, 5, DAY_MS + 5], True), ([], False):
        assert leaps([SimpleNamespace(appended_at_ms=each) for each in stamps]) == expected


def test_a_state_file_that_is_written_again_keeps_the_epoch_it_had(tmp_path: Path) -> None:
    """The file of all epochs has it as well, and so hides what is forgotten here."""
    epochs = EpochFile(tmp_path)
    epochs.save({IDENTITY.key: 7})
    state_file = StateFile(tmp_path, identity=IDENTITY, epochs=epochs)
    state_file.save(PartitionFold(), 0)
    it = checker()
    it.in_state(state_file)
    state_file._start_over()
    it.saved_anew(process(), state_file)
    state_file._highest_epoch, state_file._knows_epoch = -1, True
    state_file._start_over()
    with pytest.raises(Broken, match="I1"):
        it.saved_anew(process(), state_file)
    state_file.close()
    epochs.close()
