"""The harness of all benchmarks: servers on free ports, timed traffic, a process's memory and processor time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

import click

from portalmq import Consumer, Producer
from portalmq.producers.outgoing import MESSAGE_OVERHEAD_BYTES
from portalmq.system import Usage, children_of, usage_of

VALUE = b"x" * 100
BATCH_MESSAGES = 1_000
RECEIVE_MESSAGES = 100
READY_WITHIN_S = 30.0
WITHIN_S = 60.0
END_WITHIN_S = 30.0
NOTHING = "nothing"


# --- figures -------------------------------------------------------------------------------------------------------


def medians(rounds: int, measure: Callable[[int], dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds, which have the numbers from 0 on."""
    taken = [measure(number) for number in range(rounds)]
    return {name: median(each[name] for each in taken) for name in taken[0]}


def show(figures: dict[str, float], output: str, rows: Sequence[tuple[str, str]]) -> None:
    """Print the figures as JSON, or the rows, (title, formatted figure), as a table."""
    if output == "json":
        click.echo(json.dumps(figures, indent=2))
        return
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        click.echo(f"{name:<{width}}  {value:>20}")


# --- traffic -------------------------------------------------------------------------------------------------------


def produce_rate(url: str | list[str], topic: str, messages: int, batch_messages: int, *, grow: bool = True) -> float:
    """Return acked messages per second. A batch grows while a request is running, up to its limit of bytes."""
    batch_bytes = 1_000_000 if grow else batch_messages * (len(VALUE) + MESSAGE_OVERHEAD_BYTES)
    with Producer(url, batch_messages=batch_messages, batch_bytes=batch_bytes, linger_ms=50) as producer:
        producer.send(topic, VALUE).result(timeout=30)
        begin = time.perf_counter()
        for _ in range(messages):
            producer.send(topic, VALUE)
        producer.flush(timeout=120)
        return messages / (time.perf_counter() - begin)


def receive_rate(url: str, topic: str, messages: int, consumers: int = 8) -> float:
    """Return messages per second in queue mode: batches of 100, each acked durably before the next receive."""
    counts = [0] * consumers
    failures: list[BaseException] = []

    def consume(index: int) -> None:
        try:
            with Consumer(topic, group="bench", bootstrap=url, max_messages=RECEIVE_MESSAGES) as consumer:
                while batch := consumer.poll(timeout_s=0, max_messages=RECEIVE_MESSAGES):
                    counts[index] += len(batch)
        except Exception as failure:  # noqa: BLE001 - any error is reported at the end
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


def connection_to(url: str) -> HTTPConnection:
    host, _, port = url.removeprefix("http://").partition(":")
    return HTTPConnection(host, int(port), timeout=WITHIN_S)


def _bare_post(url: str) -> Callable[[], None]:
    connection = connection_to(url)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post() -> None:
        connection.request("POST", "/", VALUE)
        connection.getresponse().read()

    return post


def single_calls(urls: str | list[str], topic: str, times: int) -> dict[str, float]:
    """Return the median milliseconds of a synchronous send and of a bare POST to the same server software, measured
    alternately so that other load affects them alike."""
    durations: tuple[list[float], list[float]] = ([], [])
    with server(NOTHING) as (nothing_url, _), Producer(urls) as producer:

        def send() -> None:
            producer.send(topic, VALUE).result(timeout=WITHIN_S)

        send()
        bare = _bare_post(nothing_url)
        for _ in range(times):
            for call, taken in zip((bare, send), durations, strict=True):
                begin = time.perf_counter()
                call()
                taken.append(time.perf_counter() - begin)
    return {"bare_post_p50_ms": median(durations[0]) * 1000, "send_p50_ms": median(durations[1]) * 1000}


# --- processes -----------------------------------------------------------------------------------------------------


def park(url: str) -> HTTPConnection:
    """Return a connection on which a receive waits for a minute."""
    connection = connection_to(url)
    body = json.dumps({"topics": ["silent"], "wait_ms": 60_000})
    connection.request("POST", "/v1/groups/parked/receive", body, {"Content-Type": "application/json"})
    return connection


def until_parked(url: str, parked: int, every_s: float = 0.05) -> None:
    end = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < end:
        connection = connection_to(url)
        connection.request("GET", "/healthz")
        if json.loads(connection.getresponse().read()).get("parked_receives", 0) >= parked:
            return
        time.sleep(every_s)
    raise click.ClickException(f"{parked} receives did not park within {READY_WITHIN_S:.0f} s")


def family_of(pid: int) -> list[int]:
    """Return the process and its descendants."""
    found = [pid]
    for each in found:
        found += children_of(each)
    return found


def _usage_of_family(pid: int) -> list[Usage]:
    """Return the memory and the processor time of a process and its descendants; those that ended are left out."""
    usages = []
    for each in family_of(pid):
        with suppress(OSError, ValueError):
            usages.append(usage_of(each))
    return usages


def rss_mb(pid: int) -> float:
    """Return the resident megabytes of the broker's processes; shared pages count in each."""
    return sum(usage.resident_bytes for usage in _usage_of_family(pid)) / 1e6


def cpu_s(pid: int) -> float:
    return sum(usage.processor_s for usage in _usage_of_family(pid))


# --- servers to measure ----------------------------------------------------------------------------------------------

last_ready_s = 0.0


@contextmanager
def broker(data_dir: Path) -> Iterator[tuple[str, int]]:
    with server(
        "-m", "portalmq.cli.main", "dev", "{port}", "--data-dir", str(data_dir), "--log-level", "warning"
    ) as it:
        yield it


@contextmanager
def server(*command: str) -> Iterator[tuple[str, int]]:
    """Run a server on a free port and end it; yields its URL and process id."""
    global last_ready_s
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["-m", "portalmq.broker.bench.harness", "{port}"] if command == (NOTHING,) else list(command)
    begin = time.perf_counter()
    process = subprocess.Popen([sys.executable, *(each.format(port=port) for each in arguments)])
    try:
        _until_listening(port, process)
        last_ready_s = time.perf_counter() - begin
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        end(process)


def end(process: subprocess.Popen[Any]) -> None:
    """Send SIGTERM, and SIGKILL when that does not end the process in time."""
    process.terminate()
    try:
        process.wait(END_WITHIN_S)
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
    """Run the same gunicorn worker and Flask with an empty answer to every request."""
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


if __name__ == "__main__":
    serve_nothing(int(sys.argv[1]))
