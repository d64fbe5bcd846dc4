"""What pages show beside the public API: lists in pages, sums over brokers, a search over partitions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Annotated, Any, Literal

import msgspec
from flask import Response, request

from portalmq import wire
from portalmq.broker.api.outgoing import json_message
from portalmq.broker.api.query import Instant, Parameters, TopicName, read_by, whole_number
from portalmq.broker.api.request_context import RequestContext, answer
from portalmq.broker.broker import Broker
from portalmq.broker.core.queue.predicate import parse
from portalmq.broker.dashboard.cluster_rates import (
    STREAMS_MAX,
    groups_of,
    incarnation_of,
    lags_of,
    rates_of,
    sum_of,
    there_at,
    topics_of,
)
from portalmq.broker.dashboard.search import Search, find
from portalmq.broker.partition.partition import Partition
from portalmq.broker.partition.yielding import in_short_turns
from portalmq.broker.queues.outbox import HEADER_DEAD_REASON
from portalmq.broker.queues.partition_counts import delayed_lanes, not_due
from portalmq.control_plane.state import PartitionState, TopicState
from portalmq.errors import Backpressure, InvalidRequest
from portalmq.wire import NonNegative, Positive

PAGE = 50
PAGE_MAX = 500
MESSAGES = 50
# Dead letters that are read to count them by reason.
LETTERS_MAX = 5_000
REASON_LENGTH = 200
STREAM_WAIT_S = 5.0

_numbers = re.compile(r"\d+")
_has_letters = re.compile(r"[^\W\d_]").search


def events(context: RequestContext, query: Parameters) -> Response:
    """Stream the rates of the cluster as server-sent events: the past first, then each second."""
    rates = rates_of(context.broker)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    if request.method == "HEAD":
        return Response(b"", content_type=wire.EVENT_STREAM, headers=headers)
    if rates.streams >= STREAMS_MAX:
        raise Backpressure(f"{rates.streams} pages are open already: close some", retry_after_s=5)

    def parts() -> Iterator[bytes]:
        yield b"retry: 1000\n\n" + rates.history()
        while context.broker.ready:
            shown = rates.event
            rates.wait(STREAM_WAIT_S)
            yield b": still here\n\n" if rates.event is shown else rates.event

    slot = ExitStack()
    slot.enter_context(context.parked(1))  # a stream holds a connection, as a waiting call does
    rates.enter()
    slot.callback(rates.leave)
    response = Response(parts(), content_type=wire.EVENT_STREAM, headers=headers)
    response.call_on_close(slot.close)
    return response


def minutes(context: RequestContext, query: Parameters) -> Response:
    """Return a row for each minute of the last day."""
    answers = rates_of(context.broker).all(minutes=True)
    by_minute: dict[int, dict[Any, Any]] = {}
    for found in answers:
        for row in found.rows:
            by_minute.setdefault(row.second, {})[incarnation_of(found)] = row
    histories = [found.registered for found in answers]
    return answer(
        {"rows": [sum_of(minute, rows, there_at(histories, minute, 60)) for minute, rows in sorted(by_minute.items())]}
    )


# --- lists -----------------------------------------------------------------------------------------------------------


class PageQuery(Parameters):
    search: str = ""
    page: Positive = 1
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = PAGE


class TopicsQuery(PageQuery):
    """`scheduled`: only topics with delayed messages on this broker, each with how many are not due."""

    sort: Literal["name", "rate", "scheduled"] = "name"


def topics(context: RequestContext, query: TopicsQuery) -> Response:
    """Return a page of topics, by name or by rate."""
    search = query.search.lower()
    broker = context.broker
    states = {topic.name: topic.state for topic in in_short_turns(tuple(broker.topics))}
    names = sorted(name for name in states if search in name.lower())
    asked = rates_of(broker)
    if query.sort == "rate":
        busiest = topics_of(asked.all(top=PAGE_MAX))
        size = {name: busiest[name].published + busiest[name].delivered for name in names if name in busiest}
        names.sort(key=lambda name: -size.get(name, 0.0))
    elif query.sort == "scheduled":
        names = [name for name in in_short_turns(names) if _with_delayed(broker, states[name])]
    names, shown = page_of(names, query)
    rates = topics_of(asked.all(topics=names))
    rows = [_topic(broker, states[name], rates.get(name)) for name in in_short_turns(names)]
    if query.sort == "scheduled":
        wall_ms = broker.wall_ms()
        for row in rows:
            held = in_short_turns(_with_delayed(broker, states[row["name"]]))
            row["scheduled"] = sum([not_due(each, wall_ms) for each in held])
    return answer({**shown, "topics": rows, "at_ms": broker.wall_ms()})


def _with_delayed(broker: Broker, state: TopicState) -> list[Partition]:
    """Return the replicas on this broker with delayed messages."""
    local = [broker.topics.local(state.topic_id, number) for number in range(state.partitions)]
    return [each for each in local if each is not None and delayed_lanes(each)]


def _topic(broker: Broker, state: TopicState, rate: Any) -> dict[str, Any]:
    held = [broker.mirror.partitions.get((state.topic_id, number)) for number in range(state.partitions)]
    places = [each.value for each in held if each is not None]
    local = [broker.topics.local(state.topic_id, number) for number in range(state.partitions)]
    here = [each for each in local if each is not None]
    is_all = len(here) == state.partitions
    return {
        "name": state.name,
        "partitions": state.partitions,
        "replication_factor": state.replication_factor,
        "cleanup": state.config.cleanup,
        "offline": sum(each.leader is None for each in places) + state.partitions - len(places),
        "under_replicated": sum(len(each.isr) < len(each.replicas) for each in places),
        # Of the replicas on this broker: to ask the leaders of each topic would take long.
        "size_bytes": sum(each.log.size_bytes for each in here) if is_all else None,
        "messages": sum(
            each.log.messages_before(each.high_watermark) - each.log.messages_before(each.log.log_start_offset)
            for each in here
        )
        if is_all
        else None,
        "rate": None if rate is None else [rate.published, rate.delivered, rate.acked],
    }


class GroupsQuery(PageQuery):
    """`dead`: only groups with dead letters, those with the most first."""

    sort: Literal["name", "lag", "dead"] = "name"


def groups(context: RequestContext, query: GroupsQuery) -> Response:
    """Return a page of groups, by name, by lag or by dead letters."""
    search = query.search.lower()
    broker = context.broker
    names = sorted(name for name in broker.groups.names() if search in name.lower())
    if query.sort == "lag":
        lags = groups_of(rates_of(broker).all(top=PAGE_MAX))
        names.sort(key=lambda name: -lags[name].lag if name in lags else 0)
    elif query.sort == "dead":
        dead: Counter[str] = Counter()
        for count in in_short_turns(broker.group_admin.counts([])):
            dead[count.group] += count.dead
        names = sorted([name for name in names if dead[name]], key=lambda name: -dead[name])
    names, shown = page_of(names, query)
    described = broker.group_admin.describe_some(names)
    rows = [broker.offsets.describe_or(each) if each.mode == "stream" else each for each in described]
    return answer({**shown, "groups": rows, "at_ms": broker.wall_ms()})


def group(context: RequestContext, group: str, query: Parameters) -> Response:
    """Return the counts of a queue group by topic, and its lag lately."""
    wire.check_name(group, "group")
    broker = context.broker
    broker.groups.get(group)
    by_topic: dict[str, Counter[str]] = {}
    for count in broker.group_admin.counts([group]):
        numbers = by_topic.setdefault(count.topic, Counter())
        for name in ("ready", "in_flight", "scheduled", "dead", "lag"):
            numbers[name] += getattr(count, name)
    lags = lags_of(rates_of(broker).all(series=group))
    rows = [{"topic": topic, **numbers} for topic, numbers in sorted(by_topic.items())]
    return answer({"topics": rows, "lags": lags, "at_ms": broker.wall_ms()})


class ClusterQuery(PageQuery):
    show: Literal["all", "under-replicated", "offline"] = "all"


def cluster(context: RequestContext, query: ClusterQuery) -> Response:
    """Return a page of partitions with their leaders: all, or those that lack a replica or a leader."""
    show, search = query.show, query.search.lower()
    broker = context.broker
    rows, under_replicated, offline = [], 0, 0
    for topic in in_short_turns(sorted(broker.topics, key=lambda topic: topic.name)):
        for number in range(topic.state.partitions):
            held = broker.mirror.partitions.get((topic.state.topic_id, number))
            state = held.value if held is not None else None
            is_offline = state is None or state.leader is None
            is_under = state is not None and len(state.isr) < len(state.replicas)
            under_replicated += is_under
            offline += is_offline
            if search in topic.name.lower() and {"all": True, "offline": is_offline}.get(show, is_under):
                rows.append((topic.name, number, state))
    rows, shown = page_of(rows, query)
    partitions = [_partition(name, number, state) for name, number, state in rows]
    health = broker.health()
    return answer(
        {
            **shown,
            "partitions": partitions,
            "under_replicated": under_replicated,
            "offline": offline,
            "control_plane": health["control_plane"],
            "is_clustered": broker.config.is_clustered,
            "clocks_differ": health["clocks_differ"],
            "at_ms": broker.wall_ms(),
        }
    )


def _partition(topic: str, number: int, state: PartitionState | None) -> dict[str, Any]:
    if state is None:
        return {"topic": topic, "partition": number, "leader": None, "leader_epoch": 0, "replicas": [], "isr": []}
    return {
        "topic": topic,
        "partition": number,
        "leader": state.leader,
        "leader_epoch": state.leader_epoch,
        "replicas": list(state.replicas),
        "isr": sorted(state.isr),
    }


def page_of(items: list[Any], query: PageQuery) -> tuple[list[Any], dict[str, int]]:
    page, limit = query.page, query.limit
    shown = {"total": len(items), "page": page, "pages": max(1, -(-len(items) // limit))}
    return items[(page - 1) * limit : page * limit], shown


# --- messages --------------------------------------------------------------------------------------------------------


def _positions(text: str, what: str) -> dict[int, int]:
    positions = {}
    for part in text.split(","):
        number, dash, offset = part.partition("-")
        if not dash:
            raise InvalidRequest(f"{what} is {text[:100]!r}, but must be the `next` of an earlier answer")
        positions[whole_number(number, f"each partition of {what}")] = whole_number(offset, f"each offset of {what}")
    return positions


class MessagesQuery(Parameters):
    """`after`: the `next` or `tail` of an earlier answer. `where`: conditions as of a redrive."""

    topic: TopicName
    partition: NonNegative | None = None
    order: Literal["newest", "oldest"] = "newest"
    at: Instant | None = None
    after: Annotated[dict[int, int], read_by(_positions)] | None = None
    where: str | None = None
    limit: Annotated[int, msgspec.Meta(ge=1, le=PAGE_MAX)] = MESSAGES


def messages(context: RequestContext, query: MessagesQuery) -> Response:
    """Search the messages of a topic."""
    broker = context.broker
    count = broker.topics.known(query.topic).state.partitions
    search = Search(
        query.topic,
        list(range(count)) if query.partition is None else [query.partition],
        query.order == "oldest",
        query.limit,
        query.at,
        query.after,
        None if query.where is None else parse(wire.decode_json(query.where.encode(), dict[str, Any])),
    )
    found = find(broker.browser, search)
    context.make_room([stored.record for stored in found.messages])
    return answer(
        {
            "messages": [json_message(stored) for stored in in_short_turns(found.messages)],
            "next": None if found.is_end else _joined(found.positions),
            "tail": _joined(found.positions if search.oldest_first else found.ends),
            "scanned": found.scanned,
            "at_ms": broker.wall_ms(),
        }
    )


def _joined(positions: dict[int, int]) -> str:
    return ",".join(f"{number}-{offset}" for number, offset in positions.items())


class ReasonsQuery(Parameters):
    topic: TopicName


def dead_letters(context: RequestContext, group: str, query: ReasonsQuery) -> Response:
    """Count the dead letters of a group on a topic by their reasons, the first LETTERS_MAX of them. Reasons that differ
    only in numbers count as one, with "…" for each number; those without a letter stay as they are."""
    wire.check_name(group, "group")
    reasons: Counter[str] = Counter()
    after: str | None = None
    while reasons.total() < LETTERS_MAX:
        listed = context.broker.dead_letters.page(group, query.topic, limit=1_000, after=after)
        for stored in listed.messages:
            reason = (stored.record.headers or {}).get(HEADER_DEAD_REASON, "")
            masked = _numbers.sub("…", reason[:REASON_LENGTH])
            reasons[masked if _has_letters(masked) else reason[:REASON_LENGTH]] += 1
        if listed.next_after is None or listed.next_after == after:
            after = None
            break
        after = listed.next_after
    shown = [{"reason": reason, "count": count} for reason, count in reasons.most_common()]
    return answer({"reasons": shown, "counted": reasons.total(), "more": after is not None})
