"""Calls generated from the description of the API, valid and invalid ones, and walks along its links: each is answered
as described, none by a fault of the broker, which does not grow."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from support.broker_process import BrokerProcess
from support.generated_calls import run

pytestmark = pytest.mark.cluster

CASES = 20_000
GROWTH_BYTES_MAX = 50 * 1024 * 1024


def test_generated_calls_are_answered_as_described(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "broker") as broker:
        outcome = run(broker.url, tmp_path, phases="examples,fuzzing,stateful", examples=3, seed=1)
        assert not outcome.failed, outcome.failed
        assert outcome.cases > 200
        assert "Traceback" not in broker.stderr()


@pytest.mark.prove
@pytest.mark.timeout(3_600)
def test_twenty_thousand_generated_calls_are_answered_as_described(tmp_path: Path) -> None:
    phases = "examples,coverage,fuzzing,stateful"
    with BrokerProcess(tmp_path / "broker") as broker:
        worker = psutil.Process(broker.worker.pid)
        before = worker.memory_info().rss
        cases = seed = 0
        while cases < CASES:
            seed += 1
            outcome = run(broker.url, tmp_path, phases=phases, examples=60, seed=seed)
            assert not outcome.failed, outcome.failed
            cases += outcome.cases
        growth = worker.memory_info().rss - before
        print(f"{cases} calls, and {growth / 2**20:.0f} MiB more than at the start")
        assert "Traceback" not in broker.stderr()
        assert growth < GROWTH_BYTES_MAX
