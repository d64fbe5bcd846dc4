"""Formats figures for people: 12,345; 4.1 ms; 1.2 MB; 22 Nov 2026, 00:21:47 UTC."""

from __future__ import annotations

import math
from datetime import UTC, datetime, timedelta

NONE = "–"
# A no-break space keeps a figure and its unit on one line.
_SP = "\u00a0"
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_SECOND, _MINUTE, _HOUR, _DAY = 1_000, 60_000, 3_600_000, 86_400_000


def count(number: float) -> str:
    return f"{number:,.0f}" if math.isfinite(number) else NONE


def brief(number: float) -> str:
    """Format with at most four digits: for axes, and for figures of which only the magnitude matters."""
    if not math.isfinite(number):
        return NONE
    for least, unit, name in ((1e12, 1e12, "T"), (1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if abs(number) >= least:
            return f"{_digits(number / unit)}{_SP}{name}"
    return _digits(number)


def rate(per_s: float) -> str:
    return f"{_digits(per_s)}/s" if math.isfinite(per_s) else NONE


def size(of_bytes: float) -> str:
    if not math.isfinite(of_bytes):
        return NONE
    for unit, name in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(of_bytes) >= unit:
            return f"{_digits(of_bytes / unit)}{_SP}{name}"
    return f"{_digits(of_bytes)}{_SP}B"


def size_class(from_bytes: int, to_bytes: int) -> str:
    """Name the class of sizes from one border up to, but excluding, the next."""
    if to_bytes - from_bytes <= 1:
        return f"{from_bytes}{_SP}B"
    if from_bytes < 1024:
        return f"{from_bytes}–{to_bytes - 1}{_SP}B"
    return f"{size_border(from_bytes)}–{size_border(to_bytes)}"


def size_border(of_bytes: int) -> str:
    """Format a power of two."""
    for power, name in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if of_bytes >= 1 << power:
            return f"{_digits(of_bytes / (1 << power))}{_SP}{name}"
    return f"{of_bytes}{_SP}B"


def duration(ms: float) -> str:
    if not math.isfinite(ms):
        return NONE
    if ms < _SECOND:
        return f"{_digits(ms)}{_SP}ms"
    if ms < _MINUTE:
        return f"{_digits(ms / _SECOND)}{_SP}s"
    if ms < _HOUR:
        return _two(ms, _MINUTE, "min", _SECOND, "s")
    if ms < _DAY:
        return _two(ms, _HOUR, "h", _MINUTE, "min")
    return _two(ms, _DAY, "d", _HOUR, "h")


def decade(ms: float) -> str:
    """Format a power of ten, which is no round number of minutes."""
    return duration(ms) if ms < _MINUTE else f"{count(ms / _SECOND)}{_SP}s"


def _two(ms: float, big: int, big_name: str, small: int, small_name: str) -> str:
    whole, rest = divmod(round(ms / small) * small, big)
    first = f"{count(whole)}{_SP}{big_name}"
    return f"{first} {rest // small}{_SP}{small_name}" if rest else first


def share(part: float) -> str:
    if not math.isfinite(part):
        return NONE
    if 0 < part < 0.001:
        return f"<{_SP}0.1{_SP}%"
    if 0.999 < part < 1:
        return f">{_SP}99.9{_SP}%"
    percent = part * 100
    return f"{percent:.1f}".removesuffix(".0") + f"{_SP}%"


def moment(ms: float) -> str:
    at = _date(ms)
    return f"{at.day} {at:%b %Y, %H:%M:%S} UTC" if at else f"{count(ms)} ms after 1970"


def clock(ms: float, step_ms: float = _SECOND) -> str:
    """Format a time as precisely as neighbours `step_ms` apart require."""
    at = _date(ms)
    if at is None:
        return count(ms)
    if step_ms < _SECOND:
        return f"{at:%H:%M:%S}.{at.microsecond // 1000:03}"
    if step_ms < _MINUTE:
        return f"{at:%H:%M:%S}"
    if step_ms < _DAY:
        return f"{at:%H:%M}"
    return f"{at.day} {at:%b %Y}" if step_ms >= 300 * _DAY else f"{at.day} {at:%b}"


def day(ms: float) -> str:
    at = _date(ms)
    return f"{at.day} {at:%b %Y}" if at else NONE


def ordinal(number: int) -> str:
    ending = "th" if number % 100 in {11, 12, 13} else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def plural(number: int, one: str, many: str = "") -> str:
    return f"{count(number)} {one if number == 1 else many or one + 's'}"


def _digits(number: float) -> str:
    """Format two or three significant digits, without trailing zeros."""
    if abs(number) >= 99.95:
        return f"{number:,.0f}"
    if abs(number) >= 9.995:
        return f"{number:.1f}".removesuffix(".0")
    if abs(number) >= 0.0995 or number == 0:
        return f"{number:.2f}".rstrip("0").rstrip(".")
    return f"{number:.2g}"


def _date(ms: float) -> datetime | None:
    try:
        return _EPOCH + timedelta(milliseconds=ms)
    except (OverflowError, ValueError):
        return None
