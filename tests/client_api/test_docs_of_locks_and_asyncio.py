"""The programs of docs/ASYNC.md and docs/LOCKS.md run unchanged, except for the broker's address."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess

pytestmark = pytest.mark.cluster

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    broker = BrokerProcess(tmp_path_factory.mktemp("broker"), command=("dev",))
    broker.start()
    yield broker
    broker.end()


def program(document: str, broker: BrokerProcess) -> str:
    [found] = re.findall(r"```python\n(.*?)```", (DOCS / document).read_text(), re.DOTALL)
    return str(found).replace("http://localhost:5000", broker.url)


def run(text: str) -> str:
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_asyncio_program(broker: BrokerProcess) -> None:
    lines = run(program("ASYNC.md", broker)).splitlines()
    assert len(lines) == 1 + 1001
    assert lines[1] == "{'celsius': 21.5}"


def test_the_lock_program(broker: BrokerProcess) -> None:
    text = program("LOCKS.md", broker)
    assert run(f"def write_report(token): print('under', token)\n{text}") == "under 1\n"


def test_the_command_under_a_lock(broker: BrokerProcess, tmp_path: Path) -> None:
    words = re.findall(r"\$ portalmq (lock run .*?)\s+#", (DOCS / "LOCKS.md").read_text())[0].split()
    report = tmp_path / "report.sh"
    report.write_text('#!/bin/sh\necho "report under $PORTALMQ_FENCING_TOKEN"\n')
    report.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-m", "portalmq.cli.main", *words],
        cwd=tmp_path,
        env={**os.environ, "PORTALMQ_URL": broker.url},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.startswith("report under ")
