"""Celery's own integration tests, from the sdist of the installed version, against a cluster, with results in Redis.

    .venv/bin/python -m pytest -m prove tests/cluster/test_celery_suite.py -k canvas

Each file is a run of its own: some leave the process in a state in which no later test can wait for a result.
docs/CELERY.md says which tests cannot pass, and why. Left out are the files that need another broker or backend
(connection_recovery, cache_backend, backend), and request_backend_down, which uses no broker.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from support.cluster import Cluster, wait_until
from support.leader_kills import LeaderKills
from support.ports import kept_ports
from support.sdists import unpacked

celery = pytest.importorskip("celery", reason="the extra `celery` is not installed")

REDIS = shutil.which("redis-server")
NEEDED = ["redis", "pytest-rerunfailures", "pytest-order", "pydantic", "sqlalchemy", "cryptography", "django"]
FILES = [
    *("backend_leak_in_fixture_teardown", "beat", "canvas", "database_backend", "events_state_memory_leak"),
    *("group_chains", "inspect", "loader", "logfile_format", "mem_leak_in_exception_handling", "redis_backend"),
    *("security", "serialization", "tasks", "upgrade", "worker"),
]
KILLED_FILES = ["canvas", "inspect", "tasks", "worker", "beat"]
# Brokers are killed in turn; each leads some of the queues.
EVERY_S = float(os.environ.get("PORTALMQ_KILL_EVERY_S", "20"))
# Tests that cannot pass, and why.
CANNOT = {
    "test_inspect.py::test_Inspect::test_scheduled": "a task with an eta is with the broker, not with the worker",
    **dict.fromkeys(
        (f"test_tasks.py::test_trace_log_arguments::test_task_{end}" for end in ("success", "failed")),
        "the worker of the suite logs nothing of level INFO: with Redis as the broker they fail alike",
    ),
}
# Tests that may fail when a broker is killed during them, and why.
MAY_FAIL = {
    f"test_tasks.py::test_task_replacement::test_replaced_task_nesting_{end}": (
        "it sets what it asserts after delay() has returned: a task whose first answer was lost has run by then"
    )
    for end in ("level_0", "level_1")
}

pytestmark = [
    pytest.mark.prove,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(REDIS is None, reason="there is no redis-server"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Celery's tests. A sitecustomize.py beside them registers portalmq:// in workers that they start as commands."""
    directory = tmp_path_factory.mktemp("celery")
    found = unpacked("celery", celery.__version__, directory)
    install = [sys.executable, "-m", "pip", "install", "-q", "--target", str(directory / "needed"), *NEEDED]
    subprocess.run(install, check=True, timeout=600)
    shutil.rmtree(found / "celery")  # the installed one is meant
    (found / "sitecustomize.py").write_text("import portalmq.kombu\n")
    return found


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[int]:
    """An empty Redis for each run: some tests look into its database 0, whatever the URL of the results says."""
    log = tmp_path / "redis.log"
    with kept_ports(1) as (port,), log.open("wb") as opened:
        command = [str(REDIS), "--bind", "127.0.0.1", "--port", str(port), "--dir", str(tmp_path), "--save", ""]
        server = subprocess.Popen(command, stdout=opened)
        try:
            wait_until(lambda: b"Ready to accept" in log.read_bytes(), "Redis is ready")
            yield port
        finally:
            server.kill()
            server.wait()


@pytest.mark.parametrize("file", FILES)
def test_celerys_own_integration_tests_pass(file: str, cluster: Cluster, source: Path, redis: int) -> None:
    run_file(file, cluster, source, redis)


@pytest.mark.parametrize("file", KILLED_FILES)
def test_they_pass_while_leaders_are_killed(file: str, cluster: Cluster, source: Path, redis: int) -> None:
    with LeaderKills(cluster, EVERY_S, lambda number: 1 + number % len(cluster.brokers)) as kills:
        run_file(file, cluster, source, redis, may_fail={*CANNOT, *MAY_FAIL})
    print(f"{kills.count} brokers killed")
    assert kills.count


def run_file(file: str, cluster: Cluster, source: Path, redis: int, may_fail: Collection[str] = CANNOT.keys()) -> None:
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(source), str(source.parent / "needed")]),
        "TEST_BROKER": ";".join(url.replace("http", "portalmq") for url in cluster.urls),
        "TEST_BACKEND": f"redis://127.0.0.1:{redis}/0",
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(redis),
    }
    options = ["-q", "-ra", "-p", "celery.contrib.pytest", "-p", "no:cacheprovider", "--log-level", "INFO"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--timeout", "300", f"t/integration/test_{file}.py"],
        cwd=source,
        env=environment,
        capture_output=True,
        text=True,
        timeout=3500,
    )
    print(run.stdout.splitlines()[-1])
    failed = set(re.findall(r"^(?:FAILED|ERROR) t/integration/(\S+)", run.stdout, re.MULTILINE))
    assert failed <= set(may_fail), run.stdout[-12000:]
    assert run.returncode == (1 if failed else 0), run.stdout[-4000:] + run.stderr[-4000:]
    assert re.search(r"[1-9]\d* passed", run.stdout)
