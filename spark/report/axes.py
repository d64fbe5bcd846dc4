"""Axes of plots: positions of values in percent of the width or height, and labelled ticks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from portalmq.spark.report import words

_S, _MIN, _H, _D = 1_000, 60_000, 3_600_000, 86_400_000
_STEPS_MS = (
    *(1, 2, 5, 10, 20, 50, 100, 200, 500),
    *(_S, 2 * _S, 5 * _S, 10 * _S, 15 * _S, 30 * _S),
    *(_MIN, 2 * _MIN, 5 * _MIN, 10 * _MIN, 15 * _MIN, 30 * _MIN),
    *(_H, 2 * _H, 3 * _H, 6 * _H, 12 * _H),
    *(_D, 2 * _D, 7 * _D, 14 * _D, 28 * _D, 91 * _D, 182 * _D, 365 * _D, 3650 * _D),
)
TICKS_MAX = 8
# More columns cannot be told apart side by side.
COLUMNS_MAX = 480


@dataclass(frozen=True, slots=True)
class AxisTick:
    """A tick, `percent` from the left or from the bottom."""

    percent: float
    label: str


@dataclass(frozen=True, slots=True)
class Times:
    """A time axis of `columns` buckets, `width_ms` each, from `start_ms` on."""

    start_ms: int
    width_ms: int
    columns: int

    @classmethod
    def over(cls, moments: Iterable[int], bucket_ms: int) -> Times | None:
        """Return an axis with a column for each of these times, starts of buckets; None without any."""
        found = sorted(set(moments))
        if not found:
            return None
        buckets = (found[-1] - found[0]) // bucket_ms + 1
        width = bucket_ms * -(-buckets // COLUMNS_MAX)
        return cls(found[0], width, (found[-1] - found[0]) // width + 1)

    @property
    def span_ms(self) -> int:
        return self.width_ms * self.columns

    @property
    def seconds(self) -> float:
        """The width of a bucket."""
        return self.width_ms / 1000

    def column(self, at_ms: int) -> int | None:
        """Return the column of a time; None outside the axis."""
        column = (at_ms - self.start_ms) // self.width_ms
        return column if 0 <= column < self.columns else None

    def percent(self, at_ms: float) -> float:
        return 100 * (at_ms - self.start_ms) / self.span_ms

    def label(self, column: int) -> str:
        at = self.start_ms + column * self.width_ms
        clock = words.clock(at, min(self.width_ms, _H))
        return f"{words.day(at)}, {clock}" if self.crosses_days else clock

    @property
    def crosses_days(self) -> bool:
        return self.start_ms // _D != (self.start_ms + self.span_ms - 1) // _D

    @property
    def ticks(self) -> list[AxisTick]:
        step = next((step for step in _STEPS_MS if self.span_ms / step <= TICKS_MAX), _STEPS_MS[-1])
        first = -(-self.start_ms // step) * step
        moments = range(first, self.start_ms + self.span_ms + 1, step)
        return [AxisTick(self.percent(at), words.clock(at, step)) for at in moments]


@dataclass(frozen=True, slots=True)
class Linear:
    """An axis from 0 to `top`, a round number."""

    top: float
    ticks: tuple[AxisTick, ...]

    @classmethod
    def up_to(cls, most: float, label: Callable[[float], str] = words.brief, ticks: int = 4) -> Linear:
        most = most if math.isfinite(most) and most > 0 else 1.0
        step = _round_up(most / ticks)
        top = step * math.ceil(most / step - 1e-9)
        values = [step * n for n in range(round(top / step) + 1)]
        return cls(top, tuple(AxisTick(100 * value / top, label(value)) for value in values))

    def percent(self, value: float) -> float:
        return 100 * min(max(value, 0.0), self.top) / self.top


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """An axis of decades from `bottom` to `top`; smaller values are drawn at the bottom."""

    bottom: float
    top: float
    ticks: tuple[AxisTick, ...]

    @classmethod
    def around(cls, values: Iterable[float], label: Callable[[float], str], least: float = 1.0) -> Logarithmic:
        """Return an axis for these values; values below `least` are drawn as `least`."""
        found = [max(value, least) for value in values if math.isfinite(value)] or [least]
        low = math.floor(math.log10(min(found)) + 1e-9)
        high = max(math.ceil(math.log10(max(found)) - 1e-9), low + 1)
        every = -(-(high - low) // 6)
        ticks = tuple(AxisTick(100 * (n - low) / (high - low), label(10.0**n)) for n in range(low, high + 1, every))
        return cls(10.0**low, 10.0**high, ticks)

    def percent(self, value: float) -> float:
        within = min(max(value, self.bottom), self.top)
        return 100 * math.log(within / self.bottom) / math.log(self.top / self.bottom)


def _round_up(number: float) -> float:
    """Round up to the next of 1, 2, 2.5, 5, 10, … (times a power of ten)."""
    power = 10.0 ** math.floor(math.log10(number))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= number * (1 - 1e-9))
