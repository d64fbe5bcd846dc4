"""Order by key: of all messages of a key that are not done, the first one is next, and one at a time is out.

    key A    3 leased | 7 held   9 held         3 is out, so 7 and 9 wait
    key B    5 held                             4 was acked just now: 5 is next

What waits for an earlier message of its key is `held`: the group's cursor has passed it, and a span remembers it. The
book is derived from the spans of a group and from the keys of their messages, so it is in no snapshot: whoever begins
to lead builds it anew, a few messages at a time (`choice.read_keys`), and until it is whole it tells nobody's turn.
Keys are known by a hash of 64 bits; 0 says that a message has no key and waits for nobody.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

from portalmq.broker.core.queue.records import Range

# How many messages may be held on a partition; the cursor does not go on while so many are.
HELD_MAX = 10_000


class KeyQueues:
    """The unfinished messages of a group by their key.

    Invariants: a key's queue is sorted and not empty; `_keys` has exactly the offsets of all queues; while anything is
    unread, nothing is in `_finishes`.
    """

    def __init__(self, unread: Iterable[Range] = (), finished_at: int = -1) -> None:
        """`unread` is what the book is to be built of; `finished_at` the record that finished messages last."""
        self._keys: dict[int, int] = {}
        self._queues: dict[int, list[int]] = {}
        self._out: dict[int, int] = {}  # key -> the message of it that was handed out last
        self._freed: list[int] = []  # sorted offsets whose turn came when an earlier message was done
        # What is finished by records that are not committed yet, oldest first: (record, start, end). The next of a key
        # must not go before that: if the record were lost, the earlier message would come after the later one.
        self._finishes: deque[tuple[int, int, int]] = deque()
        # Where messages may be unfinished that are not in the book yet.
        self._unread: deque[Range] = deque(unread)
        # The last record that finished messages which the book did not know: it cannot say what waits for them, so
        # nobody has a turn before it is committed. -1: there is none.
        self._unseen = finished_at

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, offset: int, key: int) -> None:
        """A message that is handed out, or held."""
        if key == 0 or offset in self._keys:
            return
        self._keys[offset] = key
        queue = self._queues.setdefault(key, [])
        insort(queue, offset)
        if queue[0] == offset and len(queue) > 1:
            # A delayed one, due when a later one of its key was out already: with the end of that lease it is its turn.
            self.free(offset)

    def handed_out(self, offset: int) -> None:
        key = self._keys.get(offset)
        if key is not None:
            self._out[key] = offset

    def finish(self, start: int, end: int, record: int) -> None:
        """Messages were finished by the record at that offset."""
        if self._unread:
            self.finish_unseen(record)
            self.done(start, end)
        else:
            self._finishes.append((record, start, end))

    def finish_unseen(self, record: int) -> None:
        """Messages that are in no queue were finished by the record at that offset."""
        self._unseen = max(self._unseen, record)

    def settle(self, committed: int) -> None:
        """All records below `committed` are final."""
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
        """Whether it can be told whose turn it is."""
        return self.is_whole and self._unseen < 0

    # --- what is unread ----------------------------------------------------------------------------------------------

    @property
    def is_whole(self) -> bool:
        return not self._unread

    @property
    def unread(self) -> Range:
        """What is to be read next."""
        return self._unread[0]

    def read_later(self, start: int, end: int) -> None:
        """Messages of [start, end) that were done are unfinished again. They are not in the book until they are read:
        so what was being finished leaves it now, and not them later."""
        while self._finishes:
            record, first, last = self._finishes.popleft()
            self.finish_unseen(record)
            self.done(first, last)
        self._unread.append((start, end))

    def read_to(self, offset: int) -> None:
        """Of what is to be read next all below `offset` is in the book."""
        _, end = self._unread.popleft()
        if offset < end:
            self._unread.appendleft((offset, end))

    # --- whose turn it is --------------------------------------------------------------------------------------------

    def done(self, start: int, end: int) -> None:
        """Messages of [start, end) that are not in question any more: the next of their keys have their turn."""
        offsets = range(start, end) if end - start <= len(self._keys) else [o for o in self._keys if start <= o < end]
        for offset in offsets:
            key = self._keys.pop(offset, None)
            if key is None:
                continue
            queue = self._queues[key]
            del queue[bisect_left(queue, offset)]
            if self._out.get(key) == offset:
                del self._out[key]
            if queue:
                self.free(queue[0])
            else:
                del self._queues[key]

    def free(self, offset: int) -> None:
        """It may be this message's turn."""
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

    def is_busy(self, key: int) -> bool:
        """Whether a message of the key is unfinished."""
        return key in self._queues

    def is_first(self, offset: int) -> bool:
        key = self._keys.get(offset)
        return key is None or self._queues[key][0] == offset

    def key_of(self, offset: int) -> int:
        return self._keys.get(offset, 0)

    def out(self, key: int) -> int | None:
        """The message of the key that was handed out last, if it is not done."""
        return self._out.get(key)
