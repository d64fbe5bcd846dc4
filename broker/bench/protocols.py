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
import multiprocessing
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from portalmq.broker.bench import harness

CLIENTS = (1, 16, 64)
PROCESSES = 4
SECONDS = 3.0
ALONE_SECONDS = 12.0
ALONE_CALLS = 4
YARDSTICK = "message"
TEXT = harness.VALUE.decode()

Call = Callable[[], bool]


class Where(NamedTuple):
    """The broker, MiniQ's ports (commands, producers, consumers), and the queue."""

    url: str
    ports: tuple[int, int, int]
    queue: str


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
        return bool(http.ask("POST", f"/v1/topics/{where.queue}/messages", harness.VALUE, "text/plain"))

    def take() -> bool:
        messages = http.ask("POST", "/v1/groups/default/receive", wanted)["messages"]
        if messages:
            http.ask("POST", "/v1/groups/default/ack", json.dumps({"receipts": [messages[0]["receipt"]]}).encode())
        return bool(messages)

    return put, take


DOORS: dict[str, Callable[[Where], tuple[Call, Call]]] = {"zeromq": _zeromq, "message": _message, "topics": _topics}


# --- clients ---------------------------------------------------------------------------------------------------------


def _clients(role: str, where: Where, verb: int, threads: int, ready: Any, results: Any) -> None:
    """Run one process: each thread calls until the time is over. Only calls that moved a message count."""
    durations: list[float] = []
    faults: list[str] = []
    together = threading.Barrier(threads + 1)

    def work() -> None:
        try:
            call = DOORS[role](where)[verb]
            call()
            together.wait(harness.WITHIN_S)
            end = time.perf_counter() + SECONDS
            while (begin := time.perf_counter()) < end:
                if call():
                    durations.append(time.perf_counter() - begin)
        except Exception as fault:  # noqa: BLE001 - reported by the parent
            faults.append(repr(fault))
            together.abort()

    workers = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for worker in workers:
        worker.start()
    try:
        ready.wait(harness.WITHIN_S)
        together.wait(harness.WITHIN_S)
    except threading.BrokenBarrierError:
        faults.append("not all clients came so far")
    for worker in workers:
        worker.join(harness.WITHIN_S)
    results.put((durations, faults))


def _measure(role: str, where: Where, verb: int, clients: int) -> tuple[float, float]:
    """Return (calls per second, median milliseconds of one)."""
    context = multiprocessing.get_context("spawn")
    processes = min(clients, PROCESSES)
    ready, results = context.Barrier(processes), context.Queue()
    running = [
        context.Process(target=_clients, args=(role, where, verb, clients // processes, ready, results), daemon=True)
        for _ in range(processes)
    ]
    for process in running:
        process.start()
    durations: list[float] = []
    for _ in running:
        took, faults = results.get(timeout=2 * harness.WITHIN_S)
        if faults:
            raise click.ClickException(f"{role} with {clients} clients: {faults[0]}")
        durations += took
    for process in running:
        process.join(harness.WITHIN_S)
    if not durations:
        raise click.ClickException(f"{role} with {clients} clients: nothing was done")
    return len(durations) / SECONDS, median(durations) * 1000


def _measure_alone(wheres: dict[str, Where], verb: int) -> dict[str, tuple[float, float]]:
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


def measured(directory: Path, rounds: int) -> dict[str, float]:
    """Return all figures, each the median over `rounds`."""
    return harness.medians(rounds, lambda number: _round(directory / str(number)))


def _round(directory: Path) -> dict[str, float]:
    directory.mkdir(parents=True)
    figures: dict[str, float] = {}
    with harness.broker(directory) as (url, _), _miniq(url) as ports:
        for verb, name in enumerate(("put", "take")):
            for clients in CLIENTS:
                wheres = {role: Where(url, ports, f"{role}-{clients}") for role in DOORS}
                if verb:
                    for where in wheres.values():
                        # Enough for the fastest protocol; the rest stays in the queue.
                        harness.produce_rate(url, where.queue, 40_000)
                if clients == 1:
                    taken = _measure_alone(wheres, verb)
                else:
                    taken = {role: _measure(role, where, verb, clients) for role, where in wheres.items()}
                for role, (per_s, p50_ms) in taken.items():
                    figures[f"{name}_{role}_{clients}_per_s"] = per_s
                    figures[f"{name}_{role}_{clients}_p50_ms"] = p50_ms
                    figures[f"{name}_{role}_{clients}_to_{YARDSTICK}"] = p50_ms / taken[YARDSTICK][1]
    return figures


@contextmanager
def _miniq(url: str) -> Iterator[tuple[int, int, int]]:
    free = [option for name in ("command", "producer", "consumer") for option in (f"--{name}-port", "0")]
    arguments = [sys.executable, "-m", "portalmq.broker.protocols.zeromq.command", "--server", url, "-o", "json", *free]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        said = process.stdout.readline()
        if not said:
            raise click.ClickException("portalmq zeromq did not start")
        at = {role: int(endpoint.rpartition(":")[2]) for role, endpoint in json.loads(said).items()}
        yield at["commands"], at["producers"], at["consumers"]
    finally:
        harness.end(process)


def show(figures: dict[str, float], output: str) -> None:
    if output == "json":
        click.echo(json.dumps(figures, indent=2))
        return
    titles = {"put": "a message in, stored", "take": "a message out, and done"}
    for name, title in titles.items():
        click.echo(f"{title:<26}" + "".join(f"{role:>30}" for role in DOORS))
        for clients in CLIENTS:
            cells = [
                f"{figures[f'{name}_{role}_{clients}_per_s']:>9,.0f}/s"
                f"{figures[f'{name}_{role}_{clients}_p50_ms']:>8.2f} ms"
                f" x{figures[f'{name}_{role}_{clients}_to_{YARDSTICK}']:.2f}"
                for role in DOORS
            ]
            click.echo(f"  {clients:>3} clients{'':<13}" + "".join(f"{cell:>30}" for cell in cells))
    click.echo(f"Rate, the median of one call, and that median as a multiple of {YARDSTICK}'s in the same round.")
