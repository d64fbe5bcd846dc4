"""`portalmq broker` and `portalmq dev`: settings as options, and an exit code with a sentence for wrong ones.

The options are generated from the fields of BrokerConfig. The server is imported only when it runs: this module is
loaded for every `portalmq` command.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from portalmq.broker.cluster.exits import StartupError
from portalmq.broker.server.config import ENVIRONMENT_PREFIX, SETTINGS, BrokerConfig, load_config

# Short options for scripts that start MiniQ.
SHORT = {"no_confirm": ["-c"]}

Command = TypeVar("Command", bound=Callable[..., Any])


# Settings without effect on a single broker.
_OF_CLUSTERS = {
    "session_timeout_ms",
    "broker_id",
    "cluster_secret_file",
    "default_replication_factor",
    "replica_lag_ms",
    "fetch_wait_ms",
    "fetch_bytes_max",
}


def _with_settings(*left_out: str, is_alone: bool = False) -> Callable[[Command], Command]:
    """Add an option for every setting but those `left_out`. A broker that `is_alone` accepts cluster settings too, so
    it can read the same configuration, but hides them from its help."""

    def add(command: Command) -> Command:
        for name, setting in reversed(SETTINGS.items()):
            if name in left_out or name == "port":
                continue
            hidden = is_alone and (name in _OF_CLUSTERS or "zookeeper" in name)
            option = "--" + name.replace("_", "-")
            default = setting.default
            meaning = setting.metadata["help"] + f" [{ENVIRONMENT_PREFIX}{name.upper()}"
            meaning += f"; default {default}]" if default not in (None, False, True) else "]"
            names = [option, *SHORT.get(name, ())]
            form: dict[str, Any] = {"metavar": _metavar(str(setting.type))}
            if setting.type == "bool":
                form = {"is_flag": True, "default": None}
                if default is True:
                    names = [f"{option}/--no-{option[2:]}"]
            command = click.option(*names, name, help=meaning, hidden=hidden, **form)(command)
        command = click.option("--config", "file", type=click.Path(path_type=Path), help="settings in TOML")(command)
        return click.argument("port", required=False, metavar="[PORT]")(command)

    return add


def _metavar(kind: str) -> str:
    return "FILE" if "Path" in kind else "N" if kind.startswith(("int", "float")) else "TEXT"


@click.command(short_help="Run one broker of a cluster.")
@_with_settings()
def broker(file: Path | None, **options: Any) -> None:
    """Run one broker on PORT (default 5000; 0 takes a free one).

    Example: portalmq broker 5000 --zookeeper none --data-dir /var/lib/portalmq
    """
    _run(file, options, announce=False)


@click.command(short_help="Run a single broker for development: no ZooKeeper, no Java.")
@_with_settings("zookeeper", is_alone=True)
def dev(file: Path | None, **options: Any) -> None:
    """Run a single broker on PORT (default 5000; 0 takes a free one), with the same API, and print when it is ready.

    Example: portalmq dev 5000
    """
    _run(file, {**options, "zookeeper": "none"}, announce=True)


def _run(file: Path | None, options: dict[str, Any], *, announce: bool) -> None:
    try:
        config: BrokerConfig = load_config(options, file=file)
        from portalmq.broker.server.composition import serve

        serve(config, announce=announce)
    except StartupError as error:
        click.echo(f"portalmq: {error}", err=True)
        sys.exit(error.exit_code)
