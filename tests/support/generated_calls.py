"""Calls that schemathesis generates from the description of the API, against a broker in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

WITHIN_S = 3_000
PROGRAM = "from schemathesis.cli import schemathesis; schemathesis()"


class Outcome(NamedTuple):
    """`cases`: how many calls were made. `failed`: schemathesis's exit code and output, or ""."""

    cases: int
    failed: str


def run(url: str, folder: Path, *, phases: str, examples: int, seed: int) -> Outcome:
    """Generate calls of these phases: `examples` for each route, and as many walks along links."""
    report = folder / f"generated-{seed}.json"
    arguments = ["run", f"{url}/openapi.json", "--phases", phases, "--max-examples", examples, "--seed", seed]
    # One worker: hypothesis reads sources with `ast`, which Python 3.11 cannot do in two threads at once.
    arguments += ["--workers", 1, "--no-shrink", "--warnings", "off", "--generation-database", "none"]
    arguments += ["--checks", "as_declared,response_headers_conformance", "--suppress-health-check", "all"]
    arguments += ["--report", "json", "--report-json-path", report, "--request-timeout", 60]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "support.schemathesis_hooks",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env=environment,
        cwd=folder,
        check=False,
    )
    failed = "" if done.returncode == 0 else f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return Outcome(_cases(json.loads(report.read_text())) if report.exists() else 0, failed)


def _cases(report: dict[str, Any]) -> int:
    return int(report["test_cases"]["generated"])
