"""Identities of rows, so that each is written once however often Spark runs its task.

    <query, batch, Spark partition>/<content>[.<how often this content came before in this partition of this batch>]

The row's number is no identity: a task that runs again may get its rows in another order (a shuffle yields them as they
arrive), and only their content is the same. Two equal rows are two messages, told apart by the count; which is which
does not matter.

All rows of a task share the part before the slash, so they are neighbours in the broker's index (wire.message_id_of).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from sys import byteorder
from typing import Final

_SLOTS_FIRST: Final = 1 << 12


class Identities:
    """The keys of the rows of one task. Memory: 18 to 36 bytes a row, for the count of each content."""

    def __init__(self, query: str, batch: str, spark_partition: int) -> None:
        name = f"{len(query)}:{query}/{len(batch)}:{batch}/{spark_partition}"
        self._family = blake2b(name.encode(), digest_size=12).hexdigest()
        self._counts = Counts()

    def keys_of(self, contents: Sequence[bytes]) -> list[str]:
        """Return the keys of the rows with these contents, in order."""
        digests = [blake2b(content, digest_size=16) for content in contents]
        numbers = array("Q", b"".join([digest.digest()[:8] for digest in digests]))
        if byteorder == "big":
            numbers.byteswap()
        head = f"{self._family}/"
        return [
            f"{head}{digest.hexdigest()}.{before}" if before else head + digest.hexdigest()
            for digest, before in zip(digests, self._counts.add_all(numbers), strict=True)
        ]


class Counts:
    """Counts of 64-bit hashes, in a table with linear probing.

    A dict of ints takes six times the memory. Two contents with one hash (once in 3e12 pairs of ten million rows) are
    counted as one, which makes their keys depend on the order of the rows, and is harmless otherwise.
    """

    def __init__(self) -> None:
        self._numbers = array("Q", bytes(8 * _SLOTS_FIRST))
        self._counts = array("L" if array("L").itemsize == 4 else "I", bytes(4 * _SLOTS_FIRST))
        self._mask = _SLOTS_FIRST - 1
        self._room = _SLOTS_FIRST * 2 // 3

    def add_all(self, all_numbers: Iterable[int]) -> list[int]:
        """Count the hashes in order. Return how often each came before."""
        befores: list[int] = []
        table, counts, mask = self._numbers, self._counts, self._mask
        for each in all_numbers:
            number = each or 1  # 0 marks a free slot
            slot = number & mask
            while (found := table[slot]) and found != number:
                slot = (slot + 1) & mask
            befores.append(counts[slot])
            counts[slot] += 1
            if not found:
                table[slot] = number
                self._room -= 1
                if not self._room:
                    self._grow()
                    table, counts, mask = self._numbers, self._counts, self._mask
        return befores

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
