"""Dramatiq's own tests of actors, callbacks, pipelines, groups, results and of the Redis broker, run against the broker
of portalmq.dramatiq. Needs the package index."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

pytest.importorskip("dramatiq", reason="pip install 'portalmq[dramatiq]'")

from portalmq.testing import InMemoryBroker

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]

CONFTEST = Path(__file__).parents[2] / "support" / "dramatiqs_own_tests.py"
MODULES = ("actors", "callbacks", "composition", "results", "redis")
# Of dramatiq 2.2.1. A later one has no fewer.
TESTS_MIN = 70


def test_dramatiqs_own_tests_pass(tmp_path: Path) -> None:
    def run(*command: object, **environment: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", *(str(part) for part in command)],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **environment},
        )
        assert done.returncode == 0, f"{done.stdout[-20_000:]}\n{done.stderr[-5_000:]}"
        return done.stdout

    release = metadata.version("dramatiq")
    run("pip", "download", "--quiet", "--no-deps", "--no-binary", "dramatiq", f"dramatiq=={release}")
    run("pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "redis", "redis")  # test_redis.py imports it
    [archive] = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    folder = tmp_path / "own" / "tests"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    for name in MODULES:
        shutil.copy(tmp_path / f"dramatiq-{release}" / "tests" / f"test_{name}.py", folder)
    shutil.copy(CONFTEST, folder / "conftest.py")
    (folder / "common.py").write_text("from .conftest import skip_on_pypy, worker\n")
    with InMemoryBroker() as broker:
        path = os.pathsep.join([str(tmp_path / "redis"), os.environ.get("PYTHONPATH", "")])
        options = ("-q", "-p", "no:schemathesis", "--timeout", 120, "--rootdir", tmp_path / "own")
        said = run("pytest", *options, folder, PORTALMQ_URL=broker.url, PYTHONPATH=path)
    [passed] = re.findall(r"(\d+) passed", said)
    assert int(passed) >= TESTS_MIN
