"""A broker's plane runs on greenlets, for which kazoo has another handler: the same tests in a patched process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PATCHED = """
from gevent import monkey
monkey.patch_all()
import sys
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.cluster
@pytest.mark.timeout(300)  # it runs many tests
@pytest.mark.parametrize(
    ("file", "which"),
    [
        ("tests/contract/test_plane.py", "not standalone"),
        ("tests/control_plane/test_zookeeper.py", "greenlets"),
        *(
            pytest.param(file, which, marks=pytest.mark.prove)
            for file, which in (
                ("tests/control_plane/test_zookeeper.py", "TestOutcomes or TestTheBell or TestEphemerals"),
                ("tests/control_plane/test_zookeeper.py", "TestSessions or killed_server or closing"),
                ("tests/control_plane/test_zookeeper_set_back.py", "TestServersThatForgot or TestServersThatLag"),
            )
        ),
        ("tests/control_plane/test_zookeeper_tls.py", "works or many or certificate"),
    ],
)
def test_the_plane_works_on_greenlets(file: str, which: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", PATCHED, "-q", "-p", "no:xdist", "-p", "no:cacheprovider", file, "-k", which],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert " passed" in ran.stdout
