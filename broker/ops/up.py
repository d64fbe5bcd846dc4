"""`portalmq up` and `portalmq down`: a cluster on this machine, and its end.

Loaded for every `portalmq` command, so it stays light; see `supervisor` for what it does.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from portalmq.broker.cluster.exits import EX_CANTCREAT, EX_SOFTWARE, StartupError, UsageError
from portalmq.broker.server.config import BrokerConfig, load_config

if TYPE_CHECKING:
    from portalmq.broker.ops.supervisor import ProcessRecord

DATA_DIR = Path("data/cluster")
STARTED_WITHIN_S = 90.0
ENDED_WITHIN_S = 60.0
KILLED_WITHIN_S = 5.0
POLL_S = 0.05
# Messages, logs and the secrets in ZooKeeper's files are for the user who runs the cluster.
PRIVATE = 0o077

_data_dir_option = click.option(
    "--data-dir", default=DATA_DIR, show_default=True, type=click.Path(path_type=Path, file_okay=False),
    help="Directory of the cluster: messages, ZooKeeper's data, logs.",
)  # fmt: skip


@click.command(short_help="Run a cluster on this machine: ZooKeeper and three brokers.")
@click.option("--brokers", default=3, show_default=True, type=click.IntRange(1, 9), help="How many brokers.")
@click.option(
    "--base-port", default=5000, show_default=True, type=click.IntRange(0, 65_500),
    help="Port of the first broker, the others follow; 0 takes free ones.",
)  # fmt: skip
@_data_dir_option
@click.option(
    "--zookeepers", default="1", show_default=True, type=click.Choice(["1", "3"]), help="How many ZooKeeper servers."
)
@click.option(
    "--zookeeper-port", default=2181, show_default=True, type=click.IntRange(0, 65_500),
    help="Port of the first ZooKeeper server; 0 takes free ones.",
)  # fmt: skip
@click.option(
    "--zookeeper", envvar="PORTALMQ_ZOOKEEPER",
    help="Use the ZooKeeper at HOST:PORT,HOST:PORT/CHROOT and start none. [PORTALMQ_ZOOKEEPER]",
)  # fmt: skip
@click.option("--detach", is_flag=True, help="Return when it is ready; `portalmq down` ends it.")
def up(
    brokers: int,
    base_port: int,
    data_dir: Path,
    zookeepers: str,
    zookeeper_port: int,
    zookeeper: str | None,
    detach: bool,
) -> None:
    """Run ZooKeeper and some brokers until Ctrl-C, and print their addresses.

    They are the processes that `portalmq zookeeper` and `portalmq broker` start, and take the same PORTALMQ_ settings.
    One that ends is reported, and is not started again by itself.

    Example: portalmq up --brokers 3 --base-port 5000
    """
    os.umask(PRIVATE)
    try:
        if brokers > 1 and (zookeeper or "").strip().lower() == "none":
            raise UsageError(
                "without ZooKeeper each broker would be a cluster of its own: leave --zookeeper (PORTALMQ_ZOOKEEPER) "
                "out, and one is started; `portalmq dev` runs one broker that needs none"
            )
        if detach:
            ports = ["--base-port", str(base_port), "--zookeeper-port", str(zookeeper_port)]
            named = ["--zookeeper", zookeeper] if zookeeper else ["--zookeepers", zookeepers]
            _detached(data_dir, ["--brokers", str(brokers), *ports, *named, "--data-dir", str(data_dir)])
        else:
            from portalmq.broker.ops.supervisor import Plan, Supervisor

            settings = _settings(brokers, base_port, data_dir)
            plan = Plan(data_dir, settings, zookeeper or "", 0 if zookeeper else int(zookeepers), zookeeper_port)
            sys.exit(Supervisor(plan, lambda line: click.echo(line, err=True)).run())
    except StartupError as error:
        click.echo(f"portalmq: {error}", err=True)
        sys.exit(error.exit_code)


def _settings(brokers: int, base_port: int, data_dir: Path) -> dict[str, BrokerConfig]:
    """Return the settings of each broker: environment and portalmq.toml, with its own port, id and directory."""
    from portalmq.broker.ops.supervisor import free_ports

    shared = load_config({})
    if shared.advertised_url:
        raise UsageError("advertised_url names one broker, and `portalmq up` starts several: leave it out")
    ports = list(range(base_port, base_port + brokers)) if base_port else free_ports(shared.host, brokers)
    return {
        f"broker-{number}": load_config(
            {"port": port, "broker_id": number, "data_dir": data_dir.absolute() / f"broker-{number}"}
        )
        for number, port in enumerate(ports, start=1)
    }


def _detached(data_dir: Path, options: list[str]) -> None:
    """Run `portalmq up` with these options in its own session, and wait until it is ready."""
    log = data_dir / "up.log"
    try:
        data_dir.mkdir(parents=True, exist_ok=True)
        opened = log.open("wb")
    except OSError as fault:
        sentence = f"{data_dir} cannot be used ({fault.strerror}): name another --data-dir"
        raise StartupError(sentence, EX_CANTCREAT) from None
    with opened as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "portalmq.cli.main", "up", *options],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        _wait_ready(process, data_dir)
    except BaseException:
        process.terminate()
        process.wait()
        raise
    finally:
        click.echo(log.read_text("utf-8", "replace"), nl=False, err=True)
    if process.poll() is not None:
        sys.exit(process.returncode or EX_SOFTWARE)
    click.echo(f"`{shlex.join(['portalmq', 'down', '--data-dir', str(data_dir)])}` ends it", err=True)


def _wait_ready(process: subprocess.Popen[bytes], data_dir: Path) -> None:
    """Wait until the cluster is ready, or its supervisor has ended. Raises StartupError at the timeout."""
    from portalmq.broker.ops.supervisor import read_record

    deadline = time.monotonic() + STARTED_WITHIN_S
    while process.poll() is None:
        record = read_record(data_dir)
        if record is not None and record.ready and record.supervisor.pid == process.pid:
            return
        if time.monotonic() > deadline:
            raise StartupError(f"the cluster was not ready within {STARTED_WITHIN_S:g} s", EX_SOFTWARE)
        time.sleep(POLL_S)


@click.command(short_help="End the cluster that `portalmq up` started.")
@_data_dir_option
def down(data_dir: Path) -> None:
    """End the processes that `portalmq up` started from this directory, and no others. The data stays.

    Example: portalmq down
    """
    from portalmq.broker.ops.supervisor import read_record

    record = read_record(data_dir)
    if record is None or not record.running:
        (data_dir / "cluster.json").unlink(missing_ok=True)
        click.echo(f"no cluster runs from {data_dir}", err=True)
        _check_others(data_dir)
        return
    # The supervisor ends the others in order; without a supervisor this command ends them.
    _end([record.supervisor], signal.SIGTERM, ENDED_WITHIN_S)
    _end(record.processes[::-1], signal.SIGTERM, ENDED_WITHIN_S)
    _end([record.supervisor, *record.processes], signal.SIGKILL, KILLED_WITHIN_S)
    left = record.running
    if left:
        messages = ", ".join(f"{process.name} (pid {process.pid})" for process in left)
        click.echo(f"portalmq: these do not end: {messages}", err=True)
        sys.exit(EX_SOFTWARE)
    (data_dir / "cluster.json").unlink(missing_ok=True)
    _check_others(data_dir)
    click.echo(f"the cluster of {data_dir} has ended, its data is kept", err=True)


def _check_others(data_dir: Path) -> None:
    """Exit with a sentence when brokers started by hand still run from this directory."""
    from portalmq.broker.storage.disk import holder_of

    found = ((directory.name, holder_of(directory)) for directory in sorted(data_dir.glob("broker-*")))
    left = [f"{name} (pid {pid})" for name, pid in found if pid is not None]
    if left:
        click.echo(
            f"portalmq: these run from {data_dir}, and `portalmq up` did not start them: {', '.join(left)}; "
            "`kill PID` ends them in good order",
            err=True,
        )
        sys.exit(EX_SOFTWARE)


def _end(processes: list[ProcessRecord], by: signal.Signals, within_s: float) -> None:
    """Signal the recorded processes that still run, and wait for their end up to a limit."""
    for process in processes:
        if process.is_there:
            try:
                os.kill(process.pid, by)
            except ProcessLookupError:  # it ended just now
                continue
    deadline = time.monotonic() + within_s
    while any(process.is_there for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_S)
