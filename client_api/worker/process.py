"""One process of a worker: it loads the app, handles messages until a signal, and tells a supervisor its state.

portalmq worker app:app                  this process alone
portalmq worker app:app --processes 4    a supervisor, and `python -m portalmq.worker.process` four times
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NoReturn

import msgspec

from portalmq.worker.app import App
from portalmq.worker.counts import ProcessState
from portalmq.worker.health import HealthServer, States
from portalmq.worker.worker import Worker

log = logging.getLogger("portalmq.worker")

EXIT_USAGE = 2
TELL_EVERY_S = 1.0
TEXT_FORMAT = "%(asctime)s %(levelname)s [%(process)d] %(name)s: %(message)s"


class WorkerOptions(msgspec.Struct, frozen=True):
    """What a process of a worker needs to know. `app` is `module:attribute`."""

    app: str
    concurrency: int
    grace_s: float
    log_format: Literal["text", "json"] = "text"
    log_level: str = "INFO"
    host: str = "127.0.0.1"
    port: int | None = None
    process: int = 0


class AppNotFound(Exception):
    """The app cannot be loaded or run; the text says why and what to do."""


def load_app(name: str) -> App:
    """Import `module:attribute` (default: `app`) from the working directory or the environment. Raises AppNotFound."""
    module_name, _, attribute = name.partition(":")
    attribute = attribute or "app"
    if not module_name:
        raise AppNotFound(f"{name!r} names no module: write for instance shop.tasks:app")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as missing:
        if missing.name is not None and (module_name == missing.name or module_name.startswith(f"{missing.name}.")):
            raise AppNotFound(f"there is no module {module_name!r} in {here} nor in this environment") from None
        raise AppNotFound(f"{module_name!r} cannot be imported:\n{traceback.format_exc()}") from None
    except Exception as error:  # noqa: BLE001 - the program's own error, which its author needs to see
        if (place := _refused_at(error)) is not None:
            raise AppNotFound(f"{place}: {error}") from None
        raise AppNotFound(f"{module_name!r} cannot be imported:\n{traceback.format_exc()}") from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise AppNotFound(f"{module_name!r} has no {attribute!r}: name the portalmq.App, as in {module_name}:app")
        found = getattr(found, part)
    if not isinstance(found, App):
        raise AppNotFound(f"{name} is a {type(found).__name__}, and no portalmq.App")
    if not found.handlers:
        raise AppNotFound(f"{name} has no handlers: register functions with @app.handler(…) in what {name} imports")
    return found


def _refused_at(error: Exception) -> str | None:
    """Return the line of the program that asked App for what it refused; None where App refused nothing."""
    if not isinstance(error, (TypeError, ValueError)):
        return None
    frames = traceback.extract_tb(error.__traceback__)
    app_file = App.handler.__code__.co_filename
    for before, frame in pairwise(frames):
        if frame.filename == app_file:
            return f"{before.filename}, line {before.lineno}"
    return None


def start_logging(options: WorkerOptions) -> None:
    """Log to standard error, unless the program has set up logging itself."""
    if logging.getLogger().handlers:
        return
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter() if options.log_format == "json" else logging.Formatter(TEXT_FORMAT))
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(options.log_level)


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "process": record.process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line)


def serving_health(options: WorkerOptions, states: States) -> AbstractContextManager[object]:
    """Serve health and metrics within a `with` block, if a port was chosen."""
    return nullcontext() if options.port is None else HealthServer(options.host, options.port, states)


def run(options: WorkerOptions, tell: Callable[[ProcessState], None] = lambda state: None) -> int:
    """Handle messages until SIGTERM or SIGINT; a second signal ends the grace. Return the exit code. Raises
    AppNotFound, and OSError when the port is taken."""
    start_logging(options)
    app = load_app(options.app)
    try:
        worker = Worker(app, options.concurrency, process=options.process)
    except (TypeError, ValueError) as wrong:  # what App was given is looked at when the first client is made
        raise AppNotFound(f"{options.app} cannot reach its brokers: {wrong}") from None
    ending = threading.Event()

    def end(*_: object) -> None:
        if ending.is_set():
            worker.hurry()
        ending.set()

    signal.signal(signal.SIGTERM, end)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, end)
    with serving_health(options, lambda: ([worker.state()], 1)):
        worker.start()
        for runner in worker.runners:
            topics = ", ".join(runner.handler.topics)
            log.info(
                "handler %s: %s in group %s, %d at a time",
                *(runner.handler.name, topics, runner.handler.group, runner.concurrency),
            )
        while not ending.wait(TELL_EVERY_S):
            try:
                tell(worker.state())
            except OSError:  # the supervisor has gone
                ending.set()
        worker.stop(options.grace_s)
    log.info("stopped")
    return 0


def main() -> NoReturn:
    """Run as a process of a supervisor: its options and a descriptor of a socket to it are the arguments."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the supervisor sends SIGTERM
    options = msgspec.json.decode(sys.argv[1], type=WorkerOptions)
    supervisor = socket.socket(fileno=int(sys.argv[2]))
    lock = threading.Lock()

    def tell(state: ProcessState) -> None:
        with lock:
            supervisor.sendall(msgspec.json.encode(state) + b"\n")

    def watch() -> None:
        """Stop when the supervisor is gone, however it ended."""
        try:
            while supervisor.recv(1):
                pass
        except OSError:
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="portalmq-worker-supervisor", daemon=True).start()
    try:
        sys.exit(run(options, tell))
    except AppNotFound as wrong:
        print(f"portalmq: {wrong}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
