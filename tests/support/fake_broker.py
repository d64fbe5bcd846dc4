"""A broker made of a few dictionaries, for tests of the API: it records its calls, and refuses them on demand."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from msgspec import structs

from portalmq import wire
from portalmq.broker.cluster.rpc.messages import SchedulePosition
from portalmq.broker.messages.browse import StoredMessage, StoredPage
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.messages.scheduled import ScheduleChange, SchedulePage
from portalmq.broker.partition.long_poll import LeasedMessage
from portalmq.broker.queues.settle import ACK, SettleRequest
from portalmq.errors import (
    GroupNotFound,
    NotFound,
    OffsetOutOfRange,
    PartitionNotFound,
    PortalMQError,
    TopicNotFound,
)

NOW_MS = 1_700_000_000_000


class FakeBroker:
    broker_id = 7
    cluster_id = "c" * 32
    cluster_secret = "s" * 64
    calls = ("echo", "refuse")

    def wall_ms(self) -> int:
        return NOW_MS

    def explain(self, fault: Exception) -> PortalMQError | None:
        return fault if isinstance(fault, PortalMQError) else None

    def serve_peer(self, name: str, body: bytes, peer: Any) -> bytes:
        self._called("serve_peer", name=name, body=body, peer=peer)
        if name not in self.calls:
            raise NotFound(f"brokers do not ask each other for {name!r}")
        return body

    def __init__(self) -> None:
        self.ready = True
        self.group_moves = self
        self.browser = self.scheduled_messages = self.receive_handler = self.settlement = self.group_admin = (
            self.overview
        ) = self
        self.logs: dict[str, list[list[Any]]] = {}
        self.group_names: list[str] = []
        self.made: list[tuple[str, dict[str, Any]]] = []
        self.refuse: Exception | None = None
        self.refuse_records: dict[int, PortalMQError] = {}
        self.stale: set[str] = set()
        self.taken: dict[tuple[str, str], int] = defaultdict(int)

    def _called(self, call: str, /, **arguments: Any) -> None:
        self.made.append((call, arguments))
        if self.refuse is not None:
            raise self.refuse

    def last(self, name: str) -> dict[str, Any]:
        return next(arguments for called, arguments in reversed(self.made) if called == name)

    def calls_made(self, name: str) -> int:
        return sum(called == name for called, _ in self.made)

    # topics

    def create_topic(self, name: str, request: wire.CreateTopic) -> tuple[wire.TopicDescription, bool]:
        self._called("create_topic", name=name, request=request)
        created = name not in self.logs
        if created:
            self.logs[name] = [[] for _ in range(request.partitions or 1)]
        return self._described(name), created

    def use_topic(self, name: str) -> int:
        self._called("use_topic", name=name)
        return len(self.logs.setdefault(name, [[]]))

    def list_topics(self) -> list[wire.TopicSummary]:
        self._called("list_topics")
        return [wire.TopicSummary(name, len(log), 1) for name, log in sorted(self.logs.items())]

    def describe_topic(self, name: str) -> wire.TopicDescription:
        self._called("describe_topic", name=name)
        return self._described(name)

    def alter_topic(self, name: str, request: wire.AlterTopic, *, force: bool = False) -> wire.TopicDescription:
        self._called("alter_topic", name=name, request=request, force=force)
        return self._described(name)

    def delete_topic(self, name: str, *, force: bool = False) -> None:
        self._called("delete_topic", name=name, force=force)
        self._log(name)
        del self.logs[name]

    def purge(self, name: str, *, partition: int | None, before_offset: int | None, forward: bool = True) -> None:
        self._called("purge", name=name, partition=partition, before_offset=before_offset)

    def _log(self, name: str) -> list[list[Any]]:
        if name not in self.logs:
            raise TopicNotFound(f"there is no topic {name!r}")
        return self.logs[name]

    def _described(self, name: str) -> wire.TopicDescription:
        partitions = [
            wire.PartitionDescription(number, 7, 1, [7], [7], 0, len(log), 0)
            for number, log in enumerate(self._log(name))
        ]
        return wire.TopicDescription(name, partitions, wire.TopicConfig())

    # messages

    def produce(self, topic: str, request: ProduceRequest) -> list[Any]:
        self._called("produce", topic=topic, **structs.asdict(request))
        logs = self.logs.setdefault(topic, [[]])
        results: list[Any] = []
        for index, record in enumerate(request.records):
            if index in self.refuse_records:
                results.append(self.refuse_records[index])
                continue
            number = request.partition or (request.partitions[index] if request.partitions else None) or 0
            if number >= len(logs):
                raise PartitionNotFound(f"topic {topic!r} has no partition {number}")
            logs[number].append(record)
            offset = -1 if request.acks == "none" else len(logs[number]) - 1
            results.append(wire.Produced(number, offset, NOW_MS))
        return results

    def produce_range(self, topic: str, request: ProduceRequest) -> wire.ProducedRange:
        self._called("produce_range", topic=topic, **structs.asdict(request))
        assert request.partition is not None
        log = self.logs.setdefault(topic, [[]])[request.partition]
        log.extend(request.records)
        return wire.ProducedRange(request.partition, len(log) - len(request.records), len(request.records), NOW_MS)

    def new_producer(self, name: str | None, *, instance: str = "", renews: bool = False) -> wire.ProducerIdentity:
        self._called("new_producer", name=name, instance=instance, renews=renews)
        return wire.ProducerIdentity(5, 2)

    def browse(self, topic: str, partition: int, **options: Any) -> StoredPage:
        self._called("browse", topic=topic, partition=partition, **options)
        logs = self._log(topic)
        if partition >= len(logs):
            raise PartitionNotFound(f"topic {topic!r} has no partition {partition}")
        end = len(logs[partition])
        start = end if options.get("position") == "latest" else options["offset"] or 0
        if start > end:
            raise OffsetOutOfRange(f"offset {start} is beyond {end}")
        stop = min(end, start + options["limit"])
        messages = [self._stored(topic, partition, offset) for offset in range(start, stop)]
        return StoredPage(messages, stop, 0, end)

    def page(self, topic: str, *, after: SchedulePosition, limit: int, forward: bool = True) -> SchedulePage:
        self._called("scheduled", topic=topic, after=after, limit=limit)
        messages = [self._stored(topic, 0, offset) for offset in range(len(self._log(topic)[0]))]
        return SchedulePage(messages[:limit], SchedulePosition(9, 0, limit) if len(messages) > limit else None)

    def cancel(self, topic: str, partition: int, offset: int, *, forward: bool = True) -> None:
        self._called("cancel_scheduled", topic=topic, partition=partition, offset=offset)

    def move(self, topic: str, partition: Any, offset: int = 0, deliver_at_ms: int = 0, *, forward: bool = True) -> Any:
        if isinstance(partition, wire.MoveRequest):  # of a group: this object stands for several
            self._called("move", group=topic, wanted=partition)
            return wire.Moved(3, 2)
        self._called("move_scheduled", topic=topic, partition=partition, offset=offset, deliver_at_ms=deliver_at_ms)

    def change(self, topic: str, how: ScheduleChange, *, forward: bool = True) -> tuple[int, int]:
        self._called("change_scheduled", topic=topic, how=how)
        return 3, 2

    def _stored(self, topic: str, partition: int, offset: int) -> StoredMessage:
        return StoredMessage(topic, partition, offset, NOW_MS, self.logs[topic][partition][offset])

    def read_all(self, topic: str, limit: int | None, *, forward: bool = True) -> Any:
        self._called("read_all", topic=topic, limit=limit)
        places = [(number, at) for number, log in enumerate(self._log(topic)) for at in range(len(log))]
        return (self._stored(topic, number, at) for number, at in places[:limit])

    # groups

    def put_group(
        self, name: str, config_patch: dict[str, Any], initial: dict[str, Any] | None = None
    ) -> tuple[wire.GroupDescription, bool]:
        self._called("put_group", name=name, config_patch=config_patch, initial=initial)
        created = name not in self.group_names
        if created:
            self.group_names.append(name)
        return self._group(name), created

    def describe_group(self, name: str) -> wire.GroupDescription:
        self._called("describe_group", name=name)
        return self._group(name)

    def list_groups(self) -> list[wire.GroupDescription]:
        return [self._group(name) for name in self.group_names]

    def delete(self, name: str) -> None:
        self._called("delete_group", name=name)
        self._group(name)
        self.group_names.remove(name)

    def pause(self, name: str, *, paused: bool, reason: str, by: str) -> None:
        self._called("pause", paused=paused, reason=reason, by=by)
        self._group(name)

    def _group(self, name: str) -> wire.GroupDescription:
        if name not in self.group_names:
            raise GroupNotFound(f"there is no group {name!r}")
        return wire.GroupDescription(name, "queue", [], 0, 0, 0, 0, 0, 0, wire.GroupConfig())

    def receive(
        self,
        group: str,
        request: wire.ReceiveRequest,
        peer: Any,
        *,
        forward: bool = True,
        is_first: bool = False,
        portion: Any = None,
        leaderships: Any = None,
    ) -> list[LeasedMessage]:
        self._called("receive", group=group, request=request, peer=peer, is_first=is_first)
        delivered = []
        for topic in request.topics:
            for record in self.logs.get(topic, [[]])[0][self.taken[group, topic] :][: request.max_messages]:
                at = self.taken[group, topic]
                self.taken[group, topic] += 1
                delivered.append(LeasedMessage(topic, 0, at, NOW_MS, record, f"r{at}", 1, NOW_MS + 30_000))
        return delivered

    def settle(
        self, group: str, receipts: list[str], request: SettleRequest = ACK, *, forward: bool = True
    ) -> list[bool]:
        self._called(request.verb, group=group, receipts=receipts, time_ms=request.time_ms, reason=request.reason)
        return [receipt not in self.stale for receipt in receipts]

    # cluster

    def cluster(self) -> wire.ClusterDescription:
        return wire.ClusterDescription(self.cluster_id, 7, [wire.BrokerDescription(7, "http://x", True)])

    def metadata(self, topics: list[str] | None) -> wire.Metadata:
        self._called("metadata", topics=topics)
        return wire.Metadata([], [])

    def health(self) -> dict[str, object]:
        return {"disk_full": False}
