"""`portalmq schedule`: its requests and output."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.scripted_broker import Reply, ScriptedBroker

from portalmq.cli.main import main

PATH = "/v1/schedules/report"
SHOWN = {
    "name": "report", "topic": "t", "partition": 0, "cron": "0 6 * * *", "timezone": "UTC", "value": "go", "key": None,
    "content_type": "text/plain; charset=utf-8", "headers": {}, "paused": False, "catch_up": True,
    "next_tick": "2026-05-04T06:00:00Z",
}  # fmt: skip


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


def script(broker: ScriptedBroker, method: str, path: str, answer: object, status: int = 200) -> None:
    broker.script(method, path, [lambda broker, call: Reply(status, msgspec.json.encode(answer) if answer else b"")])


def run(broker: ScriptedBroker, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["schedule", *arguments, "--server", broker.url])


@pytest.mark.parametrize(
    ("options", "body"),
    [
        (["--cron", "0 6 * * *"], {"cron": "0 6 * * *"}),
        (["--every", "15m"], {"every_ms": 900_000}),
        (["--every", "1s", "--paused", "--no-catch-up"], {"every_ms": 1_000, "paused": True, "catch_up": False}),
        (["--cron", "@daily", "--timezone", "Europe/Berlin", "-k", "k", "-H", "A=b"],
         {"cron": "@daily", "timezone": "Europe/Berlin", "key": "k", "headers": {"a": "b"}}),
    ],
)  # fmt: skip
def test_create_puts_the_definition(broker: ScriptedBroker, options: list[str], body: dict[str, object]) -> None:
    script(broker, "PUT", PATH, SHOWN, 201)
    result = run(broker, "create", "report", "--topic", "t", "--value", "go", *options, "-o", "json")
    assert result.exit_code == 0, result.output
    sent = json.loads(broker.calls_of("PUT", PATH)[0].body)
    usual = {"topic": "t", "timezone": "UTC", "paused": False, "catch_up": True, "value": "go"}
    assert sent == {**usual, "content_type": "text/plain; charset=utf-8", **body}
    assert json.loads(result.stdout)["next_tick"] == "2026-05-04T06:00:00Z"


def test_a_json_value_is_checked(broker: ScriptedBroker) -> None:
    script(broker, "PUT", PATH, SHOWN, 201)
    good = run(broker, "create", "report", "--topic", "t", "--every", "1m", "--json", "--value", '{"a": 1}')
    assert good.exit_code == 0, good.output
    sent = json.loads(broker.calls_of("PUT", PATH)[0].body)
    assert (sent["value"], sent["content_type"]) == ({"a": 1}, "application/json")
    assert run(broker, "create", "report", "--topic", "t", "--every", "1m", "--json", "--value", "{").exit_code == 2


@pytest.mark.parametrize("options", [[], ["--cron", "* * * * *", "--every", "1m"], ["--every", "soon"]])
def test_create_needs_one_kind_of_times(broker: ScriptedBroker, options: list[str]) -> None:
    assert run(broker, "create", "report", "--topic", "t", *options).exit_code == 2


@pytest.mark.parametrize("every", ["0s", "999ms"])
def test_create_says_the_shortest_interval(broker: ScriptedBroker, every: str) -> None:
    result = run(broker, "create", "report", "--topic", "t", "--every", every)
    assert result.exit_code == 2
    assert "at least 1s" in result.stderr
    assert broker.calls == []


def test_list_shows_the_next_times(broker: ScriptedBroker) -> None:
    script(broker, "GET", "/v1/schedules", {"schedules": [SHOWN]})
    head, row = run(broker, "list").stdout.splitlines()
    assert head.split() == ["NAME", "TOPIC", "CRON", "EVERY_MS", "TIMEZONE", "PAUSED", "NEXT_TICK"]
    assert row.split() == ["report", "t", *["0", "6", "*", "*", "*"], "-", "UTC", "false", "2026-05-04T06:00:00Z"]


@pytest.mark.parametrize("verb", ["pause", "resume"])
def test_a_schedule_is_paused_and_resumed(broker: ScriptedBroker, verb: str) -> None:
    script(broker, "POST", f"{PATH}/{verb}", None, 204)
    result = run(broker, verb, "report")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "", f"schedule report is {verb}d\n")


def test_a_schedule_is_deleted(broker: ScriptedBroker) -> None:
    script(broker, "DELETE", PATH, None, 204)
    assert run(broker, "delete", "report").exit_code == 0
