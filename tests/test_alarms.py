"""docs/deploy/alarms.yml: every alarm fires in its cases, on metrics that a broker exposes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from support.broker_process import REPOSITORY, BrokerProcess

from portalmq.broker.api.routes import ROUTES
from portalmq.broker.protocols.routes import PROTOCOL_ROUTES

DEPLOY = REPOSITORY / "docs" / "deploy"
CASES = REPOSITORY / "tests" / "support" / "alarms_cases.yml"
ALARMS: list[dict[str, Any]] = [
    rule for group in yaml.safe_load((DEPLOY / "alarms.yml").read_text())["groups"] for rule in group["rules"]
]

# Debian: apt-get install prometheus. In CI, where it is required, a missing program is a failure.
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None and "PORTALMQ_PROMTOOL_REQUIRED" not in os.environ, reason="there is no promtool"
)


def promtool(*arguments: str, cwd: Path, stdin: bytes = b"") -> str:
    done = subprocess.run(["promtool", *arguments], cwd=cwd, input=stdin, capture_output=True, timeout=60, check=False)
    said = (done.stdout + done.stderr).decode()
    assert done.returncode == 0, said
    return said


@needs_promtool
def test_prometheus_takes_the_rules_and_the_configuration():
    assert f"{len(ALARMS)} rules found" in promtool("check", "rules", "alarms.yml", cwd=DEPLOY)
    promtool("check", "config", "prometheus.yml", cwd=DEPLOY)


@needs_promtool
def test_each_alarm_goes_off_where_it_should_and_only_there(tmp_path: Path):
    shutil.copy(DEPLOY / "alarms.yml", tmp_path)
    shutil.copy(CASES, tmp_path)
    promtool("test", "rules", CASES.name, cwd=tmp_path)


def test_every_alarm_has_a_case_a_severity_and_a_description():
    names = [alarm["alert"] for alarm in ALARMS]
    assert len(set(names)) == len(names) > 10
    tried = CASES.read_text()
    for alarm in ALARMS:
        assert f'alertname="{alarm["alert"]}"' in tried
        assert alarm["labels"]["severity"] in {"page", "ticket"}
        assert len(alarm["annotations"]["summary"]) > 20


def test_the_manual_has_a_procedure_for_each_alarm():
    manual = (REPOSITORY / "docs" / "OPERATING.md").read_text()
    assert [alarm["alert"] for alarm in ALARMS if f"`{alarm['alert']}`" not in manual] == []


def test_routes_in_an_expression_are_routes():
    known = {route.path for route in (*ROUTES, *PROTOCOL_ROUTES)}
    named = {
        path for alarm in ALARMS for text in re.findall(r'route=~"([^"]+)"', alarm["expr"]) for path in text.split("|")
    }
    assert named
    assert named <= known


@pytest.mark.cluster
@pytest.mark.timeout(60)
def test_every_number_in_an_expression_is_one_that_a_broker_shows(tmp_path: Path):
    with BrokerProcess(tmp_path, command=("dev",)) as broker:
        broker.request("POST", "/v1/topics/t/messages", b"x")
        taken = broker.request("POST", "/v1/groups/g/receive", {"topics": ["t"], "wait_ms": 5000}).json()["messages"]
        assert len(taken) == 1
        text = broker.request("GET", "/metrics").body
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            shown.setdefault(sample.name, set()).update(sample.labels)
    named = 0
    for alarm in ALARMS:
        for name, matchers in re.findall(r"(portalmq_\w+)(\{[^}]*\})?", alarm["expr"]):
            assert name in shown, alarm["alert"]
            assert set(re.findall(r"(\w+)=", matchers)) <= shown[name], alarm["alert"]
            named += 1
        by = set(re.findall(r"\w+", " ".join(re.findall(r"by \(([^)]*)\)", alarm["expr"])))) - {"instance"}
        for name in re.findall(r"portalmq_\w+", alarm["expr"]):
            assert by <= shown[name], f"{alarm['alert']} groups by labels that {name} does not have"
    assert named > len(ALARMS)
    if shutil.which("promtool") is not None:
        assert promtool("check", "metrics", cwd=tmp_path, stdin=text) == "", "promtool finds nothing"
