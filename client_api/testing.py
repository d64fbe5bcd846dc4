"""Brokers for the tests of programs that use PortalMQ.

    with InMemoryBroker() as broker, Producer(transport=broker.transport) as producer:
        producer.send("orders", {"id": 1}).result()

Both are the real broker: its queue groups, leases, delays, dead letters and streams are not written a second time.

    InMemoryBroker   in this process, on a thread; ready in 0.1 s; a test can move its clocks on
    DevBroker        `portalmq dev` in a process of its own: what the fixture `portalmq_broker` gives

Both need `pip install "portalmq[broker]"`. The pytest fixtures are in portalmq.pytest_plugin.
"""

from __future__ import annotations

import collections
import contextlib
import re
import subprocess
import sys
import tempfile
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

from portalmq.closeable import Closeable
from portalmq.transport.transport import Transport

NEEDS_BROKER = 'portalmq.testing runs a real broker: pip install "portalmq[broker]"'
START_WITHIN_S = 60.0
END_WITHIN_S = 20.0
LINES_KEPT = 200
_READY = re.compile(r"is ready at (\S+) ")


class InMemoryBroker(Closeable):
    """A broker in this process. It starts empty, in about 0.1 s, and close() deletes its data.

    Clients reach it by `transport` or `url`, over the loopback interface. Its files are in shared memory (/dev/shm), or
    in a temporary directory where there is none. Raises ImportError where the packages of a broker are missing.
    """

    def __init__(self) -> None:
        try:
            # Not imported as usual: clients do not depend on the broker.
            self._broker: Any = import_module("portalmq.broker.server.in_process").InProcessBroker()
        except ModuleNotFoundError as missing:
            raise ImportError(f"{NEEDS_BROKER} ({missing.name} is missing)") from missing
        self._broker.start()

    def __repr__(self) -> str:
        return f"<InMemoryBroker at {self.url}>"

    @property
    def url(self) -> str:
        """The URL of the broker, for `bootstrap=`, curl, or another process."""
        return str(self._broker.url)

    @property
    def transport(self) -> Transport:
        """A new connection to the broker, for one client, which closes it."""
        return Transport(self.url)

    def advance(self, seconds: float) -> None:
        """Move the broker's clocks on: leases and back-offs end, delayed messages become due, and messages expire, as
        after that time. Times in the client, such as `idle_timeout_s`, do not move."""
        self._broker.advance(seconds)

    def close(self) -> None:
        """End the broker, and delete its data. Raises the fault that ended it earlier, if one did."""
        self._broker.close()


class DevBroker(Closeable):
    """`portalmq dev` on a free port, in a process of its own, with its data in a temporary directory."""

    def __init__(self, *options: str) -> None:
        """`options` are those of `portalmq dev`. Raises RuntimeError with the broker's output if it does not start."""
        self._directory = tempfile.TemporaryDirectory(prefix="portalmq-")
        self._lines: collections.deque[str] = collections.deque(maxlen=LINES_KEPT)
        self._ready = threading.Event()
        self.url = ""
        command = [sys.executable, "-m", "portalmq.cli.main", "dev", "0"]
        self._process = subprocess.Popen(
            [*command, "--data-dir", str(Path(self._directory.name) / "data"), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        threading.Thread(target=self._read, name="portalmq-dev-output", daemon=True).start()
        if not self._ready.wait(START_WITHIN_S) or not self.url:
            self.close()
            raise RuntimeError(f"`portalmq dev` did not start:\n{self.output}\n{NEEDS_BROKER}, if that is missing")

    def __repr__(self) -> str:
        return f"<DevBroker at {self.url}>"

    @property
    def output(self) -> str:
        """The last lines that the broker has written."""
        return "".join(tuple(self._lines))

    @property
    def transport(self) -> Transport:
        """A new connection to the broker, for one client, which closes it."""
        return Transport(self.url)

    def close(self) -> None:
        """End the process, and delete its data."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            self._process.wait(END_WITHIN_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._directory.cleanup()

    def _read(self) -> None:
        """Read the output to its end, so that the broker never waits for a reader."""
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in lines:
                self._lines.append(line)
                found = _READY.search(line)
                if found is not None:
                    self.url = found[1]
                    self._ready.set()
        self._ready.set()
