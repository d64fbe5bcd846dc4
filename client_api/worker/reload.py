"""The files of a program under development, and whether they changed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

log = logging.getLogger("portalmq.worker")

FILES_MAX = 10_000
LEFT_OUT = frozenset({"__pycache__", "node_modules", "site-packages", "venv", "build", "dist"})


class SourceWatch:
    """Compares the times of all Python files below `directories` with those of the last look. Hidden folders and
    environments are left out, and so are files after the first `files_max`."""

    def __init__(self, directories: Sequence[Path], files_max: int = FILES_MAX) -> None:
        self._directories = directories
        self._files_max = files_max
        self._times = self._look()

    def changed(self) -> list[str]:
        """Return the files that are new, changed or gone since the last call."""
        before, self._times = self._times, self._look()
        return sorted(name for name in before.keys() | self._times.keys() if before.get(name) != self._times.get(name))

    def _look(self) -> dict[str, int]:
        times: dict[str, int] = {}
        for file in self._files():
            if len(times) >= self._files_max:
                log.warning("only the first %d Python files are watched", self._files_max)
                break
            try:
                times[file] = os.stat(file).st_mtime_ns
            except OSError:  # gone since it was listed
                continue
        return times

    def _files(self) -> Iterator[str]:
        for directory in self._directories:
            for folder, folders, files in os.walk(directory):
                folders[:] = sorted(each for each in folders if each not in LEFT_OUT and not each.startswith("."))
                yield from (os.path.join(folder, each) for each in sorted(files) if each.endswith(".py"))
