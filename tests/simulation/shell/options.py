"""The options and faults of a run, drawn from its seed."""

from __future__ import annotations

from dataclasses import dataclass, fields
from random import Random
from typing import Any

FAULTS = {
    "kill": 4.0,
    "power": 4.0,
    "crash_at_io": 5.0,
    "kill_leader": 3.0,
    "lose_grants": 3.0,
    "kill_controller": 1.5,
    "power_all": 0.7,
    "pause": 4.0,
    "expire": 3.0,
    "cut": 5.0,
    "isolate": 3.0,
    "zookeeper_gone": 1.0,
    "adopt": 1.5,
    "fsync_fails": 1.5,
    "disk_full": 2.0,
    "full_at_roll": 3.0,
    "disk_slow": 2.0,
    "stop": 1.5,
    "clock": 1.5,
    "purge": 1.0,
    "retain": 2.0,
    "replace_disk": 1.0,
    "flip": 2.0,
    "flip_epochs": 1.0,
    "compact": 1.0,
    "rest": 1.0,
    "ruin": 0.4,
}


# What the command line asks for, of all runs.
wanted = {"schedules": 0}


@dataclass(frozen=True)
class Options:
    seed: int
    brokers: int
    partitions: int
    replication: int
    min_insync: int | None
    session_s: float
    lag_ms: int
    fetch_wait_ms: int
    segment_bytes: int
    delay_s: float
    tail: float
    drop: float
    repeat: float
    plane_loss: float
    stale_reads: float
    missed: float
    outliving_s: float
    faults_s: float
    calm_s: float  # after the faults, before clients end
    producers: int
    consumers: int
    rivals: int
    members: int
    holders: int
    browses: bool
    deliveries: int
    pace_s: float
    compacts: bool
    lanes: bool
    compresses: bool
    asks: bool
    grows: bool
    briefs: bool
    restarts: bool
    kinds: bool  # of content
    idle_s: float  # of a consumer, between two receives
    few_files: bool
    limits: bool  # of the queue group
    all_verbs: bool  # releases, rejects, and acks without receipts
    # Not drawn: recurring messages. With them brokers read definitions, which makes other runs.
    schedules: int = 0

    def lines(self) -> list[str]:
        return [f"{each.name}: {getattr(self, each.name)}" for each in fields(self)]


@dataclass(frozen=True)
class Step:
    """A fault: what it does is drawn from its own seed, so that it stays the same when others are left out."""

    at_s: float
    kind: str
    seed: int

    def __str__(self) -> str:
        return f"{self.at_s:.3f} s {self.kind}"


def sometimes(random: Random, chance: float, value: Any, otherwise: Any = 0.0) -> Any:
    return value if random.random() < chance else otherwise


def draw(seed: int) -> tuple[Options, list[Step]]:
    random, more = Random(f"shell {seed}"), Random(f"shell, more {seed}")
    brokers = random.choice((3, 3, 3, 4, 1))
    replication = min(brokers, random.choice((3, 3, 3, 2)))
    options = Options(
        seed=seed,
        brokers=brokers,
        partitions=random.choice((1, 1, 2)),
        replication=replication,
        min_insync=random.choice((None, None, None, 1, min(2, replication))),
        session_s=random.choice((1.5, 2.0, 3.0)),
        lag_ms=random.choice((500, 1_000, 2_000)),
        fetch_wait_ms=random.choice((100, 250, 500)),
        segment_bytes=random.choice((64, 64, 80, 128, 1024)) * 1024,
        delay_s=random.choice((0.0002, 0.001, 0.005)),
        tail=sometimes(random, 0.3, random.random() * 0.05),
        drop=sometimes(random, 0.3, random.random() * 0.03),
        repeat=sometimes(random, 0.4, random.random() * 0.05),
        plane_loss=sometimes(random, 0.4, random.random() * 0.05),
        stale_reads=sometimes(random, 0.4, random.random() * 0.3),
        missed=sometimes(random, 0.3, random.random() * 0.05),
        outliving_s=sometimes(random, 0.3, 1.0),
        faults_s=random.choice((3.0, 4.0, 6.0, 8.0)),
        producers=random.choice((1, 2, 3)),
        consumers=random.choice((0, 2, 3, 3)),
        rivals=random.choice((0, 1)),
        members=random.choice((0, 0, 1, 2)),
        holders=random.choice((0, 0, 0, 2)),
        browses=random.random() < 0.3,
        deliveries=random.choice((2, 5, 100)),
        pace_s=random.choice((0.04, 0.08, 0.15)),
        compacts=random.random() < 0.3,
        lanes=more.random() < 0.3,
        compresses=more.random() < 0.3,
        asks=more.random() < 0.3,
        grows=more.random() < 0.15,
        briefs=more.random() < 0.15,
        restarts=more.random() < 0.7,
        kinds=more.random() < 0.3,
        calm_s=more.choice((0.0, 1.0, 3.0)),
        idle_s=more.choice((0.1, 0.1, 1.0)),
        few_files=more.random() < 0.2,
        limits=more.random() < 0.3,
        all_verbs=more.random() < 0.3,
        schedules=wanted["schedules"],
    )
    # Many kinds at once hide what a few of them do together, again and again.
    share = random.choice((0.1, 0.2, 0.6))
    weights = {kind: weight for kind, weight in FAULTS.items() if random.random() < share}
    if options.compacts and "compact" in weights:
        weights["compact"] = 6.0
    steps: list[Step] = []
    at_s = random.random()
    gap_s = random.choice((0.25, 0.5, 1.0, 2.0))
    while weights and at_s < options.faults_s:
        (kind,) = random.choices(list(weights), list(weights.values()))
        steps.append(Step(at_s, kind, random.getrandbits(32)))
        at_s += random.expovariate(1 / gap_s)
    return options, steps
