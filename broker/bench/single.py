"""How fast PortalMQ is on this machine, always beside a yardstick measured in the same run.

Absolute figures mean little on a shared machine, ratios hold: the producer is held against bare `executemany` into the
same schema with the same fsyncs, the synchronous send against a bare POST to the same gunicorn and Flask.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

import click

from portalmq import Consumer, Producer
from portalmq.broker.storage.yardstick import executemany_rate
from portalmq.producers.outgoing import MESSAGE_OVERHEAD_BYTES

VALUE = b"x" * 100
BATCH_MESSAGES = 1_000
RECEIVE_MESSAGES = 100
READY_WITHIN_S = 20.0
NOTHING = "nothing"
WAITING_MESSAGES = 1_000_000


@click.command()
@click.option("--messages", default=300_000, show_default=True, help="Messages to produce, a multiple of 1000.")
@click.option("--sends", default=1_000, show_default=True, help="Synchronous sends.")
@click.option("--parked", default=1_000, show_default=True, help="Receives to park.")
@click.option("--rounds", default=3, show_default=True, help="Rounds; the median of each figure is shown.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Where to measure (default: a temporary directory).")
@click.option("--cluster", is_flag=True, help="Measure three brokers with ZooKeeper, instead of one without.")
@click.option("--delivery", is_flag=True, help="Measure the ways of delivery: queue, stream, scheduled, one by one.")
@click.option("--seeds", is_flag=True, help="Measure the older queues' doors, ZeroMQ and HTTP side by side.")
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
    """Measure this machine: produce, synchronous send, receive and ack, beside bare SQLite and a bare POST."""
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


def produce_rate(url: str | list[str], topic: str, messages: int, batch_messages: int, *, grow: bool = True) -> float:
    """Messages a second, all acked. A batch grows while a request is on its way, unless its bytes are full."""
    batch_bytes = 1_000_000 if grow else batch_messages * (len(VALUE) + MESSAGE_OVERHEAD_BYTES)
    with Producer(url, batch_messages=batch_messages, batch_bytes=batch_bytes, linger_ms=50) as producer:
        producer.send(topic, VALUE).result(timeout=30)
        begin = time.perf_counter()
        for _ in range(messages):
            producer.send(topic, VALUE)
        producer.flush(timeout=120)
        return messages / (time.perf_counter() - begin)


def receive_rate(url: str, topic: str, messages: int, consumers: int = 8) -> float:
    """Queue mode: messages a second received in batches of 100 and acked, a batch durably before the next is given."""
    counts = [0] * consumers
    failures: list[BaseException] = []

    def consume(index: int) -> None:
        try:
            with Consumer(topic, group="bench", bootstrap=url, max_messages=RECEIVE_MESSAGES) as consumer:
                while batch := consumer.poll(timeout_s=0, max_messages=RECEIVE_MESSAGES):
                    counts[index] += len(batch)
        except Exception as failure:  # noqa: BLE001 - told at the end, whatever it was
            failures.append(failure)

    threads = [threading.Thread(target=consume, args=(index,)) for index in range(consumers)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - begin
    if failures or sum(counts) < messages:
        raise click.ClickException(f"{sum(counts)} of {messages} messages were received: {failures}")
    return sum(counts) / seconds


def bare_post(url: str) -> Callable[[], None]:
    host, _, port = url.removeprefix("http://").partition(":")
    connection = HTTPConnection(host, int(port), timeout=30)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post() -> None:
        connection.request("POST", "/", VALUE)
        connection.getresponse().read()

    return post


def _synchronous_send(url: str) -> Callable[[], None]:
    producer = Producer(url)
    producer.send("single", VALUE).result(timeout=30)
    return lambda: _discard(producer.send("single", VALUE).result(timeout=30))


def _discard(_: object) -> None:
    """Only the time counts."""


def interleaved(bare: Callable[[], None], send: Callable[[], None], times: int) -> tuple[float, float]:
    """Median milliseconds of both, taken in turns so that a noisy neighbour hits them alike."""
    durations: tuple[list[float], list[float]] = ([], [])
    for _ in range(times):
        for call, taken in zip((bare, send), durations, strict=True):
            begin = time.perf_counter()
            call()
            taken.append(time.perf_counter() - begin)
    return median(durations[0]) * 1000, median(durations[1]) * 1000


# --- the footprint of a broker ---------------------------------------------------------------------------------------


def _footprint(directory: Path, parked: int) -> dict[str, float]:
    with broker(directory) as (url, pid):
        ready_s = _last_ready_s
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


def until_parked(url: str, parked: int, every_s: float = 0.05) -> None:
    host, _, port = url.removeprefix("http://").partition(":")
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end:
        connection = HTTPConnection(host, int(port), timeout=30)
        connection.request("GET", "/healthz")
        if json.loads(connection.getresponse().read()).get("parked_receives", 0) >= parked:
            return
        time.sleep(every_s)
    raise click.ClickException(f"{parked} receives did not park within {READY_WITHIN_S:.0f} s")


def _family(pid: int) -> list[int]:
    """The process and its children."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


def rss_mb(pid: int) -> float:
    """Resident megabytes of the broker's processes together; what they share counts in each."""
    pages = sum(int(Path(f"/proc/{each}/statm").read_text().split()[1]) for each in _family(pid))
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def cpu_s(pid: int) -> float:
    ticks = 0
    for each in _family(pid):
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


# --- servers to measure ----------------------------------------------------------------------------------------------

_last_ready_s = 0.0


@contextmanager
def broker(data_dir: Path) -> Iterator[tuple[str, int]]:
    with server(
        "-m", "portalmq.cli.main", "dev", "{port}", "--data-dir", str(data_dir), "--log-level", "warning"
    ) as it:
        yield it


@contextmanager
def server(*command: str) -> Iterator[tuple[str, int]]:
    """Run a server on a free port and end it; yields its URL and process id."""
    global _last_ready_s
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["-m", "portalmq.broker.bench.single", "{port}"] if command == (NOTHING,) else list(command)
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *(each.format(port=port) for each in arguments)])
    try:
        _until_listening(port, process)
        _last_ready_s = time.perf_counter() - begin
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until_listening(port: int, process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end and process.poll() is None:
        try:
            connection = HTTPConnection("127.0.0.1", port, timeout=5)
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        time.sleep(0.01)
    raise click.ClickException("the server to measure did not start")


def serve_nothing(port: int) -> None:
    """The same gunicorn worker and Flask, answering every request with nothing."""
    from flask import Flask
    from gunicorn.app.base import BaseApplication

    application = Flask("nothing")

    @application.route("/", methods=["POST"])
    @application.route("/readyz")
    def nothing() -> str:
        return ""

    class Nothing(BaseApplication):  # type: ignore[misc]
        def load_config(self) -> None:
            settings: dict[str, Any] = {
                "bind": f"127.0.0.1:{port}",
                "worker_class": "gevent",
                "keepalive": 75,
                "timeout": 0,
                "control_socket_disable": True,
                "loglevel": "error",
            }
            for name, value in settings.items():
                self.cfg.set(name, value)

        def load(self) -> Flask:
            return application

    Nothing().run()


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


if __name__ == "__main__":
    serve_nothing(int(sys.argv[1]))
