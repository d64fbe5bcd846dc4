"""docs/EXACTLY_ONCE.md: its commands and programs run unchanged and do what the document says."""

from __future__ import annotations

import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
from support.broker_process import REPOSITORY, BrokerProcess

pytestmark = pytest.mark.cluster

TEXT = (REPOSITORY / "docs" / "EXACTLY_ONCE.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(kind: str, block: str, url: str, directory: Path) -> str:
    command = ["bash", "-e", "-c", block] if kind == "sh" else [sys.executable, "-c", block]
    ran = subprocess.run(
        command,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "URL": url},
        cwd=directory,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ran.returncode == 0, (block, ran.stderr)
    return ran.stdout


@pytest.mark.skipif(shutil.which("curl") is None, reason="the document uses curl")
def test_the_commands_and_programs_of_the_document_do_what_it_says(tmp_path: Path):
    blocks = [(kind, block) for kind, block in BLOCK.findall(TEXT) if not block.startswith(("portalmq dev", "export"))]
    with BrokerProcess(tmp_path / "broker") as broker:
        said = [
            run(kind, block.replace("http://localhost:5000", broker.url), broker.url, tmp_path)
            for kind, block in blocks
        ]
        bills = broker.request("GET", "/v1/topics/bills/messages").json()["messages"]
    assert [kind for kind, _ in blocks] == ["python", "sh", "python", "sh"]
    _, over_http, _, dead = said
    produced, first, again = over_http.splitlines()
    assert '"offset"' in produced
    assert first == again
    assert '"acked":1,"published":1' in first
    assert [bill["value"] for bill in bills] == [{"bill": 16}, {"bill": 17}]
    with sqlite3.connect(tmp_path / "bills.db") as database:
        assert database.execute("SELECT number FROM bills ORDER BY number").fetchall() == [(16,), (17,)]
    _, given_back, listed, dry, redriven, dropped = dead.splitlines()
    assert '"status":"ok"' in given_back
    assert '"portalmq-dead-reason":"a timeout"' in listed
    assert dry == '{"matched":1,"redriven":0}'
    assert redriven == '{"matched":0,"redriven":0}'
    assert dropped == '{"dropped":1}'
