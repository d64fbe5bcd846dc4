"""Small bounds in the runs of some seeds, so that a short run comes where only a large queue does."""

from __future__ import annotations

from random import Random
from typing import Any

from portalmq.broker.core.queue import selection, spans

SMALL: dict[tuple[Any, str], int] = {
    (spans, "STALE_WAKEUPS_MAX"): 3,
    (spans, "STALE_AT_ONCE"): 2,
    (spans, "RETURNED_AT_ONCE"): 2,
    (spans, "RANGES_IN_A_PASS"): 2,
    (selection, "FAR_APART"): 3,
    (selection, "HELD_MAX"): 4,
    (selection, "OUTSTANDING_MAX"): 12,
    (selection, "SPANS_PER_SELECTION"): 2,
}
LARGE = {each: getattr(*each) for each in SMALL}


def set_for(seed: int) -> None:
    """Make some of the bounds small in a third of the seeds; all others are as they are in a broker."""
    random = Random(f"bounds of {seed}")
    chance = random.choice([0.0, 0.0, 0.5])
    for each, small in SMALL.items():
        setattr(*each, small if random.random() < chance else LARGE[each])
