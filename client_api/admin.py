"""The administrator's client: topics, groups, dead letters, scheduled messages, locks, the cluster, and a read-only
view of queues; schedules are in schedules.py, searches in searches.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Literal, NamedTuple, TypeVar
from urllib.parse import quote

import msgspec

from portalmq import stream_wire, wire
from portalmq.closeable import Closeable
from portalmq.contract import history
from portalmq.errors import InvalidRequest, MessageNotFound, OffsetOutOfRange, PortalMQError
from portalmq.message import Message, RecordMetadata, message_from_json, message_from_wire
from portalmq.network.http_answer import HttpAnswer
from portalmq.network.tls import TlsFiles
from portalmq.schedules import ScheduleCalls
from portalmq.searches import SearchCalls
from portalmq.transport.answers import decode_answer
from portalmq.transport.request import Request, json_request, with_query
from portalmq.transport.transport import Bootstrap, Transport

BROWSE_WAIT_S_MAX = 20.0
PAGE_MESSAGES = 500
# The most ids in one URL: it stays below the length that servers accept for a request line.
IDS_PER_REQUEST_MAX = 200

Position = int | Literal["earliest", "latest"]
# Where a stream group continues: an end, an offset of one partition, or a time.
SeekTarget = int | Literal["earliest", "latest"] | datetime


class _TopicList(msgspec.Struct):
    topics: list[wire.TopicSummary]


class _GroupList(msgspec.Struct):
    groups: list[wire.GroupDescription]


class _LockList(msgspec.Struct):
    locks: list[wire.LockDescription]


class _DeadPage(msgspec.Struct, rename={"next": "next_after"}):
    messages: list[wire.DecodedJsonMessage]
    next: str | None = None


class _ScheduledPage(msgspec.Struct):
    messages: list[wire.DecodedJsonMessage]
    next: str | None = None


class _UnfinishedPage(msgspec.Struct):
    messages: list[wire.DecodedUnfinished]
    next: str | None = None
    counts: wire.QueueCounts | None = None


P = TypeVar("P", _DeadPage, _ScheduledPage, _UnfinishedPage)


class Unfinished(NamedTuple):
    """A message that a queue group has not finished. `available_at_ms` is when it may be delivered (again), or None if
    that is now."""

    message: Message
    state: wire.UnfinishedState
    available_at_ms: int | None


class MessageLife(NamedTuple):
    """A message, and what the log knows of its life; of a purged message the content is gone. `as_of` says up to where
    the log is known. What records of groups below `incomplete_below` said is not known: they were compacted away."""

    message: Message
    events: list[history.TraceEvent]
    replicas: history.TraceReplicas
    as_of: history.AsOf
    incomplete_below: int | None


class _Dropped(msgspec.Struct):
    dropped: int


wire.prepare(_TopicList, _GroupList, _LockList, _DeadPage, _ScheduledPage, _UnfinishedPage, _Dropped)


class Admin(ScheduleCalls, SearchCalls, Closeable):
    """A client for administrators. Thread-safe. Every call raises the PortalMQError that the broker answered."""

    def __init__(
        self,
        bootstrap: Bootstrap = None,
        *,
        token: str | None = None,
        timeout_s: float = 30,
        transport: Transport | None = None,
        tls_ca: str | None = None,
        tls_client_cert: str | None = None,
        tls_client_key: str | None = None,
        allow_advertised: bool | None = None,
    ) -> None:
        """`timeout_s` bounds each call, its retries included. `transport`, `tls_…` and `allow_advertised` are those of
        Producer."""
        self._transport = transport or Transport(
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
        """The URLs at which this client looks for a broker."""
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
        """Create a topic. Succeeds if it exists with the same values of the fields given; raises TopicExists if one
        differs."""
        body = _given(partitions=partitions, replication_factor=replication_factor, config=config)
        return self._transport.send_json("PUT", _topic(name), body, wire.TopicDescription)

    def topics(self) -> list[wire.TopicSummary]:
        """Return all topics."""
        return self._transport.get("/v1/topics", _TopicList).topics

    def describe(self, topic: str) -> wire.TopicDescription:
        """Return a topic's partitions, replicas and settings. Raises TopicNotFound."""
        return self._transport.get(_topic(topic), wire.TopicDescription)

    def alter_topic(
        self,
        name: str,
        *,
        partitions: int | None = None,
        config: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> wire.TopicDescription:
        """Change settings, or add partitions (their number never falls). None in `config` restores the default.

        With more partitions, keys map to other partitions. So a topic that a group reads in key order does not grow,
        except with `force`: then messages of one key may overtake each other once.
        """
        path = with_query(_topic(name), {"force": "true"} if force else None)
        return self._transport.send_json(
            "PATCH", path, _given(partitions=partitions, config=config), wire.TopicDescription
        )

    def delete_topic(self, name: str, *, force: bool = False) -> None:
        """Delete a topic and its messages. Raises Unavailable while outputs that its commits have ordered are still to
        be appended to their topics, except with `force`: then these are lost."""
        self._delete(_topic(name), force="true" if force else None)

    def purge(self, topic: str, *, partition: int | None = None, before_offset: int | None = None) -> None:
        """Delete the topic's messages: all, or those below an offset. Groups continue after them."""
        self._delete(f"{_topic(topic)}/messages", partition=partition, before_offset=before_offset)

    # --- groups ------------------------------------------------------------------------------------------------------

    def groups(self) -> list[wire.GroupDescription]:
        """Return all groups."""
        return self._transport.get("/v1/groups", _GroupList).groups

    def group(self, name: str) -> wire.GroupDescription:
        """Return a group's counts, members and settings. Raises GroupNotFound."""
        return self._transport.get(_group(name), wire.GroupDescription)

    def group_at(self, name: str, at: datetime) -> history.PastGroup:
        """Return a group's counts as they were. Raises GroupNotFound; OffsetOutOfRange if the log no longer reaches
        back to that time."""
        return self._transport.get(_group(name), history.PastGroup, {"at": _rfc3339(at)})

    def create_group(self, name: str, **config: Any) -> wire.GroupDescription:
        """Create or change a group; `config` has the fields of wire.GroupConfig, for instance
        visibility_timeout_ms=5000.

        Fields that are not named keep their values. Raises GroupModeMismatch: the mode of a group is fixed.
        """
        return self._transport.send_json("PUT", _group(name), config, wire.GroupDescription)

    def delete_group(self, name: str) -> None:
        """Delete a group: its position, leases and dead letters. Messages stay."""
        self._delete(_group(name))

    def pause_group(self, name: str, reason: str = "", *, by: str = "") -> None:
        """Deliver no messages to a queue group until `resume_group`: its receives wait, as with an empty queue. Leases
        that run can still be acked, nacked and extended. A group that is paused stays as it is."""
        self._post(f"{_group(name)}/pause", wire.PauseRequest(reason, by))

    def resume_group(self, name: str, *, by: str = "") -> None:
        """Deliver messages to a paused group again."""
        self._post(f"{_group(name)}/resume", wire.PauseRequest(by=by))

    def move(
        self,
        group: str,
        topic: str,
        to_topic: str,
        *,
        limit: int = 1_000,
        rate_per_s: float | None = None,
        dry_run: bool = False,
    ) -> wire.Moved:
        """Move what a queue group has ready in a topic to another topic, each message exactly once: it is done for
        this group, and its copy, whose header `portalmq-copy-of` names it, is ready there for all groups. Return how
        many were ready, and how many were moved: at most `limit`, and fewer when that takes long. Messages that the
        other topic would refuse, as too large, stay ready and are counted as `refused`. With `rate_per_s` the copies
        are delivered one after the other."""
        wire.check_name(topic, "topic")
        request = wire.MoveRequest(topic, wire.check_name(to_topic, "topic"), limit, rate_per_s, dry_run)
        return self._transport.send_json("POST", f"{_group(group)}/move", request, wire.Moved)

    def lag(self, group: str) -> int:
        """Return the number of messages that the group has not acked."""
        return self.group(group).lag

    def queue_counts(self, group: str, topic: str) -> wire.QueueCounts:
        """Return how many messages of the topic a queue group has not finished, by state; all of them if the group was
        never used."""
        query = {"topic": wire.check_name(topic, "topic"), "limit": 1}
        page = self._transport.get(f"{_group(group)}/messages", _UnfinishedPage, query)
        if page.counts is None:
            raise PortalMQError("the broker sent no counts: it is older than this client")
        return page.counts

    def unfinished(
        self, group: str, topic: str, *, limit: int | None = None, at: datetime | None = None
    ) -> Iterator[Unfinished]:
        """Yield the messages of the topic that a queue group has not finished, with their states: partition by
        partition, in log order, as they are when the page is read; or as they were at the time `at`. Reading changes
        nothing; a group that was never used has finished nothing."""
        query: dict[str, object] = {"topic": wire.check_name(topic, "topic")}
        if at is not None:
            query["at"] = _rfc3339(at)
        for page in self._pages(f"{_group(group)}/messages", _UnfinishedPage, limit, query):
            for each in page.messages:
                yield Unfinished(message_from_json(each), each.state, each.available_at_ms)

    def offsets(self, group: str) -> list[stream_wire.GroupOffset]:
        """Return the committed offset and the lag of a stream group on each partition of its topics."""
        return self._transport.get(f"{_group(group)}/offsets", stream_wire.GroupOffsets).offsets

    def seek(
        self, group: str, topic: str, to: SeekTarget, *, partition: int | None = None, dry_run: bool = False
    ) -> stream_wire.SeekAnswer:
        """Move a stream group to an end, a time, or an offset (of one partition). Its members notice at their next
        heartbeat. With `dry_run` nothing changes, and the answer says what would change."""
        target: str | dict[str, int | str] = {"offset": to} if isinstance(to, int) else _instant(to)
        request = stream_wire.SeekRequest(wire.check_name(topic, "topic"), target, partition, dry_run)
        return self._transport.send_once(f"{_group(group)}/seek", request, stream_wire.SeekAnswer)

    # --- dead letters ------------------------------------------------------------------------------------------------

    def dead_letters(self, group: str, topic: str, *, limit: int | None = None) -> Iterator[Message]:
        """Yield the dead letters of the topic in the group, oldest first. Their ids are those of the topic; headers
        that begin with `portalmq-` say how often, when and why they failed."""
        query = {"topic": wire.check_name(topic, "topic")}
        for page in self._pages(f"{_group(group)}/dead-letters", _DeadPage, limit, query):
            yield from map(message_from_json, page.messages)

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
        """Deliver dead letters to this group again, with delivery counts from zero: those with `ids`, those that match
        `where`, or all.

            admin.redrive("billing", "orders", where={"reason": {"contains": "timeout"}}, rate_per_s=100)
        """
        request = wire.RedriveRequest(
            wire.check_name(topic, "topic"), None if ids is None else list(ids), where, rate_per_s, dry_run
        )
        return self._transport.send_json("POST", f"{_group(group)}/dead-letters/redrive", request, wire.Redriven)

    def drop_dead_letters(self, group: str, topic: str, *, ids: Sequence[str] | None = None) -> int:
        """Drop dead letters, those with `ids` or all, and return their number. Copies in a dead-letter topic stay."""
        wire.check_name(topic, "topic")
        parts: list[Sequence[str] | None] = [None]
        if ids is not None:
            parts = [ids[start : start + IDS_PER_REQUEST_MAX] for start in range(0, len(ids), IDS_PER_REQUEST_MAX)]
        dropped = 0
        for part in parts:
            ids_of_part = None if part is None else ",".join(part)
            answer = self._delete(f"{_group(group)}/dead-letters", topic=topic, ids=ids_of_part)
            dropped += decode_answer(answer, _Dropped).dropped
        return dropped

    # --- copies ------------------------------------------------------------------------------------------------------

    def copy_message(
        self, topic: str, message_id: str, *, to_topic: str | None = None, **changes: Any
    ) -> RecordMetadata:
        """Produce a copy of a message, to its topic or to another one, once however often the call is repeated.
        `changes` are fields of a JSON message: value (or value_base64), key, headers, content_type, partition,
        delay_ms, deliver_at_ms, ttl_ms, priority. What is left out is kept; a header that is None is left out of the
        copy. Its header `portalmq-copy-of` names the original. Raises MessageNotFound."""
        body = {**_given(to_topic=to_topic), **changes}
        path = f"{_topic(topic)}/messages/{quote(message_id, safe='')}/copy"
        return self._transport.send_once(path, body, RecordMetadata)

    # --- scheduled messages ------------------------------------------------------------------------------------------

    def scheduled(self, topic: str, *, limit: int | None = None) -> Iterator[Message]:
        """Yield the topic's messages that are not due yet, the next one first."""
        for page in self._pages(f"{_topic(topic)}/scheduled", _ScheduledPage, limit):
            yield from map(message_from_json, page.messages)

    def cancel_scheduled(self, topic: str, message_id: str) -> None:
        """Cancel a message that is not due yet. Raises MessageNotFound if there is no such message (any more)."""
        self._delete(_scheduled(topic, message_id))

    def run_scheduled(self, topic: str, message_id: str) -> None:
        """Deliver a scheduled message now: a copy of it, whose header `portalmq-copy-of` names it. Raises
        MessageNotFound, also for one that is due, and after a call whose answer was lost."""
        request = json_request("POST", f"{_scheduled(topic, message_id)}/run", {}, repeatable=False)
        self._transport.call(request)

    def move_scheduled(self, topic: str, message_id: str, deliver_at: datetime) -> None:
        """Deliver a scheduled message at another time: a copy of it, as `run_scheduled` does."""
        body = {"deliver_at_ms": round(deliver_at.timestamp() * 1000)}
        self._transport.call(json_request("PATCH", _scheduled(topic, message_id), body, repeatable=False))

    def change_scheduled(
        self,
        topic: str,
        action: Literal["run", "move", "cancel"],
        *,
        ids: Sequence[str] | None = None,
        where: Mapping[str, Any] | None = None,
        deliver_at: datetime | None = None,
        limit: int = 1_000,
        dry_run: bool = False,
    ) -> dict[str, int]:
        """Run, move (to `deliver_at`) or cancel many scheduled messages: those with `ids`, those that match `where`, or
        all; the first `limit` by due time. Return how many matched, and how many were changed (`run`, `moved` or
        `cancelled`).

            admin.change_scheduled("reminders", "cancel", where={"value.user": {"eq": 7}}, dry_run=True)
        """
        body = _given(ids=None if ids is None else list(ids), where=where)
        body |= {"limit": limit, "dry_run": dry_run}
        if deliver_at is not None:
            body["deliver_at_ms"] = round(deliver_at.timestamp() * 1000)
        return self._transport.send_json("POST", f"{_topic(topic)}/scheduled/{action}", body, dict[str, int])

    # --- locks -------------------------------------------------------------------------------------------------------

    def locks(self) -> list[wire.LockDescription]:
        """Return the locks that are held, or were held recently."""
        return self._transport.get("/v1/locks", _LockList).locks

    def lock(self, name: str) -> wire.LockDescription:
        """Return the lock's owner, fencing token and number of waiters. Raises LockNotFound."""
        return self._transport.get(wire.lock_path(wire.check_name(name, "lock")), wire.LockDescription)

    def release_lock(self, name: str, owner: str, fencing_token: int) -> None:
        """Release a lock on behalf of its holder. Raises Fenced if `owner` does not hold it under that token any
        more."""
        self._delete(wire.lock_path(wire.check_name(name, "lock")), owner=owner, fencing_token=fencing_token)

    # --- the cluster -------------------------------------------------------------------------------------------------

    def cluster(self) -> wire.ClusterDescription:
        """Return the brokers and the controller."""
        return self._transport.get("/v1/cluster", wire.ClusterDescription)

    def metadata(self, topics: Iterable[str] | None = None) -> wire.Metadata:
        """Return the leaders of partitions: of all topics, or of those of `topics` that exist."""
        return self._transport.metadata(topics)

    def health(self) -> dict[str, Any]:
        """Return the health document of the broker that answers."""
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
        """Return one page of a partition, from `offset` or from the first message at or after the time `at`."""
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

    def digest(
        self,
        topic: str,
        partition: int,
        broker_id: int,
        *,
        offset: int = 0,
        below: int = 0,
        batches: bool = False,
        files: bool = False,
    ) -> wire.ReplicaDigest:
        """Return the state of a broker's replica, and the SHA-256 of a part of it: of the batches from `offset` to
        below `below`, at most a MiB. With `batches` each batch is listed. With `files` the file that holds `offset` is
        checked instead, and `next_offset` is where the next one begins."""
        query: dict[str, object] = {"broker": broker_id, "offset": offset, "below": below}
        query |= {name: "true" for name, given in (("batches", batches), ("files", files)) if given}
        path = f"{_topic(topic)}/partitions/{partition}/digest"
        return self._transport.get(path, wire.ReplicaDigest, query)

    def peek(
        self,
        topic: str,
        *,
        partition: int | None = None,
        offset: Position = "earliest",
        at: datetime | None = None,
        limit: int | None = 10,
    ) -> Iterator[Message]:
        """Yield messages partition by partition, up to what is readable now. Consumes nothing."""
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

    def message(self, topic: str, message_id: str) -> Message:
        """Return a message by its id, `<partition>-<offset>`. Consumes nothing. Raises MessageNotFound."""
        partition, _, offset = message_id.partition("-")
        if not (partition.isdigit() and offset.isdigit()):
            raise InvalidRequest(f"{message_id[:100]!r} is no id of a message: write <partition>-<offset>, as 0-17")
        try:
            found = self.browse(topic, int(partition), offset=int(offset), limit=1).messages
        except OffsetOutOfRange as error:
            raise MessageNotFound(f"there is no message {message_id}: {error.detail}") from None
        if not found or found[0].offset != int(offset):
            raise MessageNotFound(f"there is no message {message_id} in topic {topic!r}")
        return message_from_wire(found[0], topic)

    def trace(self, topic: str, message_id: str, *, local: bool = False) -> MessageLife:
        """Return the life of a message: who got it when, and what became of it. With `local` the broker that answers
        tells it from its own replica, which may follow. Raises MessageNotFound."""
        path = f"/v1/messages/{quote(wire.check_name(topic, 'topic'), safe='')}/{quote(message_id, safe='')}/trace"
        events: list[history.TraceEvent] = []
        after: int | None = None
        while True:
            query = {"after": after, "local": "true" if local else None}
            page = self._transport.get(path, history.MessageTrace, query)
            events += page.events
            if page.next is None:
                message = message_from_json(page.message)
                return MessageLife(message, events, page.replicas, page.as_of, page.incomplete_below)
            after = page.next

    def read_all(self, topic: str, limit: int | None = None) -> Iterator[Message]:
        """Yield the messages of all partitions, page by page."""
        return self.peek(topic, limit=limit)

    def _peek_partition(
        self, topic: str, partition: int, offset: Position, at: datetime | None, limit: int | None
    ) -> Iterator[Message]:
        end: int | None = None
        while limit is None or limit > 0:
            size = wire.BROWSE_MESSAGES_MAX if limit is None else min(limit, wire.BROWSE_MESSAGES_MAX)
            page = self.browse(topic, partition, offset=offset, at=at, limit=size)
            # Messages that arrive during the reading are left out, so that it ends.
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

    def _post(self, path: str, body: object) -> HttpAnswer:
        """Make a call that may be repeated."""
        return self._transport.call(json_request("POST", path, body, repeatable=True))

    def _delete(self, path: str, **query: object) -> HttpAnswer:
        return self._transport.call(Request("DELETE", with_query(path, query), repeatable=True))

    def _pages(
        self, path: str, kind: type[P], limit: int | None, query: Mapping[str, object] | None = None
    ) -> Iterator[P]:
        """Yield the pages of a listing, up to `limit` messages."""
        after, left = None, limit
        while left is None or left > 0:
            size = PAGE_MESSAGES if left is None else min(left, PAGE_MESSAGES)
            page = self._transport.get(path, kind, {**(query or {}), "limit": size, "after": after})
            yield page
            left = None if left is None else left - len(page.messages)
            if page.next is None or page.next == after:
                return
            after = page.next

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()


def _topic(name: str) -> str:
    return wire.topic_path(wire.check_name(name, "topic"))


def _scheduled(topic: str, message_id: str) -> str:
    return f"{_topic(topic)}/scheduled/{quote(message_id, safe='')}"


def _group(name: str) -> str:
    return wire.group_path(wire.check_name(name, "group"))


def _rfc3339(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _instant(to: str | datetime) -> str | dict[str, int | str]:
    return {"at": _rfc3339(to)} if isinstance(to, datetime) else to


def _given(**fields: object) -> dict[str, object]:
    return {name: value for name, value in fields.items() if value is not None}
