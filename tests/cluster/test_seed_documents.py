"""docs/SEEDS.md, NOTES.md and OPERATING.md: their commands run unchanged, and their script measures."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker_process import REPOSITORY, BrokerProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="the document uses curl")


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path, command=("dev",)) as broker:
        yield broker


def said_by(document: str, broker: BrokerProcess, tmp_path: Path) -> list[str]:
    """Return the output of each `sh` block of the document, pasted unchanged except for the broker's port."""
    text = (REPOSITORY / "docs" / document).read_text(encoding="utf-8")
    text = text.replace("http://localhost:5000", broker.url)
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    program = tmp_path / "portalmq"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m portalmq.cli.main "$@"\n')
    program.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "URL" and not key.startswith("PORTALMQ_")}
    path = f"{tmp_path}:{environment['PATH']}"
    # As in a terminal, where a prompt begins a line: some answers of the older queues end without a newline.
    ends = [re.sub(r"\n(?=curl|portalmq)", "; echo\n", block) for block in blocks]
    shell = subprocess.run(
        ["bash", "-eu", "-c", "\necho; echo '=== next'\n".join(ends)],
        env=environment | {"PATH": path, "PORTALMQ_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert shell.returncode == 0, shell.stderr
    return [re.sub(r"\n\s*\n", "\n", part).strip() for part in shell.stdout.split("=== next")]


@needs_curl
def test_the_older_queues_commands_do_what_the_page_says(broker: BrokerProcess, tmp_path: Path):
    doors, portal, miniq, wonderq = said_by("SEEDS.md", broker, tmp_path)
    assert json.loads(doors.splitlines()[1])["message"] == "in by WonderQ"

    _, _, first, again, shown, consumed, *empty = portal.splitlines()
    assert first == again, "a retry is the same message"
    offset = json.loads(first)["offset"]
    assert (json.loads(shown)["message"], json.loads(shown)["offset"]) == ({"celsius": 21.5}, offset)
    assert json.loads(consumed) == {"consumed": offset}
    assert empty[0].startswith("HTTP/1.1 204")

    posted, taken, listed, confirmed, *nothing = miniq.splitlines()
    key = json.loads(posted)["key"]
    assert (json.loads(taken)["message"], json.loads(taken)["key"]) == ("hello", key)
    assert [(each["key"], each["state"]) for each in json.loads(listed)["messages"]] == [(key, "in_flight")]
    assert json.loads(confirmed) == {"confirmed": key}
    assert nothing[0].startswith("HTTP/1.1 404")

    published, given, state, *table = wonderq.splitlines()
    number = json.loads(published)["id"]
    assert json.loads(given) == {"messages": [{"id": number, "message": "resize picture 7"}]}
    assert {(each["message"], each["state"]) for each in json.loads(state)["messages"]} == {
        ("in by WonderQ", "in_flight"),
        ("resize picture 7", "in_flight"),
    }
    assert [line.split()[1] for line in table] == ["STATE", "in_flight", "in_flight"]


@needs_curl
def test_the_manuals_browse_of_a_queue_works(broker: BrokerProcess, tmp_path: Path):
    (looked,) = said_by("OPERATING.md", broker, tmp_path)
    table, row, as_json, by_http = [line for line in looked.splitlines() if line]
    assert table.split()[:2] == ["ID", "STATE"]
    assert row.split()[1] == "ready"
    assert [each["value"] for each in json.loads(as_json)["messages"]] == ["look at me"]
    assert [each["value"] for each in json.loads(by_http)["messages"]] == ["look at me"]


@needs_curl
def test_the_notes_example_of_order_by_key_works(broker: BrokerProcess, tmp_path: Path):
    (said,) = said_by("NOTES.md", broker, tmp_path)
    messages = json.loads(said.splitlines()[-1])["messages"]
    assert [message["key"] for message in messages] == ["account-1", "account-2"]
    assert len({message.get("value") or message["value_base64"] for message in messages}) == 1, "open, twice"


def test_the_notes_two_function_names_work(broker: BrokerProcess):
    text = (REPOSITORY / "docs" / "NOTES.md").read_text(encoding="utf-8")
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    program, ends = re.subn("idle_timeout_s=2", "idle_timeout_s=10", program)  # a busy machine may be later
    assert ends == 1
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"PORTALMQ_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "resize picture 7\n"), done.stderr


def test_the_measuring_script_measures(broker: BrokerProcess):
    script = str(REPOSITORY / "docs" / "deploy" / "measure.py")
    measured = subprocess.run(
        [sys.executable, script, "bytes", broker.url, "--messages", "20000", "--size", "200"],
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert measured.returncode == 0, measured.stderr
    (a_message,) = re.findall(r"on disk .* ([\d.]+) bytes a message", measured.stdout)
    assert 200 <= float(a_message) <= 300, "the manual's figure for messages of 200 bytes"
    assert broker.request("GET", "/v1/topics").json()["topics"] == [], "it leaves nothing behind"
