"""kombu's own integration tests, from the sdist of the installed version, against a cluster."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from support.cluster import Cluster

kombu = pytest.importorskip("kombu", reason="the extra `celery` is not installed")

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
    return kombu.Connection(f"portalmq://localhost:9;{URL}", connect_timeout=10)

class TestBasics(common.BasicFunctionality): pass
class TestExchangeTypes(common.BaseExchangeTypes): pass
class TestTimeToLive(common.BaseTimeToLive): pass
class TestPriority(common.BasePriority): pass
class TestMessages(common.BaseMessage): pass
class TestEventLoop(common.BaseEventLoop): pass
class TestFailover(common.BaseFailover): pass
"""


def sdist(directory: Path) -> Path:
    """Unpack kombu's sdist there, without building it."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, "--no-binary", ":all:", "-d", str(directory), f"kombu=={kombu.__version__}"],
        check=True,
        timeout=300,
    )
    (archive,) = directory.glob("kombu-*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(directory, filter="data")
    return next(each for each in directory.iterdir() if each.is_dir())


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_kombus_own_integration_tests_pass(cluster: Cluster, tmp_path: Path) -> None:
    source = sdist(tmp_path)
    suite = source / "test_on_portalmq.py"
    suite.write_text(SUITE)
    (source / "pytest.ini").write_text("[pytest]\n")
    environment = {
        **os.environ,
        "KOMBU_BROKER": cluster.urls[0].replace("http", "portalmq"),
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
