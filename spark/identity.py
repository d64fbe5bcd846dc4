"""What a row is known by, so that it is written once however often Spark runs the task that writes it.

    <query, batch, Spark partition>/<content>[.<how often this content came before in this partition of this batch>]

Not the row's number: a task that is run again may be given its rows in another order (they come out of a shuffle as
they arrive), and only what is in them is the same. Two rows that are alike are two messages, told apart by the count;
which of the two is which does not matter, as they are alike.

The part before the slash is common to all rows of a task, which the broker's index is grateful for: they stand side by
side in it (wire.message_id_of).
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import Final

_SLOTS_FIRST: Final = 1 << 12


class Identities:
    """The keys of the rows of one task. Memory: 18 to 36 bytes a row, for the count of each content."""

    def __init__(self, query: str, batch: str, spark_partition: int) -> None:
        name = f"{len(query)}:{query}/{len(batch)}:{batch}/{spark_partition}"
        self._family = blake2b(name.encode(), digest_size=12).hexdigest()
        self._counts = Counts()

    def key_of(self, content: bytes) -> str:
        digest = blake2b(content, digest_size=16).digest()
        before = self._counts.add(int.from_bytes(digest[:8], "little"))
        return f"{self._family}/{digest.hex()}.{before}" if before else f"{self._family}/{digest.hex()}"


class Counts:
    """How often each of many 64-bit numbers came, which are hashes themselves, in a table with linear probing.

    A dict of ints takes six times as much. Two contents of one number (once in 3e12 pairs of ten million rows) are
    counted as one, which makes their keys depend on the order of the rows, and does no other harm.
    """

    def __init__(self) -> None:
        self._numbers = array("Q", bytes(8 * _SLOTS_FIRST))
        self._counts = array("L" if array("L").itemsize == 4 else "I", bytes(4 * _SLOTS_FIRST))
        self._mask = _SLOTS_FIRST - 1
        self._room = _SLOTS_FIRST * 2 // 3

    def add(self, number: int) -> int:
        """Count it; how often it came before."""
        number = number or 1  # 0 marks a free slot
        numbers, mask = self._numbers, self._mask
        slot = number & mask
        while (found := numbers[slot]) != number:
            if not found:
                numbers[slot] = number
                self._counts[slot] = 1
                self._room -= 1
                if not self._room:
                    self._grow()
                return 0
            slot = (slot + 1) & mask
        before = self._counts[slot]
        self._counts[slot] = before + 1
        return before

    def _grow(self) -> None:
        old = zip(self._numbers, self._counts, strict=True)
        slots = 2 * (self._mask + 1)
        mask = slots - 1
        numbers, counts = array("Q", bytes(8 * slots)), array(self._counts.typecode, bytes(4 * slots))
        for number, count in old:
            if number:
                slot = number & mask
                while numbers[slot]:
                    slot = (slot + 1) & mask
                numbers[slot], counts[slot] = number, count
        self._room = slots * 2 // 3 - (self._mask + 1) * 2 // 3
        self._numbers, self._counts, self._mask = numbers, counts, mask
