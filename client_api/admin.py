"""The administrator's view: topics, groups and what they gave up, schedules, locks, the cluster, and a look into queues
that changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from portalmq import stream_wire, wire
from portalmq.closeable import Closeable
from portalmq.errors import PortalMQError
from portalmq.message import Message, message_from_json, message_from_wire
from portalmq.network.tls import TlsFiles
from portalmq.transport.transport import Bootstrap, Request, Transport, decode_answer, with_query

BROWSE_WAIT_S_MAX = 20.0
PAGE_MESSAGES = 500
# So many ids in one URL stay below what a server takes for a request line.
IDS_PER_REQUEST_MAX = 200

Position = int | Literal["earliest", "latest"]
# Where a stream group is to go on: an end, an offset of one partition, or a time.
SeekTarget = int | Literal["earliest", "latest"] | datetime


class _TopicList(msgspec.Struct):
    topics: list[wire.TopicSummary]


class _GroupList(msgspec.Struct):
    groups: list[wire.GroupDescription]


class _LockList(msgspec.Struct):
    locks: list[wire.LockDescription]


class _DeadPage(msgspec.Struct):
    messages: list[wire.DecodedJsonMessage]
    next_after: str | None = None


class _ScheduledPage(msgspec.Struct):
    messages: list[wire.DecodedJsonMessage]
    next: str | None = None


class _UnfinishedPage(msgspec.Struct):
    messages: list[wire.DecodedUnfinished]
    next: str | None = None
    counts: wire.QueueCounts | None = None


class Unfinished(NamedTuple):
    """A message that a queue group has not done. `available_at_ms` is when it may be handed out (again), where that is
    not now."""

    message: Message
    state: wire.UnfinishedState
    available_at_ms: int | None


class _Dropped(msgspec.Struct):
    dropped: int


wire.prepare(_TopicList, _GroupList, _LockList, _DeadPage, _ScheduledPage, _UnfinishedPage, _Dropped)


class Admin(Closeable):
    """Thread-safe. Every call raises the PortalMQError that the broker answered."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        token: str | None = None,
        timeout_s: float = 30,
        tls_ca: str | None = None,
        tls_client_cert: str | None = None,
        tls_client_key: str | None = None,
        allow_advertised: bool | None = None,
    ) -> None:
        """`timeout_s` bounds each call, its retries included. `tls_…` and `allow_advertised` are those of Producer."""
        self._transport = Transport(
            bootstrap,
            token=token,
            timeout_s=timeout_s,
            tls=TlsFiles(tls_ca, tls_client_cert, tls_client_key),
            allow_advertised=allow_advertised,
        )

    def __repr__(self) -> str:
        return f"<Admin at {', '.join(self.urls)}>"

    @property
    def urls(self) -> list[str]:
        """Where this client looks for a broker."""
        return self._transport.urls

    # --- topics ------------------------------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        replication_factor: int | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> wire.TopicDescription:
        """Make a topic. One that exists alike in the fields given is fine; raises TopicExists when one differs."""
        body = _given(partitions=partitions, replication_factor=replication_factor, config=config)
        return self._transport.send_json("PUT", _topic(name), body, wire.TopicDescription)

    def topics(self) -> list[wire.TopicSummary]:
        return self._transport.get("/v1/topics", _TopicList).topics

    def describe(self, topic: str) -> wire.TopicDescription:
        return self._transport.get(_topic(topic), wire.TopicDescription)

    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        config: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> wire.TopicDescription:
        """Change settings, or add partitions (their number never falls). None in `config` sets the default.

        Keys go to other partitions when there are more. So a topic that a group reads in the order of keys is not
        grown, unless with `force`: then messages of a key may pass each other once.
        """
        path = with_query(_topic(name), {"force": "true"} if force else None)
        return self._transport.send_json(
            "PATCH", path, _given(partitions=partitions, config=config), wire.TopicDescription
        )

    def delete_topic(self, name: str) -> None:
        self._transport.call(Request("DELETE", _topic(name), repeatable=True))

    def purge(self, topic: str, *, partition: int | None = None, before_offset: int | None = None) -> None:
        """Delete the topic's messages, all or those below an offset. Groups go on behind them."""
        query = {"partition": partition, "before_offset": before_offset}
        path = with_query(wire.messages_path(wire.check_name(topic, "topic")), query)
        self._transport.call(Request("DELETE", path, repeatable=True))

    # --- groups ------------------------------------------------------------------------------------------------------

    def groups(self) -> list[wire.GroupDescription]:
        return self._transport.get("/v1/groups", _GroupList).groups

    def group(self, name: str) -> wire.GroupDescription:
        return self._transport.get(_group(name), wire.GroupDescription)

    def create_group(self, name: str, **config: Any) -> wire.GroupDescription:
        """Make or change a group; `config` as in wire.GroupConfig, for instance visibility_timeout_ms=5000.

        What is not named is left as it is. Raises GroupModeMismatch: a group keeps its mode.
        """
        return self._transport.send_json("PUT", _group(name), config, wire.GroupDescription)

    def delete_group(self, name: str) -> None:
        self._transport.call(Request("DELETE", _group(name), repeatable=True))

    def lag(self, group: str) -> int:
        """How many messages the group has not yet acked."""
        return self.group(group).lag

    def queue_counts(self, group: str, topic: str) -> wire.QueueCounts:
        """How many messages of the topic a queue group has not done: all of them, when nobody has used it yet."""
        query = {"topic": wire.check_name(topic, "topic"), "limit": 1}
        page = self._transport.get(f"{_group(group)}/messages", _UnfinishedPage, query)
        if page.counts is None:
            raise PortalMQError("the broker told no counts: it is older than this client")
        return page.counts

    def unfinished(self, group: str, topic: str, *, limit: int | None = None) -> Iterator[Unfinished]:
        """The messages of the topic that a queue group has not done, and what is becoming of each: partition by
        partition, in the order of the log, as it is when the page is read. Looking changes nothing; a group that
        nobody has used yet has done nothing."""
        after, left = None, limit
        while left is None or left > 0:
            size = PAGE_MESSAGES if left is None else min(left, PAGE_MESSAGES)
            query = {"topic": wire.check_name(topic, "topic"), "limit": size, "after": after}
            page = self._transport.get(f"{_group(group)}/messages", _UnfinishedPage, query)
            for shown in page.messages:
                yield Unfinished(message_from_json(shown), shown.state, shown.available_at_ms)
            left = None if left is None else left - len(page.messages)
            if page.next is None or page.next == after:
                return
            after = page.next

    def offsets(self, group: str) -> list[stream_wire.GroupOffset]:
        """Where a stream group stands on each partition of its topics."""
        return self._transport.get(f"{_group(group)}/offsets", stream_wire.GroupOffsets).offsets

    def seek(
        self, group: str, topic: str, to: SeekTarget, *, partition: int | None = None, dry_run: bool = False
    ) -> stream_wire.SeekAnswer:
        """Have a stream group go on elsewhere: at an end, at a time, or at an offset (of one partition). Its members
        notice at their next heartbeat. With `dry_run` nothing changes, and the answer says what would."""
        target: str | dict[str, int | str] = {"offset": to} if isinstance(to, int) else _instant(to)
        request = stream_wire.SeekRequest(wire.check_name(topic, "topic"), target, partition, dry_run)
        return self._transport.send_once(f"{_group(group)}/seek", request, stream_wire.SeekAnswer)

    # --- dead letters ------------------------------------------------------------------------------------------------

    def dead_letters(self, group: str, topic: str, *, limit: int | None = None) -> Iterator[Message]:
        """The messages of the topic that the group gave up, oldest first. Their ids are those of the topic; headers
        that begin with `portalmq-` tell how often, when and why."""
        after, left = None, limit
        while left is None or left > 0:
            size = PAGE_MESSAGES if left is None else min(left, PAGE_MESSAGES)
            query = {"topic": wire.check_name(topic, "topic"), "limit": size, "after": after}
            page = self._transport.get(f"{_group(group)}/dead-letters", _DeadPage, query)
            yield from map(message_from_json, page.messages)
            left = None if left is None else left - len(page.messages)
            if page.next_after is None or page.next_after == after:
                return
            after = page.next_after

    def redrive(
        self,
        group: str,
        topic: str,
        *,
        ids: Sequence[str] | None = None,
        where: Mapping[str, Any] | None = None,
        rate_per_s: float | None = None,
        dry_run: bool = False,
    ) -> wire.Redriven:
        """Have dead letters handed out again to this group, counted from zero: those with `ids`, those that `where`
        means, or all.

            admin.redrive("billing", "orders", where={"reason": {"contains": "timeout"}}, rate_per_s=100)
        """
        request = wire.RedriveRequest(
            wire.check_name(topic, "topic"), None if ids is None else list(ids), where, rate_per_s, dry_run
        )
        return self._transport.send_json("POST", f"{_group(group)}/dead-letters/redrive", request, wire.Redriven)

    def drop_dead_letters(self, group: str, topic: str, *, ids: Sequence[str] | None = None) -> int:
        """Forget dead letters, those with `ids` or all; answers how many. Copies in a dead-letter topic stay."""
        wire.check_name(topic, "topic")
        parts: list[Sequence[str] | None] = [None]
        if ids is not None:
            parts = [ids[start : start + IDS_PER_REQUEST_MAX] for start in range(0, len(ids), IDS_PER_REQUEST_MAX)]
        dropped = 0
        for part in parts:
            query = {"topic": topic, "ids": None if part is None else ",".join(part)}
            request = Request("DELETE", with_query(f"{_group(group)}/dead-letters", query), repeatable=True)
            dropped += decode_answer(self._transport.call(request), _Dropped).dropped
        return dropped

    # --- scheduled messages ------------------------------------------------------------------------------------------

    def scheduled(self, topic: str, *, limit: int | None = None) -> Iterator[Message]:
        """The topic's messages that are not due yet, the next one first."""
        after, left = None, limit
        while left is None or left > 0:
            size = PAGE_MESSAGES if left is None else min(left, PAGE_MESSAGES)
            page = self._transport.get(f"{_topic(topic)}/scheduled", _ScheduledPage, {"limit": size, "after": after})
            yield from map(message_from_json, page.messages)
            left = None if left is None else left - len(page.messages)
            if page.next is None or page.next == after:
                return
            after = page.next

    def cancel_scheduled(self, topic: str, message_id: str) -> None:
        """Take a message back that is not due yet. Raises MessageNotFound when there is none such (any more)."""
        path = f"{_topic(topic)}/scheduled/{quote(message_id, safe='')}"
        self._transport.call(Request("DELETE", path, repeatable=True))

    # --- locks -------------------------------------------------------------------------------------------------------

    def locks(self) -> list[wire.LockDescription]:
        return self._transport.get("/v1/locks", _LockList).locks

    def lock(self, name: str) -> wire.LockDescription:
        """Who holds the lock, under which fencing token, and how many wait. Raises LockNotFound."""
        return self._transport.get(wire.lock_path(wire.check_name(name, "lock")), wire.LockDescription)

    def release_lock(self, name: str, owner: str, fencing_token: int) -> None:
        """Give a lock back in its holder's name. Raises Fenced when that is not the holder any more."""
        query = {"owner": owner, "fencing_token": fencing_token}
        path = with_query(wire.lock_path(wire.check_name(name, "lock")), query)
        self._transport.call(Request("DELETE", path, repeatable=True))

    # --- the cluster -------------------------------------------------------------------------------------------------

    def cluster(self) -> wire.ClusterDescription:
        return self._transport.get("/v1/cluster", wire.ClusterDescription)

    def metadata(self, topics: Iterable[str] | None = None) -> wire.Metadata:
        """Who leads what; of `topics`, those that exist."""
        return self._transport.metadata(topics)

    def health(self) -> dict[str, Any]:
        """What the answering broker says of itself."""
        return self._transport.get("/healthz", dict[str, Any])

    # --- looking at messages -----------------------------------------------------------------------------------------

    def browse(
        self,
        topic: str,
        partition: int = 0,
        *,
        offset: Position = "earliest",
        at: datetime | None = None,
        limit: int = 100,
        wait_s: float = 0,
    ) -> wire.PackBrowsePage:
        """One page of a partition from `offset` on, or from the first message at or after the time `at`."""
        query: dict[str, object] = {"limit": limit}
        if at is None:
            query["offset"] = offset
        else:
            query["at"] = _rfc3339(at)
        if wait_s > 0:
            query["wait_ms"] = round(min(wait_s, BROWSE_WAIT_S_MAX) * 1000)
        path = with_query(wire.partition_messages_path(wire.check_name(topic, "topic"), partition), query)
        request = Request(
            "GET", path, headers=(("Accept", wire.BATCH_MSGPACK),), repeatable=True, leader_of=(topic, partition),
            wait_s=wait_s,
        )  # fmt: skip
        return decode_answer(self._transport.call(request), wire.PackBrowsePage)

    def peek(
        self,
        topic: str,
        *,
        partition: int | None = None,
        offset: Position = "earliest",
        at: datetime | None = None,
        limit: int | None = 10,
    ) -> Iterator[Message]:
        """Messages as they stand, partition after partition, up to what is readable now. Consumes nothing."""
        wire.check_name(topic, "topic")
        if partition is None:
            partitions = [description.partition for description in self.describe(topic).partitions]
        else:
            partitions = [partition]
        left = limit
        for each in partitions:
            for message in self._peek_partition(topic, each, offset, at, left):
                yield message
                left = None if left is None else left - 1
            if left is not None and left <= 0:
                return

    def read_all(self, topic: str, limit: int | None = None) -> Iterator[Message]:
        """The whole queue over all partitions, page by page."""
        return self.peek(topic, limit=limit)

    def _peek_partition(
        self, topic: str, partition: int, offset: Position, at: datetime | None, limit: int | None
    ) -> Iterator[Message]:
        end: int | None = None
        while limit is None or limit > 0:
            size = wire.BROWSE_MESSAGES_MAX if limit is None else min(limit, wire.BROWSE_MESSAGES_MAX)
            page = self.browse(topic, partition, offset=offset, at=at, limit=size)
            # What comes in while we read is not followed: the reading ends.
            end = page.high_watermark if end is None else end
            for packed in page.messages:
                if packed.offset >= end:
                    return
                yield message_from_wire(packed, topic)
            if limit is not None:
                limit -= len(page.messages)
            if page.next_offset >= end or page.next_offset == offset:
                return
            offset, at = page.next_offset, None

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._transport.close()


def _topic(name: str) -> str:
    return wire.topic_path(wire.check_name(name, "topic"))


def _group(name: str) -> str:
    return wire.group_path(wire.check_name(name, "group"))


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _instant(to: str | datetime) -> str | dict[str, int | str]:
    return {"at": _rfc3339(to)} if isinstance(to, datetime) else to


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
