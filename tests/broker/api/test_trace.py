"""GET /v1/messages/{topic}/{id}/trace: the life of a message, on a broker in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture, running
from support.protocols import client_of
from support.replicas import eventually

from portalmq import wire
from portalmq.broker.partition import history
from portalmq.broker.queues import message_traces
from portalmq.errors import Unavailable

START_MS = 1_700_000_000_000


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        started.broker.create_topic("t", wire.CreateTopic(partitions=1))
        yield started


@pytest.fixture
def client(fixture: Fixture) -> FlaskClient:
    return client_of(fixture)


def produce(client: FlaskClient, **headers: object) -> str:
    named = {name.replace("_", "-"): str(value) for name, value in headers.items()}
    answer = client.post("/v1/topics/t/messages", data="x", content_type="text/plain", headers=named)
    return str(answer.get_json()["id"])


def receive(client: FlaskClient, **more: object) -> list[str]:
    answer = client.post("/v1/groups/g/receive", json={"topics": ["t"], "wait_ms": 0, **more})
    return [each["receipt"] for each in answer.get_json()["messages"]]


def settle(client: FlaskClient, verb: str, receipts: list[str], **more: object) -> None:
    assert client.post(f"/v1/groups/g/{verb}", json={"receipts": receipts, **more}).status_code == 200


def trace(client: FlaskClient, message_id: str, query: str = "") -> dict[str, Any]:
    answer = client.get(f"/v1/messages/t/{message_id}/trace{query}")
    assert answer.status_code == 200, answer.get_json()
    shown: dict[str, Any] = answer.get_json()
    return shown


def told(client: FlaskClient, message_id: str, *fields: str) -> list[tuple[Any, ...]]:
    events = trace(client, message_id)["events"]
    return [(each["at_ms"] - START_MS, each["event"], *(each.get(field) for field in fields)) for each in events]


def test_deliveries_and_their_ends_are_told_in_order(client: FlaskClient, fixture: Fixture) -> None:
    message_id = produce(client)
    fixture.clock.advance(1_000)
    first = receive(client, consumer="ann")
    settle(client, "extend", first, visibility_timeout_ms=60_000)
    fixture.clock.advance(1_000)
    settle(client, "nack", first, delay_ms=500, reason="no")
    fixture.clock.advance(500)
    receive(client, consumer="bob")
    fixture.clock.advance(31_000)
    settle(client, "ack", receive(client, consumer="ann"))
    assert told(client, message_id, "group", "consumer", "delivery_count", "reason", "until_ms") == [
        (0, "appended", None, None, None, None, None),
        (1_000, "delivered", "g", "ann", 1, None, START_MS + 31_000),
        (1_000, "extended", "g", None, None, None, START_MS + 61_000),
        (2_000, "nacked", "g", None, None, "no", START_MS + 2_500),
        (2_500, "delivered", "g", "bob", 2, None, START_MS + 32_500),
        (32_500, "expired", "g", None, None, None, None),
        (33_500, "delivered", "g", "ann", 3, None, START_MS + 63_500),
        (33_500, "acked", "g", None, None, None, None),
    ]


def test_the_answer_says_who_knows_what(client: FlaskClient, fixture: Fixture) -> None:
    message_id = produce(client)
    shown = trace(client, message_id)
    assert (shown["message"]["id"], shown["message"]["value"]) == (message_id, "x")
    appended = shown["events"][0]
    assert (appended["broker"], appended["leader_epoch"], f"0-{appended['offset']}") == (1, 1, message_id)
    assert shown["replicas"] == {"leader": 1, "leader_epoch": 1, "replicas": [1], "isr": [1], "holders": [1]}
    end = fixture.broker.topics.known("t").local[0].high_watermark
    assert shown["as_of"] == {"broker": 1, "is_leader": True, "offset": end, "at_ms": START_MS}
    assert trace(client, message_id, "?local=true") == shown


def test_a_lease_that_ran_out_is_told_before_a_later_record(client: FlaskClient, fixture: Fixture) -> None:
    message_id = produce(client)
    receive(client)
    fixture.clock.advance(29_999)
    assert [event for _, event in told(client, message_id)] == ["appended", "delivered"]
    fixture.clock.advance(1)
    assert told(client, message_id)[2:] == [(30_000, "expired")]


def test_a_dead_letter_leads_to_its_copy_and_back(client: FlaskClient) -> None:
    message_id = produce(client)
    client.put("/v1/groups/g", json={"max_deliveries": 1})
    settle(client, "nack", receive(client), reason="bad")
    eventually(lambda: told(client, message_id)[-1][1] == "copied")
    assert told(client, message_id, "reason", "to_topic", "delivery_count", "to_id")[2:] == [
        (0, "dead", "bad", "t.dlq", 1, None),
        (0, "copied", None, "t.dlq", None, trace(client, message_id)["events"][-1]["to_id"]),
    ]
    copy = client.get(f"/v1/messages/t.dlq/{trace(client, message_id)['events'][-1]['to_id']}/trace").get_json()
    assert copy["message"]["headers"]["portalmq-source-offset"] == message_id.partition("-")[2]
    client.post("/v1/groups/g/dead-letters/redrive", json={"topic": "t"})
    settle(client, "ack", receive(client))
    assert [event for _, event in told(client, message_id)][-3:] == ["redriven", "delivered", "acked"]


def test_the_search_for_many_copies_takes_several_calls(client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
    message_id = produce(client)
    client.put("/v1/groups/g", json={"max_deliveries": 1})
    for number in range(3):
        settle(client, "nack", receive(client), reason="bad")
        eventually(lambda number=number: [event for _, event in told(client, message_id)].count("copied") > number)
        client.post("/v1/groups/g/dead-letters/redrive", json={"topic": "t"})
    whole = trace(client, message_id)
    assert "next" not in whole
    monkeypatch.setattr(message_traces, "LOCATE_WITHIN_S", 0.0)
    events, after, pages = [], 0, 0
    while after is not None:
        page = trace(client, message_id, f"?after={after}")
        assert len([each for each in page["events"] if each["event"] == "copied"]) <= 1
        events += page["events"]
        pages += 1
        after = page.get("next")
    assert (events, pages) == (whole["events"], 3)


def test_a_copy_that_is_gone_is_not_told(client: FlaskClient) -> None:
    message_id = produce(client)
    client.put("/v1/groups/g", json={"max_deliveries": 1})
    settle(client, "nack", receive(client), reason="bad")
    eventually(lambda: told(client, message_id)[-1][1] == "copied")
    client.delete("/v1/topics/t.dlq")
    assert told(client, message_id)[-1][1] == "dead"


def test_delays_and_times_to_live_are_told(client: FlaskClient, fixture: Fixture) -> None:
    message_id = produce(client, PortalMQ_Delay_Ms=5_000, PortalMQ_Ttl_Ms=2_000)
    later = produce(client, PortalMQ_Delay_Ms=60_000)
    assert told(client, message_id, "until_ms")[1:] == [(0, "scheduled", START_MS + 5_000)]
    fixture.clock.advance(7_000)
    assert told(client, message_id)[2:] == [(7_000, "ttl_expired")]
    assert client.delete(f"/v1/topics/t/scheduled/{later}").status_code == 204
    assert told(client, later)[2:] == [(7_000, "cancelled")]
    moved = produce(client, PortalMQ_Delay_Ms=60_000)
    client.patch(f"/v1/topics/t/scheduled/{moved}", json={"delay_ms": 30_000})
    eventually(lambda: told(client, moved)[-1][1] == "copied")
    copy = trace(client, moved)["events"][-1]["to_id"]
    assert told(client, moved, "until_ms", "to_topic", "to_id")[2:] == [
        (7_000, "rescheduled", START_MS + 37_000, None, None),
        (7_000, "copied", None, "t", copy),
    ]
    assert trace(client, copy)["message"]["deliver_at_ms"] == START_MS + 37_000


def test_a_message_given_back_unseen_says_so(client: FlaskClient) -> None:
    message_id = produce(client)
    settle(client, "nack", receive(client), unseen=True)
    assert told(client, message_id, "unseen")[2:] == [(0, "nacked", True)]


def test_a_commit_call_tells_its_outputs(client: FlaskClient) -> None:
    message_id = produce(client)
    body = {"ack": receive(client), "publish": [{"topic": "out", "value": 1}, {"topic": "out", "value": 2}]}
    assert client.post("/v1/groups/g/commit", json=body).status_code == 200
    assert told(client, message_id, "outputs")[2:] == [(0, "acked", 2)]


def test_a_purged_message_tells_its_life_without_its_content(client: FlaskClient) -> None:
    message_id = produce(client)
    receive(client)
    assert client.delete("/v1/topics/t/messages").status_code == 204
    shown = trace(client, message_id)
    assert [each["event"] for each in shown["events"]] == ["appended", "delivered", "purged"]
    assert "value" not in shown["message"]


def test_groups_of_one_topic_are_told_apart_and_a_stream_group_acks_by_its_offset(client: FlaskClient) -> None:
    first, second = produce(client), produce(client)
    client.put("/v1/groups/s", json={"mode": "stream"})
    member = client.post("/v1/groups/s/members", json={"topics": ["t"]}).get_json()
    offset = int(first.partition("-")[2]) + 1
    body = {
        "member_id": member["member_id"],
        "generation": member["generation"],
        "offsets": [{"topic": "t", "partition": 0, "offset": offset}],
    }
    assert client.put("/v1/groups/s/offsets", json=body).status_code == 200
    settle(client, "ack", receive(client, max_messages=1))
    assert told(client, first, "group")[1:] == [(0, "acked", "s"), (0, "delivered", "g"), (0, "acked", "g")]
    assert [event for _, event in told(client, second)] == ["appended"]


def test_pages_cover_all_events_without_gap_or_overlap(client: FlaskClient) -> None:
    message_id = produce(client)
    client.put("/v1/groups/g", json={"max_deliveries": 100})
    for _ in range(7):
        settle(client, "nack", receive(client))
    whole = trace(client, message_id)["events"]
    assert len(whole) == 15
    found: list[dict[str, Any]] = []
    after = 0
    while True:
        page = trace(client, message_id, f"?limit=4&after={after}")
        found += page["events"]
        if "next" not in page:
            break
        after = page["next"]
    assert found == whole


def test_a_long_log_is_read_in_pages_and_only_once(
    client: FlaskClient, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id = produce(client)
    receipts = receive(client)
    for _ in range(20):
        produce(client)
    settle(client, "ack", receipts)
    monkeypatch.setattr(history, "BLOCK_OFFSETS", 4)
    monkeypatch.setattr(history, "READ_WITHIN_S", 0.0)
    monkeypatch.setattr(history, "THREAD_WITHIN_S", 0.0)
    pages, events, after = 0, [], 0
    while True:
        page = fixture.broker.message_traces.trace("t", 0, int(message_id.partition("-")[2]), after=after)
        events += [event.event for event in page.events]
        pages += 1
        if page.next is None:
            break
        after = page.next
    assert (events, pages > 3) == (["appended", "delivered", "acked"], True)
    reads: list[int] = []
    read = history.BlockSummaries._read

    def counted(self: object, *arguments: Any) -> None:
        reads.append(arguments[2])
        read(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(history.BlockSummaries, "_read", counted)
    monkeypatch.setattr(history, "READ_WITHIN_S", 60.0)
    fixture.broker.message_traces.trace("t", 0, int(message_id.partition("-")[2]) + 6)
    assert len(reads) <= 2, "only its own block, and the last one, which is not complete"


def test_a_life_of_many_records_that_were_read_before_takes_several_calls_too(
    client: FlaskClient, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(history, "BLOCK_OFFSETS", 4)
    monkeypatch.setattr(history, "READ_WITHIN_S", 60.0)
    offset = int(produce(client).partition("-")[2])
    receipts = receive(client)
    for _ in range(20):
        settle(client, "extend", receipts, visibility_timeout_ms=60_000)
    whole = fixture.broker.message_traces.trace("t", 0, offset)
    assert whole.next is None
    monkeypatch.setattr(history, "READ_WITHIN_S", 0.0)
    monkeypatch.setattr(history, "THREAD_WITHIN_S", 0.0)
    events, after, ends = [], 0, []
    while after is not None:
        page = fixture.broker.message_traces.trace("t", 0, offset, after=after)
        events += page.events
        ends.append(page.as_of.offset)
        after = page.next
    assert events == whole.events
    assert len(ends) > 5
    assert ends == sorted(set(ends))


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("t/0-99", 404, "message_not_found"),
        ("t/7-0", 404, "message_not_found"),
        ("t/0-0", 404, "message_not_found"),  # the start of the leader's epoch
        ("nowhere/0-0", 404, "topic_not_found"),
        ("t/0", 400, "invalid_request"),
        ("t/x-1", 400, "invalid_request"),
        ("t/0-1?at=1", 400, "invalid_request"),
        ("t/0-1?limit=0", 400, "invalid_request"),
    ],
)
def test_what_is_not_there_is_refused(client: FlaskClient, path: str, status: int, code: str) -> None:
    produce(client)
    route, question, query = path.partition("?")
    answer = client.get(f"/v1/messages/{route}/trace{question}{query}")
    assert (answer.status_code, answer.get_json()["code"]) == (status, code)


def test_without_a_leader_a_replica_tells_what_it_knows(
    client: FlaskClient, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id = produce(client)
    whole = trace(client, message_id)

    def fail(*arguments: object, **options: object) -> None:
        raise Unavailable("no leader just now")

    monkeypatch.setattr(fixture.broker.leaders, "call_one", fail)
    assert trace(client, message_id) == whole
    asked = {"PortalMQ-No-Forward": "1"}
    assert client.get(f"/v1/messages/t/{message_id}/trace", headers=asked).status_code == 503


def test_a_broker_without_a_replica_names_the_leader(
    client: FlaskClient, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    message_id = produce(client)
    monkeypatch.setattr(fixture.broker.metadata_cache, "leader_of", lambda place: 2)
    monkeypatch.setattr(fixture.broker.topics.known("t"), "local", {})
    answer = client.get(f"/v1/messages/t/{message_id}/trace?local=true")
    assert (answer.status_code, answer.get_json()["code"], answer.get_json()["leader"]) == (421, "not_leader", 2)
