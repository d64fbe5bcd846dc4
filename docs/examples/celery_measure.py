"""Measure Celery over a broker: how fast tasks are sent, how fast workers run them, and how long one takes.

    python celery_measure.py portalmq://localhost:5000 redis://localhost:6379 --tasks 2000

Tasks do nothing but note the time. For each broker: tasks sent a second by one program; tasks run a second, from the
first to the last of a full queue, by one and by four workers of one process each; and the median time from before
`delay()` to the task, one at a time. Brokers should be empty, and the machine quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from celery import Celery

import portalmq.kombu  # noqa: F401 - registers the scheme

WITHIN_S = 600.0
QUEUE = "celery_measure"

app = Celery("celery_measure", broker=os.environ.get("MEASURED_BROKER", "portalmq://localhost:5000"))
app.conf.update(
    task_default_queue=QUEUE,
    task_ignore_result=True,
    task_acks_late=os.environ.get("MEASURED_ACKS_LATE") == "1",
    worker_prefetch_multiplier=int(os.environ.get("MEASURED_PREFETCH", "4")),
    broker_connection_retry_on_startup=True,
)


@app.task
def note(number: int) -> None:
    line = os.open(os.environ["MEASURED_NOTES"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(line, b"%d %.6f\n" % (number, time.time()))
    os.close(line)


class Workers:
    """Some workers of one process each, noting to a file."""

    def __init__(self, broker: str, count: int, notes: Path) -> None:
        environment = {**os.environ, "MEASURED_BROKER": broker, "MEASURED_NOTES": str(notes)}
        command = [sys.executable, "-m", "celery", "-A", "celery_measure", "worker", "-c", "1", "-l", "WARNING"]
        self._processes = [
            subprocess.Popen(
                [*command, "-n", f"measured{number}@%h"],
                env=environment,
                cwd=Path(__file__).parent,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            for number in range(count)
        ]

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *fault: object) -> None:
        for process in self._processes:
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            process.wait(60)


def noted(notes: Path) -> list[float]:
    return [float(line.split()[1]) for line in notes.read_text().splitlines()] if notes.exists() else []


def wait_for(notes: Path, count: int) -> list[float]:
    """Return when the tasks ran. Raises TimeoutError."""
    deadline = time.monotonic() + WITHIN_S
    while len(times := noted(notes)) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(times)} of {count} tasks ran within {WITHIN_S:g} s")
        time.sleep(0.02)
    return times


def send(broker: str, count: int) -> float:
    """Return the tasks sent a second."""
    with app.connection_for_write(broker) as connection, connection.Producer() as producer:
        note.apply_async([-1], producer=producer, ignore_result=True, countdown=0)
        began = time.perf_counter()
        for number in range(count - 1):
            note.apply_async([number], producer=producer)
        return (count - 1) / (time.perf_counter() - began)


def measure(broker: str, count: int, latencies: int, directory: Path) -> dict[str, object]:
    found: dict[str, object] = {"broker": broker.partition("://")[0], "tasks": count}
    for workers in (1, 4):
        notes = directory / f"notes-{workers}"
        found["sent_per_s"] = round(max(float(str(found.get("sent_per_s", 0))), send(broker, count)))
        with Workers(broker, workers, notes):
            times = sorted(wait_for(notes, count))
            found[f"run_per_s_{workers}"] = round((count - 1) / (times[-1] - times[0]))
            if workers == 1:
                found["latency_p50_ms"] = latency_ms(broker, notes, count, latencies)
    return found


def latency_ms(broker: str, notes: Path, before: int, count: int) -> float:
    taken = []
    with app.connection_for_write(broker) as connection, connection.Producer() as producer:
        for number in range(count):
            began = time.time()
            note.apply_async([number], producer=producer)
            taken.append(wait_for(notes, before + number + 1)[-1] - began)
    return round(statistics.median(taken) * 1000, 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("brokers", nargs="+", help="URLs, as for Celery")
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--latencies", type=int, default=100)
    given = parser.parse_args()
    for broker in given.brokers:
        with tempfile.TemporaryDirectory() as directory:
            print(json.dumps(measure(broker, given.tasks, given.latencies, Path(directory))), flush=True)


if __name__ == "__main__":
    main()
