"""`portalmq bench`: the speed of PortalMQ on this machine, compared with yardsticks measured in the same run.

On a shared machine only ratios are meaningful: the producer is compared with bare `executemany` into the same schema
with the same fsyncs, the synchronous send with a bare POST to the same gunicorn and Flask.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import click

from portalmq.broker.bench import harness, modes
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
@click.option("--peers", is_flag=True, help="Measure beside Redis, RabbitMQ and NATS, those that are installed.")
@click.option("--growth", is_flag=True, help="Measure how cost grows with sizes and numbers of all kinds.")
@modes.options
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
    peers: bool,
    growth: bool,
    **chosen: Any,
) -> None:
    """Measure produce, synchronous send, receive and ack on this machine, compared with bare SQLite and a bare POST."""
    with tempfile.TemporaryDirectory(dir=data_dir) as temporary:
        directory = Path(temporary)
        if growth:
            modes.grow(directory, **chosen)
        elif peers:
            modes.compare(directory, rounds, **chosen)
        elif delivery:
            from portalmq.broker.bench import delivery as bench_delivery

            bench_delivery.show(bench_delivery.measured(directory, messages, sends, rounds), output)
        elif seeds:
            from portalmq.broker.bench import protocols as bench_seeds

            bench_seeds.show(bench_seeds.measured(directory, rounds), output)
        elif cluster:
            from portalmq.broker.bench import cluster as bench_cluster

            bench_cluster.show(bench_cluster.measured(directory, messages, sends, partitions, rounds), output)
        else:
            figures = harness.medians(rounds, lambda number: _round(directory / str(number), messages, sends))
            _show(_with_ratios(figures | _footprint(directory / "footprint", parked)), output)


def _round(directory: Path, messages: int, sends: int) -> dict[str, float]:
    directory.mkdir(parents=True)
    batches = max(1, messages // harness.BATCH_MESSAGES)
    figures = {
        "bare_insert_per_s": executemany_rate(
            directory, batches=batches, batch_messages=harness.BATCH_MESSAGES, value=harness.VALUE
        )
    }
    with harness.broker(directory / "data") as (url, _):
        figures["produce_per_s"] = harness.produce_rate(url, "bulk", messages, harness.BATCH_MESSAGES)
        figures["produce_exact_per_s"] = harness.produce_rate(
            url, "exact", messages, harness.BATCH_MESSAGES, grow=False
        )
        figures["produce_small_per_s"] = harness.produce_rate(
            url, "small", messages // 4, harness.RECEIVE_MESSAGES, grow=False
        )
        figures["receive_ack_per_s"] = harness.receive_rate(url, "bulk", messages)
        return figures | harness.single_calls(url, "single", sends)


# --- the footprint of a broker ---------------------------------------------------------------------------------------


def _footprint(directory: Path, parked: int) -> dict[str, float]:
    with harness.broker(directory) as (url, pid):
        ready_s = harness.last_ready_s
        idle_mb = harness.rss_mb(pid)
        sockets = [harness.park(url) for _ in range(parked)]
        try:
            harness.until_parked(url, parked)
            before_s, begin = harness.cpu_s(pid), time.perf_counter()
            time.sleep(3)
            cpu_percent = 100 * (harness.cpu_s(pid) - before_s) / (time.perf_counter() - begin)
            parked_mb = harness.rss_mb(pid)
        finally:
            for each in sockets:
                each.close()
        harness.produce_rate(url, "waiting", WAITING_MESSAGES, harness.BATCH_MESSAGES)
        waiting_mb = harness.rss_mb(pid)
    size = sum(path.stat().st_size for path in directory.glob("partitions/waiting@*/*/*.sqlite*"))
    return {
        "ready_s": ready_s,
        "idle_rss_mb": idle_mb,
        "parked_rss_mb": parked_mb,
        "parked_cpu_percent": cpu_percent,
        "waiting_rss_mb": waiting_mb,
        "waiting_disk_bytes": size / WAITING_MESSAGES,
    }


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
    harness.show(figures, output, rows)
