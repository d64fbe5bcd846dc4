"""Order by key: of a key's unfinished messages only the first may be delivered, one at a time. With a *width* of N, the
first N may be: a limit of the messages in flight of a key, without an order.

    key A    3 leased | 7 held   9 held         3 is leased, so 7 and 9 wait
    key B    5 held                             4 was acked: 5 is next

With a rate for each key (key_rates.py) a message is held, too, until its key has a token.

A message that waits for an earlier one of its key is `held`: the group's cursor has passed it, and a span remembers it.
The queues are derived from a group's spans and the keys of their messages, so no snapshot holds them. A new leader
rebuilds them, a few messages at a time (`selection.read_keys`); until they are complete no message is in turn. Keys are
identified by a 64-bit hash; 0 means that a message has no key and waits for none.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from itertools import islice

from portalmq.broker.core.queue.key_rates import KeyLimits, KeyRates
from portalmq.broker.core.queue.records import Range

# The most held messages on a partition; the cursor stops there.
HELD_MAX = 10_000


class KeyQueues:
    """The unfinished messages of a group by key. Invariants: a key's queue is sorted and not empty; `_keys` has
    exactly the offsets of all queues; while anything is unread, `_finishes` is empty."""

    def __init__(self, unread: Iterable[Range] = (), finished_at: int = -1, width: int = 1) -> None:
        """`unread` are the ranges to read keys of; `finished_at` is the offset of the last record that finished
        messages."""
        self.width = width
        self.rates = KeyRates()
        self._keys: dict[int, int] = {}
        self._queues: dict[int, list[int]] = {}
        self._delivered: dict[int, set[int]] = {}  # key -> its unfinished messages that were delivered
        self._freed: list[int] = []  # sorted offsets that came into turn when an earlier message finished
        # Messages finished by records that are not committed yet, oldest first: (record, start, end). The next of a key
        # must not be delivered before: if the record were lost, the earlier message would come after the later one.
        self._finishes: deque[tuple[int, int, int]] = deque()
        # Ranges that may hold unfinished messages whose keys are not read yet.
        self._unread: deque[Range] = deque(unread)
        # The last record that finished messages of unknown keys. Messages that wait for them are unknown too, so none
        # is in turn before it is committed. -1: there is none.
        self._unseen = finished_at

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, offset: int, key: int) -> None:
        """Add a message that is delivered or held."""
        if key == 0 or offset in self._keys:
            return
        self._keys[offset] = key
        queue = self._queues.setdefault(key, [])
        insort(queue, offset)
        if queue[-1] != offset and bisect_left(queue, offset) < self.width:
            # A delayed message, due while a later one of its key was leased: its turn comes when that lease ends.
            self.free(offset)

    def mark_delivered(self, offset: int) -> None:
        key = self._keys.get(offset)
        if key is not None:
            self._delivered.setdefault(key, set()).add(offset)

    def finish(self, start: int, end: int, record: int) -> None:
        """Take that messages were finished by the record at that offset."""
        if self._unread:
            self.finish_unseen(record)
            self.done(start, end)
        else:
            self._finishes.append((record, start, end))

    def finish_unseen(self, record: int) -> None:
        """Take that messages in no queue were finished by the record at that offset."""
        self._unseen = max(self._unseen, record)

    def settle(self, committed: int) -> None:
        """Take that all records below `committed` are final."""
        while self._finishes and self._finishes[0][0] < committed:
            _, start, end = self._finishes.popleft()
            self.done(start, end)
        if self._unseen < committed:
            self._unseen = -1

    @property
    def is_settled(self) -> bool:
        return not self._finishes and self._unseen < 0

    @property
    def knows_turns(self) -> bool:
        """True if the messages in turn are known."""
        return self.is_whole and self._unseen < 0

    # --- reading keys ------------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        return not self._unread

    @property
    def unread(self) -> Range:
        """The next range to read."""
        return self._unread[0]

    def read_later(self, start: int, end: int) -> None:
        """Take that finished messages of [start, end) are unfinished again. They are unknown until they are read, so
        pending finishes are applied now: later they would remove these messages too."""
        while self._finishes:
            record, first, last = self._finishes.popleft()
            self.finish_unseen(record)
            self.done(first, last)
        self._unread.append((start, end))

    def read_to(self, offset: int) -> None:
        """Take that the next range is read below `offset`."""
        _, end = self._unread.popleft()
        if offset < end:
            self._unread.appendleft((offset, end))

    # --- messages in turn --------------------------------------------------------------------------------------------

    def done(self, start: int, end: int) -> None:
        """Remove messages of [start, end); the next ones of their keys are in turn."""
        offsets = range(start, end) if end - start <= len(self._keys) else [o for o in self._keys if start <= o < end]
        for offset in offsets:
            key = self._keys.pop(offset, None)
            if key is None:
                continue
            queue = self._queues[key]
            del queue[bisect_left(queue, offset)]
            delivered = self._delivered.get(key)
            if delivered is not None:
                delivered.discard(offset)
                if not delivered:
                    del self._delivered[key]
            if queue:
                self.free(queue[min(self.width, len(queue)) - 1])
            else:
                del self._queues[key]

    def free(self, offset: int) -> None:
        """Note that this message may be in turn."""
        at = bisect_left(self._freed, offset)
        if at == len(self._freed) or self._freed[at] != offset:
            self._freed.insert(at, offset)

    @property
    def freed(self) -> list[int]:
        return self._freed

    def forget_freed(self, offset: int) -> None:
        at = bisect_left(self._freed, offset)
        if at < len(self._freed) and self._freed[at] == offset:
            del self._freed[at]

    def set_limits(self, limits: KeyLimits, now_ms: int) -> None:
        """Take the limits that hold for each key from now on."""
        if limits.width > self.width:
            for queue in self._queues.values():
                for offset in queue[self.width : limits.width]:
                    self.free(offset)
        self.width = limits.width
        self.rates.set(limits.rate_per_s, limits.burst, now_ms)
        self.lift_rates(False, now_ms)

    # --- the rate of a key -------------------------------------------------------------------------------------------

    def lift_rates(self, is_lifted: bool, now_ms: int) -> None:
        """Take whether keys need no tokens, and look again at those that have one now."""
        self.rates.is_lifted = is_lifted
        for key in self.rates.due(now_ms):
            tokens = self.rates.tokens(key, now_ms)
            held = self._held(key)
            for offset in islice(held, tokens):
                self.free(offset)
            if next(held, None) is not None:
                self.rates.wait(key, now_ms, tokens + 1)

    def _held(self, key: int) -> Iterator[int]:
        """Yield the messages of the key that were not delivered, and whose others do not keep them back."""
        delivered = self._delivered.get(key, ())
        for offset in islice(self._queues.get(key, ()), self.width):
            if offset not in delivered:
                yield offset

    def has_token(self, key: int, now_ms: int) -> bool:
        """Return whether the rate allows a message of the key; if not, it waits."""
        if self.rates.tokens(key, now_ms) > 0:
            return True
        self.rates.wait(key, now_ms)
        return False

    def took(self, offset: int, now_ms: int) -> None:
        """Take a token of its key for the message, which is delivered."""
        if not self.rates.has_limit:
            return
        key = self._keys.get(offset, 0)
        self.rates.took(key, now_ms)
        if len(self._queues.get(key, ())) > len(self._delivered.get(key, ())):
            self.rates.wait(key, now_ms)

    def unfinished(self, key: int) -> int:
        """Return how many messages of the key are delivered or held, and unfinished."""
        return len(self._queues.get(key, ()))

    def is_among_first(self, offset: int) -> bool:
        """Return whether the message is one of the first of its key, as many as may be delivered."""
        key = self._keys.get(offset)
        return key is None or bisect_left(self._queues[key], offset) < self.width

    def key_of(self, offset: int) -> int:
        return self._keys.get(offset, 0)

    def delivered(self, key: int) -> Collection[int]:
        """Return the unfinished messages of the key that were delivered."""
        return self._delivered.get(key, ())
