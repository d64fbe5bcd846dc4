"""The options of every command: broker, token, form of the output.

They may precede or follow the command; the latter take precedence.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import click
import msgspec

from portalmq.admin import Admin
from portalmq.cli.output import Form
from portalmq.errors import Unavailable
from portalmq.tokens import tokens_in

# Someone waits for a command, so an unreachable broker is reported soon.
COMMAND_TIMEOUT_S = 30.0
REACH_TIMEOUT_S = 2.0

_SETTINGS = ("server", "token_file", "output")


class Session:
    """The connection and output options of a command."""

    def __init__(self, server: str | None, token_file: Path | None, output: Form) -> None:
        self.server = server
        self.output = output
        try:
            self.token = None if token_file is None else tokens_in(token_file)[0]
        except ValueError as fault:
            raise click.UsageError(str(fault)) from None

    @functools.cached_property
    def admin(self) -> Admin:
        """An Admin whose broker answers, open until the command ends. Raises as `check` does."""
        self.check()
        admin = Admin(self.server, token=self.token, timeout_s=COMMAND_TIMEOUT_S)
        return click.get_current_context().with_resource(admin)

    def check(self) -> None:
        """Raise Unavailable within seconds if no broker answers."""
        try:
            with Admin(self.server, token=self.token, timeout_s=REACH_TIMEOUT_S) as probe:
                _reach(probe)
        except ValueError as fault:
            raise click.UsageError(str(fault)) from None


def _reach(probe: Admin) -> None:
    """Raise Unavailable if no broker answers; one that answers and cannot serve raises its own error.

    A silent broker (paused or just starting) uses up the time of one call: each other one gets a call too.
    """
    for others in reversed(range(len(probe.urls))):
        try:
            probe.metadata([])
            return
        except Unavailable as error:
            if error.outcome != "unknown":
                raise
            if not others:
                error.extra.setdefault("looked_at", list(probe.urls))
                raise


def _remember_file(ctx: click.Context, parameter: click.Parameter, file: Path | None) -> None:
    """Set the environment variable, from which every connection of this process takes the file."""
    if file is not None:
        os.environ[f"PORTALMQ_{parameter.name}".upper()] = str(file)


def _tls_option(name: str, meaning: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(
        name, type=click.Path(path_type=Path, dir_okay=False, exists=True), callback=_remember_file, expose_value=False,
        help=f"{meaning} [PORTALMQ_{name.removeprefix('--').replace('-', '_').upper()}]",
    )  # fmt: skip


def connection_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --server, --token-file, -o and the TLS options; store their values for subcommands."""

    @functools.wraps(command)
    def remember(*arguments: Any, **options: Any) -> Any:
        settings = click.get_current_context().ensure_object(dict)
        for name in _SETTINGS:
            given = options.pop(name)
            if given is not None:
                settings[name] = given
        return command(*arguments, **options)

    options = (
        click.option(
            "--server", metavar="URL",
            help="Where the broker is; several with commas. [PORTALMQ_URL, http://localhost:5000]",
        ),
        click.option(
            "--token-file", type=click.Path(path_type=Path, dir_okay=False),
            help="File with the token to show to the broker.",
        ),
        _tls_option("--tls-ca", "File with the authority of the brokers' certificates."),
        _tls_option("--tls-client-cert", "File with the certificate to show where brokers ask for one."),
        _tls_option("--tls-client-key", "File with its private key; default: in the same file."),
        click.option(
            "-o", "--output", type=click.Choice(["table", "json", "ndjson"]), help="Form of the data on stdout."
        ),
    )  # fmt: skip
    for option in reversed(options):
        remember = option(remember)
    return remember


def with_session(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add connection_options, and pass a Session as the first argument."""

    @connection_options
    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> Any:
        settings = click.get_current_context().ensure_object(dict)
        output = cast(Form, settings.get("output", "table"))
        return command(Session(settings.get("server"), settings.get("token_file"), output), *arguments, **options)

    return run


def fields(struct: msgspec.Struct) -> dict[str, Any]:
    """Return the struct as a dict, for the output."""
    return cast(dict[str, Any], msgspec.to_builtins(struct))
