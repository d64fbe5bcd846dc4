"""`portalmq message` and `portalmq group show --at`: their requests and output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.scripted_broker import Reply, ScriptedBroker, Step, refuse

from portalmq.cli.main import main

AT_MS = 1_700_000_000_000
MESSAGE = {
    "id": "0-7",
    "topic": "t",
    "partition": 0,
    "offset": 7,
    "key": "k",
    "content_type": "text/plain",
    "headers": {},
    "timestamp_ms": AT_MS,
    "value": "v",
}
APPENDED = {"at_ms": AT_MS, "event": "appended", "offset": 7, "leader_epoch": 1, "broker": 2}
DEAD = {"at_ms": AT_MS + 1, "event": "dead", "group": "g", "reason": "no", "to_topic": "t.dlq", "offset": 9}
REPLICAS = {"leader": 2, "leader_epoch": 1, "replicas": [1, 2], "isr": [1, 2], "holders": [1, 2]}
AS_OF = {"broker": 2, "is_leader": True, "offset": 10, "at_ms": AT_MS + 5}
PATH = "/v1/messages/t/0-7/trace"


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


def run(broker: ScriptedBroker, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--server", broker.url])


def reply(body: object) -> Step:
    return lambda broker, call: Reply(200, msgspec.json.encode(body))


def page(*events: object, **more: Any) -> Step:
    return reply({"message": MESSAGE, "events": list(events), "replicas": REPLICAS, "as_of": AS_OF, **more})


def test_trace_shows_the_events_of_all_pages(broker: ScriptedBroker) -> None:
    broker.script("GET", PATH, [page(APPENDED, next=1), page(DEAD)])
    result = run(broker, "message", "trace", "t", "0-7")
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert lines[0][:4] == ["AT", "EVENT", "GROUP", "CONSUMER"]
    assert [line[1] for line in lines[1:]] == ["appended", "dead"]
    assert lines[2][-2:] == ["to_topic=t.dlq", "no"]
    assert "committed below offset 10" in result.stderr
    assert [call.query.get("after") for call in broker.calls_of("GET", PATH)] == [None, "1"]


def test_trace_as_json_is_one_document(broker: ScriptedBroker) -> None:
    broker.script("GET", PATH, [page(APPENDED, incomplete_below=8)])
    shown = json.loads(run(broker, "message", "trace", "t", "0-7", "--local", "-o", "json").stdout)
    assert (shown["message"]["id"], shown["message"]["value"]) == ("0-7", "v")
    assert (shown["events"], shown["incomplete_below"]) == ([APPENDED], 8)
    assert broker.calls_of("GET", PATH)[0].query.get("local") == "true"


def test_an_unknown_message_is_an_error(broker: ScriptedBroker) -> None:
    broker.script("GET", PATH, [refuse(404, "message_not_found")])
    assert run(broker, "message", "trace", "t", "0-7").exit_code == 1
    assert run(broker, "message", "show", "t", "7").exit_code == 1


def test_a_group_is_shown_as_it_was(broker: ScriptedBroker) -> None:
    counts = dict.fromkeys(("ready", "in_flight", "scheduled", "dead", "lag", "oldest_unacked_ms"), 3)
    body = {"group": "g", "at_ms": AT_MS, "mode": "queue", **counts, "partitions": [], "paused": None}
    broker.script("GET", "/v1/groups/g", [reply(body)] * 2)
    result = run(broker, "group", "show", "g", "--at", "2023-11-14T22:13:20Z")
    assert result.exit_code == 0, result.output
    assert "2023-11-14T22:13:20.000Z" in result.stdout
    assert broker.calls_of("GET", "/v1/groups/g")[0].query.get("at") == "2023-11-14T22:13:20Z"
    assert json.loads(run(broker, "group", "show", "g", "--at", "1h", "-o", "json").stdout) == body
    assert run(broker, "group", "show", "g", "--at", "yesterday").exit_code == 2
