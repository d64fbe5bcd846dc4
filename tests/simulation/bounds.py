"""Small bounds in the runs of some seeds, so that a short run comes where only a large queue does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

from portalmq.broker.core import fold
from portalmq.broker.core.queue import selection, spans
from portalmq.broker.core.replica import leader
from portalmq.broker.core.stream import membership

Bounds = Mapping[tuple[Any, str], int]

CORE: Bounds = {
    (spans, "STALE_WAKEUPS_MAX"): 3,
    (spans, "STALE_AT_ONCE"): 2,
    (spans, "RETURNED_AT_ONCE"): 2,
    (spans, "RANGES_IN_A_PASS"): 2,
    (selection, "FAR_APART"): 3,
    (selection, "HELD_MAX"): 4,
    (selection, "OUTSTANDING_MAX"): 12,
    (selection, "SPANS_PER_SELECTION"): 2,
    (fold, "LARGE_BYTES"): 64,
    (leader, "UNCOMMITTED_MAX"): 20,
    (membership, "MEMBERS_MAX"): 2,
}


@contextmanager
def of(seed: int, bounds: Bounds = CORE) -> Iterator[None]:
    """Make some of the bounds small for the block, in a third of the seeds."""
    random = Random(f"bounds of {seed}")
    chance = random.choice([0.0, 0.0, 0.5])
    with ExitStack() as stack:
        for each, small in bounds.items():
            if random.random() < chance:
                stack.enter_context(patch.object(*each, small))
        yield
