"""The options of a run, drawn from its seed: the cluster, its settings, the severity of the faults."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random

from simulation.group_options import EVENTS_FACTOR, GroupOptions, draw_groups

# The faults and their relative frequency. A seed turns some of them off, so that others dominate.
FAULTS = {
    "crash": 6.0,
    "kill_leader": 4.0,
    "kill_controller": 2.0,
    "crash_all": 0.6,
    "pause": 4.0,
    "pause_leader": 2.0,
    "expire_session": 3.0,
    "cut": 5.0,
    "isolate": 3.0,
    "mistake": 3.0,
    "clog": 3.0,
    "swizzle": 1.0,
    "zookeeper_gone": 1.0,
    "depose_controller": 1.0,
    "disk_full": 2.0,
    "fsync_fails": 1.5,
    "disk_slow": 2.0,
    "disk_replaced": 2.0,
    "bit_flip": 2.0,
    "clock_jump": 1.0,
    "drain": 1.0,
    "retain": 4.0,
    "zombie": 2.0,
}


@dataclass(frozen=True, slots=True)
class Options:
    """`polls`: a fetch waits until there is an answer, and requests renew it meanwhile. `after` is the end of the run:
    all recovers, one broker stays dead, or the faults of the network continue."""

    seed: int
    events: int
    brokers: int
    late_brokers: int
    replication_factor: int
    min_insync: int | None
    session_ms: int
    lag_ms: int
    tick_ms: int
    batch_max: int
    fetch_batches_max: int
    fsync_ms: int
    delay_ms: int
    drop: float
    duplicate: float
    late_copies_ms: int
    heavy_tail: float
    stale_reads: float
    missed_watches: float
    stale_words: float
    connection_loss: float
    outliving_ms: int
    fault_every_ms: int
    trouble_in_isr_change: float
    one_event_at_a_time: bool
    sends_ahead: bool
    polls: bool
    producers: int
    disaster: bool
    after: str
    faults: dict[str, float]
    groups: GroupOptions | None = None

    @property
    def lease_ms(self) -> int:
        return self.session_ms * 2 // 3

    def lines(self) -> list[str]:
        return [f"{name} = {value}" for name, value in dataclasses.asdict(self).items()]


def draw(seed: int, events: int, random: Random) -> Options:
    brokers = random.choice([3, 3, 3, 4, 5])
    replication_factor = random.choice([3, 3, 3, 3, 2, 1])
    silent = random.choice([0.0, 0.3, 0.6, 0.8])
    faults = {name: weight for name, weight in FAULTS.items() if random.random() >= silent}
    rough = random.choice([0.0, 0.0, 0.02, 0.1])
    groups = draw_groups(seed)
    return Options(
        seed=seed,
        events=events * EVENTS_FACTOR if groups else events,
        brokers=brokers,
        late_brokers=random.choice([0, 0, 0, 1, brokers - 1]),
        replication_factor=replication_factor,
        min_insync=random.choice([None, None, 1, 2, 2, min(3, replication_factor)]),
        session_ms=random.choice([1_500, 3_000, 6_000]),
        lag_ms=random.choice([400, 1_000, 3_000]),
        tick_ms=random.choice([100, 200, 300]),
        batch_max=random.choice([1, 3]),
        fetch_batches_max=random.choice([1, 2, 10]),
        fsync_ms=random.choice([1, 5, 20, 60]),
        delay_ms=random.choice([1, 5, 20]),
        drop=rough * random.random(),
        duplicate=random.choice([0.0, 0.02, 0.2]),
        late_copies_ms=random.choice([0, 300, 3_000]),
        heavy_tail=random.choice([0.0, 0.01, 0.1]),
        stale_reads=random.choice([0.0, 0.2, 0.6]),
        missed_watches=random.choice([0.0, 0.1, 0.4]),
        stale_words=random.choice([0.0, 0.1, 0.5]),
        connection_loss=random.choice([0.0, 0.02, 0.2]),
        outliving_ms=random.choice([0, 0, 500, 3_000]),
        fault_every_ms=random.choice([150, 400, 1_000, 2_500]),
        trouble_in_isr_change=random.choice([0.0, 0.2, 0.5]),
        one_event_at_a_time=random.random() < 0.5,
        sends_ahead=seed % 3 != 2,
        polls=seed // 4 % 2 == 1,
        producers=random.choice([1, 2, 4]),
        disaster=random.random() < 0.04 and groups is None,
        after=random.choice(["whole", "whole", "one dead", "rough"]),
        faults=faults or {"crash": 1.0},
        groups=groups,
    )
