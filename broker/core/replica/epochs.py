"""The table of leader epochs and their first offsets, by which two logs are compared (KIP-101, KIP-279).

epochs   (1, 0)      (3, 57)          (4, 90)
log      |---- 1 ----|------- 3 ------|--- 4 --> end
"""

from __future__ import annotations

from collections.abc import Iterable


class Epochs:
    """(leader epoch, first offset) of each epoch. Invariant: both columns rise strictly."""

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self.entries = [(epoch, start) for epoch, start in entries]
        self._check()

    @property
    def last(self) -> int:
        """The epoch of the last record; 0 in an empty log."""
        return self.entries[-1][0] if self.entries else 0

    def add(self, epoch: int, start: int) -> None:
        self.entries.append((epoch, start))
        self._check()

    def start_of(self, epoch: int) -> int | None:
        return next((start for known, start in reversed(self.entries) if known == epoch), None)

    def end_of(self, epoch: int, log_end: int) -> tuple[int, int]:
        """Return the largest known epoch that is not above `epoch`, and the end of its records. Return (0, the first
        epoch's start) if all are above. The last epoch ends with the log."""
        found, end = 0, log_end
        for known, start in self.entries:
            if known > epoch:
                end = start
                break
            found = known
        return found, end

    def truncate(self, end: int) -> None:
        """Drop the epochs that began at or above `end`."""
        self.entries = [(epoch, start) for epoch, start in self.entries if start < end]

    def _check(self) -> None:
        if len(self.entries) > 1:
            (before, start), (after, next_start) = self.entries[-2:]
            assert before < after, self.entries
            assert start < next_start, self.entries
