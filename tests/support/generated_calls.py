"""Calls that schemathesis generates from the description of the API, against a broker in a process of its own.

Schemathesis loads this module too: it makes generated calls quick (short waits, few names), encodes MessagePack, and
holds each answer against the description.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec
import schemathesis
from support.declared import Asked, check

from portalmq import wire

WITHIN_S = 3_000
NAMES = 5
WAIT_MS_MAX = 5
PARTITIONS_MAX = 3
# The disk of a test is not full, and a broker makes no mistakes.
SERVER_ERRORS = {503}
NAMED = ("topic", "group", "lock", "member", "name", "owner", "consumer", "queue", "dead_letter_topic", "id")
PROGRAM = "from schemathesis.cli import schemathesis; schemathesis()"


class Outcome(NamedTuple):
    """`cases`: how many calls were made. `failed`: schemathesis's exit code and output, or ""."""

    cases: int
    failed: str


def run(url: str, folder: Path, *, phases: str, examples: int, seed: int, workers: int = 1) -> Outcome:
    """Generate calls of these phases: `examples` for each route, and as many walks along links."""
    report = folder / f"generated-{seed}.json"
    arguments = ["run", f"{url}/openapi.json", "--phases", phases, "--max-examples", examples, "--seed", seed]
    arguments += ["--workers", workers, "--no-shrink", "--warnings", "off", "--generation-database", "none"]
    arguments += ["--checks", "as_declared,response_headers_conformance", "--suppress-health-check", "all"]
    arguments += ["--report", "json", "--report-json-path", report, "--request-timeout", 60]
    environment = {
        **os.environ,
        "SCHEMATHESIS_HOOKS": "support.generated_calls",
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


@schemathesis.serializer(wire.BATCH_MSGPACK)
def as_msgpack(_context: Any, value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Keep the broker from growing and from waiting: few names, few partitions, short waits."""
    for part in (case.body, case.query, case.path_parameters):
        _shrink(part)
    for name, value in list((case.headers or {}).items()):
        if name.lower() == "accept" and wire.EVENT_STREAM in str(value):
            case.headers[name] = wire.JSON


def _shrink(part: Any) -> None:
    if isinstance(part, list):
        for each in part:
            _shrink(each)
    if not isinstance(part, dict):
        return
    for name, value in part.items():
        if name in ("wait_ms", "keep_place_ms") and str(value).isdigit():
            part[name] = min(int(value), WAIT_MS_MAX)
        elif name == "partitions" and isinstance(value, int):
            part[name] = min(value, PARTITIONS_MAX)
        elif name == "topics" and isinstance(value, list):
            part[name] = [_few(each) for each in value]
        elif name in NAMED:
            part[name] = _few(value)
        elif name in ("partitions", "publish", "offsets", "payload"):
            _shrink(value)


def _few(name: Any) -> Any:
    """Return one of a few names for a valid one."""
    return f"n{sum(map(ord, name)) % NAMES}" if isinstance(name, str) and wire.NAME.match(name) else name


@schemathesis.check
def as_declared(_context: Any, response: Any, case: Any) -> None:
    assert response.status_code < 500 or response.status_code in SERVER_ERRORS, response.content[:500]
    headers = {name.lower(): value[0] for name, value in response.headers.items()}
    path = unquote(urlsplit(response.request.url).path)
    check(Asked(case.method, path), response.status_code, headers, response.content)
