"""What the pages read beside the public API."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from flask.testing import FlaskClient
from support.domain import Fixture, running
from support.stretches import Stretches

from portalmq import wire
from portalmq.broker.api.app import create_app
from portalmq.broker.dashboard import data, search
from portalmq.broker.dashboard.cluster_rates import rates_of
from portalmq.broker.dashboard.routes import DASHBOARD_ROUTES
from portalmq.broker.messages.produce import ProduceRequest
from portalmq.broker.partition import answer_size
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.storage.batch import Record


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fixture]:
    with running(tmp_path_factory.mktemp("data")) as fixture:
        yield fixture


@pytest.fixture
def client(fixture: Fixture) -> FlaskClient:
    return create_app(
        fixture.broker, BrokerConfig(), fixture.broker.metrics, Auth(), pages=DASHBOARD_ROUTES
    ).test_client()


def get(client: FlaskClient, path: str, **parameters: Any) -> Any:
    answer = client.get(path, query_string={name: value for name, value in parameters.items() if value is not None})
    assert answer.status_code == 200, answer.text
    return answer.get_json()


def produce(client: FlaskClient, topic: str, *messages: dict[str, Any]) -> None:
    body = json.dumps({"messages": messages})
    sent = client.post(f"/v1/topics/{topic}/messages", data=body, content_type=wire.BATCH_JSON)
    assert sent.status_code == 200, sent.text


class TestSearch:
    @pytest.fixture(autouse=True)
    def messages(self, fixture: Fixture) -> None:
        """300 messages over three partitions."""
        broker = fixture.broker
        if broker.topics.get("found") is not None:
            return
        broker.create_topic("found", wire.CreateTopic(partitions=3))
        for n in range(300):
            fixture.clock.advance(1_000)
            record = Record(b'{"n": %d}' % n, "application/json", b"k%d" % (n % 7), {"trace": str(n % 5)})
            broker.produce("found", ProduceRequest([record], partition=n % 3))

    def numbers(self, found: Any) -> list[int]:
        return [message["value"]["n"] for message in found["messages"]]

    @pytest.mark.parametrize("order", ["newest", "oldest"])
    @pytest.mark.parametrize("limit", [1, 7, 50, 400])
    def test_all_messages_of_all_partitions_in_the_order_of_time(
        self, client: FlaskClient, order: str, limit: int
    ) -> None:
        seen: list[int] = []
        place = None
        while True:
            found = get(client, "/ui/data/messages", topic="found", order=order, limit=limit, after=place)
            seen += self.numbers(found)
            place = found["next"]
            if place is None:
                break
        assert seen == (list(range(300)) if order == "oldest" else list(range(299, -1, -1)))

    def test_one_partition(self, client: FlaskClient) -> None:
        found = get(client, "/ui/data/messages", topic="found", partition=1, limit=4)
        assert self.numbers(found) == [298, 295, 292, 289]

    def test_from_a_moment_on(self, client: FlaskClient, fixture: Fixture) -> None:
        first = get(client, "/ui/data/messages", topic="found", order="oldest", limit=1)["messages"][0]["timestamp_ms"]
        moment = "1970-01-01T00:00:00+00:00"
        assert self.numbers(get(client, "/ui/data/messages", topic="found", order="oldest", at=moment, limit=2)) == [
            0,
            1,
        ]

        at = datetime.fromtimestamp((first + 100_000) / 1000, UTC).isoformat()
        found = get(client, "/ui/data/messages", topic="found", order="oldest", at=at, limit=2)
        assert self.numbers(found) == [100, 101]
        at = "1970-01-01T00:00:00Z"
        assert self.numbers(get(client, "/ui/data/messages", topic="found", order="oldest", at=at, limit=2)) == [0, 1]

    @pytest.mark.parametrize(
        ("where", "count"),
        [
            ({"value.n": {"lt": 10}}, 10),
            ({"key": {"eq": "k3"}}, 43),
            ({"headers.trace": {"eq": "4"}, "value.n": {"gte": 290}}, 2),
            ({"value.other": {"exists": True}}, 0),
        ],
    )
    def test_a_filter(self, client: FlaskClient, where: dict[str, Any], count: int) -> None:
        found = get(client, "/ui/data/messages", topic="found", where=json.dumps(where), limit=500)
        assert (len(found["messages"]), found["next"], found["scanned"]) == (count, None, 300)

    def test_a_long_search_says_where_it_goes_on(self, client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(search, "SCANNED_MAX", 10)
        where, seen, place, turns = json.dumps({"value.n": {"eq": 5}}), [], None, 0
        while place is not None or turns == 0:
            found = get(client, "/ui/data/messages", topic="found", where=where, after=place)
            seen += self.numbers(found)
            place, turns = found["next"], turns + 1
        assert seen == [5]
        assert turns > 1

    def test_large_messages_are_all_found(
        self, client: FlaskClient, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An answer of a browse has fewer messages than the window when they are large; the newest come first all the
        same, and an answer of the search ends early and says where it goes on."""
        monkeypatch.setattr(answer_size, "ANSWER_BYTES_MAX", 3_000)
        monkeypatch.setattr(search, "FOUND_BYTES_MAX", 4_000)
        if fixture.broker.topics.get("large") is None:
            fixture.broker.create_topic("large", wire.CreateTopic(partitions=1))
            for n in range(40):
                record = Record(b'{"n": %d, "pad": "%s"}' % (n, b"x" * (1_000 if n < 35 else 1)), "application/json")
                fixture.broker.produce("large", ProduceRequest([record], partition=0))
        numbers: list[int] = []
        after = None
        for _ in range(40):
            page = get(client, "/ui/data/messages", topic="large", limit=30, after=after)
            assert page["messages"]
            assert sum(len(json.dumps(message["value"])) for message in page["messages"]) < 6_000
            numbers += [message["value"]["n"] for message in page["messages"]]
            after = page["next"]
            if after is None:
                break
        assert numbers == list(range(39, -1, -1))

    def test_others_run_while_messages_are_searched(
        self, client: FlaskClient, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever the number of messages, the event loop polls its sockets after each turn of 5 ms."""
        monkeypatch.setattr(search, "SEARCH_S", 600.0)
        if fixture.broker.topics.get("many") is None:
            fixture.broker.create_topic("many", wire.CreateTopic(partitions=1))
            for n in range(8):
                records = [Record(b'{"n": %d, "list": [%s1]}' % (n, b"1," * 200), "application/json")] * 1_000
                fixture.broker.produce("many", ProduceRequest(records, partition=0))
        with Stretches() as stretches:
            page = get(client, "/ui/data/messages", topic="many", where='{"value.n": {"eq": -1}}')
        assert page["scanned"] == 8_000
        assert stretches.count > 5
        assert stretches.longest.ms < 60, stretches.longest

    def test_the_tail_gives_what_comes_later(self, client: FlaskClient) -> None:
        produce(client, "tail", {"value": 1})
        tail = get(client, "/ui/data/messages", topic="tail")["tail"]
        produce(client, "tail", {"value": 2}, {"value": 3})
        found = get(client, "/ui/data/messages", topic="tail", order="oldest", after=tail)
        assert [message["value"] for message in found["messages"]] == [2, 3]
        again = get(client, "/ui/data/messages", topic="tail", order="oldest", after=found["tail"])
        assert again["messages"] == []

    @pytest.mark.parametrize(
        "wrong",
        [{"topic": "nowhere"}, {"topic": "found", "partition": 9}, {"topic": "found", "after": "x"},
         {"topic": "found", "where": "{}"}, {"topic": "found", "where": "["}, {"topic": "found", "order": "up"}, {}],
    )  # fmt: skip
    def test_what_makes_no_sense_is_refused(self, client: FlaskClient, wrong: dict[str, Any]) -> None:
        assert client.get("/ui/data/messages", query_string=wrong).status_code in {400, 404}


class TestLists:
    def test_topics_come_in_pages(self, client: FlaskClient) -> None:
        for n in range(12):
            produce(client, f"listed-{n:02}", {"value": n})
        found = get(client, "/ui/data/topics", search="LISTED", limit=5, page=2)
        assert [topic["name"] for topic in found["topics"]] == [f"listed-{n:02}" for n in range(5, 10)]
        assert (found["total"], found["page"], found["pages"]) == (12, 2, 3)
        first = found["topics"][0]
        assert (first["messages"], first["offline"], first["under_replicated"]) == (1, 0, 0)

    def test_busy_topics_can_come_first(self, client: FlaskClient, fixture: Fixture) -> None:
        rates = fixture.broker.rates
        rates.read_topics()
        produce(client, "listed-07", *({"value": n} for n in range(50)))
        rates.read_topics()
        found = get(client, "/ui/data/topics", search="listed", sort="rate", limit=3)
        assert found["topics"][0]["name"] == "listed-07"
        assert found["topics"][0]["rate"][0] > 0

    def test_topics_with_what_is_scheduled(self, client: FlaskClient, fixture: Fixture) -> None:
        later = {"value": 1, "delay_ms": 60_000}
        produce(client, "later-a", later, later, {"value": 2}, {"value": 3, "delay_ms": 90_000, "priority": 3})
        produce(client, "later-b", {"value": 1})
        produce(client, "later-c", later)
        cancelled = client.get("/v1/topics/later-a/scheduled").get_json()["messages"][0]["id"]
        assert client.delete(f"/v1/topics/later-a/scheduled/{cancelled}").status_code == 204

        def listed() -> list[tuple[str, int]]:
            found = get(client, "/ui/data/topics", sort="scheduled", search="later-")
            return [(topic["name"], topic["scheduled"]) for topic in found["topics"]]

        assert listed() == [("later-a", 2), ("later-c", 1)]
        fixture.clock.advance(60_001)
        assert listed() == [("later-a", 1), ("later-c", 0)]

    def test_groups_with_their_topics_and_lags(self, client: FlaskClient, fixture: Fixture) -> None:
        for topic in ("work-a", "work-b"):
            produce(client, topic, {"value": 1}, {"value": 2}, {"value": 3})
            client.post("/v1/groups/workers/receive", json={"topics": [topic], "max_messages": 1})
        fixture.broker.rates.read_lags()
        fixture.broker.rates.sample()
        found = get(client, "/ui/data/groups/workers")
        assert [(each["topic"], each["ready"], each["in_flight"], each["lag"]) for each in found["topics"]] == [
            ("work-a", 2, 1, 3),
            ("work-b", 2, 1, 3),
        ]
        assert found["lags"][-1][1] == 6
        listed = get(client, "/ui/data/groups", search="work", sort="lag")
        assert [(each["group"], each["lag"]) for each in listed["groups"]] == [("workers", 6)]
        assert client.get("/ui/data/groups/nobody").status_code == 404

    def test_dead_letters_by_reason(self, client: FlaskClient) -> None:
        client.put("/v1/groups/strict", json={"max_deliveries": 1})
        produce(client, "letters", *({"value": n} for n in range(5)))
        got = client.post("/v1/groups/strict/receive", json={"topics": ["letters"], "max_messages": 5}).get_json()
        for n, message in enumerate(got["messages"]):
            reason = f"timeout after {n} s" if n else "no such user"
            client.post("/v1/groups/strict/nack", json={"receipts": [message["receipt"]], "reason": reason})
        found = get(client, "/ui/data/groups/strict/dead-letters", topic="letters")
        assert found["reasons"] == [{"reason": "timeout after … s", "count": 4}, {"reason": "no such user", "count": 1}]
        assert (found["counted"], found["more"]) == (5, False)

    def test_groups_with_dead_letters_are_found_among_any_number(self, client: FlaskClient) -> None:
        for name in ("busy", "gave-up"):
            client.put(f"/v1/groups/{name}", json={"max_deliveries": 1})
            produce(client, f"of-{name}", {"value": 1})
            asked = {"topics": [f"of-{name}"], "max_messages": 1}
            [message] = client.post(f"/v1/groups/{name}/receive", json=asked).get_json()["messages"]
            if name == "gave-up":
                client.post(f"/v1/groups/{name}/nack", json={"receipts": [message["receipt"]]})
        found = get(client, "/ui/data/groups", sort="dead", search="u", limit=1)
        assert [(each["group"], each["dead"]) for each in found["groups"]] == [("gave-up", 1)]
        assert found["total"] == 1

    def test_reasons_of_numbers_alone_stay_apart(self, client: FlaskClient) -> None:
        client.put("/v1/groups/numeric", json={"max_deliveries": 1})
        for reason in ("404", "404", "5-1"):
            produce(client, "codes", {"value": "x"})
            body = {"topics": ["codes"], "wait_ms": 0}
            (message,) = client.post("/v1/groups/numeric/receive", json=body).get_json()["messages"]
            client.post("/v1/groups/numeric/nack", json={"receipts": [message["receipt"]], "reason": reason})
        found = get(client, "/ui/data/groups/numeric/dead-letters", topic="codes")
        assert found["reasons"] == [{"reason": "404", "count": 2}, {"reason": "5-1", "count": 1}]

    def test_partitions_of_the_cluster(self, client: FlaskClient, fixture: Fixture) -> None:
        fixture.broker.create_topic("wide", wire.CreateTopic(partitions=4))
        found = get(client, "/ui/data/cluster", search="wide", limit=3)
        assert (found["total"], len(found["partitions"])) == (4, 3)
        assert found["partitions"][0] == {
            "topic": "wide", "partition": 0, "leader": 1, "leader_epoch": 1, "replicas": [1], "isr": [1],
        }  # fmt: skip
        assert get(client, "/ui/data/cluster", show="under-replicated")["partitions"] == []


class TestEvents:
    def test_the_past_comes_first(self, client: FlaskClient, fixture: Fixture) -> None:
        produce(client, "evented", *({"value": n} for n in range(10)))
        fixture.clock.advance(1_000)
        fixture.broker.rates.sample()
        fixture.broker.rates.mark("isr", "something happened")
        fixture.clock.advance(2_000)
        with client.get("/ui/events") as answer:
            assert answer.content_type == wire.EVENT_STREAM
            name, _, text = next(answer.response).decode().partition("\n\n")[2].partition("\n")
        assert name == "event: history"
        shown = json.loads(text.removeprefix("data: "))
        assert shown["rows"][-1][1] > 0
        assert [mark[1:] for mark in shown["marks"]] == [["isr", "something happened", 1]]
        assert shown["brokers"][0]["led"] > 0
        assert rates_of(fixture.broker).streams == 0

    def test_streams_are_bounded(self, client: FlaskClient, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(data, "STREAMS_MAX", 1)
        with client.get("/ui/events"):
            assert client.get("/ui/events").status_code == 429
        with client.get("/ui/events") as answer:
            assert answer.status_code == 200
