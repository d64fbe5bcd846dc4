"""What the HTTP room asks of the domain: the methods of `portalmq.broker.broker.Broker` that it calls, and the values
they give. Errors that are none of `portalmq.errors` are explained by `Domain.explain`, at the edge."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any, Protocol

from portalmq import wire
from portalmq.broker.cluster.locks import Locks
from portalmq.broker.cluster.registry import Registry
from portalmq.broker.messages.browsing import Page, Stored
from portalmq.broker.messages.idempotency import Keyed
from portalmq.broker.messages.scheduled import Due, SchedulePage
from portalmq.broker.partition.long_poll import LeasedMessage, Peer, Portion
from portalmq.broker.queues.commit import GroupCommits
from portalmq.broker.queues.dead_letters import DeadLetters
from portalmq.broker.queues.finish import Completion
from portalmq.broker.queues.settle import Verdict
from portalmq.broker.queues.unfinished import UnfinishedMessages
from portalmq.broker.queues.unfinished_counts import Sizing
from portalmq.broker.storage.batch import Record
from portalmq.broker.streams.coordination import Coordinating
from portalmq.broker.streams.offsets import Offsets
from portalmq.broker.streams.reader_fetch import ReaderFetch
from portalmq.broker.streams.shared_offset import SharedOffsets
from portalmq.errors import PortalMQError

__all__ = ["Domain", "LeasedMessage", "Page", "Peer", "Stored", "Verdict"]


class Domain(Protocol):
    """`Broker`, as this room sees it. Without `forward` a call that concerns another broker raises NotLeader."""

    @property
    def broker_id(self) -> int: ...
    @property
    def cluster_id(self) -> str: ...
    @property
    def ready(self) -> bool: ...
    @property
    def cluster_secret(self) -> str: ...
    def wall_ms(self) -> int:
        """The time of day, from which delays count."""
        ...

    def explain(self, fault: Exception) -> PortalMQError | None:
        """Return the contract's error for what a call raised; None for a mistake of ours."""
        ...

    @property
    def calls(self) -> Container[str]:
        """The names that `serve_peer` knows."""
        ...

    def serve_peer(self, name: str, body: bytes, peer: Peer | None) -> bytes: ...

    def create_topic(self, name: str, request: wire.CreateTopic) -> tuple[wire.TopicDescription, bool]: ...
    def use_topic(self, name: str) -> int: ...
    def list_topics(self) -> list[wire.TopicSummary]: ...
    def describe_topic(self, name: str) -> wire.TopicDescription: ...
    def alter_topic(self, name: str, request: wire.AlterTopic, *, force: bool = False) -> wire.TopicDescription: ...
    def delete_topic(self, name: str) -> None: ...
    def purge(self, name: str, *, partition: int | None, before_offset: int | None, forward: bool = True) -> None: ...

    def produce(
        self,
        topic: str,
        records: list[Record],
        partitions: list[int | None] | None,
        *,
        acks: wire.Acks,
        partition: int | None = None,
        producer: wire.ProducerStamp | None = None,
        idempotency_key: str | None = None,
        as_sent: tuple[int | str | None, ...] = (),
        keys: Sequence[Keyed | None] | None = None,
        forward: bool = True,
    ) -> Sequence[wire.Produced | PortalMQError]: ...
    def produce_range(
        self,
        topic: str,
        records: list[Record],
        *,
        acks: wire.Acks,
        partition: int,
        producer: wire.ProducerStamp | None,
        forward: bool = True,
    ) -> wire.ProducedRange: ...
    def new_producer(self, name: str | None, *, instance: str = "", renews: bool = False) -> wire.ProducerIdentity: ...
    def browse(
        self,
        topic: str,
        partition: int,
        *,
        offset: int | None,
        position: Any,
        at_ms: int | None,
        limit: int,
        wait_ms: int,
        peer: Peer | None,
        forward: bool = True,
    ) -> Page: ...
    def scheduled(self, topic: str, *, after: Due, limit: int, forward: bool = True) -> SchedulePage: ...
    def cancel_scheduled(self, topic: str, partition: int, offset: int, *, forward: bool = True) -> None: ...
    def read_all(self, topic: str, limit: int | None, *, forward: bool = True) -> Iterator[Stored]: ...

    def put_group(
        self, name: str, config_patch: dict[str, Any], initial: dict[str, Any] | None = None
    ) -> tuple[wire.GroupDescription, bool]: ...
    def describe_group(self, name: str) -> wire.GroupDescription: ...
    def list_groups(self) -> list[wire.GroupDescription]: ...
    def delete_group(self, name: str) -> None: ...
    def receive(
        self,
        group: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool = True,
        is_first: bool = False,
        portion: Portion | None = None,
    ) -> Sequence[LeasedMessage]: ...
    def ack_and_receive(
        self,
        group: str,
        request: wire.ReceiveRequest,
        peer: Peer | None,
        *,
        forward: bool = True,
        is_first: bool = False,
        portion: Portion | None = None,
    ) -> tuple[Sequence[LeasedMessage], Sequence[Verdict]]: ...
    def ack(self, group: str, receipts: list[str], *, forward: bool = True) -> Sequence[Verdict]: ...
    def nack(
        self,
        group: str,
        receipts: list[str],
        delay_ms: int | None,
        reason: str | None,
        *,
        unseen: bool = False,
        forward: bool = True,
    ) -> Sequence[Verdict]: ...
    def extend(
        self, group: str, receipts: list[str], visibility_timeout_ms: int | None, *, forward: bool = True
    ) -> Sequence[Verdict]: ...
    @property
    def completion(self) -> Completion: ...
    @property
    def sizing(self) -> Sizing: ...
    @property
    def shared_offsets(self) -> SharedOffsets: ...
    @property
    def registry(self) -> Registry: ...
    @property
    def unfinished(self) -> UnfinishedMessages: ...
    @property
    def group_commits(self) -> GroupCommits: ...
    @property
    def dead_letters(self) -> DeadLetters: ...

    @property
    def locks(self) -> Locks: ...

    @property
    def streams(self) -> Coordinating: ...
    @property
    def offsets(self) -> Offsets: ...

    @property
    def fetching(self) -> ReaderFetch: ...

    def cluster(self) -> wire.ClusterDescription: ...
    def metadata(self, topics: list[str] | None) -> wire.Metadata: ...
    def health(self) -> dict[str, object]: ...
