"""The harness of all benchmarks: servers on free ports, timed traffic, a process's memory and processor time."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from statistics import median
from typing import Any

import click

from portalmq import Producer
from portalmq.system import Usage, children_of, usage_of

VALUE = b"x" * 100
BATCH_MESSAGES = 1_000
READY_WITHIN_S = 30.0
WITHIN_S = 60.0
END_WITHIN_S = 30.0


# --- figures -------------------------------------------------------------------------------------------------------


def medians(rounds: int, measure: Callable[[int], dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure over the rounds, which have the numbers from 0 on."""
    taken = [measure(number) for number in range(rounds)]
    return {name: median(each[name] for each in taken) for name in taken[0]}


# --- traffic -------------------------------------------------------------------------------------------------------


def produce_rate(url: str, topic: str, messages: int) -> float:
    """Return acked messages per second, in batches that grow while a request is running."""
    with Producer(url, batch_messages=BATCH_MESSAGES, linger_ms=50) as producer:
        producer.send(topic, VALUE).result(timeout=30)
        begin = time.perf_counter()
        for _ in range(messages):
            producer.send(topic, VALUE)
        producer.flush(timeout=120)
        return messages / (time.perf_counter() - begin)


def connection_to(url: str) -> HTTPConnection:
    host, _, port = url.removeprefix("http://").partition(":")
    return HTTPConnection(host, int(port), timeout=WITHIN_S)


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


@contextmanager
def broker(data_dir: Path) -> Iterator[tuple[str, int]]:
    """Run a broker on a free port and end it; yields its URL and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = ["dev", str(port), "--data-dir", str(data_dir), "--log-level", "warning"]
    process = subprocess.Popen([sys.executable, "-m", "portalmq.cli.main", *arguments])
    try:
        _until_listening(port, process)
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
