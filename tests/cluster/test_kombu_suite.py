"""kombu's own integration tests, from the sdist of the installed version, against a cluster, which loses leaders."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.cluster import Cluster
from support.leader_kills import LeaderKills
from support.sdists import unpacked

kombu = pytest.importorskip("kombu", reason="the extra `celery` is not installed")

# Brokers are killed in turn; each leads some of the queues.
EVERY_S = float(os.environ.get("PORTALMQ_KILL_EVERY_S", "20"))

SUITE = """
import os
import kombu, pytest
import portalmq.kombu
from t.integration import common

URL = os.environ["KOMBU_BROKER"]

@pytest.fixture
def connection():
    return kombu.Connection(URL)

@pytest.fixture
def invalid_connection():
    return kombu.Connection("portalmq://localhost:9")

@pytest.fixture
def failover_connection():
    return kombu.Connection(f"portalmq://localhost:9;{URL.split(';')[-1]}", connect_timeout=10)

class TestBasics(common.BasicFunctionality): pass
class TestExchangeTypes(common.BaseExchangeTypes): pass
class TestTimeToLive(common.BaseTimeToLive): pass
class TestPriority(common.BasePriority): pass
class TestMessages(common.BaseMessage): pass
class TestEventLoop(common.BaseEventLoop): pass
class TestFailover(common.BaseFailover): pass
"""


def run_suite(cluster: Cluster, directory: Path) -> None:
    source = unpacked("kombu", kombu.__version__, directory)
    suite = source / "test_on_portalmq.py"
    suite.write_text(SUITE)
    (source / "pytest.ini").write_text("[pytest]\n")
    environment = {
        **os.environ,
        "KOMBU_BROKER": ";".join(url.replace("http", "portalmq") for url in cluster.urls),
        "PYTHONPATH": str(source),
    }
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120", str(suite)],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert run.returncode == 0, run.stdout[-8000:]
    assert re.search(r"4\d passed", run.stdout)


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_kombus_own_integration_tests_pass(cluster: Cluster, tmp_path: Path) -> None:
    run_suite(cluster, tmp_path)


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_kombus_own_integration_tests_pass_while_leaders_are_killed(cluster: Cluster, tmp_path: Path) -> None:
    with LeaderKills(cluster, EVERY_S, lambda number: 1 + number % len(cluster.brokers)) as kills:
        run_suite(cluster, tmp_path)
        assert kills.count
