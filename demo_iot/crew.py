"""Processes of the demo, started and ended by their ids.

Each is in a process group of its own, so that Ctrl-C reaches the conductor alone, which ends them in order; and each
is told by the kernel to die with the conductor (PR_SET_PDEATHSIG), so that even a killed demo leaves none behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import requests

READY_WITHIN_S = 30.0
END_WITHIN_S = 15.0
POLL_S = 0.05
LOG_TAIL_LINES = 15

_PR_SET_PDEATHSIG = 1


class DemoFailed(Exception):
    """What went wrong, for the last line."""


class Worker:
    """One process, whose output goes to a log file."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                process_group=0,
                preexec_fn=_die_with(os.getpid()),
            )

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """SIGKILL: no goodbye, nothing flushed."""
        self._process.kill()
        self._process.wait()

    def end_well(self) -> None:
        """SIGTERM, and then the process has END_WITHIN_S to end with 0. Raises DemoFailed when it does not."""
        self._process.terminate()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            raise DemoFailed(f"{self.name} did not end within {END_WITHIN_S:g} s of SIGTERM\n{self.tail()}") from None
        self.check_not_failed()

    def check_not_failed(self) -> None:
        if self.exit_code not in {None, 0}:
            raise DemoFailed(f"{self.name} ended with {self.exit_code}\n{self.tail()}")

    def tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
        return "\n".join(f"    {self.name}: {line}" for line in lines)


class Crew:
    """Every process of a demo; on leaving, none is left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._workers: list[Worker] = []

    def start(self, name: str, *command: str) -> Worker:
        worker = Worker(name, [sys.executable, *command], self.directory / f"{name}.log")
        self._workers.append(worker)
        return worker

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for worker in self._workers:
            if worker.exit_code is None:
                worker.kill()


class Broker:
    """`portalmq dev` on a port and a data directory that stay the same over its lives."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._worker = self._start()

    def _start(self) -> Worker:
        run = "from portalmq.cli.main import main; main()"
        data = str(self._crew.directory / "data")
        return self._crew.start("broker", "-c", run, "dev", str(self._port), "--data-dir", data)

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            self._worker.check_not_failed()
            try:
                return requests.get(f"{self.url}/readyz", timeout=2).ok
            except requests.RequestException:
                return False

        wait_for(ready, READY_WITHIN_S, f"the broker at {self.url} was not ready")

    def kill_and_restart(self) -> float:
        """Answers when it was killed, on the monotonic clock."""
        killed_at = time.monotonic()
        self._worker.kill()
        self._worker = self._start()
        return killed_at

    def end_well(self) -> None:
        self._worker.end_well()


def wait_for(condition: Callable[[], bool], within_s: float, otherwise: str) -> None:
    """Raises DemoFailed, with `otherwise`, when the condition does not come true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise DemoFailed(f"{otherwise} within {within_s:g} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """A port that is free now. Not bound to port 0 by the broker itself, since it has to come back on the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with(parent: int) -> Callable[[], None]:
    """For between fork and exec: the kernel kills this process when its parent ends."""
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it ended in between
            os._exit(1)

    return prepare
