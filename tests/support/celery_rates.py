"""Celery over PortalMQ beside Celery over Redis and RabbitMQ: rates, latency and memory, on this machine.

    cd tests && ../.venv/bin/python -m support.celery_rates [--systems portalmq,redis,...] [--tasks 3000]

Each system is started in a new directory, measured alone, and ended. It needs the extra `celery`, and for the others
redis-server with the package redis, and rabbitmq-server. Every task is an empty one whose result is ignored. Celery's
settings are its defaults, except that RabbitMQ's messages are confirmed (`confirm_publish`).

send         tasks/s of one thread that calls `delay()`; then the task is as durable as the system promises
drain-1, -4  tasks/s of a worker with that many processes, from a full queue
both-1, -4   tasks/s from the first `delay()` to the end of the last task: sender and worker side by side
p50, p99     ms from the call of `delay()` to the start of the task, one task at a time
worker MB    proportional memory of a worker with one process, and server MB: that of the servers, at the end
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from celery import Celery

import portalmq.kombu as registered
from portalmq.broker.bench.harness import family_of
from portalmq.broker.bench.peers import Rabbit, Redis
from portalmq.broker.bench.systems import HOST, OneBroker, System, ThreeBrokers, running

__all__ = ["registered"]

WITHIN_S = 120.0
WARM_UP = 200
NOTE = "{:017.6f} {:017.6f}\n"
NOTE_BYTES = len(NOTE.format(0, 0))
POLL_S = 0.001


class RedisEachSecond(Redis):
    name, fsync = "redis-everysec", "everysec"
    promise = "in memory, on disk within a second"


SYSTEMS: dict[str, type[System]] = {
    each.name: each for each in (OneBroker, ThreeBrokers, Redis, RedisEachSecond, Rabbit)
}


def broker_of(system: System) -> str:
    """Return the broker URL of a system that runs."""
    if isinstance(system, OneBroker):
        return ";".join(url.replace("http", "portalmq") for url in system.urls)
    if isinstance(system, Redis):
        return f"redis://{HOST}:{system.port}/0"
    assert isinstance(system, Rabbit)
    return f"amqp://guest:guest@{HOST}:{system.ports[0]}//"


def application(broker: str, notes: str) -> Celery:
    """An application whose one task appends to `notes` when it was sent and when it started."""
    app = Celery("rates", broker=broker)
    app.conf.update(task_ignore_result=True, broker_connection_retry_on_startup=True, worker_hijack_root_logger=False)
    if broker.startswith("amqp"):
        app.conf.broker_transport_options = {"confirm_publish": True}
    opened: list[int] = []

    @app.task(name="note")
    def note(sent_s: float) -> None:
        started_s = time.time()
        if not opened:
            opened.append(os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644))
        os.write(opened[0], NOTE.format(sent_s, started_s).encode())

    return app


class Run:
    """One system that runs, and what is measured of it."""

    def __init__(self, broker: str, directory: Path, tasks: int) -> None:
        self.broker, self.notes, self.tasks = broker, directory / "notes", tasks
        self.app = application(broker, str(self.notes))
        self._done_before = 0

    def send(self, count: int) -> float:
        """Send tasks; return the seconds it took."""
        note = self.app.tasks["note"]
        began = time.perf_counter()
        for _ in range(count):
            note.delay(time.time())
        return time.perf_counter() - began

    def done(self) -> int:
        with suppress(FileNotFoundError):
            return self.notes.stat().st_size // NOTE_BYTES
        return 0

    def wait_done(self, count: int) -> None:
        deadline = time.monotonic() + WITHIN_S
        while self.done() < count:
            if time.monotonic() > deadline:
                raise SystemExit(f"{self.broker}: {self.done()} of {count} tasks ran within {WITHIN_S:g} s")
            time.sleep(POLL_S)

    @contextmanager
    def worker(self, processes: int) -> Iterator[int]:
        """Run a worker; yields its process id."""
        environment = {**os.environ, "RATES_BROKER": self.broker, "RATES_NOTES": str(self.notes)}
        command = [sys.executable, "-m", "celery", "-A", "support.celery_rates:app", "worker", "-c", str(processes)]
        with self.notes.with_suffix(".log").open("ab") as log:
            worker = subprocess.Popen(
                command, env=environment, cwd=Path(__file__).parents[1], stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield worker.pid
            worker.send_signal(signal.SIGTERM)
            worker.wait(WITHIN_S)
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()

    def drain(self, processes: int) -> float:
        """Return tasks/s from the first to the last one of a full queue."""
        before = self.done()
        self.send(self.tasks)
        with self.worker(processes):
            self.wait_done(before + self.tasks)
        started = sorted(self._starts(before))
        return (len(started) - 1) / (started[-1] - started[0])

    def both(self, processes: int) -> float:
        before = self.done()
        with self.worker(processes):
            self.send(WARM_UP)
            self.wait_done(before + WARM_UP)
            began = time.perf_counter()
            self.send(self.tasks)
            self.wait_done(before + WARM_UP + self.tasks)
            return self.tasks / (time.perf_counter() - began)

    def latencies_ms(self, worker: int, count: int = 200) -> tuple[list[float], float]:
        """Return the latencies of single tasks, and the megabytes of the worker."""
        before = self.done()
        for number in range(count):
            self.send(1)
            self.wait_done(before + number + 1)
        lines = self.notes.read_text().splitlines()[before + count // 10 :]
        pairs = [[float(each) for each in line.split()] for line in lines]
        return [1000 * (started - sent) for sent, started in pairs], pss_mb([worker])

    def _starts(self, before: int) -> list[float]:
        return [float(line.split()[1]) for line in self.notes.read_text().splitlines()[before:]]


def pss_mb(pids: list[int]) -> float:
    """Return the proportional memory of these processes and their descendants: shared pages count once."""
    total = 0
    for pid in {member for parent in pids for member in family_of(parent)}:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 1000


def measure(system: System, tasks: int, only: list[str]) -> dict[str, float]:
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="celery-rates-") as place, running(system, Path(place)) as site:
        run = Run(broker_of(system), Path(place), tasks)
        with run.worker(1) as pid:  # declares the queue, and takes what warms up
            run.send(WARM_UP)
            run.wait_done(WARM_UP)
            if "latency" in only:
                latencies, found["worker MB"] = run.latencies_ms(pid)
                found["p50"] = statistics.median(latencies)
                found["p99"] = statistics.quantiles(latencies, n=100)[98]
        if "send" in only:
            before = run.done()
            found["send"] = tasks / run.send(tasks)
            with run.worker(1):
                run.wait_done(before + tasks)
        for processes in (1, 4):
            for name, call in (("drain", run.drain), ("both", run.both)):
                if name in only:
                    found[f"{name}-{processes}"] = call(processes)
        found["server MB"] = pss_mb(site.pids())
        run.app.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", default=",".join(SYSTEMS))
    parser.add_argument("--tasks", type=int, default=3000)
    parser.add_argument("--only", default="send,drain,both,latency")
    given = parser.parse_args()
    for name in given.systems.split(","):
        system = SYSTEMS[name]()
        if missing := system.left_out():
            print(f"{name}: {missing}")
            continue
        found = measure(system, given.tasks, given.only.split(","))
        print(f"{name}: " + "  ".join(f"{what} {value:,.1f}" for what, value in found.items()), flush=True)


if "RATES_BROKER" in os.environ:  # a worker of Run.worker
    app = application(os.environ["RATES_BROKER"], os.environ["RATES_NOTES"])
if __name__ == "__main__":
    main()
