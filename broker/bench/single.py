"""`portalmq bench`: the speed of PortalMQ on this machine, compared with yardsticks measured in the same run.

On a shared machine only ratios are meaningful: the producer is compared with bare `executemany` into the same schema
with the same fsyncs, the synchronous send with a bare POST to the same gunicorn and Flask.
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import click

from portalmq import Producer
from portalmq.broker.bench import harness
from portalmq.broker.bench.harness import (
    BATCH_MESSAGES,
    NOTHING,
    RECEIVE_MESSAGES,
    VALUE,
    bare_post,
    broker,
    cpu_s,
    interleaved,
    produce_rate,
    receive_rate,
    rss_mb,
    server,
    until_parked,
)
from portalmq.broker.storage.yardstick import executemany_rate

WAITING_MESSAGES = 1_000_000


@click.command()
@click.option("--messages", default=300_000, show_default=True, help="Messages to produce, a multiple of 1000.")
@click.option("--sends", default=1_000, show_default=True, help="Synchronous sends.")
@click.option("--parked", default=1_000, show_default=True, help="Receives to park.")
@click.option("--rounds", default=3, show_default=True, help="Rounds; the median of each figure is shown.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where to measure (default: a temporary directory).")
@click.option("--cluster", is_flag=True, help="Measure three brokers with ZooKeeper, instead of one without.")
@click.option("--delivery", is_flag=True, help="Measure the ways of delivery: queue, stream, scheduled, one by one.")
@click.option("--seeds", is_flag=True, help="Measure the older queues' protocols, ZeroMQ and HTTP side by side.")
@click.option("--partitions", default=300, show_default=True, help="With --cluster: of the topic with many.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def bench(
    messages: int,
    sends: int,
    parked: int,
    rounds: int,
    data_dir: Path | None,
    cluster: bool,
    partitions: int,
    output: str,
    *,
    delivery: bool,
    seeds: bool,
) -> None:
    """Measure produce, synchronous send, receive and ack on this machine, compared with bare SQLite and a bare POST."""
    if delivery:
        from portalmq.broker.bench import delivery as bench_delivery

        with tempfile.TemporaryDirectory(dir=data_dir) as directory:
            bench_delivery.show(bench_delivery.measured(Path(directory), messages, sends, rounds), output)
        return
    if seeds:
        from portalmq.broker.bench import protocols as bench_seeds

        with tempfile.TemporaryDirectory(dir=data_dir) as directory:
            bench_seeds.show(bench_seeds.measured(Path(directory), rounds), output)
        return
    if cluster:
        from portalmq.broker.bench import cluster as bench_cluster

        with tempfile.TemporaryDirectory(dir=data_dir) as directory:
            figures = bench_cluster.measured(Path(directory), messages, sends, partitions, rounds)
        bench_cluster.show(figures, output)
        return
    with tempfile.TemporaryDirectory(dir=data_dir) as directory:
        taken = [_round(Path(directory) / str(number), messages, sends) for number in range(rounds)]
        figures = {name: median(each[name] for each in taken) for name in taken[0]}
        figures |= _footprint(Path(directory) / "footprint", parked)
    _show(_with_ratios(figures), output)


def _round(directory: Path, messages: int, sends: int) -> dict[str, float]:
    directory.mkdir(parents=True)
    batches = max(1, messages // BATCH_MESSAGES)
    figures = {
        "bare_insert_per_s": executemany_rate(directory, batches=batches, batch_messages=BATCH_MESSAGES, value=VALUE)
    }
    with broker(directory / "data") as (url, _):
        figures["produce_per_s"] = produce_rate(url, "bulk", messages, BATCH_MESSAGES)
        figures["produce_exact_per_s"] = produce_rate(url, "exact", messages, BATCH_MESSAGES, grow=False)
        figures["produce_small_per_s"] = produce_rate(url, "small", messages // 4, RECEIVE_MESSAGES, grow=False)
        figures["receive_ack_per_s"] = receive_rate(url, "bulk", messages)
        with server(NOTHING) as (nothing_url, _):
            bare, single = interleaved(bare_post(nothing_url), _synchronous_send(url), sends)
    return figures | {"bare_post_p50_ms": bare, "send_p50_ms": single}


def _synchronous_send(url: str) -> Callable[[], None]:
    producer = Producer(url)
    producer.send("single", VALUE).result(timeout=30)
    return lambda: _discard(producer.send("single", VALUE).result(timeout=30))


def _discard(_: object) -> None:
    """Send a request and read its answer."""


# --- the footprint of a broker ---------------------------------------------------------------------------------------


def _footprint(directory: Path, parked: int) -> dict[str, float]:
    with broker(directory) as (url, pid):
        ready_s = harness.last_ready_s
        idle_mb = rss_mb(pid)
        sockets = [_park(url) for _ in range(parked)]
        try:
            until_parked(url, parked)
            before_s, begin = cpu_s(pid), time.perf_counter()
            time.sleep(3)
            cpu_percent = 100 * (cpu_s(pid) - before_s) / (time.perf_counter() - begin)
            parked_mb = rss_mb(pid)
        finally:
            for each in sockets:
                each.close()
        produce_rate(url, "waiting", WAITING_MESSAGES, BATCH_MESSAGES)
        waiting_mb = rss_mb(pid)
    size = sum(path.stat().st_size for path in directory.glob("partitions/waiting@*/*/*.sqlite*"))
    return {
        "ready_s": ready_s,
        "idle_rss_mb": idle_mb,
        "parked_rss_mb": parked_mb,
        "parked_cpu_percent": cpu_percent,
        "waiting_rss_mb": waiting_mb,
        "waiting_disk_bytes": size / WAITING_MESSAGES,
    }


def _park(url: str) -> socket.socket:
    host, _, port = url.removeprefix("http://").partition(":")
    body = json.dumps({"topics": ["silent"], "wait_ms": 60_000}).encode()
    connection = socket.create_connection((host, int(port)), timeout=30)
    head = (
        "POST /v1/groups/parked/receive HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall(head.encode() + body)
    return connection


# --- the report ------------------------------------------------------------------------------------------------------


def _with_ratios(figures: dict[str, float]) -> dict[str, float]:
    return figures | {
        "produce_to_bare_insert": figures["produce_per_s"] / figures["bare_insert_per_s"],
        "send_to_bare_post": figures["send_p50_ms"] / figures["bare_post_p50_ms"],
        "receive_ack_to_produce": figures["receive_ack_per_s"] / figures["produce_per_s"],
        "produce_exact_to_bare_insert": figures["produce_exact_per_s"] / figures["bare_insert_per_s"],
        "receive_ack_to_produce_exact": figures["receive_ack_per_s"] / figures["produce_exact_per_s"],
        "receive_ack_to_produce_small": figures["receive_ack_per_s"] / figures["produce_small_per_s"],
    }


def _show(figures: dict[str, float], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(figures, indent=2))
        return
    rows = [
        ("bare executemany, batches of 1000 x 100 bytes, fsync each", f"{figures['bare_insert_per_s']:,.0f} rows/s"),
        (
            "produce from Python, batches of 1000 and what comes meanwhile",
            f"{figures['produce_per_s']:,.0f} messages/s",
        ),
        ("  ratio (at least 0.45)", f"{figures['produce_to_bare_insert']:.2f}"),
        ("produce in batches of exactly 1000", f"{figures['produce_exact_per_s']:,.0f} messages/s"),
        ("  ratio", f"{figures['produce_exact_to_bare_insert']:.2f}"),
        ("bare POST, p50", f"{figures['bare_post_p50_ms']:.3f} ms"),
        ("synchronous send, p50", f"{figures['send_p50_ms']:.3f} ms"),
        ("  ratio (at most 4)", f"{figures['send_to_bare_post']:.2f}"),
        ("produce in batches of exactly 100", f"{figures['produce_small_per_s']:,.0f} messages/s"),
        ("receive and ack in batches of 100, 8 consumers", f"{figures['receive_ack_per_s']:,.0f} messages/s"),
        ("  ratio to produce, growing batches (at least 0.3)", f"{figures['receive_ack_to_produce']:.2f}"),
        ("  ratio to produce, exactly 1000", f"{figures['receive_ack_to_produce_exact']:.2f}"),
        ("  ratio to produce, exactly 100", f"{figures['receive_ack_to_produce_small']:.2f}"),
        ("ready after", f"{figures['ready_s']:.2f} s"),
        ("memory when idle, both processes", f"{figures['idle_rss_mb']:.0f} MB"),
        ("memory with the receives parked", f"{figures['parked_rss_mb']:.0f} MB"),
        ("CPU with the receives parked", f"{figures['parked_cpu_percent']:.1f} %"),
        ("memory with a million messages waiting", f"{figures['waiting_rss_mb']:.0f} MB"),
        ("disk for each of them, 100 bytes of it payload", f"{figures['waiting_disk_bytes']:.0f} bytes"),
    ]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value:>20}")
