"""The processes of the demo, started and ended by their ids.

Each has a process group of its own, so that Ctrl-C reaches only the demo, which ends them in order; and each dies with
the demo (system.py), so that even a killed demo leaves none behind.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.request import urlopen

from portalmq.system import dies_with_this_process

READY_WITHIN_S = 30.0
END_WITHIN_S = 30.0
POLL_S = 0.05
LOG_TAIL_LINES = 15

# The command `portalmq`, wherever it is installed.
PORTALMQ = ("-m", "portalmq.cli.main")


class DemoFailed(Exception):
    """The reason of a failed demo, for its last line."""


class DemoProcess:
    """One process. All its output goes to a log file; with `answer`, its stdout goes to that file."""

    def __init__(self, name: str, command: list[str], log: Path, answer: Path | None = None) -> None:
        self.name = name
        self.log = log
        self._was_asked = False
        with log.open("ab") as talk, (answer or log).open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=talk,
                process_group=0,
                preexec_fn=dies_with_this_process(),
            )

    @property
    def exit_code(self) -> int | None:
        return self._process.poll()

    def kill(self) -> None:
        """Send SIGKILL, so that it flushes nothing."""
        self._process.kill()
        self._process.wait()

    def kill_all(self) -> None:
        """Send SIGKILL to the process and its children in the same group, such as Spark's Java."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def ask_to_end(self) -> None:
        """Send SIGTERM once: a second one would make a draining broker stop at once."""
        if not self._was_asked:
            self._process.terminate()
            self._was_asked = True

    def end_well(self) -> None:
        """Send SIGTERM, and wait END_WITHIN_S for exit code 0. Raises DemoFailed otherwise."""
        self.ask_to_end()
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


class ProcessGroup:
    """Every process of a demo; on exit, none is left."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._members: list[DemoProcess] = []

    def start(self, name: str, *command: str, answer: Path | None = None) -> DemoProcess:
        process = DemoProcess(name, [sys.executable, *command], self.directory / f"{name}.log", answer)
        self._members.append(process)
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for process in self._members:
            if process.exit_code is None:
                process.kill_all()


def broker_name(number: int) -> str:
    """Return the name of a broker and of its data directory."""
    return f"broker-{number}"


class DemoBroker:
    """One broker, now running as `process`, whose port and data directory stay the same after `start` starts it again.
    `arguments` are those of `portalmq`; the port follows the first."""

    def __init__(self, processes: ProcessGroup, name: str, *arguments: str) -> None:
        self.name = name
        self._processes = processes
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}"
        self._arguments = arguments
        self.start()

    def start(self) -> None:
        command, *options = self._arguments
        data = str(self._processes.directory / self.name)
        started = (*PORTALMQ, command, str(self._port), *options, "--data-dir", data)
        self.process = self._processes.start(self.name, *started)

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            self.process.check_not_failed()
            try:
                with urlopen(f"{self.url}/readyz", timeout=2) as answer:
                    return bool(answer.status == 200)
            except (OSError, HTTPException):  # an HTTP error status is an OSError as well
                return False

        wait_for(ready, READY_WITHIN_S, f"{self.name} at {self.url} was not ready")


class DemoCluster:
    """A ZooKeeper, unless PORTALMQ_ZOOKEEPER names one, and brokers 1, 2, 3, …"""

    def __init__(self, processes: ProcessGroup, brokers: int) -> None:
        given = os.environ.get("PORTALMQ_ZOOKEEPER")
        self._zookeeper: DemoProcess | None = None
        if given:
            # In a chroot of its own, so that each demo starts empty.
            self.zookeeper = f"{given.rstrip('/')}/portalmq-demo-{uuid.uuid4().hex[:12]}"
        else:
            self.zookeeper = self._start_zookeeper(processes)
        self.brokers = {
            number: DemoBroker(
                processes, broker_name(number), "broker", "--broker-id", str(number), "--zookeeper", self.zookeeper
            )
            for number in range(1, brokers + 1)
        }

    def _start_zookeeper(self, processes: ProcessGroup) -> str:
        data = str(processes.directory / "zookeeper")
        process = self._zookeeper = processes.start(
            "zookeeper", *PORTALMQ, "zookeeper", "--port", "0", "--data-dir", data
        )

        def serves() -> re.Match[str] | None:
            process.check_not_failed()
            return re.search(r"ZooKeeper serves at (\S+)", process.log.read_text(errors="replace"))

        wait_for(lambda: serves() is not None, READY_WITHIN_S, "ZooKeeper did not serve")
        found = serves()
        assert found
        return found[1]

    @property
    def urls(self) -> list[str]:
        return [broker.url for broker in self.brokers.values()]

    def check_not_failed(self) -> None:
        for process in self._processes():
            process.check_not_failed()

    def end_well(self) -> None:
        """End the brokers first, all at once, and then ZooKeeper, which they need to leave."""
        for broker in self.brokers.values():
            broker.process.ask_to_end()
        for process in self._processes():
            process.end_well()

    def _processes(self) -> list[DemoProcess]:
        """Return the brokers' processes, and ZooKeeper's last, if there is one."""
        zookeeper = [self._zookeeper] if self._zookeeper else []
        return [*(broker.process for broker in self.brokers.values()), *zookeeper]


def wait_for(condition: Callable[[], bool], within_s: float, otherwise: str) -> None:
    """Wait for the condition. Raises DemoFailed, with `otherwise`, if it does not come true in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            raise DemoFailed(f"{otherwise} within {within_s:g} s")
        time.sleep(POLL_S)


def free_port() -> int:
    """Return a free port. The broker does not bind port 0 itself, since it has to restart on the same one."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
