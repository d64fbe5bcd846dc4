"""The table of bindings that all processes share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from portalmq import wire
from portalmq.errors import OffsetOutOfRange, TopicNotFound
from portalmq.kombu.bindings import PAGE, Binding, Bindings, Destination, matches


class Log:
    """A compacted topic, as Admin and Producer see it."""

    def __init__(self) -> None:
        self.messages: list[wire.PackMessageOut] | None = None
        self.reads = 0

    def create_topic(self, name: str, config: dict[str, Any]) -> None:
        assert config["cleanup"] == "compact"
        self.messages = self.messages or []

    def browse(self, topic: str, *, offset: int, limit: int) -> wire.PackBrowsePage:
        self.reads += 1
        if self.messages is None:
            raise TopicNotFound(topic)
        if offset > len(self.messages):
            raise OffsetOutOfRange(topic)
        page = self.messages[offset : offset + limit]
        return wire.PackBrowsePage(page, offset + len(page), 0, len(self.messages))

    def send(self, topic: str, value: Any, *, key: str) -> Log:
        if self.messages is None:
            self.messages = []
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.messages.append(wire.PackMessageOut(0, len(self.messages), data, 0, key.encode()))
        return self

    def result(self) -> None:
        pass


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def bindings(log: Log, clock: Clock | None = None) -> Bindings:
    return Bindings(log, log, "kombu.bindings", clock or Clock())  # type: ignore[arg-type]


def test_a_queue_that_another_process_has_bound_gets_its_copy() -> None:
    log = Log()
    bindings(log).add(Binding("jobs", "mail", "m"), "direct")
    other = bindings(log)
    assert other.route("jobs", "direct", "m") == Destination(frozenset({"mail"}), to_exchange=False)
    assert other.route("jobs", "direct", "x") == Destination(frozenset(), to_exchange=False)


def test_a_key_that_was_never_looked_up_is_looked_up_at_once() -> None:
    log = Log()
    publisher = bindings(log)
    assert not publisher.route("reply", "direct", "before").to_exchange
    bindings(log).add(Binding("reply", "r.reply", "after"), "direct", transient=True)
    assert publisher.route("reply", "direct", "after").to_exchange


def test_a_known_route_is_used_for_a_second_and_then_read_on() -> None:
    log, clock = Log(), Clock()
    publisher = bindings(log, clock)
    publisher.route("events", "topic", "m")
    bindings(log).add(Binding("events", "mail", "#"), "topic")
    reads = log.reads
    assert not publisher.route("events", "topic", "m").queues
    assert log.reads == reads
    clock.now = 1.5
    assert publisher.route("events", "topic", "m").queues == {"mail"}


def test_a_reply_after_the_client_has_left_does_not_lose_the_next_one() -> None:
    log = Log()
    worker, client = bindings(log), bindings(log)
    assert not worker.route("reply", "direct", "client").to_exchange
    client.add(Binding("reply", "q", "client"), "direct", transient=True)
    assert worker.route("reply", "direct", "client").to_exchange


def test_a_binding_is_written_once() -> None:
    log = Log()
    for _ in range(3):
        bindings(log).add(Binding("jobs", "mail", "m"), "direct")
    assert len(log.messages or []) == 1


def test_a_removed_binding_gets_nothing() -> None:
    log = Log()
    first = bindings(log)
    first.add(Binding("jobs", "mail", "m"), "direct")
    first.remove(first.of_queue("mail"))
    assert not first.route("jobs", "direct", "m").queues
    assert not bindings(log).route("jobs", "direct", "m").queues


def test_a_transient_binding_ends_unless_it_is_renewed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1_000_000.0
    monkeypatch.setattr("portalmq.kombu.bindings.time.time", lambda: now)
    log = Log()
    owner = bindings(log)
    owner.add(Binding("celeryev", "flower", "#"), "topic", transient=True)
    owner.renew()
    assert len(log.messages or []) == 1
    now += 3000
    owner.renew()
    now += 3000
    assert bindings(log).route("celeryev", "topic", "task.sent").to_exchange
    now += 3000
    assert not bindings(log).route("celeryev", "topic", "task.sent").to_exchange


def test_a_table_of_many_pages_is_read_whole() -> None:
    log = Log()
    log.create_topic("kombu.bindings", {"cleanup": "compact"})
    for number in range(2 * PAGE + 10):
        key = Binding("jobs", f"q{number}", "m").key
        log.send("kombu.bindings", {"kind": "direct", "until_ms": None}, key=key)
    assert len(bindings(log).route("jobs", "direct", "m").queues) == 2 * PAGE + 10


def test_a_topic_that_was_deleted_and_made_again_is_read_from_its_beginning() -> None:
    log = Log()
    reader = bindings(log)
    for name in "abc":
        reader.add(Binding("jobs", name, "m"), "direct")
    log.messages = []
    bindings(log).add(Binding("jobs", "new", "m"), "direct")
    assert set(reader.of_queue("a")) == set()
    assert reader.route("jobs", "direct", "m").queues == {"new"}


@pytest.mark.parametrize("value", [b"x", b"[]", b'{"kind": "direct"}'])
def test_what_is_no_binding_is_passed_over(value: bytes) -> None:
    log = Log()
    log.send("kombu.bindings", value, key="x")
    log.send("kombu.bindings", value, key='["jobs", "q", "m"]')
    assert not bindings(log).route("jobs", "direct", "m").queues


@pytest.mark.parametrize(
    ("kind", "bound", "key", "is_matched"),
    [
        ("direct", "a", "a", True),
        ("direct", "a", "b", False),
        ("direct", "*", "a", False),
        ("topic", "t.*", "t.1", True),
        ("topic", "t.*", "t", False),
        ("topic", "t.#", "t.1.2", True),
        ("topic", "#", "any.thing", True),
        ("topic", "t.x", "txx", False),
        ("fanout", "", "any", True),
    ],
)
def test_routing_keys_match_as_in_amqp(kind: str, bound: str, key: str, is_matched: bool) -> None:
    assert matches(kind, bound, key) is is_matched
