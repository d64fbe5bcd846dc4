"""Django's own tests of its task framework, run against the backend: the newest Django, with its sdist's tests.

Needs Python 3.12 or newer (another one on the PATH will do) and the package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import portalmq
from portalmq.testing import InMemoryBroker

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]

RUNNER = Path(__file__).parents[2] / "support" / "djangos_task_tests.py"
# Of Django 6.1. A later one has no fewer.
TESTS_MIN = 60


def python() -> str:
    """Return a Python that the newest Django supports."""
    if sys.version_info >= (3, 12):
        return sys.executable
    for name in ("python3.14", "python3.13", "python3.12"):
        found = shutil.which(name)
        if found and subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode == 0:
            return found
    pytest.skip("Django 6 needs Python 3.12 or newer: put one on the PATH")


def test_djangos_own_tests_pass(tmp_path: Path) -> None:
    def run(*command: object, **environment: str) -> str:
        done = subprocess.run(
            [str(part) for part in command],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
            cwd=tmp_path,
            env={**os.environ, **environment},
        )
        assert done.returncode == 0, f"{done.stdout[-5_000:]}\n{done.stderr[-20_000:]}"
        return done.stdout

    run(python(), "-m", "venv", tmp_path / "venv")
    own = tmp_path / "venv" / "bin" / "python"
    run(own, "-m", "pip", "install", "--quiet", "django", "msgspec", "click")
    release = run(own, "-c", "import django; print(django.__version__)").strip()
    run(own, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "django", f"django=={release}")
    [archive] = tmp_path.glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path, filter="data")
    (tmp_path / "packages").mkdir()
    (tmp_path / "packages" / "portalmq").symlink_to(Path(str(portalmq.__file__)).parent)
    tests = tmp_path / f"django-{release}" / "tests"
    with InMemoryBroker() as broker:
        said = run(own, RUNNER, tests, broker.url, PYTHONPATH=str(tmp_path / "packages"))
    [(version, count)] = re.findall(r"django (\S+): (\d+) tests", said)
    assert version == release
    assert int(count) >= TESTS_MIN
