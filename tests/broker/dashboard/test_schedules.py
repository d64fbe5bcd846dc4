"""What the pages read of schedules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from flask.testing import FlaskClient
from support.domain import Fixture, HandClock, own_turns, running, schedule_turn
from support.replicas import eventually

from portalmq.broker.api.app import create_app
from portalmq.broker.cluster.rpc.schedules import LAST_TICKS, LastTicks, LastTicksShare
from portalmq.broker.dashboard.routes import DASHBOARD_ROUTES
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.errors import Unavailable

START_MS = 1_700_000_000_000  # 2023-11-14T22:13:20Z


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path, HandClock(START_MS)) as started:
        own_turns(started)
        yield started


@pytest.fixture
def client(fixture: Fixture) -> FlaskClient:
    return create_app(
        fixture.broker, BrokerConfig(), fixture.broker.metrics, Auth(), pages=DASHBOARD_ROUTES
    ).test_client()


def get(client: FlaskClient, path: str, **parameters: Any) -> Any:
    answer = client.get(path, query_string=parameters)
    assert answer.status_code == 200, answer.text
    return answer.get_json()


def put(client: FlaskClient, fixture: Fixture, name: str, **more: Any) -> None:
    assert client.put(f"/v1/schedules/{name}", json={"topic": "t", "value": 1, **more}).status_code == 201
    schedule_turn(fixture)


def tick(fixture: Fixture, seconds: int) -> None:
    """Let the time pass, and wait until what is due then is committed."""
    fixture.clock.advance(1_000 * seconds)
    schedule_turn(fixture)
    partition = fixture.broker.topics.get("t").local[0]
    eventually(lambda: partition.high_watermark == partition.replica.next_offset)


def test_schedules_come_in_pages_with_their_last_and_next_ticks(client: FlaskClient, fixture: Fixture) -> None:
    for n in range(3):
        put(client, fixture, f"beat-{n}", every_ms=1_000 * (n + 1))
    put(client, fixture, "report", cron="0 6 * * *", timezone="Europe/Berlin", paused=True)
    tick(fixture, 2)
    found = get(client, "/ui/data/schedules", limit=2)
    assert (found["total"], found["pages"]) == (4, 2)
    assert [(each["name"], each["last_ms"], each["next_ms"]) for each in found["schedules"]] == [
        ("beat-0", START_MS + 2_000, START_MS + 3_000),
        ("beat-1", START_MS + 2_000, START_MS + 4_000),
    ]
    rest = get(client, "/ui/data/schedules", limit=2, page=2)["schedules"]
    assert [(each["name"], each["last_ms"], each["next_ms"]) for each in rest] == [
        ("beat-2", 0, START_MS + 3_000),
        ("report", 0, None),
    ]
    assert rest[1] == {
        "name": "report", "topic": "t", "cron": "0 6 * * *", "every_ms": None, "timezone": "Europe/Berlin",
        "paused": True, "next_ms": None, "last_ms": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({"search": "BEAT"}, ["beat"]),
        ({"search": "t"}, ["beat", "off"]),
        ({"show": "paused"}, ["off"]),
        ({"show": "running"}, ["beat"]),
    ],
)
def test_schedules_are_found_by_name_topic_and_state(
    client: FlaskClient, fixture: Fixture, query: dict[str, str], names: list[str]
) -> None:
    put(client, fixture, "beat", every_ms=1_000)
    put(client, fixture, "off", every_ms=1_000, paused=True)
    assert [each["name"] for each in get(client, "/ui/data/schedules", **query)["schedules"]] == names


def test_a_schedule_has_its_next_ticks(client: FlaskClient, fixture: Fixture) -> None:
    put(client, fixture, "daily", cron="0 6 * * *", timezone="Europe/Berlin")
    found = get(client, "/ui/data/schedules/daily")
    first = 1_700_024_400_000  # 2023-11-15T05:00:00Z
    assert found["next_ms"] == [first + day * 86_400_000 for day in range(5)]
    assert found["last_ms"] == 0
    client.post("/v1/schedules/daily/pause")
    assert get(client, "/ui/data/schedules/daily")["next_ms"] == []
    assert client.get("/ui/data/schedules/none").status_code == 404


def test_a_last_tick_that_is_not_known_is_not_said_to_be_none(
    client: FlaskClient, fixture: Fixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(client, fixture, "beat", every_ms=1_000)
    tick(fixture, 1)
    place = fixture.broker.topics.get("t").local[0]
    with monkeypatch.context() as patch:
        patch.setattr(type(place), "high_watermark", 0)
        assert get(client, "/ui/data/schedules/beat")["last_ms"] is None, "not committed yet"

    def silent(*arguments: Any) -> Any:
        raise Unavailable("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(fixture.broker.metadata_cache, "partition", silent)
        assert get(client, "/ui/data/schedules/beat")["last_ms"] is None, "its leader does not answer"
    assert get(client, "/ui/data/schedules/beat")["last_ms"] == START_MS + 1_000


def test_the_leader_answers_other_brokers(client: FlaskClient, fixture: Fixture) -> None:
    put(client, fixture, "beat", every_ms=1_000)
    tick(fixture, 1)
    [known] = fixture.broker.schedules.known()
    request = LastTicks([LastTicksShare("t", known.topic_id, 0, [known.schedule_id, known.schedule_id + 1])])

    class Wire:
        def call(self, broker_id: int, name: str, request: Any, kind: Any, *, timeout_s: float) -> Any:
            return msgspec.msgpack.decode(
                fixture.broker.serve_peer(name, msgspec.msgpack.encode(request), None), type=kind
            )

    assert list(LAST_TICKS.outcomes(Wire(), 1, request, request.places).values()) == [[START_MS + 1_000, 0]]


def test_ticks_of_a_cron_line_are_shown_before_it_is_used(client: FlaskClient) -> None:
    found = get(client, "/ui/data/ticks", cron="*/20 * * * *", timezone="Asia/Tokyo")["next_ms"]
    assert [(each - START_MS) // 1_000 for each in found] == [400, 1_600, 2_800, 4_000, 5_200]


@pytest.mark.parametrize(
    "wrong", [{"cron": "x"}, {"cron": ""}, {"cron": "0 0 30 2 *"}, {"cron": "* * * * *", "timezone": "Mars"}, {}]
)
def test_what_is_no_cron_line_is_refused(client: FlaskClient, wrong: dict[str, str]) -> None:
    answer = client.get("/ui/data/ticks", query_string=wrong)
    assert (answer.status_code, answer.get_json()["code"]) == (400, "invalid_request")
