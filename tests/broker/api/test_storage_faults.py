"""An error of the storage during a call becomes an error of the contract, in every package and protocol.
The tests use a broker in this process whose log reads fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from support.domain import Fixture, running
from support.protocols import client_of

from portalmq import wire
from portalmq.broker.cluster.peers import credential
from portalmq.broker.cluster.rpc.queues import LookAt
from portalmq.broker.storage.errors import CorruptBatch, DiskFull, StorageFault, TooManyOpenFiles
from portalmq.broker.storage.lanes import Lanes
from portalmq.broker.storage.log import Log

Call = Callable[[FlaskClient, Fixture], Any]

READS = ("messages_before", "offset_for_time", "find_message_id")
FAULTS = [
    (DiskFull("no room"), 507, "storage_full"),
    (TooManyOpenFiles("none is left"), 503, "unavailable"),
    (CorruptBatch(Path("0.sqlite"), 7, "checksum"), 503, "unavailable"),
    (StorageFault("I/O error"), 503, "unavailable"),
]


@pytest.fixture
def fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fixture]:
    # No background task meets the fault.
    for name in ("SAVE_STATE_EVERY_S", "RETAIN_EVERY_S", "SWEEP_EVERY_S", "COMPACT_EVERY_S"):
        monkeypatch.setattr(f"portalmq.broker.cluster.maintenance.{name}", 3_600.0)
    with running(tmp_path) as started:
        for topic in ("t", "default"):
            started.broker.create_topic(topic, wire.CreateTopic())
        yield started


@pytest.fixture
def http(fixture: Fixture) -> FlaskClient:
    client = client_of(fixture)
    for topic in ("t", "default"):
        client.post(f"/v1/topics/{topic}/messages", data="a", content_type="text/plain")
    client.post("/v1/groups/q/receive", json={"topics": ["t"], "wait_ms": 0})
    client.post("/v1/groups/default/receive", json={"topics": ["default"], "wait_ms": 0})
    client.put("/v1/groups/s", json={"mode": "stream"})
    client.post("/v1/groups/s/members", json={"topics": ["t"], "member_id": "a"})
    return client


def ask_as_a_broker(http: FlaskClient, fixture: Fixture) -> Any:
    topic = fixture.broker.topics.known("t")
    body = msgspec.msgpack.encode(LookAt("q", "t", topic.state.topic_id, [0]))
    headers = {"Authorization": credential(fixture.broker.cluster_secret)}
    return http.post("/internal/v1/look", data=body, headers=headers)


CALLS: dict[str, Call] = {
    "browse": lambda http, _: http.get("/v1/topics/t/partitions/0/messages?at=2026-01-01T00:00:00Z"),
    "a tail": lambda http, _: http.get(
        "/v1/topics/t/partitions/0/messages?at=2026-01-01T00:00:00Z", headers={"Accept": wire.EVENT_STREAM}
    ),
    "produce": lambda http, _: http.post("/v1/topics/t/messages", data="a", headers={"Idempotency-Key": "k"}),
    "unfinished": lambda http, _: http.get("/v1/groups/q/messages?topic=t"),
    "seek": lambda http, _: http.post(
        "/v1/groups/s/seek", json={"topic": "t", "to": {"at": "2000-01-01T00:00:00Z"}, "dry_run": True}
    ),
    "offsets": lambda http, _: http.get("/v1/groups/s/offsets"),
    "a command": lambda http, _: http.post("/miniq/command", json={"type": "QUEUE_SIZE", "payload": {"queue": "t"}}),
    "an older queue": lambda http, _: http.get("/v1/queue"),
    "another broker": ask_as_a_broker,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_storage_error_becomes_an_error_of_the_contract(
    fixture: Fixture, http: FlaskClient, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    for fault, status, code in FAULTS:

        def failing(*_: object, fault: Exception = fault) -> None:
            raise fault

        with monkeypatch.context() as patch:
            for name in READS:
                patch.setattr(Log, name, failing)
            patch.setattr(Lanes, "count_others", failing)
            problem = call(http, fixture).get_json(force=True)
        assert (problem["status"], problem["code"], problem["outcome"]) == (status, code, "unknown"), repr(fault)
        assert (fault in fixture.faults) == isinstance(fault, StorageFault), "a fault ends the broker"
        fixture.broker.ready = True


def test_a_fault_after_the_head_was_sent_cuts_the_answer_off_and_ends_the_broker(
    fixture: Fixture, http: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = StorageFault("I/O error")
    read_all = fixture.broker.browser.read_all

    def failing(*args: Any, **more: Any) -> Iterator[Any]:
        for stored in read_all(*args, **more):
            yield from [stored] * 200  # more than a block
        raise fault

    monkeypatch.setattr(fixture.broker.browser, "read_all", failing)
    answer = http.get("/v1/topics/t/messages", headers={"Accept": wire.NDJSON}, buffered=False)
    assert answer.status_code == 200
    with pytest.raises(StorageFault):
        _ = answer.data
    assert fixture.faults == [fault]


def test_a_tail_that_meets_a_fault_ends_and_so_does_the_broker(
    fixture: Fixture, http: FlaskClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = StorageFault("I/O error")
    answer = http.get("/v1/topics/t/partitions/0/messages?offset=0", headers={"Accept": wire.EVENT_STREAM})

    def failing(*_: Any, **__: Any) -> None:
        raise fault

    monkeypatch.setattr(fixture.broker.leaders, "call_one", failing)
    assert answer.data.count(b"id:") == 1
    assert fixture.faults == [fault]
