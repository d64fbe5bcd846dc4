"""The limits of the queue group of a run, which an operator changes, and the rule that consumers hold them to.

A consumer knows its leases only in part: one may have ended, and another may have lost it. So of the leases of one
leader those count that run for sure, and they are compared with the widest limits that were ever asked for.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

IN_FLIGHT = "max_in_flight"
IN_FLIGHT_PER_KEY = "max_in_flight_per_key"
# Whether a group has limits for each key is fixed when it is made.
KEYED = ({"ordering": "key"}, {IN_FLIGHT_PER_KEY: 1}, {IN_FLIGHT_PER_KEY: 3}, {"rate_per_s_per_key": 20.0})


@dataclass
class Limits:
    """What was asked for, ever. None: no limit."""

    keyed: dict[str, Any] = field(default_factory=dict)
    in_flight: int | None = None
    per_key: int | None = None
    keys: dict[bytes, bytes | None] = field(default_factory=dict)  # of values

    def first(self, random: Random) -> dict[str, Any]:
        """Return the settings to make the group with."""
        self.keyed = random.choice((*KEYED, {}))
        self.per_key = 1 if self.keyed.get("ordering") else self.keyed.get(IN_FLIGHT_PER_KEY)
        settings = self._drawn(random)
        self.in_flight = settings[IN_FLIGHT]
        return self.keyed | settings

    def later(self, random: Random) -> dict[str, Any]:
        """Return other settings, which hold from any time on after they are sent."""
        settings = self._drawn(random)
        self.in_flight = _wider(self.in_flight, settings[IN_FLIGHT])
        if IN_FLIGHT_PER_KEY in self.keyed:
            settings[IN_FLIGHT_PER_KEY] = random.choice((1, 2, 5))
            self.per_key = _wider(self.per_key, settings[IN_FLIGHT_PER_KEY])
        elif "rate_per_s_per_key" in self.keyed:
            settings["rate_per_s_per_key"] = random.choice((5.0, 50.0))
        return settings

    def _drawn(self, random: Random) -> dict[str, Any]:
        rate_per_s = random.choice((None, None, 10.0, 50.0))
        burst = None if rate_per_s is None else random.choice((None, 1, 5))
        return {IN_FLIGHT: random.choice((None, 2, 5, 20)), "rate_per_s": rate_per_s, "rate_burst": burst}

    def lift(self) -> None:
        """Take that the group may have been made anew, without limits."""
        self.in_flight = self.per_key = None

    def broken(self, partitions: int, value: bytes, out: Iterable[bytes]) -> str:
        """Return how a delivery breaks a limit, when the messages `out` of the same partition are out too; else ""."""
        out = list(out)
        share = None if self.in_flight is None else max(1, -(-self.in_flight // partitions))
        if share is not None and len(out) >= share:
            return f"{len(out) + 1} are out, and {self.in_flight} may be, in {partitions} partitions"
        key = self.keys.get(value)
        same = [] if key is None else [other for other in out if self.keys.get(other) == key]
        if self.per_key is not None and len(same) >= self.per_key:
            return f"{len(same) + 1} of key {key!r} are out, and {self.per_key} may be"
        return ""


def _wider(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else max(one, other)
