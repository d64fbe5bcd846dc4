"""The command line: data on stdout, messages for people on stderr, exit codes for scripts."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner, Result
from support.scripted_broker import Call, Reply, ScriptedBroker, refuse
from support.tls import TlsFront, pem

from portalmq import wire
from portalmq.cli import main as cli
from portalmq.cli import output
from portalmq.cli.main import main
from portalmq.cli.receipts import checksum_of
from portalmq.message import Message

PARTITION = wire.PartitionDescription(0, 1, 1, [1], [1], 0, 3, 100)
TOPIC = wire.TopicDescription("t", [PARTITION], wire.TopicConfig())
GROUP = wire.GroupDescription("g", "queue", [], 2, 1, 0, 0, 3, 1500, wire.GroupConfig())


@pytest.fixture
def broker() -> Iterator[ScriptedBroker]:
    with ScriptedBroker() as broker:
        yield broker


def run(broker: ScriptedBroker, *arguments: str, stdin: str | bytes | None = None) -> Result:
    return CliRunner().invoke(main, [*arguments, "--server", broker.url], input=stdin)


def reply(body: object, status: int = 200):  # type: ignore[no-untyped-def]
    return lambda broker, call: Reply(status, msgspec.json.encode(body))


def browse(broker: ScriptedBroker, call: Call) -> Reply:
    """Return pages of the scripted broker's messages."""
    log = broker.topics["t"][0]
    given = call.query.get("offset", "earliest")
    start = 0 if given == "earliest" else len(log) if given == "latest" else int(given)
    stop = min(len(log), start + int(call.query["limit"]))
    messages = [
        wire.PackMessageOut(
            0, offset, log[offset].value, 1_700_000_000_000, content_type=log[offset].content_type or wire.BYTES
        )
        for offset in range(start, stop)
    ]
    page = wire.PackBrowsePage(messages, stop, 0, len(log))
    return Reply(200, msgspec.msgpack.encode(page), wire.BATCH_MSGPACK)


# --- the frame -------------------------------------------------------------------------------------------------------


def test_help_names_every_command() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    for name in ("topic", "produce", "consume", "peek", "group", "status", "broker", "dev"):
        assert f"\n  {name} " in result.stdout


def test_every_command_explains_itself() -> None:
    for words in (
        ["topic", "create"],
        ["topic", "purge"],
        ["produce"],
        ["consume"],
        ["peek"],
        ["group", "lag"],
        ["status"],
    ):
        result = CliRunner().invoke(main, [*words, "--help"])
        assert result.exit_code == 0
        assert "Usage:" in result.stdout


def test_a_broker_that_is_silent_does_not_hide_one_that_answers(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A paused or starting broker: the kernel accepts the connection, and no answer comes."""
    for limit in ("cli.session.REACH_TIMEOUT_S", "transport.request.READ_TIMEOUT_S"):
        monkeypatch.setattr(f"portalmq.{limit}", 3.0)
    broker.script("GET", "/v1/topics", [reply({"topics": []})])
    with socket.create_server(("127.0.0.1", 0)) as silent:
        servers = f"http://127.0.0.1:{silent.getsockname()[1]},{broker.url}"
        result = CliRunner().invoke(main, ["topic", "list", "-o", "json", "--server", servers])
    assert (result.exit_code, result.stdout) == (0, "[]\n")


def test_an_unreachable_broker_is_exit_69_with_its_address_and_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.cli.session.REACH_TIMEOUT_S", 1.0)
    for words in (["status"], ["topic", "list"], ["produce", "t"], ["consume", "t"]):
        result = CliRunner().invoke(main, [*words, "--server", "http://127.0.0.1:1"])
        assert result.exit_code == 69
        assert "http://127.0.0.1:1" in result.stderr
        assert "portalmq dev" in result.stderr
        assert result.stdout == ""


@pytest.mark.parametrize(
    "words",
    [["nonsense"], ["topic", "create"], ["consume", "t", "--offset", "x"], ["status", "--server", "ftp://here:21"]],
)
def test_a_usage_error_is_exit_2(words: list[str]) -> None:
    assert CliRunner().invoke(main, words).exit_code == 2


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "0"])
@pytest.mark.parametrize("words", [["move", "t", "u", "--rate"], ["dlq", "redrive", "g", "t", "--rate"]])
def test_a_rate_is_a_finite_number(broker: ScriptedBroker, words: list[str], number: str) -> None:
    assert run(broker, *words, number).exit_code == 2
    assert broker.calls == []


@pytest.mark.parametrize("words", [["worker", "shop:app", "--grace"], ["zeromq", "--timeout"], ["zeromq", "--lease"]])
def test_no_number_of_seconds_is_nan(words: list[str]) -> None:
    result = CliRunner().invoke(main, [*words, "nan"])
    assert (result.exit_code, "not a finite number" in result.stderr) == (2, True)


@pytest.mark.parametrize(("given", "timeout_ms"), [("2", 2_000), ("0.5", 500), ("1s", 1_000), ("250ms", 250)])
def test_sql_takes_its_timeout_as_seconds_or_as_a_duration(broker: ScriptedBroker, given: str, timeout_ms: int) -> None:
    broker.script("POST", "/v1/sql", [reply({"columns": ["n"], "rows": [], "truncated": False, "elapsed_ms": 1})])
    assert run(broker, "sql", "SELECT 1", "--timeout", given).exit_code == 0
    assert broker.calls[-1].json()["timeout_ms"] == timeout_ms


@pytest.mark.parametrize("given", ["nan", "0", "0s", "31", "1m", "soon"])
def test_sql_refuses_a_timeout_that_the_broker_would_not_take(broker: ScriptedBroker, given: str) -> None:
    assert run(broker, "sql", "SELECT 1", "--timeout", given).exit_code == 2
    assert broker.calls == []


def test_sql_refuses_an_empty_query_with_a_sentence(broker: ScriptedBroker) -> None:
    result = run(broker, "sql", " ")
    assert result.exit_code == 2
    assert "the query is empty" in result.stderr
    assert broker.calls == []


@pytest.mark.parametrize("url", ["http://localhost:99999", "localhost:http"])
def test_an_address_with_a_port_that_is_none_is_named(url: str) -> None:
    result = CliRunner().invoke(main, ["status", "--server", url])
    assert result.exit_code == 2
    assert repr(url) in result.stderr


def test_an_error_of_the_broker_is_exit_1_with_its_sentence(broker: ScriptedBroker) -> None:
    broker.script("GET", "/v1/topics/t", [refuse(404, "topic_not_found")])
    result = run(broker, "topic", "show", "t")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "portalmq: scripted topic_not_found\n"


def test_options_may_precede_the_command(broker: ScriptedBroker, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("# mine\nsecret\n")
    broker.script("GET", "/v1/topics", [reply({"topics": []})])
    words = ["--server", broker.url, "--token-file", str(token), "-o", "json", "topic", "list"]
    result = CliRunner().invoke(main, words)
    assert json.loads(result.stdout) == []
    assert broker.calls[-1].headers["authorization"] == "Bearer secret"


def test_a_command_of_a_missing_package_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broken = EntryPoint("report", "portalmq.spark.nowhere:report", "portalmq.commands")
    monkeypatch.setattr(cli, "_room_commands", lambda: {"report": broken})
    result = CliRunner().invoke(main, ["report", "--data-dir", "x"])
    assert result.exit_code == 1
    assert 'pip install "portalmq[spark]"' in result.stderr
    assert "report" in CliRunner().invoke(main, ["--help"]).stdout


def test_the_command_line_of_the_client_imports_no_other_package() -> None:
    code = (
        "import sys, portalmq.cli.main; print([m for m in sys.modules if m.startswith(('portalmq.broker', 'flask'))])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


# --- topics, groups -------------------------------------------------------------------------------------------------


def test_topics_are_listed_in_three_forms(broker: ScriptedBroker) -> None:
    topics = {"topics": [wire.TopicSummary("t", 2, 1), wire.TopicSummary("longer", 1, 1)]}
    broker.script("GET", "/v1/topics", [reply(topics)] * 3)
    table = run(broker, "topic", "list").stdout.splitlines()
    assert table == ["NAME    PARTITIONS  REPLICATION_FACTOR", "t       2           1", "longer  1           1"]
    assert [row["name"] for row in json.loads(run(broker, "topic", "list", "-o", "json").stdout)] == ["t", "longer"]
    lines = run(broker, "topic", "list", "-o", "ndjson").stdout.splitlines()
    assert [json.loads(line)["name"] for line in lines] == ["t", "longer"]


def test_a_topic_is_created_with_settings(broker: ScriptedBroker) -> None:
    broker.script("PUT", "/v1/topics/t", [reply(TOPIC, 201)])
    result = run(broker, "topic", "create", "t", "-p", "3", "-c", "retention_ms=1000", "-c", "cleanup=compact")
    assert (result.exit_code, result.stdout) == (0, "")
    assert broker.calls[-1].json() == {"partitions": 3, "config": {"retention_ms": 1000, "cleanup": "compact"}}


def test_a_topic_is_shown_and_altered(broker: ScriptedBroker) -> None:
    broker.script("GET", "/v1/topics/t", [reply(TOPIC)] * 2)
    broker.script("PATCH", "/v1/topics/t", [reply(TOPIC)])
    assert "high_watermark".upper() in run(broker, "topic", "show", "t").stdout
    assert json.loads(run(broker, "topic", "show", "t", "-o", "json").stdout)["name"] == "t"
    run(broker, "topic", "alter", "t", "-c", "retention_bytes=null")
    assert broker.calls[-1].json() == {"config": {"retention_bytes": None}}
    assert run(broker, "topic", "alter", "t").exit_code == 2


def test_deleting_and_purging_ask_first(broker: ScriptedBroker) -> None:
    broker.script("DELETE", "/v1/topics/t", [reply(None, 204)] * 2)
    assert run(broker, "topic", "delete", "t", stdin="n\n").exit_code == 1
    assert broker.calls == []
    assert run(broker, "topic", "delete", "t", stdin="y\n").exit_code == 0
    assert run(broker, "topic", "purge", "t", "-y", "--before-offset", "5").exit_code == 0
    assert broker.calls[-1].query == {"before_offset": "5"}


def test_cancelling_all_that_is_scheduled_asks_first(broker: ScriptedBroker) -> None:
    broker.script("POST", "/v1/topics/t/scheduled", [reply({"matched": 2, "changed": 2})] * 4)
    cancel = ("scheduled", "cancel", "t")
    assert run(broker, *cancel, "--all", stdin="n\n").exit_code == 1
    assert run(broker, *cancel, "--all", stdin="").exit_code == 1, "no answer is no yes"
    assert broker.calls_of("POST", "/v1/topics/t/scheduled/cancel") == []
    assert run(broker, *cancel, "--all", stdin="y\n").exit_code == 0
    assert run(broker, *cancel, "--all", "-y").exit_code == 0
    assert run(broker, *cancel, "--all", "--dry-run").exit_code == 0, "it changes nothing"
    assert run(broker, *cancel, "--where", '{"key":{"eq":"k"}}').exit_code == 0, "they were selected"


def test_groups_and_their_lag_are_shown(broker: ScriptedBroker) -> None:
    broker.script("GET", "/v1/groups/g", [reply(GROUP)] * 2)
    broker.script("GET", "/v1/groups", [reply({"groups": [GROUP]})])
    assert "g" in run(broker, "group", "list").stdout.splitlines()[1]
    assert "max_deliveries" in run(broker, "group", "show", "g").stdout
    lag = json.loads(run(broker, "group", "lag", "g", "-o", "json").stdout)
    assert lag == {"group": "g", "lag": 3, "oldest_unacked_ms": 1500}


# --- produce ---------------------------------------------------------------------------------------------------------


def test_produce_sends_each_line(broker: ScriptedBroker) -> None:
    result = run(broker, "produce", "t", "-k", "key", "-H", "Source=test", stdin="one\r\n\ntwo")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "sent 3 messages to t" in result.stderr
    first, _, _ = broker.topics["t"][0]
    assert broker.values("t") == [b"one", b"", b"two"]
    assert (first.key, first.headers, first.content_type) == ("key", {"source": "test"}, wire.TEXT)


def test_produce_sends_lines_that_are_no_text_as_bytes(broker: ScriptedBroker) -> None:
    run(broker, "produce", "t", stdin=b"\xff\xfe\n")
    assert (broker.values("t"), broker.topics["t"][0][0].content_type) == ([b"\xff\xfe"], None)


def test_produce_appends_a_receipt_for_each_message_that_was_acknowledged(
    broker: ScriptedBroker, tmp_path: Path
) -> None:
    file = tmp_path / "receipts"
    words = ("produce", "t", "--receipts", str(file), "-k", "key", "-H", "a=b")
    assert run(broker, *words, stdin="one\ntwo\n").exit_code == 0
    broker.script("POST", "/v1/topics/t/messages", [refuse(403, "forbidden")])
    assert run(broker, *words, stdin="refused\n").exit_code == 1
    assert run(broker, *words, stdin=b"\xff\n").exit_code == 0
    found = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(each["topic"], each["partition"], each["offset"], each["id"]) for each in found] == [
        ("t", 0, offset, f"0-{offset}") for offset in (0, 1, 2)
    ]
    stored = [(b"one", wire.TEXT), (b"two", wire.TEXT), (b"\xff", wire.BYTES)]
    assert [each["checksum"] for each in found] == [checksum_of(b"key", *each, {"a": "b"}) for each in stored]


def test_there_are_no_receipts_without_acknowledgements(broker: ScriptedBroker, tmp_path: Path) -> None:
    result = run(broker, "produce", "t", "--acks", "none", "--receipts", str(tmp_path / "r"), stdin="one\n")
    assert result.exit_code == 2
    assert broker.topics == {}


def test_produce_ndjson_checks_each_line_and_sends_the_good_ones(broker: ScriptedBroker) -> None:
    result = run(broker, "produce", "t", "--ndjson", stdin='{"a": 1}\nnonsense\n2\n')
    assert result.exit_code == 1
    assert broker.values("t") == [b'{"a": 1}', b"2"]
    assert broker.topics["t"][0][0].content_type == wire.JSON
    assert "1 message not sent; the first: line 2: not JSON" in result.stderr


def test_produce_fails_when_a_message_is_refused(broker: ScriptedBroker) -> None:
    broker.script("POST", "/v1/topics/t/messages", [refuse(403, "forbidden")])
    result = run(broker, "produce", "t", stdin="one\n")
    assert result.exit_code == 1
    assert "1 message not sent; the first: scripted forbidden" in result.stderr


@pytest.mark.parametrize("option", ["--delay", "--ttl"])
def test_a_time_that_is_too_long_is_a_usage_error(broker: ScriptedBroker, option: str) -> None:
    result = run(broker, "produce", "t", option, "100000000000000d", stdin="one\n")
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert f"Invalid value for '{option}'" in result.stderr
    assert broker.topics == {}


# --- consume and peek ------------------------------------------------------------------------------------------------


def test_consume_as_a_group_prints_and_acks(broker: ScriptedBroker) -> None:
    broker.fill("t", [b"one", b"\xff", b"three"])
    result = run(broker, "consume", "t", "--group", "g", "-n", "2")
    assert result.stdout_bytes == b"one\n\xff\n"
    assert "2 messages" in result.stderr
    assert broker.done == {("t", 0, 0), ("t", 0, 1)}
    assert broker.leased == {}


def test_consume_as_a_group_ends_at_the_end(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.cli.messages.END_WAIT_S", 0.05)
    broker.fill("t", [b"%d" % number for number in range(250)])
    result = run(broker, "consume", "t", "--group", "g", "--exit-at-end", "-o", "ndjson")
    assert [json.loads(line)["value"] for line in result.stdout.splitlines()] == [str(number) for number in range(250)]
    assert len(broker.done) == 250


def test_consume_as_a_group_acks_printed_messages_while_it_waits(broker: ScriptedBroker) -> None:
    """Otherwise the lease of a message would expire before the hundredth arrives, and it would be printed again."""
    broker.fill("t", [b"one"])
    program = [sys.executable, "-m", "portalmq.cli.main", "consume", "t", "-g", "g", "--server", broker.url]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        try:
            broker.wait_for(lambda: ("t", 0, 0) in broker.done)
            assert process.poll() is None
        finally:
            process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == b"one\n"
    assert process.returncode == 130


def test_consume_as_a_group_returns_unprinted_messages(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader has ended (`| head`): consume acks only messages that it can have read."""

    def show(message: Message, form: str) -> None:
        if message.value == b"three":
            raise BrokenPipeError

    monkeypatch.setattr("portalmq.cli.messages._show", show)
    broker.fill("t", [b"one", b"two", b"three", b"four"])
    run(broker, "consume", "t", "--group", "g")
    assert broker.done == {("t", 0, 0), ("t", 0, 1)}
    assert broker.leased == {}


def test_consume_without_a_group_acks_nothing(broker: ScriptedBroker) -> None:
    broker.fill("t", [b"one", b"two", b"three"])
    broker.script("GET", "/v1/topics/t/partitions", [browse] * 10)
    broker.script("GET", "/v1/topics/t", [reply(TOPIC)] * 10)
    assert run(broker, "consume", "t", "--from-beginning", "--exit-at-end").stdout == "one\ntwo\nthree\n"
    assert run(broker, "consume", "t", "--offset", "1", "-n", "1").stdout == "two\n"
    assert not [call for call in broker.calls if call.path.startswith("/v1/groups")]


def test_consume_starts_at_a_time(broker: ScriptedBroker) -> None:
    broker.fill("t", [])
    broker.script("GET", "/v1/topics/t/partitions", [browse] * 10)
    broker.script("GET", "/v1/topics/t", [reply(TOPIC)] * 10)
    run(broker, "consume", "t", "--since", "2026-05-01T12:00:00Z", "--exit-at-end")
    assert broker.calls[-1].query["at"] == "2026-05-01T12:00:00Z"
    assert run(broker, "consume", "t", "--since", "yesterday").exit_code == 2
    assert run(broker, "consume", "t", "--since", "15m", "--exit-at-end").exit_code == 0


@pytest.mark.parametrize("words", [["--from-beginning", "--offset", "1"], ["--group", "g", "--offset", "1"]])
def test_consume_refuses_contradicting_positions(broker: ScriptedBroker, words: list[str]) -> None:
    assert run(broker, "consume", "t", *words).exit_code == 2


def test_peek_shows_messages_in_a_table_that_no_message_can_break(broker: ScriptedBroker) -> None:
    broker.topics["t"] = [[wire.PackMessage(value=b"\x1b[31mred\nline", content_type=wire.TEXT)]]
    broker.script("GET", "/v1/topics/t/partitions", [browse] * 2)
    broker.script("GET", "/v1/topics/t", [reply(TOPIC)] * 2)
    header, row = run(broker, "peek", "t").stdout.splitlines()
    assert header.split() == ["ID", "TIME", "KEY", "CONTENT_TYPE", "VALUE"]
    assert row.endswith(r"\x1b[31mred\nline")
    shown = json.loads(run(broker, "peek", "t", "-o", "json").stdout)
    assert (shown[0]["id"], shown[0]["value"]) == ("0-0", "\x1b[31mred\nline")


def test_a_host_that_resets_connections_is_a_broker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.cli.session.REACH_TIMEOUT_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:

        def reset() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:  # the test has ended
                    return
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()

        threading.Thread(target=reset, daemon=True).start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        result = CliRunner().invoke(main, ["topic", "list", "--server", url])
        server.shutdown(socket.SHUT_RDWR)
    assert result.exit_code == 69
    assert f"no broker answers at {url}" in result.stderr


def test_a_certificate_that_is_not_trusted_is_the_cause_and_tls_ca_the_remedy(broker: ScriptedBroker) -> None:
    with TlsFront(int(broker.url.rpartition(":")[2]), "server") as front:
        result = CliRunner().invoke(main, ["topic", "list", "--server", f"https://localhost:{front.port}"])
    assert result.exit_code == 69
    assert f"https://localhost:{front.port}" in result.stderr
    assert "certificate verify failed" in result.stderr
    assert "--tls-ca" in result.stderr
    assert "portalmq up" not in result.stderr


def test_https_to_a_broker_without_tls_says_to_write_http(broker: ScriptedBroker) -> None:
    result = CliRunner().invoke(main, ["topic", "list", "--server", broker.url.replace("http", "https")])
    assert result.exit_code == 69
    assert "SSL" in result.stderr
    assert "http://" in result.stderr
    assert "portalmq up" not in result.stderr


def test_http_to_a_broker_with_tls_says_to_write_https(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("portalmq.cli.session.REACH_TIMEOUT_S", 1.0)
    with TlsFront(int(broker.url.rpartition(":")[2]), "server") as front:
        result = CliRunner().invoke(main, ["topic", "list", "--server", f"http://localhost:{front.port}"])
    assert result.exit_code == 69
    assert f"no broker answers at http://localhost:{front.port}" in result.stderr
    assert "https://" in result.stderr


def test_a_broker_that_wants_a_certificate_says_which_option_shows_one(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portalmq.cli.session.REACH_TIMEOUT_S", 1.0)
    monkeypatch.setenv("PORTALMQ_TLS_CA", str(pem("authority")))
    with TlsFront(int(broker.url.rpartition(":")[2]), "server", asks_for_certificate=True) as front:
        result = CliRunner().invoke(main, ["topic", "list", "--server", f"https://localhost:{front.port}"])
    assert result.exit_code == 69
    assert "--tls-client-cert" in result.stderr


def test_peek_marks_bytes_that_are_no_text(broker: ScriptedBroker) -> None:
    broker.topics["t"] = [[wire.PackMessage(value=b"\xff\x00", content_type=wire.BYTES)]]
    broker.script("GET", "/v1/topics/t/partitions", [browse])
    broker.script("GET", "/v1/topics/t", [reply(TOPIC)])
    _, row = run(broker, "peek", "t").stdout.splitlines()
    assert row.endswith(r"b'\xff\x00'")


def test_no_row_is_wider_than_the_terminal(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(output, "_on_terminal", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "70")
    output.show_rows([{"name": "short", "value": "x" * 59}], "table", ["name", "value"])
    output.show_rows([{"name": "n" * 40, "value": "y" * 59}], "table", ["name", "value"])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 70
    assert lines[1].endswith("x" * 59)
    assert lines[3].endswith("y…")


def test_a_state_is_coloured_only_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    rows = [{"topic": "t", "problem": "without leader"}]
    output.show_rows(rows, "table", ["topic", "problem"])
    assert "\x1b[" not in capsys.readouterr().out
    monkeypatch.setattr(output, "_on_terminal", lambda: True)
    output.show_rows(rows, "table", ["topic", "problem"])
    assert "\x1b[31mwithout leader" in capsys.readouterr().out


def test_a_missing_package_is_reported_with_its_extra(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'pyarrow'", name="pyarrow.lib")

    monkeypatch.setattr("portalmq.admin.Admin.topics", missing)
    result = run(broker, "topic", "list")
    assert result.exit_code == 2
    assert result.stderr == "portalmq: pyarrow is not installed: `pip install 'portalmq[spark]'`\n"


def test_consuming_as_a_group_from_a_missing_topic_says_that_it_is_created(broker: ScriptedBroker) -> None:
    result = run(broker, "consume", "typo", "--group", "g", "--exit-at-end")
    assert "there is no topic typo yet" in result.stderr


def test_an_interrupted_produce_says_how_many_were_sent(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_lines() -> Iterator[bytes]:
        yield b"one\n"
        yield b"two\n"
        raise KeyboardInterrupt

    monkeypatch.setattr("portalmq.cli.messages._lines", two_lines)
    result = run(broker, "produce", "t")
    assert result.exit_code == 130
    assert "sent 2 messages to t" in result.stderr


def test_an_interrupted_tail_is_exit_130_without_a_message(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("portalmq.cli.messages._of_topic", interrupt)
    result = run(broker, "consume", "t")
    assert (result.exit_code, result.stdout, result.stderr) == (130, "", "")


def test_a_reader_that_goes_away_is_no_error(broker: ScriptedBroker) -> None:
    broker.fill("t", [b"x" * 1000] * 500)
    broker.script("GET", "/v1/topics/t/partitions", [browse] * 10)
    broker.script("GET", "/v1/topics/t", [reply(TOPIC)] * 10)
    program = f"{sys.executable} -m portalmq.cli.main consume t --from-beginning --exit-at-end --server {broker.url}"
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {program} | head -n 1 | wc -c"],
        capture_output=True,
        text=True,
        timeout=60,
        env=dict(os.environ),
    )
    assert piped.stdout.strip() == "1001"
    assert "Traceback" not in piped.stderr
    assert piped.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="has no /dev/full")
def test_a_full_output_is_an_error_and_a_closed_one_is_not(broker: ScriptedBroker) -> None:
    broker.script("GET", "/v1/topics", [reply({"topics": [wire.TopicSummary("t", 1, 3)]})] * 2)
    program = f"{sys.executable} -m portalmq.cli.main topic list --server {broker.url}"
    full = subprocess.run(["bash", "-c", f"{program} >/dev/full"], capture_output=True, text=True, timeout=60)
    assert (full.returncode, full.stderr) == (1, "portalmq: cannot write: No space left on device\n")
    closed = subprocess.run(["bash", "-c", f"{program} >&-"], capture_output=True, text=True, timeout=60)
    assert (closed.returncode, closed.stderr) == (0, "")
