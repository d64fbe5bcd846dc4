"""Benchmark of the older queues' protocols, side by side on one broker: producing and consuming single messages.

zeromq      MiniQ's ports: MiniQService to `portalmq zeromq`
message     MiniQ over HTTP: POST /message; GET /message and POST /confirm
topics      the current API: POST /v1/topics/{topic}/messages; receive with max_messages=1 and ack

Each client has one request at a time. Clients are threads in PROCESSES processes, so that one interpreter's lock is not
the limit. A single client alternates between the protocols every few calls, so that other load affects all of them
alike, and the ratios hold.
"""

from __future__ import annotations

import json
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from portalmq.broker.bench import harness
from portalmq.broker.bench.comparison import Begin
from portalmq.broker.bench.measure import Figures, cause, in_workers
from portalmq.broker.bench.report import Table
from portalmq.broker.bench.systems import HOST, OneBroker, Site, free_ports, running

CLIENTS = (1, 16, 64)
PROCESSES = 4
SECONDS = 3.0
ALONE_SECONDS = 12.0
ALONE_CALLS = 4
YARDSTICK = "message"
# Enough for the fastest protocol; the rest stays in the queue.
WAITING = 40_000
TEXT = "x" * 100

Call = Callable[[], bool]


class Where(NamedTuple):
    """The broker, MiniQ's ports (commands, producers, consumers), and the queue."""

    url: str
    ports: list[int]
    queue: str


class _BrokerAndMiniQ(OneBroker):
    """A broker, and `portalmq zeromq` in front of it."""

    def start(self, site: Site) -> None:
        super().start(site)
        self.ports = free_ports(3)
        command, producer, consumer = map(str, self.ports)
        options = ("--command-port", command, "--producer-port", producer, "--consumer-port", consumer)
        module = "portalmq.broker.protocols.zeromq.command"
        site.spawn(sys.executable, "-m", module, "--server", self.urls[0], *options, ends_by=signal.SIGTERM)
        for port in self.ports:
            site.until(lambda port=port: socket.create_connection((HOST, port)))  # type: ignore[misc]


# --- the protocols ---------------------------------------------------------------------------------------------------


class _Http:
    def __init__(self, url: str) -> None:
        self._connection = harness.connection_to(url)

    def ask(self, method: str, path: str, body: bytes = b"", content_type: str = "application/json") -> Any:
        """Return the answer; None for 404."""
        self._connection.request(method, path, body, {"Content-Type": content_type})
        answer = self._connection.getresponse()
        said = answer.read()
        if answer.status not in (200, 404):
            raise click.ClickException(f"{method} {path}: {answer.status} {said[:200]!r}")
        return json.loads(said) if answer.status == 200 else None


def _zeromq(where: Where) -> tuple[Call, Call]:
    from portalmq.broker.protocols.zeromq.service import MiniQService

    commands, producers, consumers = where.ports
    miniq = MiniQService(command_port=commands, producer_port=producers, consumer_port=consumers)

    def put() -> bool:
        return bool(miniq.produce(where.queue, TEXT))

    def take() -> bool:
        message = miniq.consume(where.queue)
        if message is not None:
            miniq.delete(message)
        return message is not None

    return put, take


def _message(where: Where) -> tuple[Call, Call]:
    http = _Http(where.url)
    body = json.dumps({"Message": TEXT}).encode()

    def put() -> bool:
        return bool(http.ask("POST", f"/message?queue={where.queue}", body))

    def take() -> bool:
        got = http.ask("GET", f"/message?queue={where.queue}")
        if got is not None:
            http.ask("POST", f"/confirm?queue={where.queue}", json.dumps({"Key": got["key"]}).encode())
        return got is not None

    return put, take


def _topics(where: Where) -> tuple[Call, Call]:
    http = _Http(where.url)
    wanted = json.dumps({"topics": [where.queue], "max_messages": 1, "wait_ms": 0}).encode()

    def put() -> bool:
        return bool(http.ask("POST", f"/v1/topics/{where.queue}/messages", TEXT.encode(), "text/plain"))

    def take() -> bool:
        messages = http.ask("POST", "/v1/groups/default/receive", wanted)["messages"]
        if messages:
            http.ask("POST", "/v1/groups/default/ack", json.dumps({"receipts": [messages[0]["receipt"]]}).encode())
        return bool(messages)

    return put, take


DOORS: dict[str, Callable[[Where], tuple[Call, Call]]] = {"zeromq": _zeromq, "message": _message, "topics": _topics}


# --- clients ---------------------------------------------------------------------------------------------------------


def _calling(begin: Begin, role: str, where: Where, verb: int, clients: int) -> list[float]:
    """Call in a thread for each client until the time is over; return how long calls that moved a message took."""
    calls = [DOORS[role](where)[verb] for _ in range(clients)]
    for call in calls:
        call()
    begin()
    end = time.perf_counter() + SECONDS

    def work(call: Call) -> list[float]:
        durations_s = []
        while (began := time.perf_counter()) < end:
            if call():
                durations_s.append(time.perf_counter() - began)
        return durations_s

    with ThreadPoolExecutor(clients) as pool:
        return [took_s for each in pool.map(work, calls) for took_s in each]


def _together(role: str, where: Where, verb: int, clients: int) -> tuple[float, float]:
    """Return (calls per second, median milliseconds of one)."""
    processes = min(clients, PROCESSES)
    shares = (role, where, verb, clients // processes)
    taken = in_workers([_calling] * processes, *shares, within_s=SECONDS + harness.WITHIN_S)
    durations_s = [took_s for each in taken for took_s in each]
    if not durations_s:
        raise click.ClickException(f"{role} with {clients} clients: nothing was done")
    return len(durations_s) / SECONDS, median(durations_s) * 1000


def _alone(wheres: dict[str, Where], verb: int) -> dict[str, tuple[float, float]]:
    """Return the same for one client that alternates between the protocols."""
    calls = {role: DOORS[role](where)[verb] for role, where in wheres.items()}
    durations: dict[str, list[float]] = {role: [] for role in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + ALONE_SECONDS
    while time.perf_counter() < end:
        for role, call in calls.items():
            for _ in range(ALONE_CALLS):
                begin = time.perf_counter()
                if call():
                    durations[role].append(time.perf_counter() - begin)
    if not all(durations.values()):
        raise click.ClickException("single client: one of the protocols completed no call")
    return {role: (len(took) / sum(took), median(took) * 1000) for role, took in durations.items()}


# --- the run ---------------------------------------------------------------------------------------------------------


def measured(directory: Path, rounds: int) -> Figures:
    """Return all figures, each the median over `rounds`. If a round fails or is cut off, they are those of the rounds
    before, and `failed` says why."""
    taken: list[Figures] = []
    failed: Figures = {}
    try:
        for _ in range(rounds):
            taken.append(_round(directory))
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - what is measured may fail in any way
        failed = {"failed": {"seeds": f"{cause(error)} after {len(taken)} of {rounds} rounds"}}
    return {name: median(each[name] for each in taken) for name in (taken[0] if taken else ())} | failed


def _round(directory: Path) -> Figures:
    figures: Figures = {}
    system = _BrokerAndMiniQ()
    with running(system, directory):
        for verb, name in enumerate(("put", "take")):
            for clients in CLIENTS:
                wheres = {role: Where(system.urls[0], system.ports, f"{role}-{clients}") for role in DOORS}
                if verb:
                    for where in wheres.values():
                        producer = system.client(where.queue)
                        producer.send([TEXT.encode()] * WAITING)
                        producer.close()
                if clients == 1:
                    taken = _alone(wheres, verb)
                else:
                    taken = {role: _together(role, where, verb, clients) for role, where in wheres.items()}
                for role, (per_s, p50_ms) in taken.items():
                    figures[f"{name}_{role}_{clients}_per_s"] = per_s
                    figures[f"{name}_{role}_{clients}_p50_ms"] = p50_ms
                    figures[f"{name}_{role}_{clients}_to_{YARDSTICK}"] = p50_ms / taken[YARDSTICK][1]
    return figures


def tables(figures: Figures) -> list[Table]:
    """Return rates, the medians of one call, and these as multiples of the yardstick's in the same round."""

    def cell(name: str) -> str:
        per_s, p50_ms, ratio = (figures[f"{name}_{each}"] for each in ("per_s", "p50_ms", f"to_{YARDSTICK}"))
        return f"{per_s:,.0f}/s {p50_ms:.2f} ms x{ratio:.2f}"

    return [
        (
            f"{title}: rate, median of a call, the median as a multiple of {YARDSTICK}'s",
            ["clients", *DOORS],
            [[str(clients), *(cell(f"{name}_{role}_{clients}") for role in DOORS)] for clients in CLIENTS],
        )
        for name, title in (("put", "A message in, stored"), ("take", "A message out, and done"))
        if figures.keys() != {"failed"}
    ]
