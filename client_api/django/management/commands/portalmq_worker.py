"""`manage.py portalmq_worker`: runs tasks until it is told to stop."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError
from django.utils import autoreload

from portalmq.django.backend import TaskBackend
from portalmq.django.compat import task_backends
from portalmq.django.worker import TaskWorker
from portalmq.errors import PortalMQError

CONCURRENCY_MAX = 1_000


class PortalMQWorker(BaseCommand):
    help = (
        "Run tasks of a PortalMQ task backend. SIGTERM or Ctrl-C lets the running tasks finish, a second ends them."
        " With the reloader (default with DEBUG) they are cut off, and run again."
    )

    def add_arguments(self, parser: Any) -> None:
        parser.add_argument("--queues", help="Names, separated by commas (default: the backend's QUEUES).")
        parser.add_argument("-c", "--concurrency", type=int, default=8, help="Tasks at a time, each in a thread.")
        parser.add_argument("--backend", default="default", help="The alias in TASKS.")
        parser.add_argument(
            "--reload", action="store_true", default=None, help="Start again when code changes (default with DEBUG)."
        )
        parser.add_argument("--no-reload", action="store_false", dest="reload")

    def handle(self, *args: Any, **options: Any) -> None:
        worker = self._worker(options)
        reloads = settings.DEBUG if options["reload"] is None else options["reload"]
        if reloads:
            autoreload.run_with_reloader(self._run_below_reloader, worker, **options)
        else:
            self.run(worker, **options)

    def _run_below_reloader(self, worker: TaskWorker, **options: Any) -> None:
        """Run in a thread, where an error ends nothing, and sys.exit only the thread. So end as runserver does."""
        try:
            self.run(worker, **options)
        except CommandError as error:
            self.stderr.write(f"{type(error).__name__}: {error}")
            self.stderr.flush()
            os._exit(1)

    def run(self, worker: TaskWorker, **options: Any) -> None:
        try:
            worker.prepare()
        except PortalMQError as error:
            raise CommandError(f"{error}") from error
        if threading.current_thread() is threading.main_thread():  # not below the reloader, which ends the process
            self._stop_at_signals(worker)
        worker.start()
        queues = ", ".join(self._queues(options))
        self.stdout.write(f"runs the tasks of {queues}, {options['concurrency']} at a time")
        self.stdout.flush()
        worker.join()

    def _stop_at_signals(self, worker: TaskWorker) -> None:
        def stop(number: int, frame: object) -> None:
            self.stdout.write("finishes the running tasks; a second signal ends it at once")
            self.stdout.flush()
            worker.stop()
            signal.signal(number, signal.SIG_DFL)

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGINT, stop)

    def _worker(self, options: dict[str, Any]) -> TaskWorker:
        backend = self._backend(options["backend"])
        queues = self._queues(options)
        unknown = sorted(set(queues) - backend.queues) if backend.queues else []
        if unknown or not queues:
            known = ", ".join(sorted(backend.queues)) or "any, so name them with --queues"
            raise CommandError(f"{', '.join(unknown) or 'none'}: no such queue. QUEUES of this backend: {known}")
        if not 1 <= options["concurrency"] <= CONCURRENCY_MAX:
            raise CommandError(f"--concurrency is 1 to {CONCURRENCY_MAX:,}")
        return TaskWorker(backend, queues, options["concurrency"])

    def _backend(self, alias: str) -> TaskBackend:
        if alias not in task_backends.settings:
            raise CommandError(f"TASKS has no {alias!r}: it has {', '.join(task_backends.settings)}")
        backend = task_backends[alias]
        if not isinstance(backend, TaskBackend):
            raise CommandError(
                f"TASKS[{alias!r}] is {type(backend).__name__}: this command runs portalmq.django.TaskBackend"
            )
        return backend

    def _queues(self, options: dict[str, Any]) -> list[str]:
        if options["queues"] is None:
            return sorted(self._backend(options["backend"]).queues)
        return list(dict.fromkeys(name.strip() for name in options["queues"].split(",") if name.strip()))


Command = PortalMQWorker  # the name that Django looks for
