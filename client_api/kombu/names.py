"""The names of topics and groups for kombu's queues and exchanges, and the transport options.

A queue is a topic and a queue group of its name. An exchange whose messages several queues share is a topic
`<exchange>.exchange`; a queue bound to it has the group `<queue>.<exchange>` there.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from portalmq import wire

_FOREIGN = re.compile(r"[^A-Za-z0-9._-]")
_KEPT_LENGTH = 160
MAX_DELIVERIES = 20


class TransportOptions(NamedTuple):
    """Transport options, checked. `max_deliveries` is None if the user left it to the group."""

    topic_prefix: str = ""
    visibility_timeout_s: float = 30.0
    wait_time_s: float = 10.0
    max_deliveries: int | None = None


def options_of(given: Mapping[str, Any]) -> TransportOptions:
    """Return the checked options. Raises ValueError for a value that cannot be used; others' options are ignored."""
    prefix = given.get("topic_prefix", "")
    if not isinstance(prefix, str) or _FOREIGN.search(prefix) or len(prefix) > 60:
        raise ValueError(f"topic_prefix={prefix!r}: use up to 60 of the characters A-Z a-z 0-9 . _ -")
    most = given.get("max_deliveries")
    if most is not None and (not isinstance(most, int) or most < 1):
        raise ValueError(f"max_deliveries={most!r}: use a whole number from 1")
    longest_s = wire.VISIBILITY_TIMEOUT_MS_MAX / 1000
    return TransportOptions(
        prefix,
        _seconds(given, "visibility_timeout", TransportOptions().visibility_timeout_s, 1, longest_s),
        _seconds(given, "wait_time_s", TransportOptions().wait_time_s, 0.1, 20),
        most,
    )


def _seconds(given: Mapping[str, Any], name: str, default: float, least: float, most: float) -> float:
    value = given.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value) or not least <= value <= most:
        raise ValueError(f"{name}={value!r}: use a number of seconds from {least:g} to {most:g}")
    return float(value)


class Names(NamedTuple):
    """Names under one `topic_prefix`."""

    prefix: str

    def topic(self, queue: str) -> str:
        return self._valid(queue)

    def group(self, queue: str) -> str:
        return self._valid(queue)

    def exchange_topic(self, exchange: str) -> str:
        return self._valid(f"{exchange}.exchange")

    def exchange_group(self, queue: str, exchange: str) -> str:
        return self._valid(f"{queue}.{exchange}")

    @property
    def bindings_topic(self) -> str:
        return self._valid("kombu.bindings")

    def _valid(self, name: str) -> str:
        """Return the name with the prefix; with a digest if it has other characters than a topic may have, or is too
        long, so that no two queues share a topic."""
        full = self.prefix + name
        if wire.NAME.match(full) and not full.startswith("__") and full.strip("."):
            return full
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        return f"{self.prefix}{_FOREIGN.sub('-', name).lstrip('_.')[: _KEPT_LENGTH - len(self.prefix)]}-{digest}"
