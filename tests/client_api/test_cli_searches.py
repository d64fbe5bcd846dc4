"""`portalmq sql` and `portalmq peek --where`: their requests and output."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.scripted_broker import Reply, ScriptedBroker, Step, refuse

from portalmq import Admin
from portalmq.cli.main import main

QUERY = "SELECT topic, count(*) FROM messages GROUP BY 1"


@pytest.fixture
def broker() -> Any:
    with ScriptedBroker() as broker:
        yield broker


def run(broker: ScriptedBroker, *arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments, "--server", broker.url])


def reply(body: object) -> Step:
    return lambda broker, call: Reply(200, msgspec.json.encode(body))


def result(columns: list[str], *rows: list[Any], truncated: bool = False) -> Step:
    return reply({"columns": columns, "rows": list(rows), "truncated": truncated, "elapsed_ms": 1.5})


def page(*offsets: int, following: str | None = None) -> Step:
    messages = [
        {
            "id": f"0-{offset}",
            "topic": "t",
            "partition": 0,
            "offset": offset,
            "key": "k",
            "headers": {},
            "content_type": "application/json",
            "timestamp_ms": 1_700_000_000_000,
            "value": {"n": offset},
        }
        for offset in offsets
    ]
    return reply({"messages": messages, "next": following, "tail": "0-9", "scanned": 9, "at_ms": 0})


def asked(broker: ScriptedBroker, path: str) -> list[dict[str, str]]:
    return [call.query for call in broker.calls if call.path == path]


class TestSql:
    def test_rows_are_shown_as_a_table(self, broker: ScriptedBroker) -> None:
        broker.script("POST", "/v1/sql", [result(["topic", "count(*)"], ["orders", 3], [None, 1])])
        shown = run(broker, "sql", QUERY, "-n", "7", "--timeout", "0.25")
        assert [line.split() for line in shown.stdout.splitlines()] == [
            ["TOPIC", "COUNT(*)"],
            ["orders", "3"],
            ["-", "1"],
        ]
        [call] = [call for call in broker.calls if call.path == "/v1/sql"]
        assert json.loads(call.body) == {"query": QUERY, "limit": 7, "timeout_ms": 250}

    def test_columns_of_one_name_are_told_apart(self, broker: ScriptedBroker) -> None:
        broker.script("POST", "/v1/sql", [result(["n", "n", "x"], [1, 2, {"base64": "/w=="}], truncated=True)])
        shown = run(broker, "sql", "SELECT 1 AS n, 2 AS n, x'ff' AS x", "-o", "ndjson")
        assert json.loads(shown.stdout) == {"n": 1, "n:1": 2, "x": {"base64": "/w=="}}
        assert "and more" in shown.stderr

    def test_a_query_that_is_refused_ends_with_the_reason(self, broker: ScriptedBroker) -> None:
        broker.script("POST", "/v1/sql", [refuse(400, "query_limit")])
        shown = run(broker, "sql", QUERY)
        assert (shown.exit_code, "scripted query_limit" in shown.stderr) == (1, True)


class TestPeekWhere:
    def test_pages_are_asked_for_until_there_are_enough(self, broker: ScriptedBroker) -> None:
        broker.script("GET", "/ui/data/messages", [page(8, 6, following="0-6"), page(following="0-3"), page(2, 1)])
        shown = run(broker, "peek", "t", "--where", '{"value.n":{"gt":0}}', "-n", "3", "-o", "ndjson")
        assert [json.loads(line)["id"] for line in shown.stdout.splitlines()] == ["0-8", "0-6", "0-2"]
        first, second, third = asked(broker, "/ui/data/messages")
        assert first == {"topic": "t", "where": '{"value.n":{"gt":0}}', "order": "newest"}
        assert (second["after"], third["after"]) == ("0-6", "0-3")

    def test_a_time_is_where_the_search_begins(self, broker: ScriptedBroker) -> None:
        broker.script("GET", "/ui/data/messages", [page(1, following="0-2"), page(2)])
        options = (
            "--where",
            '{"key":{"eq":"k"}}',
            "--since",
            "2023-11-14T22:00:00Z",
            "--partition",
            "0",
            "-o",
            "ndjson",
        )
        assert run(broker, "peek", "t", *options).exit_code == 0
        first, second = asked(broker, "/ui/data/messages")
        assert (first["order"], first["at"], first["partition"]) == ("oldest", "2023-11-14T22:00:00+00:00", "0")
        assert ("at" in second, second["order"]) == (False, "oldest")

    def test_the_newest_come_first_without_a_condition_too(self, broker: ScriptedBroker) -> None:
        broker.script("GET", "/ui/data/messages", [page(8, 6, following="0-6")])
        shown = run(broker, "peek", "t", "--newest", "-n", "1", "-o", "ndjson")
        assert [json.loads(line)["id"] for line in shown.stdout.splitlines()] == ["0-8"]
        assert asked(broker, "/ui/data/messages") == [{"topic": "t", "order": "newest"}]

    @pytest.mark.parametrize(
        "options", [("--where", "{}", "--offset", "1"), ("--newest", "--offset", "1"), ("--newest", "--since", "1h")]
    )
    def test_a_place_without_a_meaning_is_refused(self, broker: ScriptedBroker, options: tuple[str, ...]) -> None:
        assert run(broker, "peek", "t", *options).exit_code == 2


def test_a_search_yields_messages(broker: ScriptedBroker) -> None:
    broker.script("GET", "/ui/data/messages", [page(3)])
    with Admin(broker.url) as admin:
        [message] = admin.search("t", {"value.n": {"eq": 3}})
    assert (message.id, message.json(), message.key) == ("0-3", {"n": 3}, b"k")
