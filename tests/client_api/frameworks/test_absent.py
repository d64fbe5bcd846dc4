"""Adapters whose framework is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "framework", "extra"),
    [("kombu", "kombu", "celery"), ("dramatiq", "dramatiq", "dramatiq"), ("taskiq", "taskiq", "taskiq")],
)
def test_an_adapter_without_its_framework_names_the_extra(module: str, framework: str, extra: str) -> None:
    program = f"import sys; sys.modules[{framework!r}] = None; import portalmq.{module}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    said = done.stderr.splitlines()[-1]
    assert said == f"ImportError: portalmq.{module} needs {framework}: pip install 'portalmq[{extra}]'"
