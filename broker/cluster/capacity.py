"""Limits on topics, replicas and groups of a cluster: each takes memory and files on its brokers permanently.

The broker that creates a new one counts what its mirror shows and what it is creating itself. Two brokers at the same
moment may each create the last one; nothing depends on the exact number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Protocol

from portalmq.control_plane.mirror import Mirror
from portalmq.errors import Backpressure


class Limits(Protocol):
    """The settings with the limits; `partitions_max` is the share of one broker."""

    @property
    def topics_max(self) -> int: ...
    @property
    def partitions_max(self) -> int: ...
    @property
    def groups_max(self) -> int: ...


class Capacity:
    """Invariant: `_in_progress` counts what is being created and may not be in the mirror yet."""

    def __init__(self, config: Limits, mirror: Mirror) -> None:
        self._config = config
        self._mirror = mirror
        self._in_progress: Counter[str] = Counter()

    @contextmanager
    def topic(self, replicas: int) -> Iterator[None]:
        """Reserve room for a topic with so many replicas over all its partitions. Raises Backpressure."""
        self._check("topics_max", len(self._mirror.topics), 1, self._config.topics_max)
        with self.replicas(replicas), self._count("topics_max", 1):
            yield

    @contextmanager
    def replicas(self, count: int) -> Iterator[None]:
        """Reserve room for so many new replicas. Raises Backpressure."""
        brokers = max(1, len(self._mirror.brokers))
        existing = sum([len(held.value.replicas) for held in tuple(self._mirror.partitions.values())])
        self._check("partitions_max", existing, count, self._config.partitions_max * brokers)
        with self._count("partitions_max", count):
            yield

    @contextmanager
    def group(self, names: Callable[[], Collection[str]]) -> Iterator[None]:
        """Reserve room for a group. `names` lists all groups without those just deleted by this broker; it is called
        only where the mirror has too many. Raises Backpressure."""
        existing = len(self._mirror.groups)
        if existing >= self._config.groups_max:
            existing = len(names())
        self._check("groups_max", existing, 1, self._config.groups_max)
        with self._count("groups_max", 1):
            yield

    def _check(self, setting: str, existing: int, more: int, at_most: int) -> None:
        existing += self._in_progress[setting]
        if more > 0 and existing + more > at_most:
            what = {"topics_max": "topics", "groups_max": "groups", "partitions_max": "replicas of partitions"}[setting]
            of = f"{self._config.partitions_max} a broker" if setting == "partitions_max" else "the cluster"
            raise Backpressure(
                f"there are {existing} {what}, {more} more would pass the limit of {at_most} ({setting}, {of}): delete"
                " some, or raise it",
                retryable=False,
            )

    @contextmanager
    def _count(self, setting: str, count: int) -> Iterator[None]:
        self._in_progress[setting] += count
        try:
            yield
        finally:
            self._in_progress[setting] -= count
