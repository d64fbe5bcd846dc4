"""A Celery application that notes what it runs, and its worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from celery import Celery, Task
from support.cluster import wait_until

import portalmq.kombu as registered

__all__ = ["Notes", "Worker", "application", "registered"]

END_WITHIN_S = 60.0


def application(broker: str, notes: Path, **options: Any) -> Celery:
    """An application whose tasks are acked late and append their number to `notes`."""
    app = Celery("proof", broker=broker)
    app.conf.update(
        broker_transport_options=options,
        broker_connection_retry_on_startup=True,
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        worker_cancel_long_running_tasks_on_connection_loss=False,
    )

    @app.task(name="note", bind=True)
    def note(self: Task, number: int, takes_s: float = 0.0) -> None:
        time.sleep(takes_s)
        _append(notes, number, self)

    @app.task(name="fails_first", bind=True, max_retries=3)
    def fails_first(self: Task, number: int) -> None:
        if self.request.retries < 2:
            raise self.retry(countdown=0.2)
        _append(notes, number, self)

    return app


def _append(notes: Path, number: int, task: Task) -> None:
    how = "again" if task.request.delivery_info.get("redelivered") else "first"
    line = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(line, f"{number} {how} {task.request.id} {time.time():.3f}\n".encode())
    os.close(line)


class Notes:
    """What the tasks have noted."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def counts(self) -> Counter[int]:
        return Counter(int(line.split()[0]) for line in self._lines())

    def repeated(self) -> list[str]:
        """What is known of the tasks that ran more than once: number, delivery, id, time."""
        counts = self.counts()
        return [line for line in self._lines() if counts[int(line.split()[0])] > 1]

    def _lines(self) -> list[str]:
        # The last line may be half written.
        return self.path.read_text().split("\n")[:-1] if self.path.exists() else []

    def wait_for(self, numbers: range, within_s: float) -> Counter[int]:
        wait_until(lambda: self.counts().keys() >= set(numbers), f"tasks {numbers}", within_s)
        return self.counts()


class Worker:
    """A worker's processes, which `kill` ends all at once."""

    def __init__(self, broker: str, notes: Path, *arguments: str, options: Mapping[str, Any]) -> None:
        given = ",".join(f"{name}={value}" for name, value in options.items())
        environment = {
            **os.environ,
            "PROOF_BROKER": broker,
            "PROOF_NOTES": str(notes),
            "PROOF_OPTIONS": given,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
        }
        command = [sys.executable, "-m", "celery", "-A", "support.celery_app", "worker", "--loglevel", "INFO"]
        self.log = notes.with_suffix(f".{time.monotonic_ns()}.log")
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--without-gossip", "--without-mingle", "-n", f"{self.log.stem}@%h", *arguments],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        wait_until(lambda: b" ready." in self.log.read_bytes(), "a worker that is ready", END_WITHIN_S)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> int:
        """End it as a deployment does."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(END_WITHIN_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.kill()
        if fault is not None:
            sys.stderr.write(self.log.read_text()[-8000:])
