"""How many rows each log gives to a micro-batch that may hold only so many: in proportion to what waits in it.

A log that waits is never passed over for ever: each gets one offset before any gets its share, and where there are not
enough for that, they take turns in the order of their names. Offsets have gaps (control records), so that a batch
holds at most as many rows as it was given offsets, and a log of many control records goes on nevertheless.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping


def shares(waiting: Mapping[str, int], rows_max: int, last_served: str = "") -> dict[str, int]:
    """Offsets each log gives, of those that wait in it; together at most `rows_max`, and as many as can be had.

    `last_served` is the name that came last when there were fewer rows than logs: the turn goes on behind it."""
    assert rows_max > 0, rows_max
    logs = {name: count for name, count in sorted(waiting.items()) if count > 0}
    total = sum(logs.values())
    if total <= rows_max:
        return logs
    if rows_max <= len(logs):
        return dict.fromkeys(_in_turn(list(logs), last_served)[:rows_max], 1)
    spare, left = rows_max - len(logs), total - len(logs)
    given = {name: 1 + (count - 1) * spare // left for name, count in logs.items()}
    # What rounding down left over, at most one offset a log: to those that were cut off most.
    cut = sorted(logs, key=lambda name: ((logs[name] - 1) * spare % left, logs[name]), reverse=True)
    for name in cut[: rows_max - sum(given.values())]:
        given[name] += 1
    return given


def _in_turn(names: list[str], last_served: str) -> list[str]:
    behind = bisect_right(names, last_served)
    return names[behind:] + names[:behind]
