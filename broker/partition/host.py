"""What a partition needs of the broker it stands on, and of the control plane behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from portalmq.broker.core.replica.events import Fetch, IsrAnswered, PartitionStateChanged, ProposeIsr
from portalmq.broker.partition.cache import BatchCache
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.writer import WriterHost

if TYPE_CHECKING:
    from portalmq.broker.partition.partition import Partition


class Urls(Protocol):
    def url_of(self, broker_id: int) -> str | None: ...


class PartitionMembership(Protocol):
    """The control plane, as far as one partition asks for it. `change_isr` and `reread` may block; neither raises."""

    @property
    def mirror(self) -> Urls: ...

    def answered_ms(self) -> int:
        """When the last request that the control plane answered was begun, on the clock that times leases."""
        ...

    def change_isr(
        self, topic_id: str, number: int, proposal: ProposeIsr, configured_min_insync: int | None
    ) -> IsrAnswered: ...

    def reread(
        self, topic_id: str, number: int, refresh: int, configured_min_insync: int | None
    ) -> PartitionStateChanged | None:
        """The partition's word as it stands now, read after a sync; None when it cannot be read."""
        ...


class Fetching(Protocol):
    """Who carries the fetches of this broker's followers."""

    def follow(self, partition: Partition, leader: int, fetch: Fetch) -> None: ...
    def unfollow(self, partition: Partition) -> None: ...

    def heard_ms(self, partition: Partition) -> int:
        """When a leader's broker that was followed answered last."""
        ...


class PartitionHost(WriterHost, Protocol):
    """The broker. `lag_ms` is how long a follower may be behind, `lease_ms` how long a leader serves unheard;
    `began_ms` is when this process began."""

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
    def fetchers(self) -> Fetching: ...

    def disk_is_full(self) -> bool: ...
