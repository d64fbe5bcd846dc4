"""The branches that runs reach, for `--coverage`. Imported before the product, whose imports count too.

A run of the core's simulator keeps what it reached in build/; a report of the shell's runs has that in it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Arcs = tuple[int, int]

HOME = Path(__file__).parents[2]
ROOMS = [f"{HOME}/broker/{room}/*" for room in ("core", "partition", "storage", "cluster")]
KEPT = HOME / "build/coverage-of-core"
measured: Any = None
if "--coverage" in sys.argv:
    from coverage import Coverage, CoverageData  # type: ignore[import-not-found,unused-ignore]

    measured = Coverage(data_file=None, branch=True, concurrency=["greenlet"], config_file=False, include=ROOMS)
    measured.start()


def reached() -> dict[str, list[Arcs]]:
    """Return what this process has run, by file, if that is measured."""
    if measured is None:
        return {}
    measured.stop()
    data = measured.get_data()
    return {file: data.arcs(file) or [] for file in data.measured_files()}


def keep() -> None:
    """Keep what this process has run, for a later report, if that is measured."""
    if measured is not None:
        KEPT.unlink(missing_ok=True)
        KEPT.parent.mkdir(exist_ok=True)
        core = CoverageData(str(KEPT))
        core.add_arcs(reached())
        core.write()


def report(arcs: Mapping[str, Iterable[Arcs]]) -> None:
    """Print what the runs have reached, room by room, if that is measured."""
    if measured is not None:
        measured.stop()
        measured.get_data().add_arcs(arcs)
        changed_s = max(file.stat().st_mtime for file in (HOME / "broker").rglob("*.py"))
        if KEPT.exists() and KEPT.stat().st_mtime > changed_s:  # else its line numbers may be wrong
            core = CoverageData(str(KEPT))
            core.read()
            measured.get_data().update(core)
        for room in ROOMS:
            measured.report(include=room, show_missing=True, precision=1)
