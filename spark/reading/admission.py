"""Shares a limited micro-batch among the logs, in proportion to the unread offsets of each.

No log starves: each gets one offset before any gets its share, and when there are fewer offsets than logs, the logs
take turns in the order of their names. Offsets have gaps (control records), so a batch may hold fewer rows than
offsets, and a log of many control records still advances.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping


def shares(waiting: Mapping[str, int], rows_max: int, last_served: str = "") -> dict[str, int]:
    """Return the number of offsets to read from each log: in all `rows_max`, or fewer when fewer are waiting.

    `last_served` is the last name of the previous batch when there were fewer rows than logs: the turn continues after
    it.
    """
    assert rows_max > 0, rows_max
    logs = {name: count for name, count in sorted(waiting.items()) if count > 0}
    total = sum(logs.values())
    if total <= rows_max:
        return logs
    if rows_max <= len(logs):
        return dict.fromkeys(_in_turn(list(logs), last_served)[:rows_max], 1)
    spare, left = rows_max - len(logs), total - len(logs)
    given = {name: 1 + (count - 1) * spare // left for name, count in logs.items()}
    # Rounding down leaves at most one offset a log: those go to the logs that were cut most.
    cut = sorted(logs, key=lambda name: ((logs[name] - 1) * spare % left, logs[name]), reverse=True)
    for name in cut[: rows_max - sum(given.values())]:
        given[name] += 1
    return given


def _in_turn(names: list[str], last_served: str) -> list[str]:
    behind = bisect_right(names, last_served)
    return names[behind:] + names[:behind]
