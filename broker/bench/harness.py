"""What benchmarks take beside traffic: parked receives, a process's memory and processor time, an empty server."""

from __future__ import annotations

import json
import sys
import time
from contextlib import suppress
from http.client import HTTPConnection
from typing import Any

import click

from portalmq.system import Usage, children_of, usage_of

READY_WITHIN_S = 30.0
WITHIN_S = 60.0


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
