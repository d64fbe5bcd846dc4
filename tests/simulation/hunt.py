"""`make mutants`: plant each bug, and look for a seed that finds it. One that survives 2,000 seeds, and its own, is a
hole in the checker. A bug is found by a violation or an assertion; one whose run ends with any other error, as a wrong
signature's TypeError, is planted wrong and proves nothing.

    python -m simulation.hunt                all
    python -m simulation.hunt NAME...        some
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from multiprocessing import Pool
from unittest.mock import patch

from simulation import delivery_mutants
from simulation.group_options import EVERY
from simulation.mutants import MUTANTS, RARE
from simulation.run import error_of
from support import ledger

SEEDS_MAX = 2_000
assert delivery_mutants.mutant  # imported for its side effect: it registers its mutants


class PlantedWrong(Exception):
    """A run with a planted bug ended with an error that no check raised."""


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
    that found it once after them. None if all hold. Raise PlantedWrong."""
    with planted(name):
        for seed in chain(first, seeds_for(name), [MUTANTS[name].seed]):
            error, _ = error_of(seed)
            if error is None:
                continue
            failure = f"{type(error).__name__} {error}"
            if not isinstance(error, AssertionError):
                raise PlantedWrong(f"seed {seed}, {failure}") from error
            return seed, failure
    return None


def hunted(name: str) -> tuple[bool, str]:
    """Return whether a seed found this bug, and what there is to say."""
    try:
        found = killer_of(name)
    except PlantedWrong as error:
        return False, f"IS PLANTED WRONG: {error}"
    return (True, f"seed {found[0]}, {found[1]}") if found else (False, "SURVIVES")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="of planted bugs (default: all)")
    parser.add_argument("--ledger", action="store_true", help="enter the run")
    given = parser.parse_args()
    began = time.monotonic()
    names = given.names or [name for name in MUTANTS if name not in RARE]
    survivors = []
    run = ledger.Run("mutants", 0, writes=given.ledger)
    with run, Pool() as pool:
        for name, (found, report) in zip(names, pool.imap(hunted, names), strict=True):
            print(f"{name}: {report[:150]}", flush=True)
            run.count({"planted": 1, "found": int(found)})
            if not found:
                survivors.append(name)
                run.fail(name)
    print(f"{len(names) - len(survivors)} of {len(names)} found, {time.monotonic() - began:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
