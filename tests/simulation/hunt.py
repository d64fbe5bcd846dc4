"""`make mutants`: plant each bug, and look for a seed that finds it. One that survives 2,000 seeds, and its own, is a
hole in the checker.

    python -m simulation.hunt                all
    python -m simulation.hunt NAME...        some
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from multiprocessing import Pool
from unittest.mock import patch

from simulation import delivery_mutants
from simulation.group_options import EVERY
from simulation.mutants import MUTANTS
from simulation.run import failure_of

SEEDS_MAX = 2_000
assert delivery_mutants.mutant  # imported for its side effect: it registers its mutants


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant the bug in the core, the controller or the simulated broker for the block."""
    with ExitStack() as stack:
        for owner, target, replacement in MUTANTS[name].patches:
            stack.enter_context(patch.object(owner, target, replacement))
        yield


def seeds_for(name: str) -> Iterable[int]:
    """SEEDS_MAX runs; a bug of delivery is hunted in those that have groups."""
    return range(EVERY - 1, EVERY * SEEDS_MAX, EVERY) if MUTANTS[name].has_groups else range(SEEDS_MAX)


def killer_of(name: str, first: Iterable[int] = ()) -> tuple[int, str] | None:
    """Return a seed whose run breaks with this bug, and its failure; `first` are tried before all others, and the seed
    that found it once after them. None if all hold."""
    with planted(name):
        for seed in chain(first, seeds_for(name), [MUTANTS[name].seed]):
            failure, _ = failure_of(seed)
            if failure is not None:
                return seed, failure
    return None


def main() -> int:
    began = time.monotonic()
    names = sys.argv[1:] or list(MUTANTS)
    survivors = []
    with Pool() as pool:
        for name, found in zip(names, pool.imap(killer_of, names), strict=True):
            print(f"{name}: " + (f"seed {found[0]}, {found[1]}"[:150] if found else "SURVIVES"), flush=True)
            if found is None:
                survivors.append(name)
    print(f"{len(names) - len(survivors)} of {len(names)} found, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
