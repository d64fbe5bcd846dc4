"""Brokers forked from a process that has imported them: a start without 0.4 s of processor time for the imports.

    nursery = Nursery.of_this_process()
    child = nursery.fork("from … import broker; broker()", ["5000"], directory, environment, log)
    child.wait(60)

The nursery runs no thread and has imported what a broker imports before its own fork, no more. It is the parent of what
it forks, so `Child` asks it for exit codes. It ends, with all its children, when this process does.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import IO, Any

ORDER_BYTES = 1 << 20
POLL_S = 0.01
TESTS = Path(__file__).resolve().parents[1]
PROGRAM = "from support.nursery import serve; order = serve({}); exec(order, {{'__name__': '__main__'}})"


class Child:
    """A forked process, with the calls of `subprocess.Popen` that tests need."""

    def __init__(self, nursery: Nursery, pid: int) -> None:
        self._nursery = nursery
        self._ended = os.pidfd_open(pid)
        self._lock = threading.Lock()
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative after a signal; None while the process runs."""
        with self._lock:
            if self.returncode is None and self._has_ended():
                self.returncode = self._nursery.collect(self.pid)
                os.close(self._ended)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code once the process has ended. Raise subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_S)
        return code

    def _has_ended(self) -> bool:
        waiting = select.poll()  # select.select refuses high descriptors
        waiting.register(self._ended, select.POLLIN)
        return bool(waiting.poll(0))

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Nursery:
    """The nursery of this process. It starts with the first fork."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        number = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(number)],
            cwd=TESTS,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])},
            stdin=subprocess.DEVNULL,
            pass_fds=[number],
        )
        theirs.close()

    @staticmethod
    @functools.cache
    def of_this_process() -> Nursery | None:
        """Return the nursery; None where the system lacks what it needs (Linux has it)."""
        return Nursery() if hasattr(os, "pidfd_open") and sys.platform == "linux" else None

    def fork(
        self, program: str, arguments: list[str], directory: Path, environment: dict[str, str], output: IO[bytes]
    ) -> Child:
        """Run a Python program with this standard output and error."""
        order = {"program": program, "arguments": arguments, "directory": str(directory), "environment": environment}
        return Child(self, self._ask(order, output.fileno()))

    def collect(self, pid: int) -> int:
        """Return the exit code of a process that has ended."""
        return self._ask({"ended": pid})

    def _ask(self, order: dict[str, Any], *descriptors: int) -> int:
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(order).encode()], descriptors)
            said = self._channel.recv(100)
        assert said, "the nursery has ended: its output tells why"
        return int(said)


def serve(number: int) -> str:
    """Serve the process at the other end of a socket. Returns in children only, with the program to be run."""
    import portalmq.broker.server.commands
    import portalmq.broker.server.composition  # noqa: F401 - what a broker imports before it forks its worker

    gc.freeze()
    channel = socket.socket(fileno=number)
    children: set[int] = set()
    while True:
        try:
            said, descriptors, _, _ = socket.recv_fds(channel, ORDER_BYTES, 1)
        except KeyboardInterrupt:  # it is for the tests, which then close the channel
            continue
        if not said:
            for child in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            os._exit(0)
        order = json.loads(said)
        if "ended" in order:
            _, status = os.waitpid(order["ended"], 0)
            children.discard(order["ended"])
            channel.send(b"%d" % os.waitstatus_to_exitcode(status))
            continue
        child = os.fork()
        if child == 0:
            channel.close()
            return _prepare(order, descriptors[0])
        os.close(descriptors[0])
        children.add(child)
        channel.send(b"%d" % child)


def _prepare(order: dict[str, Any], output: int) -> str:
    """Make this process what `python -c program argument …` would be."""
    gc.unfreeze()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(order["environment"])
    time.tzset()
    os.chdir(order["directory"])
    sys.argv = ["-c", *order["arguments"]]
    sys.path[:] = ["", *(path for path in sys.path if path not in ("", str(TESTS)))]
    return str(order["program"])
