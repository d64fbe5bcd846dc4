"""The one source of randomness of a run. It draws the same numbers as its base class, in half the time."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Dice(Random):
    def randint(self, a: int, b: int) -> int:
        width = b - a + 1
        assert width > 0, (a, b)
        bits = width.bit_length()
        number = self.getrandbits(bits)
        while number >= width:
            number = self.getrandbits(bits)
        return a + number

    def choice(self, seq: Sequence[T]) -> T:  # type: ignore[override]
        return seq[self.randint(0, len(seq) - 1)]
