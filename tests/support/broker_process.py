"""A real broker in a process of its own, for tests: it starts on a free port, is waited for, and always ends.

    with BrokerProcess(directory) as broker:
        broker.request("POST", "/v1/topics/t/messages", b"hello")
        broker.kill()       # SIGKILL to the started process, as a crash
        broker.start()      # again, on the same directory and port

Every wait is bounded. The broker's output is in `broker.stderr()`, and in the failure when it does not start. It keeps
its port from the first start to the end, also while it does not run: other processes ask for free ports.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
from support.nursery import Child, Nursery
from support.ports import kept_port, number_of
from support.stopping import stop

REPOSITORY = Path(__file__).resolve().parents[2]
START_WITHIN_S = 60.0
END_WITHIN_S = 60.0
POLL_S = 0.02


def wait_until_gone(process: psutil.Process) -> None:
    """Wait until the process has ended; a zombie, which no parent has collected yet, has ended."""
    deadline = time.monotonic() + END_WITHIN_S
    while not has_ended(process):
        if time.monotonic() > deadline:
            raise AssertionError(f"process {process.pid} is still there after {END_WITHIN_S} s")
        time.sleep(POLL_S)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def stood_in_line_s(process: psutil.Process) -> float:
    """How long the busiest of its threads was ready to run and had no processor: the delay that a busy machine adds to
    a start."""
    files = list(Path(f"/proc/{process.pid}/task").glob("*/schedstat"))  # Linux only; elsewhere the result is 0
    waited_ns = []
    for file in files:
        with contextlib.suppress(OSError):  # a thread may end during the reading
            waited_ns.append(int(file.read_text().split()[1]))
    return max(waited_ns, default=0) / 1e9


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


class BrokerProcess:
    """One broker, without ZooKeeper unless `command` says otherwise.

    `options` are command-line options, `environment` is added to this process's, and `prelude` is Python that runs
    first in the process: a test injects a fault there. With `port` 0 the broker chooses one. A test of memory or of the
    start itself says `is_forked=False`: the process is not forked from one that has imported its modules."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        command: tuple[str, ...] = ("broker", "--zookeeper", "none"),
        environment: dict[str, str] | None = None,
        prelude: str = "",
        port: int | None = None,
        is_forked: bool = True,
    ) -> None:
        self.directory = directory
        self.data_dir = directory / "data"
        self.options = options
        self.command = command
        self.environment = environment or {}
        self.prelude = prelude
        self.is_forked = is_forked
        self.port = port or 0
        self._keeps_port = port != 0
        self._place: socket.socket | None = None
        self.ready_after_s = 0.0
        self._process: subprocess.Popen[bytes] | Child | None = None
        self._starts = 0
        self._launched_at = 0.0

    # --- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> BrokerProcess:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def launch(self) -> subprocess.Popen[bytes] | Child:
        """Start the process without waiting. It binds the port of its first start again."""
        if self._keeps_port:
            self._keep_port()
        name, *more = self.command
        program = (
            f"{self.prelude}\nfrom portalmq.broker.server.commands import {name}; {name}(prog_name='portalmq {name}')"
        )
        arguments = [str(self.port), "--data-dir", str(self.data_dir), *more, *self.options]
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PORTALMQ_")}
        # A prelude may replace what modules take from each other at import.
        nursery = Nursery.of_this_process() if self.is_forked and not self.prelude else None
        self.directory.mkdir(parents=True, exist_ok=True)
        self._starts += 1
        self._launched_at = time.monotonic()
        with self._log_path().open("wb") as log:
            if nursery is not None:
                self._process = nursery.fork(program, arguments, self.directory, inherited | self.environment, log)
            else:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", program, *arguments],
                    cwd=self.directory,
                    env=inherited | self.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        return self._process

    def _keep_port(self) -> None:
        if self._place is None:
            with contextlib.suppress(OSError):  # if another process has the port, the broker reports it
                self._place = kept_port(self.port)
                self.port = number_of(self._place)

    def start(self) -> None:
        """Start, and return once /readyz answers that the broker is ready."""
        self.launch()
        self.wait_ready()

    def wait_ready(self) -> None:
        """Wait until the broker that was launched last is ready."""
        while not (self._has_said_where() and self._is_ready()):
            if self.process.poll() is not None:
                raise AssertionError(f"the broker ended with {self.process.returncode}:\n{self.stderr()}")
            if time.monotonic() - self._launched_at > START_WITHIN_S:
                said = self.stderr()
                self.end()
                raise AssertionError(f"the broker was not ready within {START_WITHIN_S} s:\n{said}")
            time.sleep(POLL_S)
        self.ready_after_s = time.monotonic() - self._launched_at

    def wait(self, within_s: float = END_WITHIN_S) -> int:
        """Wait until the process has ended, and return its exit code."""
        return self.process.wait(within_s)

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait()

    def strike(self) -> list[psutil.Process]:
        """Send SIGKILL to the started process. Return the processes that must end: later its children have no
        parent."""
        family = self.family()
        self.process.kill()
        return family

    def kill(self) -> None:
        """Send SIGKILL to the started process, and wait until all its children have ended too."""
        family = self.strike()
        self.wait()
        for process in family:
            wait_until_gone(process)

    def restart(self) -> None:
        self.stop()
        self.start()

    def pause(self) -> None:
        """Send SIGSTOP to the started process and its children: it keeps its port and answers nothing."""
        for process in self.family():
            stop(process.pid)

    def resume(self) -> None:
        for process in self.family():
            process.resume()

    def end(self) -> None:
        """End the process in any state."""
        if self.runs:
            with contextlib.suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGCONT)
            self.kill()
        if self._place is not None:
            self._place.close()
            self._place = None

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def has_started(self) -> bool:
        return self._process is not None

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process(self) -> subprocess.Popen[bytes] | Child:
        assert self._process is not None, "the broker was not started"
        return self._process

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def worker(self) -> psutil.Process:
        (worker,) = psutil.Process(self.process.pid).children()
        return worker

    def family(self) -> list[psutil.Process]:
        """The started process and its children."""
        try:
            process = psutil.Process(self.process.pid)
            return [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stderr(self) -> str:
        """The output since the latest start."""
        return self._log_path().read_text("utf-8", "replace")

    def _log_path(self) -> Path:
        return self.directory / f"stderr-{self._starts}"

    def _has_said_where(self) -> bool:
        """Return whether the broker has printed its address, as it does once it is ready. Keep a port that it chose for
        the next start."""
        found = re.search(r"is ready at \w+://\S+:(\d+) .*\n", self.stderr())
        if found is not None and self.port == 0:
            self.port = int(found[1])
        return found is not None

    def _is_ready(self) -> bool:
        try:
            return self.request("GET", "/readyz", timeout_s=5).status == 200
        except (OSError, http.client.HTTPException):
            return False

    # --- requests ----------------------------------------------------------------------------------------------------

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, timeout_s: float = 30.0
    ) -> Answer:
        """Send one request on a connection of its own. A body that is not bytes is sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode("utf-8")
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Answer(response.status, response.headers, response.read())
        finally:
            connection.close()
