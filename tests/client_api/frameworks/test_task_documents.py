"""The programs of docs/DRAMATIQ.md, run with the frameworks' own worker commands as they are pasted."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("dramatiq", reason="pip install 'portalmq[dramatiq]'")
pytest.importorskip("taskiq", reason="pip install 'portalmq[taskiq]'")

from support.broker_process import BrokerProcess

pytestmark = pytest.mark.cluster

TEXT = (Path(__file__).parents[3] / "docs" / "DRAMATIQ.md").read_text()
WITHIN_S = 110


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker"), command=("dev",)) as broker:
        yield broker


@pytest.mark.parametrize(
    ("framework", "lines"),
    [("dramatiq", {"charged 1", "charged 2", "refunded 3"}), ("taskiq", {"packed 1", "packed 2"})],
)
def test_a_worker_of_the_document(framework: str, lines: set[str], broker: BrokerProcess, tmp_path: Path) -> None:
    part = TEXT.partition(f"## {framework}\n")[2]
    [(name, program), *_] = re.findall(r"```python\n# (\S+)\n(.*?)```", part, re.DOTALL)
    (tmp_path / name).write_text(program.replace("http://localhost:5000", broker.url))
    work, send = re.findall(r"^\$ (?!pip)(.*)$", part, re.MULTILINE)[:2]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(tmp_path)}
    worker = subprocess.Popen(
        work.removesuffix(" &").split(),
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        done = subprocess.run(
            ["bash", "-c", send], cwd=tmp_path, env=environment, capture_output=True, timeout=WITHIN_S, check=False
        )
        assert done.returncode == 0, done.stderr
        assert worker.stdout is not None
        seen = ""  # two threads may print at once, and share a line
        while not all(line in seen for line in lines):
            line = worker.stdout.readline()
            assert line, f"the worker ended with {worker.wait(WITHIN_S)}, having said {seen}"
            seen += line
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(WITHIN_S) == 0
    finally:
        if worker.poll() is None:
            for each in [*psutil.Process(worker.pid).children(recursive=True), worker]:
                each.kill()
            worker.wait(WITHIN_S)
        if worker.stdout is not None:
            worker.stdout.close()
