"""How fast the disk commits lately, and so on which thread the next small transaction is committed.

A change to a native thread and back costs more than a commit on a fast disk. So a small transaction that nothing but a
fast disk can delay is committed on the event loop. Until then the broker does nothing else, so this must stay short:

- Commits took less than FAST_S on average lately. They are measured on both threads, so a slow disk is never tried
  again on the event loop: native threads find out that it has become fast.
- After a commit of the event loop took longer than SLOW_S, the following ones go to native threads for PAUSE times as
  long as it took. So a disk that stalls now and then blocks the event loop for a twentieth of the time at most.
- Only one partition is writing, and no followers of it write at the same time. Commits of several overlap on native
  threads, and the file system joins their fsyncs.
"""

from __future__ import annotations

SMALL_BYTES = 64 * 1024
SMALL_MESSAGES = 200

FAST_S = 0.001
SLOW_S = 0.005
PAUSE = 20
# The weight of the newest commit in the average.
WEIGHT = 1 / 8


class DiskPace:
    """The pace of one broker's disk. `average_s` is a decaying average, slow until commits were measured; `writers` is
    the number of partitions that are writing."""

    def __init__(self) -> None:
        self.average_s = SLOW_S
        self.writers = 0
        self._paused_until_s = 0.0

    @staticmethod
    def is_small(size_bytes: int, messages: int) -> bool:
        """Whether a transaction writes so little that its time is the disk's."""
        return size_bytes <= SMALL_BYTES and messages <= SMALL_MESSAGES

    def is_fast(self, now_s: float) -> bool:
        """Whether the event loop may wait for the commit of a small transaction."""
        return self.average_s <= FAST_S and now_s >= self._paused_until_s

    def committed(self, seconds: float, now_s: float, *, on_loop: bool) -> None:
        """Note how long a small transaction took."""
        self.average_s += (min(seconds, SLOW_S) - self.average_s) * WEIGHT
        if on_loop and seconds > SLOW_S:
            self._paused_until_s = now_s + PAUSE * seconds
