"""How often messages of a key are delivered: a bucket of tokens for each, one a delivery, filled by the leader's clock.

A bucket is one number, the time at which it is full again (the generic cell rate algorithm of ITU-T I.371): a delivery
moves it on by the time that one token takes. So a key whose time is over needs no row. A new leader begins with full
buckets, and so does a key that has to be forgotten because too many others were delivered since.

    key A    full at 12:00:07, a token takes 1 s, 5 fit     at 12:00:05 there are 3 of them
    key B    full at 12:00:20                               none before 12:00:16: B *waits*

A key waits while messages of it are kept back for a token. The times are kept in a heap: a timer, or the next receive,
takes those that are over, and looks again at the messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import NamedTuple

# The most keys whose buckets a partition remembers, of those that are not full.
KEYS_MAX = 100_000
# Full buckets that a delivery forgets.
FORGOTTEN_AT_ONCE = 2
UNLIMITED = 1 << 62
# Of a token: less than this is missing because of rounding.
ROUNDING = 1e-6


class KeyLimits(NamedTuple):
    """`width`: the most messages of a key in flight. `rate_per_s`, `burst`: its tokens a second, and the most that it
    may have; None: no such limit, and the tokens of a second, at least one."""

    width: int = 1
    rate_per_s: float | None = None
    burst: float | None = None


class KeyRates:
    """The buckets of the keys of one group on one partition. Invariants: at most KEYS_MAX rows; the rows of the heap
    that are not stale are those of `_waits`."""

    def __init__(self) -> None:
        # Nothing is kept back, and no token is taken.
        self.is_lifted = False
        self._rate_per_s: float | None = None
        self._token_ms = 0.0
        self._burst = 1.0
        self._full_at_ms: dict[int, float] = {}  # the key that was delivered last comes last
        self._waits: dict[int, int] = {}  # key -> when it has its next token
        self._heap: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._full_at_ms)

    @property
    def has_limit(self) -> bool:
        return self._rate_per_s is not None

    def set(self, rate_per_s: float | None, burst: float | None, now_ms: int) -> None:
        """Take the limit that holds from now on. The tokens that a key has used stay used."""
        most = max(1.0, (rate_per_s or 1.0) if burst is None else float(burst))
        if (rate_per_s, most) == (self._rate_per_s, self._burst):
            return
        token_ms = 0.0 if rate_per_s is None else 1_000 / rate_per_s
        factor = token_ms / self._token_ms if self._token_ms else 0.0
        self._full_at_ms = {
            key: now_ms + (at_ms - now_ms) * factor
            for key, at_ms in self._full_at_ms.items()
            if at_ms > now_ms and factor
        }
        self._rate_per_s, self._token_ms, self._burst = rate_per_s, token_ms, most
        for key in self._waits:
            self._wait_until(key, now_ms)

    def tokens(self, key: int, now_ms: int) -> int:
        """Return how many messages of the key may be delivered now."""
        if key == 0 or not self.has_limit or self.is_lifted:
            return UNLIMITED
        used_ms = self._full_at_ms.get(key, 0.0) - now_ms
        return int(self._burst + ROUNDING) if used_ms <= 0 else max(0, int(self._tokens_less(used_ms)))

    def _tokens_less(self, used_ms: float) -> float:
        return self._burst - used_ms / self._token_ms + ROUNDING

    def took(self, key: int, now_ms: int) -> None:
        """Note that a message of the key was delivered."""
        if key == 0 or not self.has_limit or self.is_lifted:
            return
        at_ms = max(self._full_at_ms.pop(key, 0.0), now_ms) + self._token_ms
        self._forget(now_ms)
        self._full_at_ms[key] = at_ms

    def _forget(self, now_ms: int) -> None:
        """Forget keys that were delivered long ago: those with a full bucket, and any while there are too many."""
        for _ in range(FORGOTTEN_AT_ONCE):
            first = next(iter(self._full_at_ms), None)
            if first is None or (len(self._full_at_ms) < KEYS_MAX and self._full_at_ms[first] > now_ms):
                return
            del self._full_at_ms[first]

    # --- keys that wait ----------------------------------------------------------------------------------------------

    def wait(self, key: int, now_ms: int, token: int = 1) -> None:
        """Have the key looked at again when it has so many tokens, if it may ever have."""
        if not self.has_limit or token > self._burst + ROUNDING:
            return
        missing = token - self._tokens_less(max(0.0, self._full_at_ms.get(key, 0.0) - now_ms))
        self._wait_until(key, now_ms + max(0, int(missing * self._token_ms) + 1 if missing > 0 else 0))

    def _wait_until(self, key: int, at_ms: int) -> None:
        if self._waits.get(key) != at_ms:
            self._waits[key] = at_ms
            heappush(self._heap, (at_ms, key))

    def due(self, now_ms: int) -> Iterator[int]:
        """Yield the keys whose wait is over, and all of them while the limit is lifted; they wait no longer."""
        while self._heap and (self._heap[0][0] <= now_ms or self.is_lifted):
            at_ms, key = heappop(self._heap)
            if self._waits.get(key) == at_ms:
                del self._waits[key]
                yield key

    def next_at_ms(self) -> int | None:
        """Return when the next key has a token, None if none waits."""
        while self._heap and self._waits.get(self._heap[0][1]) != self._heap[0][0]:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None
