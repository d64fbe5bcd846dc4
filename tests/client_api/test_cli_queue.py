"""`portalmq queue`: its requests and output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.scripted_broker import Reply, ScriptedBroker, refuse

from portalmq.cli.main import main

COUNTS = {"ready": 2, "in_flight": 1, "scheduled": 0, "dead": 4, "oldest_unacked_ms": 1500}


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


def message(offset: int, state: str, **more: Any) -> dict[str, Any]:
    told = {"id": f"0-{offset}", "topic": "t", "partition": 0, "offset": offset, "key": None, "headers": {}}
    told |= {"content_type": "text/plain", "timestamp_ms": 1_700_000_000_000, "value": f"m{offset}"}
    return {**told, "state": state, "delivery_count": 0, **more}


def script(broker: ScriptedBroker, *pages: dict[str, Any]) -> None:
    """Script the pages; the first answer gives the counts."""
    replies = [Reply(200, msgspec.json.encode(page)) for page in ({"messages": [], "counts": COUNTS}, *pages)]
    broker.script("GET", "/v1/groups/g/messages", [lambda broker, call, reply=reply: reply for reply in replies])


def run(broker: ScriptedBroker, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["queue", "--topic", "t", "--group", "g", *arguments, "--server", broker.url])


def test_a_table_shows_each_message_beside_the_counts(broker: ScriptedBroker) -> None:
    leased = message(3, "in_flight", delivery_count=2, available_at_ms=1_700_000_030_000)
    script(broker, {"messages": [leased, message(4, "ready")]})
    result = run(broker)
    assert result.exit_code == 0, result.output
    head, first, second = result.stdout.splitlines()
    assert head.split() == ["ID", "STATE", "DELIVERIES", "SENT", "AVAILABLE", "KEY", "VALUE"]
    assert first.split() == ["0-3", "in_flight", "2", "2023-11-14T22:13:20.000Z", "2023-11-14T22:13:50.000Z", "-", "m3"]
    assert second.split() == ["0-4", "ready", "0", "2023-11-14T22:13:20.000Z", "-", "-", "m4"]
    assert result.stderr == "ready 2  in_flight 1  scheduled 0  dead 4  oldest_unacked_ms 1500\n"


def test_json_is_one_document(broker: ScriptedBroker) -> None:
    script(broker, {"messages": [message(3, "ready"), message(4, "ready")]})
    told = json.loads(run(broker, "-n", "1", "-o", "json").stdout)
    assert (told["topic"], told["group"], told["ready"], told["dead"], told["more"]) == ("t", "g", 2, 4, True)
    assert [(each["id"], each["state"], each["value"]) for each in told["messages"]] == [("0-3", "ready", "m3")]
    assert broker.calls_of("GET", "/v1/groups/g/messages")[1].query["limit"] == "2"


def test_pages_are_read_until_the_count_is_reached(broker: ScriptedBroker) -> None:
    script(broker, {"messages": [message(3, "ready")], "next": "0-3"}, {"messages": [message(4, "scheduled")]})
    result = run(broker, "-o", "ndjson")
    assert [json.loads(line)["id"] for line in result.stdout.splitlines()] == ["0-3", "0-4"]
    assert [call.query.get("after") for call in broker.calls_of("GET", "/v1/groups/g/messages")] == [None, None, "0-3"]


def test_only_the_counts_are_shown(broker: ScriptedBroker) -> None:
    script(broker)
    told = json.loads(run(broker, "-n", "0", "-o", "json").stdout)
    assert told == {"topic": "t", "group": "g", **COUNTS, "messages": [], "more": False}
    assert len(broker.calls_of("GET", "/v1/groups/g/messages")) == 1


def test_a_missing_topic_raises_topic_not_found(broker: ScriptedBroker) -> None:
    broker.script("GET", "/v1/groups/g/messages", [refuse(404, "topic_not_found")])
    assert run(broker).exit_code == 1
