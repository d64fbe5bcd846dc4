"""The commands of docs/QUEUES.md, docs/SCHEDULES.md and docs/COMING_FROM.md, run in turn as they are pasted."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from portalmq.testing import InMemoryBroker

pytestmark = pytest.mark.prove

DOCS = Path(__file__).parents[2] / "docs"
# The message of the example is in no log, and the program asks for it.
UNKNOWN = ("portalmq message trace",)
COMMANDS_MIN = {"QUEUES.md": 12, "SCHEDULES.md": 2, "COMING_FROM.md": 7}


def commands(page: str) -> list[str]:
    """Return the lines of a page that begin with a prompt, with the indented ones that continue them."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (DOCS / page).read_text("utf-8"), re.MULTILINE | re.DOTALL)
    shown = [block for language, block in blocks if language in ("", "console")]
    found = [found for block in shown for found in re.findall(r"^\$ (.*(?:\n {4}.*)*)$", block, re.MULTILINE)]
    return [each for each in found if not each.startswith(UNKNOWN)]


def run(text: str, folder: Path, broker: InMemoryBroker) -> str:
    """Run what is pasted into a shell, and return its output; a request that is refused is an error."""
    here = text.replace("http://localhost:5000", broker.url).replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", here],
        cwd=folder,
        env={**os.environ, "PORTALMQ_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_scheduled_messages_are_run_moved_and_counted_by_the_block_of_the_page(tmp_path: Path) -> None:
    (block,) = re.findall(r"^```sh\n(.*?)^```", (DOCS / "QUEUES.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    with InMemoryBroker() as broker:
        moved, matched = map(json.loads, run(block, tmp_path, broker).splitlines())  # a run is answered 204
    assert moved["copy_of"].startswith("reminders/")
    assert matched["cancelled"] == 0


@pytest.mark.parametrize("page", COMMANDS_MIN)
def test_every_command_of_the_page_works(page: str, tmp_path: Path) -> None:
    found = commands(page)
    assert len(found) >= COMMANDS_MIN[page]
    with InMemoryBroker() as broker:
        for command in found:
            run(command, tmp_path, broker)
