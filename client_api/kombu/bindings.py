"""The bindings of all queues to exchanges, shared by every process: one message for each in a compacted topic.

A reader keeps a copy and reads on from where it was. A publisher's copy may be STALE_S_MAX old for a routing key that
it has looked up since; for any other one, and for one of a direct exchange that has no queue, it is read on first.

A *transient* queue (a worker's mailbox, an event receiver) has no topic of its own: it reads its exchange's. Its
binding has an end, `until_ms`, that its process moves on, so those of killed processes count for nothing some day.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

from kombu.transport.virtual.exchange import TopicExchange

from portalmq.admin import Admin
from portalmq.errors import OffsetOutOfRange, TopicNotFound
from portalmq.producer import Producer

STALE_S_MAX = 1.0
TRANSIENT_S = 3600.0
PAGE = 1000
ROUTES_MAX = 10_000
TOPIC_CONFIG = {"cleanup": "compact", "segment_bytes": 1024 * 1024}

_patterns = TopicExchange(None)


class Binding(NamedTuple):
    exchange: str
    queue: str
    routing_key: str

    @property
    def key(self) -> str:
        return json.dumps(self)


class BoundAs(NamedTuple):
    kind: str
    until_ms: int | None


class Destination(NamedTuple):
    """Queues that get a copy, and whether transient ones read the exchange's topic."""

    queues: frozenset[str]
    to_exchange: bool


def matches(kind: str, bound_key: str, routing_key: str) -> bool:
    """Return whether an exchange of this kind gives a message of `routing_key` to a queue bound with `bound_key`."""
    if kind == "fanout":
        return True
    if kind == "topic":
        return bool(_patterns._match(_patterns.key_to_pattern(bound_key), routing_key))
    return bound_key == routing_key


class Bindings:
    """Thread-safe."""

    def __init__(
        self, admin: Admin, producer: Producer, topic: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._admin = admin
        self._producer = producer
        self._topic = topic
        self._clock = clock
        self._lock = threading.Lock()
        self._table: dict[Binding, BoundAs] = {}
        self._next_offset: int | None = None
        self._routes: dict[tuple[str, str, str], tuple[float, Destination]] = {}
        # The transient bindings of this process, to be renewed.
        self._own: dict[Binding, BoundAs] = {}

    def route(self, exchange: str, kind: str, routing_key: str) -> Destination:
        """Return where a message goes that is published now."""
        with self._lock:
            known = self._routes.get((exchange, kind, routing_key))
            if known is not None and self._clock() - known[0] < STALE_S_MAX:
                return known[1]
            looked_at = self._clock()
            self._read_on()
            found = self._route(exchange, kind, routing_key)
            if len(self._routes) >= ROUTES_MAX:
                self._routes.clear()
            # The key of a reply has no queue between two questions of one client: that must not be remembered.
            if kind == "topic" or found.queues or found.to_exchange:
                self._routes[exchange, kind, routing_key] = looked_at, found
            return found

    def _route(self, exchange: str, kind: str, routing_key: str) -> Destination:
        now_ms = time.time() * 1000
        queues, to_exchange = set(), False
        for binding, bound in self._table.items():
            if binding.exchange == exchange and matches(kind, binding.routing_key, routing_key):
                if bound.until_ms is None:
                    queues.add(binding.queue)
                elif bound.until_ms > now_ms:
                    to_exchange = True
        return Destination(frozenset(queues), to_exchange)

    def of_queue(self, queue: str) -> dict[Binding, BoundAs]:
        with self._lock:
            self._read_on()
            return {binding: bound for binding, bound in self._table.items() if binding.queue == queue}

    def add(self, binding: Binding, kind: str, *, transient: bool = False) -> None:
        """Add a binding, if it is new; durable on return."""
        until_ms = round((time.time() + TRANSIENT_S) * 1000) if transient else None
        bound = BoundAs(kind, until_ms)
        with self._lock:
            if transient:
                self._own[binding] = bound
            else:
                self._read_on()
                if self._table.get(binding) == bound:
                    return
            self._write(binding, bound)

    def remove(self, bindings: Iterable[Binding], *, waits: bool = True) -> None:
        """Remove bindings; durable on return, or soon without `waits`."""
        with self._lock:
            futures = []
            for binding in bindings:
                self._own.pop(binding, None)
                self._table.pop(binding, None)
                futures.append(self._producer.send(self._topic, b"", key=binding.key))
            self._routes.clear()
            for future in futures if waits else ():
                future.result()

    def renew(self) -> None:
        """Move the ends of this process's transient bindings on, when half of their time is over."""
        half_ms = (time.time() + TRANSIENT_S / 2) * 1000
        for binding, bound in list(self._own.items()):
            if bound.until_ms is not None and bound.until_ms < half_ms:
                self.add(binding, bound.kind, transient=True)

    def own(self) -> list[Binding]:
        return list(self._own)

    def _write(self, binding: Binding, bound: BoundAs) -> None:
        self._create()
        self._producer.send(self._topic, bound._asdict(), key=binding.key).result()
        self._table[binding] = bound
        self._routes.clear()

    def _create(self) -> None:
        if self._next_offset is None:
            self._admin.create_topic(self._topic, config=TOPIC_CONFIG)
            self._next_offset = 0

    def _read_on(self) -> None:
        """Read what was written since the last time."""
        while True:
            try:
                page = self._admin.browse(self._topic, offset=self._next_offset or 0, limit=PAGE)
            except TopicNotFound:
                self._table, self._next_offset = {}, None
                return
            except OffsetOutOfRange:  # the topic was deleted, and created again
                if not self._next_offset:
                    raise
                self._table, self._next_offset = dict(self._own), 0
                continue
            for message in page.messages:
                self._learn(message.key or b"", message.value)
            has_more = page.next_offset < page.high_watermark and page.next_offset != self._next_offset
            self._next_offset = page.next_offset
            if not has_more:
                return

    def _learn(self, key: bytes, value: bytes) -> None:
        self._routes.clear()
        try:
            binding = Binding(*json.loads(key))
            if value:
                entry = json.loads(value)
                self._table[binding] = BoundAs(str(entry["kind"]), entry["until_ms"])
            else:
                self._table.pop(binding, None)
        except (ValueError, TypeError, KeyError):
            return  # not a binding: someone else wrote to the topic
