"""`portalmq worker`: the command line of portalmq.worker, which it imports when it runs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Literal

import click

from portalmq.cli.options import FiniteRange

PROCESSES_MAX = 256


@click.command(short_help="Run the handlers of an app.")
@click.argument("app", metavar="MODULE:APP")
@click.option(
    "-c", "--concurrency", type=click.IntRange(1, 1_000), default=8, show_default=True,
    help="Messages that a process handles at a time, for each handler that does not say so itself.",
)  # fmt: skip
@click.option("--processes", type=click.IntRange(1, PROCESSES_MAX), default=1, show_default=True, help="How many.")
@click.option("--reload", is_flag=True, help="Start again when a Python file changes. For development.")
@click.option(
    "--reload-dir", "folders", multiple=True, type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder to watch instead of this one; may be repeated.",
)  # fmt: skip
@click.option(
    "--grace", "grace_s", type=FiniteRange(0, 86_400), default=30.0, show_default=True,
    help="Seconds that running handlers have to end after SIGTERM.",
)  # fmt: skip
@click.option("--host", default="127.0.0.1", show_default=True, help="The address of --port.")
@click.option("--port", type=click.IntRange(0, 65_535), help="Serve /healthz, /readyz and /metrics there.")
@click.option("--log-format", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "--log-level", type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False), default="INFO",
    show_default=True,
)  # fmt: skip
def worker(
    app: str,
    concurrency: int,
    processes: int,
    reload: bool,
    folders: tuple[Path, ...],
    grace_s: float,
    host: str,
    port: int | None,
    log_format: Literal["text", "json"],
    log_level: str,
) -> None:
    """Handle messages with the functions of the portalmq.App named APP in MODULE, until SIGTERM or Ctrl-C.

    Example: portalmq worker shop.tasks:app -c 8 --processes 4 --port 9000
    """
    from portalmq.worker.process import EXIT_USAGE, AppNotFound, WorkerOptions, run
    from portalmq.worker.supervisor import WorkerSupervisor

    options = WorkerOptions(app, concurrency, grace_s, log_format, log_level.upper(), host, port)
    try:
        if processes > 1 or reload:
            watched = (folders or (Path.cwd(),)) if reload else ()
            sys.exit(WorkerSupervisor(options, processes, watched).run())
        sys.exit(run(options))
    except AppNotFound as wrong:
        click.echo(f"portalmq: {wrong}", err=True)
        sys.exit(EXIT_USAGE)
    except OSError as fault:
        if port is None:
            raise
        click.echo(f"portalmq: cannot serve health and metrics at {host}:{port}: {fault.strerror or fault}", err=True)
        sys.exit(EXIT_USAGE)
