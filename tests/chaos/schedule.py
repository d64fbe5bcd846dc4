"""The schedule of a run's faults: a pure function of the seed and the length."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

SESSION_S = 6.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 3.0, 9.0
QUIET_AT_END_S = 5.0
# Each kind, and how often it is in one deck of faults.
DECK = {
    "kill the leader": 3,
    "kill the controller": 2,
    "kill a follower": 2,
    "kill all brokers": 1,
    "stop a broker (SIGSTOP)": 3,
    "restart one after another (SIGTERM)": 1,
    "restart ZooKeeper": 1,
    "ZooKeeper gone for 30 s": 1,
    "cut one way": 2,
    "black hole": 2,
    "refuse connections": 1,
    "slow link": 2,
    "fill the disk": 2,
    "empty a disk": 1,
    "move a clock": 1,
    "kill a client": 2,
    "stop a client (SIGSTOP)": 1,
}
LINK_KINDS = ("client-broker", "broker-broker", "broker-ZooKeeper")


@dataclass(frozen=True)
class Fault:
    """`at_s` counts from the start of the faults. `choice` in [0, 1) selects among the targets there are then."""

    at_s: float
    kind: str
    length_s: float
    choice: float
    details: dict[str, Any] = field(default_factory=dict)


def schedule(seed: int, seconds: float, only: tuple[str, ...] = ()) -> list[Fault]:
    chance = random.Random(seed)
    faults, at_s = [], chance.uniform(1, SHORTEST_PAUSE_S)
    for kind in _kinds(chance, only):
        length_s = _length_s(kind, chance)
        details = _details(kind, chance)
        if at_s + min(length_s, SHORTEST_PAUSE_S) > seconds - QUIET_AT_END_S:
            return faults
        faults.append(Fault(round(at_s, 2), kind, round(length_s, 2), chance.random(), details))
        at_s += chance.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
    raise AssertionError("the kinds never end")


def _kinds(chance: random.Random, only: tuple[str, ...]) -> Iterator[str]:
    """Deck after deck, each shuffled: all kinds come about equally early, whatever the seed."""
    while True:
        deck = [kind for kind, count in DECK.items() for _ in range(count) if not only or kind in only]
        chance.shuffle(deck)
        yield from deck


def _length_s(kind: str, chance: random.Random) -> float:
    if kind == "stop a broker (SIGSTOP)":
        return chance.uniform(0.5, 3.0) * SESSION_S
    if kind == "ZooKeeper gone for 30 s":
        return 30.0
    if kind.startswith("kill"):
        return chance.choice((0.0, chance.uniform(0.2, 3.0), chance.uniform(3.0, 10.0)))
    return chance.uniform(2.0, 12.0)


def _details(kind: str, chance: random.Random) -> dict[str, Any]:
    if kind in ("cut one way", "black hole", "refuse connections", "slow link"):
        details = {"link": chance.choice(LINK_KINDS), "way": chance.choice(("in", "out"))}
        return {**details, "slow_s": chance.choice((0.02, 0.1, 0.4))} if kind == "slow link" else details
    if kind == "fill the disk":
        return {"to": chance.choice(("low water", "the last byte"))}
    if kind == "move a clock":
        return {"hours": chance.choice((-1.0, 1.0))}
    return {}
