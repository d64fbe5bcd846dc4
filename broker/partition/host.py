"""Interfaces of a partition: what it needs of its broker and the control plane, and what its parts need of it."""

from __future__ import annotations

from typing import Protocol

from portalmq.broker.core.replica.events import Event, Fetch, IsrAnswered, PartitionStateChanged, ProposeIsr
from portalmq.broker.core.replica.replica import PartitionReplica
from portalmq.broker.partition.cache import BatchCache
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.fetch_answers import PartitionAnswer
from portalmq.broker.partition.writer import WriterHost
from portalmq.broker.storage.log import Log
from portalmq.broker.storage.state import StateFile


class Urls(Protocol):
    def url_of(self, broker_id: int) -> str | None: ...


class PartitionMembership(Protocol):
    """The control plane, as one partition uses it. `change_isr` and `reread` may block; neither raises."""

    @property
    def mirror(self) -> Urls: ...

    def answered_ms(self) -> int:
        """Return when the last request that the control plane answered was begun, on the clock that times leases."""
        ...

    def change_isr(
        self, topic_id: str, number: int, proposal: ProposeIsr, configured_min_insync: int | None
    ) -> IsrAnswered: ...

    def reread(
        self, topic_id: str, number: int, refresh: int, configured_min_insync: int | None
    ) -> PartitionStateChanged | None:
        """Return the partition's present state, read after a sync; None when it cannot be read."""
        ...


class FetchAnswers(Protocol):
    """Takes the leader's answers."""

    def replied(self, answer: PartitionAnswer) -> None: ...


class FollowedPartition(Protocol):
    """A partition that follows a leader, as the fetchers see it."""

    topic_id: str
    number: int

    @property
    def high_watermark(self) -> int: ...

    @property
    def following(self) -> FetchAnswers: ...


class FollowerFetches(Protocol):
    """The fetchers of this broker's followers."""

    def follow(self, partition: FollowedPartition, leader: int, fetch: Fetch) -> None: ...
    def unfollow(self, partition: FollowedPartition) -> None: ...

    def heard_ms(self, partition: FollowedPartition) -> int:
        """Return when the followed leader's broker last answered."""
        ...


class PartitionHost(WriterHost, Protocol):
    """The broker. `lag_ms` is how far a follower may be behind, `lease_ms` how long a leader serves without an answer
    of the control plane; `began_ms` is when this process began."""

    broker_id: int
    incarnation: int
    store_uuid: str
    clock: Clock
    cache: BatchCache
    lag_ms: int
    lease_ms: int
    began_ms: int

    @property
    def membership(self) -> PartitionMembership: ...

    @property
    def fetchers(self) -> FollowerFetches: ...

    def disk_is_full(self) -> bool: ...


class Replica(Protocol):
    """A partition, as its parts see it."""

    topic_id: str
    number: int
    min_insync_replicas: int | None
    dedup_window_ms: int
    log: Log
    state_file: StateFile
    replica: PartitionReplica
    closed: bool

    @property
    def host(self) -> PartitionHost: ...

    @property
    def high_watermark(self) -> int: ...

    def step(self, event: Event) -> None:
        """Pass an event to the core, and perform the resulting actions."""
        ...

    def report_damage(self, reason: str) -> None:
        """Note a damaged file. The replica's files are replaced, or it stops for good."""
        ...

    def storage_failed(self, fault: Exception) -> None:
        """Report damage. Any other fault ends the broker."""
        ...
