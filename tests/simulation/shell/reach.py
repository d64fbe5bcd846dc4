"""The branches of the shell that runs reach, for `--coverage`. Imported before the product, whose imports count too."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Arcs = tuple[int, int]

ROOMS = [f"{Path(__file__).parents[3]}/broker/{room}/*" for room in ("core", "partition", "storage", "cluster")]
measured: Any = None
if "--coverage" in sys.argv:
    from coverage import Coverage  # type: ignore[import-not-found,unused-ignore]

    measured = Coverage(data_file=None, branch=True, concurrency=["greenlet"], config_file=False, include=ROOMS)
    measured.start()


def reached() -> dict[str, list[Arcs]]:
    """Return what this process has run, by file, if that is measured."""
    if measured is None:
        return {}
    measured.stop()
    data = measured.get_data()
    return {file: data.arcs(file) or [] for file in data.measured_files()}


def report(arcs: Mapping[str, Iterable[Arcs]]) -> None:
    """Print what the runs have reached, room by room, if that is measured."""
    if measured is not None:
        measured.stop()
        measured.get_data().add_arcs(arcs)
        for room in ROOMS:
            measured.report(include=room, show_missing=True, precision=1)
