"""`portalmq group`, `dlq`, `scheduled`, and related options of `produce` and `topic`: their requests and output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.scripted_broker import Call, Reply, ScriptedBroker, Step, refuse

from portalmq import wire
from portalmq.cli.main import main

GROUP = wire.GroupDescription("g", "queue", [], 2, 1, 0, 0, 3, 1500, wire.GroupConfig())
STREAM = wire.GroupDescription("g", "stream", ["m"], 0, 0, 0, 0, 3, 1500, wire.GroupConfig(mode="stream"))


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


def run(broker: ScriptedBroker, *arguments: str, stdin: str | None = None) -> Result:
    return CliRunner().invoke(main, [*arguments, "--server", broker.url], input=stdin)


def reply(body: object, status: int = 200) -> Step:
    return lambda broker, call: Reply(status, b"" if status == 204 else msgspec.json.encode(body))


def shown(offset: int, **more: Any) -> dict[str, Any]:
    message = {
        "id": f"0-{offset}",
        "topic": "t",
        "partition": 0,
        "offset": offset,
        "key": "k",
        "content_type": "application/json",
        "headers": {},
        "timestamp_ms": 1_700_000_000_000,
        "value": {"n": offset},
    }
    return {**message, **more}


class TestGroups:
    def test_pause_and_resume_name_who_asks(self, broker: ScriptedBroker) -> None:
        broker.script("POST", "/v1/groups/g/pause", [reply(None, 204)])
        broker.script("POST", "/v1/groups/g/resume", [reply(None, 204)])
        assert run(broker, "group", "pause", "g", "--reason", "why", "--by", "eva").exit_code == 0
        assert run(broker, "group", "resume", "g").exit_code == 0
        assert broker.calls_of("POST", "/v1/groups/g/pause")[0].json() == {"reason": "why", "by": "eva"}
        assert "@" in broker.calls_of("POST", "/v1/groups/g/resume")[0].json()["by"]

    def test_create_sends_the_settings_that_are_given(self, broker: ScriptedBroker) -> None:
        broker.script("PUT", "/v1/groups/g", [reply(GROUP, 201)])
        words = ["-c", "max_deliveries=3", "-c", "retry_backoff_ms=[0,1000]", "-c", "dead_letter_topic="]
        result = run(broker, "group", "create", "g", "--mode", "queue", *words, "-o", "json")
        assert result.exit_code == 0, result.output
        assert broker.calls_of("PUT", "/v1/groups/g")[0].json() == {
            "max_deliveries": 3,
            "retry_backoff_ms": [0, 1000],
            "dead_letter_topic": "",
            "mode": "queue",
        }
        assert json.loads(result.stdout)["group"] == "g"

    def test_alter_creates_no_group(self, broker: ScriptedBroker) -> None:
        broker.script("GET", "/v1/groups/g", [refuse(404, "group_not_found")])
        result = run(broker, "group", "alter", "g", "-c", "max_deliveries=3")
        assert result.exit_code == 1
        assert not broker.calls_of("PUT", "/v1/groups/g")

    @pytest.mark.parametrize("words", [["-c", "max_delivery=3"], ["-c", "noequals"], []])
    def test_a_wrong_setting_is_a_usage_error_without_a_request(self, broker: ScriptedBroker, words: list[str]) -> None:
        assert run(broker, "group", "alter", "g", *words).exit_code == 2
        assert not broker.calls_of("PUT", "/v1/groups/g")

    def test_delete_asks_first(self, broker: ScriptedBroker) -> None:
        broker.script("DELETE", "/v1/groups/g", [reply(None, 204)])
        assert run(broker, "group", "delete", "g", stdin="n\n").exit_code == 1
        assert not broker.calls_of("DELETE", "/v1/groups/g")
        assert run(broker, "group", "delete", "g", "--yes").exit_code == 0
        assert len(broker.calls_of("DELETE", "/v1/groups/g")) == 1

    def test_the_lag_of_a_stream_group_is_shown_by_partition(self, broker: ScriptedBroker) -> None:
        offsets = [{"topic": "t", "partition": 0, "committed": 4, "high_watermark": 9, "lag": 5, "lag_ms": 70}]
        broker.script("GET", "/v1/groups/g/offsets", [reply({"offsets": offsets})] * 2)
        broker.script("GET", "/v1/groups/g", [reply(STREAM)] * 2)
        result = run(broker, "group", "lag", "g")
        assert result.stdout.split()[-6:] == ["t", "0", "4", "9", "5", "70"]
        assert json.loads(run(broker, "group", "lag", "g", "-o", "ndjson").stdout) == offsets[0]

    @pytest.mark.parametrize(
        ("to", "sent"),
        [
            ("earliest", "earliest"),
            ("latest", "latest"),
            ("17", {"offset": 17}),
            ("2026-05-01T12:00:00Z", {"at": "2026-05-01T12:00:00Z"}),
        ],
    )
    def test_seek_shows_the_old_and_the_new_offsets(self, broker: ScriptedBroker, to: str, sent: object) -> None:
        sought = {"topic": "t", "offsets": [{"partition": 0, "from": 9, "to": 17}], "dry_run": True}
        broker.script("POST", "/v1/groups/g/seek", [reply(sought)])
        result = run(broker, "group", "seek", "g", "t", "--to", to, "--partition", "0", "--dry-run", "-o", "json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == [{"topic": "t", "partition": 0, "from": 9, "to": 17}]
        assert "nothing was changed" in result.stderr
        call = broker.calls_of("POST", "/v1/groups/g/seek")[0].json()
        assert call == {"topic": "t", "to": sent, "partition": 0, "dry_run": True}

    def test_an_invalid_position_is_a_usage_error(self, broker: ScriptedBroker) -> None:
        assert run(broker, "group", "seek", "g", "t", "--to", "yesterday").exit_code == 2


class TestDeadLetters:
    def test_list_reads_all_pages_and_shows_reasons(self, broker: ScriptedBroker) -> None:
        headers = {
            "portalmq-delivery-count": "5",
            "portalmq-dead-reason": "timeout",
            "portalmq-dead-at-ms": "1700000000000",
        }
        pages = [
            {"messages": [shown(1, headers=headers)], "next_after": "0-1"},
            {"messages": [shown(2)], "next_after": None},
        ]
        broker.script("GET", "/v1/groups/g/dead-letters", list(map(reply, pages)))
        result = run(broker, "dlq", "list", "g", "t", "-o", "json")
        rows = json.loads(result.stdout)
        assert [(row["id"], row["value"]) for row in rows] == [("0-1", {"n": 1}), ("0-2", {"n": 2})]
        assert (rows[0]["deliveries"], rows[0]["reason"]) == (5, "timeout")
        assert rows[0]["dead_at"] == "2023-11-14T22:13:20+00:00"
        asked = [call.query for call in broker.calls_of("GET", "/v1/groups/g/dead-letters")]
        assert [query.get("after") for query in asked] == [None, "0-1"]

    def test_a_count_limits_the_request(self, broker: ScriptedBroker) -> None:
        page = {"messages": [shown(1)], "next_after": "0-1"}
        broker.script("GET", "/v1/groups/g/dead-letters", [reply(page)])
        assert run(broker, "dlq", "list", "g", "t", "-n", "1").exit_code == 0
        assert [call.query["limit"] for call in broker.calls_of("GET", "/v1/groups/g/dead-letters")] == ["1"]

    def test_redrive_sends_the_selection(self, broker: ScriptedBroker) -> None:
        path = "/v1/groups/g/dead-letters/redrive"
        broker.script("POST", path, [reply({"matched": 3, "redriven": 0}), reply({"matched": 2, "redriven": 2})])
        where = '{"reason":{"contains":"timeout"}}'
        result = run(broker, "dlq", "redrive", "g", "t", "--where", where, "--rate", "10", "--dry-run", "-o", "json")
        assert json.loads(result.stdout) == {"matched": 3, "redriven": 0}
        assert run(broker, "dlq", "redrive", "g", "t", "--ids", "0-1, 0-2").exit_code == 0
        first, second = (call.json() for call in broker.calls_of("POST", path))
        assert first == {"topic": "t", "where": json.loads(where), "rate_per_s": 10.0, "dry_run": True}
        assert second == {"topic": "t", "ids": ["0-1", "0-2"]}

    @pytest.mark.parametrize(
        "words",
        [
            ["--where", "reason=x"],
            ["--where", "[]"],
            ["--ids", ","],
            ["--rate", "0"],
            ["--ids", "0-1", "--where", "{}"],
        ],
    )
    def test_invalid_options_are_a_usage_error(self, broker: ScriptedBroker, words: list[str]) -> None:
        assert run(broker, "dlq", "redrive", "g", "t", *words).exit_code == 2
        assert not broker.calls_of("POST", "/v1/groups/g/dead-letters/redrive")

    def test_drop_asks_first_and_takes_ids_from_stdin_in_parts(self, broker: ScriptedBroker) -> None:
        path = "/v1/groups/g/dead-letters"
        broker.script("DELETE", path, [reply({"dropped": 200}), reply({"dropped": 50})])
        assert run(broker, "dlq", "drop", "g", "t", stdin="n\n").exit_code == 1
        assert not broker.calls_of("DELETE", path)
        ids = [f"0-{number}" for number in range(250)]
        result = run(broker, "dlq", "drop", "g", "t", "--ids", "-", "-y", "-o", "json", stdin="\n".join(ids))
        assert json.loads(result.stdout) == {"dropped": 250}
        sent = [call.query["ids"].split(",") for call in broker.calls_of("DELETE", path)]
        assert [each for part in sent for each in part] == ids
        assert len(sent) == 2

    def test_drop_without_ids_drops_all(self, broker: ScriptedBroker) -> None:
        path = "/v1/groups/g/dead-letters"
        broker.script("DELETE", path, [reply({"dropped": 7})])
        assert run(broker, "dlq", "drop", "g", "t", "-y").exit_code == 0
        assert broker.calls_of("DELETE", path)[0].query == {"topic": "t"}


class TestSchedules:
    def test_list_shows_when_each_is_due(self, broker: ScriptedBroker) -> None:
        path = "/v1/topics/t/scheduled"
        first = {"messages": [shown(1, deliver_at_ms=1_800_000_000_000)], "next": "1800000000000-1-0"}
        broker.script("GET", path, [reply(first), reply({"messages": [shown(2)]})])
        rows = json.loads(run(broker, "scheduled", "list", "t", "-o", "json").stdout)
        assert [row["due"] for row in rows] == ["2027-01-15T08:00:00.000+00:00", None]
        assert broker.calls_of("GET", path)[1].query["after"] == "1800000000000-1-0"

    def test_cancel_takes_several(self, broker: ScriptedBroker) -> None:
        broker.script("DELETE", "/v1/topics/t/scheduled/0-1", [reply(None, 204)])
        broker.script("DELETE", "/v1/topics/t/scheduled/0-2", [refuse(404, "message_not_found")])
        result = run(broker, "scheduled", "cancel", "t", "0-1", "0-2")
        assert result.exit_code == 1
        assert "0-1 of t is cancelled" in result.stderr

    def test_produce_sends_delays_times_ttls_and_priorities(self, broker: ScriptedBroker) -> None:
        words = ["--delay", "1.5s", "--ttl", "2h", "--priority", "7"]
        assert run(broker, "produce", "t", *words, stdin="x\n").exit_code == 0
        sent = broker.topics["t"][0][0]
        assert (sent.delay_ms, sent.ttl_ms, sent.priority) == (1_500, 7_200_000, 7)
        assert run(broker, "produce", "t", "--at", "2027-01-15T08:00:00Z", stdin="x\n").exit_code == 0
        assert broker.topics["t"][0][1].deliver_at_ms == 1_800_000_000_000

    @pytest.mark.parametrize(
        "words",
        [
            ["--delay", "soon"],
            ["--delay", "-1s"],
            ["--at", "tomorrow"],
            ["--ttl", "5"],
            ["--priority", "32"],
            ["--delay", "1s", "--at", "2027-01-15T08:00:00Z"],
        ],
    )
    def test_invalid_times_are_usage_errors(self, broker: ScriptedBroker, words: list[str]) -> None:
        assert run(broker, "produce", "t", *words, stdin="x\n").exit_code == 2
        assert broker.topics == {}


def test_growing_a_topic_that_is_read_in_key_order_needs_force(broker: ScriptedBroker) -> None:
    partitions = [wire.PartitionDescription(0, 1, 1, [1], [1], 0, 3, 100)]

    def grown(broker: ScriptedBroker, call: Call) -> Reply:
        assert call.query == {"force": "true"}
        return Reply(body=msgspec.json.encode(wire.TopicDescription("t", partitions, wire.TopicConfig())))

    broker.script("PATCH", "/v1/topics/t", [grown])
    assert run(broker, "topic", "alter", "t", "--partitions", "2", "--force").exit_code == 0


class TestCopies:
    def test_a_copy_sends_only_the_changes(self, broker: ScriptedBroker) -> None:
        path = "/v1/topics/t/messages/0-3/copy"
        made = {"id": "0-9", "topic": "u", "partition": 0, "offset": 9, "timestamp_ms": 9}
        broker.script("POST", path, [reply(made), reply(made)])
        words = ["--to", "u", "--value", '{"a": 1}', "-H", "X=1", "--without", "y", "--delay", "2s"]
        result = run(broker, "copy", "t", "0-3", *words, "-o", "json")
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout) == {"id": "0-9", "topic": "u"}
        assert run(broker, "copy", "t", "0-3", "--value", "plain text", "--at", "2030-01-01T00:00:00Z").exit_code == 0
        first, second = (call.json() for call in broker.calls_of("POST", path))
        assert first == {"to_topic": "u", "value": {"a": 1}, "headers": {"y": None, "x": "1"}, "delay_ms": 2_000}
        assert second == {"value": "plain text", "deliver_at_ms": 1_893_456_000_000}
        assert run(broker, "copy", "t", "0-3", "--delay", "1s", "--at", "2030-01-01T00:00:00Z").exit_code == 2


class TestChangesOfScheduledMessages:
    def test_a_selection_is_sent_in_one_call(self, broker: ScriptedBroker) -> None:
        path = "/v1/topics/t/scheduled"
        for action, done in (("run", "run"), ("move", "moved"), ("cancel", "cancelled")):
            broker.script("POST", f"{path}/{action}", [reply({"matched": 3, done: 2})])
        result = run(broker, "scheduled", "run", "t", "0-1", "0-2", "-o", "json")
        assert json.loads(result.stdout) == {"matched": 3, "run": 2}
        assert run(broker, "scheduled", "move", "t", "--all", "--at", "2030-01-01T00:00:00Z").exit_code == 0
        where = '{"value.user":{"eq":7}}'
        words = ["--where", where, "--limit", "5", "--dry-run"]
        assert run(broker, "scheduled", "cancel", "t", *words).exit_code == 0
        sent = [broker.calls_of("POST", f"{path}/{action}")[0].json() for action in ("run", "move", "cancel")]
        assert sent == [
            {"ids": ["0-1", "0-2"], "limit": 1_000, "dry_run": False},
            {"deliver_at_ms": 1_893_456_000_000, "limit": 1_000, "dry_run": False},
            {"where": json.loads(where), "limit": 5, "dry_run": True},
        ]

    @pytest.mark.parametrize(
        "words",
        [["run", "t"], ["run", "t", "0-1", "--all"], ["move", "t", "--all"], ["cancel", "t"]]
        + [["cancel", "t", "0-1", "--where", "{}"], ["move", "t", "--all", "--delay", "1s", "--at", "2030-01-01"]],
        ids=str,
    )
    def test_an_unclear_selection_is_a_usage_error(self, broker: ScriptedBroker, words: list[str]) -> None:
        assert run(broker, "scheduled", *words).exit_code == 2
        assert not broker.calls_of("POST", "/v1/topics/t/scheduled/run")


class TestMoves:
    def test_calls_are_repeated_until_nothing_is_left(self, broker: ScriptedBroker) -> None:
        path = "/v1/groups/default/move"
        broker.script("POST", path, [reply({"matched": 1_500, "moved": n}) for n in (1_000, 500, 0)])
        result = run(broker, "move", "t", "u", "-o", "json")
        assert json.loads(result.stdout) == {"matched": 1_500, "moved": 1_500}
        assert {call.json()["topic"] for call in broker.calls_of("POST", path)} == {"t"}

    def test_a_limit_and_a_dry_run_are_sent(self, broker: ScriptedBroker) -> None:
        path = "/v1/groups/g/move"
        broker.script("POST", path, [reply({"matched": 9, "moved": 0})])
        words = ["--group", "g", "--limit", "7", "--rate", "5", "--dry-run"]
        result = run(broker, "move", "t", "u", *words, "-o", "json")
        assert json.loads(result.stdout) == {"matched": 9, "moved": 0}
        (call,) = broker.calls_of("POST", path)
        assert call.json() == {"topic": "t", "to_topic": "u", "limit": 7, "rate_per_s": 5.0, "dry_run": True}
