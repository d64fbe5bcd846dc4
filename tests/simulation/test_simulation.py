"""The core under every fault, over seeds; and the proof that bugs would be found.

A failing seed is replayed, with its trace, by `make simulate SEED=n`. A bug that a seed found is kept as a mutant
(mutants.py), which must be found again, and as a scenario in tests/broker/core: seeds change their meaning whenever the
simulator draws one number more.
"""

from __future__ import annotations

import runpy
from pathlib import Path
from random import Random

import pytest
from simulation.dice import Dice
from simulation.group_options import EVERY
from simulation.hunt import PlantedWrong, killer_of, planted
from simulation.mutants import MUTANTS, RARE, Mutant
from simulation.queue_groups import Receipt, commit_id_of
from simulation.run import failure_of
from simulation.world import World

from portalmq.broker.core.replica.isr import IsrTracker

SEEDS = 1_000
CHUNK = 25
WINDOW = 5


@pytest.mark.parametrize("first", range(0, SEEDS, CHUNK))
def test_no_fault_breaks_an_invariant(first: int) -> None:
    failures = {seed: failure for seed in range(first, first + CHUNK) if (failure := failure_of(seed)[0])}
    assert failures == {}, f"replay with: make simulate SEED={min(failures)}"


@pytest.mark.parametrize("name", [name for name in MUTANTS if name not in RARE])
def test_a_planted_bug_is_found(name: str) -> None:
    seed, step = MUTANTS[name].seed, EVERY if MUTANTS[name].has_groups else 1
    assert killer_of(name, range(seed, seed + WINDOW * step, step)) is not None


@pytest.mark.parametrize("name", RARE)
def test_a_rare_bug_is_found_by_its_scenario(name: str) -> None:
    file, scenario = RARE[name]
    run = runpy.run_path(str(Path(__file__).parents[1] / "broker/core" / file))[scenario]
    run()
    with planted(name), pytest.raises(AssertionError):
        run()


def test_a_bug_that_is_planted_wrong_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TypeError ends every run, and says nothing of the checker."""
    wrong = Mutant("wrong", 0, ((IsrTracker, "fetched", lambda self, fetch: True),))
    monkeypatch.setitem(MUTANTS, wrong.name, wrong)
    with pytest.raises(PlantedWrong, match="TypeError"):
        killer_of(wrong.name)


def test_the_same_seed_gives_the_same_run() -> None:
    traces = []
    for _ in range(2):
        world = World(7, tracing=True)
        world.run()
        traces.append(list(world.trace))
    assert traces[0] == traces[1]
    assert len(traces[0]) > 100


def test_the_dice_draw_the_numbers_of_the_standard_library() -> None:
    """A seed is the same run as ever, whatever draws its numbers."""
    dice, random = Dice(7), Random(7)
    for width in range(300):
        assert dice.randint(5, 5 + width) == random.randint(5, 5 + width)
        assert dice.choice(range(1, 2 + width)) == random.choice(range(1, 2 + width))
        assert dice.sample(range(width), width // 2) == random.sample(range(width), width // 2)


def test_commits_under_two_leases_of_a_message_are_two_commits() -> None:
    """After a lost grant the next one has the same number of deliveries; seed 324443 took the second for a repeat."""
    first, second = Receipt(37, 5, 4, 17), Receipt(37, 5, 4, 20)
    assert repr(first) == repr(second)
    assert commit_id_of("key", [first]) != commit_id_of("key", [second])
    assert commit_id_of("key", [first, second]) == commit_id_of("key", [second, first])


@pytest.mark.parametrize("seed", [328795, 352011])  # in the second one the registration outlived its session
def test_no_election_trusts_the_old_registration_of_a_disk_that_lied(seed: int) -> None:
    """With min_insync_replicas 1 that left the liar alone in the ISR."""
    failure, reached = failure_of(seed)
    assert failure is None
    assert reached["disk lied"]


def test_a_leader_that_does_not_serve_yet_states_no_fold() -> None:
    """The STATE of one with fetched records still to write made replicas forget a lease, in seed 337403."""
    assert failure_of(337403)[0] is None


def test_a_message_may_be_cancelled_after_it_was_delivered() -> None:
    """Its grant was lost, and by the clock of the next leader it was still scheduled. A late ack of it is answered."""
    failure, reached = failure_of(1_018_123)
    assert failure is None
    assert reached["Cancel"]


def test_no_replica_is_lost_for_good_during_an_election() -> None:
    """With min_insync_replicas 1 the election may leave that replica alone in the ISR, and no broker could lead."""
    world = World(7)
    while (session := world.nodes[1].membership.session) is None or not world.is_quiet():
        world.step()
    world.zookeeper.write(session, lambda tree: tree, lambda answer: None, "election", of_partition=True)
    assert not world.is_quiet()
    world.nodes[1].crash()
    assert not world.is_quiet(), "a sent request is carried out, even if its sender ends"
    while world.now <= session.executed_ms:
        world.step()
    assert world.is_quiet()


def test_the_simulation_reaches_the_rare_states() -> None:
    """Counted over some seeds: a fault that is drawn without effect would prove nothing."""
    reached = sum((failure_of(seed)[1] for seed in range(200, 300)), start=World(0).reached)
    rare = [
        what
        for what in ("truncated", "reset", "retained", "duplicate", "disk refused", "sent ahead",
                     "unsynced survived", "left dead", "isr change", "trouble in isr change", "disk_replaced",
                     "bit_flip", "zombie", "crash_all", "disk lied", "cold election",
             "Grant", "Ack", "Nack", "Extend", "Dead", "Redrive", "Drop", "Commit", "Done", "Cancel", "Pause",
             "Reschedule", "Claim",
             "CommitOffset", "Seek", "delivery", "redelivery", "commit call", "stream commit", "generation",
             "coordinator", "output", "output repeated", "zombie receipts", "folds compared",
             "refused illegal_generation", "refused offset_moved", "cut again")
        if reached[what] == 0
    ]  # fmt: skip
    assert rare == []
