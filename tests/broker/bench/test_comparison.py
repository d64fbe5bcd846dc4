"""The comparison of systems: gaps, failures of one system, and a small run of PortalMQ alone."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from portalmq.broker.bench import comparison
from portalmq.broker.bench.comparison import CasePlan, compared, longest_gap
from portalmq.broker.bench.single import bench
from portalmq.broker.bench.systems import BenchClient, Site, System

PLAN = CasePlan(["produce"], [100], [1], [1], 0.1, 2, 0, 0)


def test_a_gap_reaches_from_the_begin_and_to_the_end() -> None:
    assert longest_gap([(1, 11.0), (2, 14.0), (3, 15.0)], begin=10, end=16) == 3
    assert longest_gap([(1, 11.0)], begin=10, end=16) == 5
    assert longest_gap([(1, 15.0), (2, 90.0)], begin=10, end=16) == 5
    assert longest_gap([], begin=10, end=16) == 6


class _Broken(System):
    name = "broken"

    def start(self, site: Site) -> None:
        raise click.ClickException("its port is taken")


def test_a_system_that_fails_is_reported_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Good(System):
        name = "good"

        def start(self, site: Site) -> None: ...

    monkeypatch.setattr(comparison, "measured", lambda system, site, plan, under_way: [{"system": system.name}])
    results, calibrations, failures = compared([_Broken(), Good()], PLAN, tmp_path, lambda line: None)
    assert failures == {"broken": "its port is taken"}
    assert [each["system"] for each in results] == ["good"]
    assert results[0]["rounds"] == 2
    assert [each["before"] for each in calibrations] == ["broken", "good"] * 2 + ["the end"]


def test_a_client_goes_to_the_next_node_after_an_error() -> None:
    asked: list[int] = []

    class Node(BenchClient):
        def __init__(self, node: int) -> None:
            self.node = node

        def send(self, messages: list[bytes]) -> None:
            asked.append(self.node)
            if self.node == 2:
                raise ConnectionError

    def send(client: BenchClient) -> bool:
        client.send([])
        return True

    client = comparison._Roaming(Node, node=2, nodes=3)
    assert [client.call(send) for _ in range(3)] == [None, True, True]
    assert asked == [2, 0, 0]


@pytest.mark.parametrize(
    "arguments", [["--systems", "kafka"], ["--cases", "wait"], ["--sizes", "0"], ["--batches", "1,many"]]
)
def test_what_cannot_be_measured_is_a_usage_error(arguments: list[str]) -> None:
    assert CliRunner().invoke(bench, ["--peers", *arguments]).exit_code == 2


@pytest.mark.cluster
@pytest.mark.prove
def test_portalmq_alone_is_measured_in_a_moment(tmp_path: Path) -> None:
    files = ["--json", str(tmp_path / "bench.json"), "--markdown", str(tmp_path / "bench.md")]
    run = CliRunner().invoke(bench, ["--quick", "--systems", "portalmq,sqlite,post", *files])
    assert run.exit_code == 0, run.output
    report = json.loads((tmp_path / "bench.json").read_text())
    taken = {(each["case"], each.get("batch")) for each in report["results"] if each["system"] == "portalmq"}
    assert taken == {("produce", 1), ("produce", 100), ("consume", 1), ("consume", 100), ("wake", None)}
    for each in report["results"]:
        assert 0 < each["p50_ms"] <= each["p90_ms"] <= each["p99_ms"] <= each["max_ms"]
        assert each["case"] == "wake" or each["per_s"] > 0
    assert len(report["calibrations"]) == 4
    floors = {(each["system"], each["batch"]) for each in report["results"] if each["system"] != "portalmq"}
    assert floors == {("sqlite", 1), ("sqlite", 100), ("post", 1)}
    assert "| portalmq |" in (tmp_path / "bench.md").read_text()
    assert "CPU s per million" in run.output
