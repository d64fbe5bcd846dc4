"""Benchmark of a cluster of three brokers on one machine: with replication and without, in the same run.

produce     the same producer to a topic of one replica and to one of three (acks=all), in turns
send        one message at a time to three replicas, beside a bare POST to the same server software
partitions  the cost of 300 idle partitions, and how long the partitions of a killed leader are without one
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from portalmq import Admin
from portalmq.broker.bench import harness
from portalmq.broker.ops.supervisor import ClusterRecord, read_record

READY_WITHIN_S = 60.0
ELECTED_WITHIN_S = 60.0
IDLE_S = 10.0
POLL_S = 0.02


def measured(directory: Path, messages: int, sends: int, partitions: int, rounds: int) -> dict[str, float]:
    """Return all figures, each the median over `rounds`; the last part, with its kill, runs once."""
    directory.mkdir(parents=True, exist_ok=True)
    with _cluster(directory / "traffic") as record:
        figures = harness.medians(rounds, lambda number: _round(record.urls, number, messages, sends))
    with _cluster(directory / "partitions") as record:
        figures |= _many_partitions(record, partitions)
    return figures | {
        "ready_s": _ready_s,
        "replicated_to_single": figures["replicated_per_s"] / figures["single_per_s"],
        "replicated_exact_to_single": figures["replicated_exact_per_s"] / figures["single_exact_per_s"],
        "send_to_bare_post": figures["send_p50_ms"] / figures["bare_post_p50_ms"],
    }


def _round(urls: list[str], number: int, messages: int, sends: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    with Admin(urls) as admin:
        for factor, name in ((1, "single"), (3, "replicated")):
            for grow, suffix in ((True, ""), (False, "_exact")):
                topic = f"{name}{suffix}-{number}"
                admin.create_topic(topic, replication_factor=factor)
                rate = harness.produce_rate(urls, topic, messages, harness.BATCH_MESSAGES, grow=grow)
                figures[f"{name}{suffix}_per_s"] = rate
                admin.delete_topic(topic)
        admin.create_topic(f"sends-{number}", replication_factor=3)
    return figures | harness.single_calls(urls, f"sends-{number}", sends)


def _many_partitions(record: ClusterRecord, partitions: int) -> dict[str, float]:
    brokers = [process for process in record.processes if process.name.startswith("broker")]
    with Admin(record.urls) as admin:
        admin.create_topic("many", partitions=partitions, replication_factor=3)
        _until_led(admin, partitions, set())
        time.sleep(2)  # excludes the cost of creating them
        before, begin = [harness.cpu_s(broker.pid) for broker in brokers], time.perf_counter()
        time.sleep(IDLE_S)
        seconds = time.perf_counter() - begin
        idle = [100 * (harness.cpu_s(each.pid) - was) / seconds for each, was in zip(brokers, before, strict=True)]
        victim = next(each for each in admin.describe("many").partitions if each.leader is not None).leader
        assert victim is not None
        with Admin([url for number, url in enumerate(record.urls, start=1) if number != victim]) as others:
            began = time.perf_counter()
            os.kill(next(each.pid for each in brokers if each.name == f"broker-{victim}"), signal.SIGKILL)
            _until_led(others, partitions, {victim})
            took_s = time.perf_counter() - began
    return {"idle_cpu_percent": max(idle), "failover_of_many_s": took_s}


def _until_led(admin: Admin, partitions: int, gone: set[int]) -> None:
    """Wait until every partition has a leader other than the killed broker, and the leader answers for it."""
    deadline = time.monotonic() + ELECTED_WITHIN_S
    while time.monotonic() < deadline:
        topic = admin.describe("many")
        led = [each for each in topic.partitions if each.leader is not None and each.leader not in gone]
        if len(led) == partitions and all(each.high_watermark > 0 for each in led):
            return
        time.sleep(POLL_S)
    raise click.ClickException(f"not every partition has a leader within {ELECTED_WITHIN_S:.0f} s")


# --- the cluster to measure ------------------------------------------------------------------------------------------

_ready_s = 0.0


@contextmanager
def _cluster(data_dir: Path) -> Iterator[ClusterRecord]:
    """Run ZooKeeper and three brokers on free ports."""
    command = [sys.executable, "-m", "portalmq.cli.main"]
    ports = ["--base-port", "0", "--zookeeper-port", "0"]
    environment = {**os.environ, "PORTALMQ_LOG_LEVEL": "warning"}
    data_dir.mkdir(parents=True)
    with (data_dir / "bench.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "up", *ports, "--data-dir", str(data_dir)], env=environment, stdout=log, stderr=log
        )
    try:
        yield _record_of(process, data_dir)
    finally:
        process.terminate()
        process.wait(60)


def _record_of(process: subprocess.Popen[bytes], data_dir: Path) -> ClusterRecord:
    global _ready_s
    begin = time.perf_counter()
    while process.poll() is None and time.perf_counter() - begin < READY_WITHIN_S:
        record = read_record(data_dir)
        if record is not None and record.ready:
            _ready_s = max(_ready_s, time.perf_counter() - begin)
            return record
        time.sleep(POLL_S)
    raise click.ClickException(f"the cluster did not start:\n{(data_dir / 'bench.log').read_text('utf-8', 'replace')}")


def show(figures: dict[str, float], output: str) -> None:
    rows = [
        ("three brokers and ZooKeeper are ready after", f"{figures['ready_s']:.1f} s"),
        ("produce to 1 replica", f"{figures['single_per_s']:,.0f} messages/s"),
        ("produce to 3 replicas, acks=all", f"{figures['replicated_per_s']:,.0f} messages/s"),
        ("  ratio (at least 0.25)", f"{figures['replicated_to_single']:.2f}"),
        ("  ratio in batches of exactly 1000", f"{figures['replicated_exact_to_single']:.2f}"),
        ("bare POST, p50", f"{figures['bare_post_p50_ms']:.3f} ms"),
        ("synchronous send to 3 replicas, p50", f"{figures['send_p50_ms']:.3f} ms"),
        ("  ratio (at most 16)", f"{figures['send_to_bare_post']:.2f}"),
        ("idle CPU of a broker, 300 partitions", f"{figures['idle_cpu_percent']:.1f} %"),
        ("new leaders for all that a killed broker led", f"{figures['failover_of_many_s']:.2f} s"),
    ]
    harness.show(figures, output, rows)
