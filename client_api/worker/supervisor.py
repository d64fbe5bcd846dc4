"""Several processes of a worker: started, started again when one ends, told to stop, reloaded when files change."""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec

from portalmq.worker.counts import ProcessState
from portalmq.worker.process import EXIT_USAGE, WorkerOptions, serving_health, start_logging
from portalmq.worker.reload import SourceWatch
from portalmq.worker.worker import SETTLE_WITHIN_S

log = logging.getLogger("portalmq.worker")

LOOK_S = 0.2
LOOK_AT_FILES_S = 0.5
# Pauses before a process that ended is started again; one that ran for long enough begins with the first.
PAUSE_FIRST_S = 0.5
PAUSE_MAX_S = 30.0
RAN_LONG_S = 60.0
# How much longer than its grace a process may take to stop before it is killed.
KILL_AFTER_S = SETTLE_WITHIN_S + 10.0


class WorkerProcess:
    """One process, and the state that it told last."""

    def __init__(self, options: WorkerOptions) -> None:
        self.options = options
        self.state: ProcessState | None = None
        self.started_at = time.monotonic()
        self._socket, theirs = socket.socketpair()
        with theirs:
            arguments = [msgspec.json.encode(options).decode(), str(theirs.fileno())]
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "portalmq.worker.process", *arguments], pass_fds=[theirs.fileno()]
            )
        threading.Thread(target=self._read, name="portalmq-worker-state", daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self.state = msgspec.json.decode(line, type=ProcessState)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.popen.send_signal(signal.SIGTERM)

    def end(self, within_s: float) -> None:
        """Wait until it has ended; kill it after that time."""
        try:
            self.popen.wait(max(0.0, within_s))
        except subprocess.TimeoutExpired:
            log.error("process %d does not stop: it is killed, and its leases run out", self.popen.pid)
            self.popen.kill()
            self.popen.wait()
        self._socket.close()


class WorkerSupervisor:
    """Keeps `processes` running. With `watched` folders it replaces them when a Python file there changes."""

    def __init__(self, options: WorkerOptions, processes: int, watched: tuple[Path, ...] = ()) -> None:
        self._options = options
        self._count = processes
        self._watched = watched
        self._processes: list[WorkerProcess] = []
        # When a process that ended is started again, by its number; the pause before the next time.
        self._due: dict[int, float] = {}
        self._pauses: dict[int, float] = {}
        self._signals = 0
        self._awake = threading.Event()

    def run(self) -> int:
        """Return the exit code, after SIGTERM or SIGINT, or when the app cannot be loaded. Raises OSError when the port
        is taken."""
        options = self._options
        start_logging(options)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, self._on_signal)
        watch = SourceWatch(self._watched) if self._watched else None
        look_at = time.monotonic()
        with serving_health(options, self._states):
            self._start_all()
            try:
                while not self._signals:
                    self._awake.wait(LOOK_S)
                    if (code := self._tend()) is not None:
                        return code
                    if watch is not None and time.monotonic() >= look_at:
                        look_at = time.monotonic() + LOOK_AT_FILES_S
                        if changed := watch.changed():
                            log.info("%s changed: the worker reloads", ", ".join(changed[:5]))
                            self._stop_all()
                            watch.changed()
                            self._start_all()
                return 0
            finally:
                self._stop_all()

    def _on_signal(self, *_: object) -> None:
        self._signals += 1
        self._awake.set()
        if self._signals > 1:
            for process in self._processes:
                process.terminate()

    def _states(self) -> tuple[list[ProcessState], int]:
        running = [process for process in tuple(self._processes) if process.popen.poll() is None]
        return [process.state for process in running if process.state is not None], self._count

    def _start_all(self) -> None:
        self._due, self._pauses = {}, {}
        for number in range(self._count):
            self._start(number)

    def _start(self, number: int) -> None:
        options = msgspec.structs.replace(self._options, process=number, port=None)
        self._processes.append(WorkerProcess(options))

    def _tend(self) -> int | None:
        """Start processes that ended again, after a pause. Return an exit code when that would be in vain."""
        now = time.monotonic()
        for process in tuple(self._processes):
            code = process.popen.poll()
            if code is None:
                continue
            self._processes.remove(process)
            process.end(0)
            if code == EXIT_USAGE and not self._watched:
                return EXIT_USAGE
            number = process.options.process
            pause_s = (
                PAUSE_FIRST_S if now - process.started_at > RAN_LONG_S else self._pauses.get(number, PAUSE_FIRST_S)
            )
            self._pauses[number] = min(2 * pause_s, PAUSE_MAX_S)
            if code == EXIT_USAGE:
                log.error("the app cannot be loaded: the worker waits for a change of its files")
                continue
            self._due[number] = now + pause_s
            log.error("process %d ended with %d: it starts again in %g s", process.popen.pid, code, pause_s)
        for number, due_at in tuple(self._due.items()):
            if now >= due_at:
                del self._due[number]
                self._start(number)
        return None

    def _stop_all(self) -> None:
        for process in self._processes:
            process.terminate()
        deadline = time.monotonic() + self._options.grace_s + KILL_AFTER_S
        for process in self._processes:
            process.end(deadline - time.monotonic())
        self._processes.clear()
