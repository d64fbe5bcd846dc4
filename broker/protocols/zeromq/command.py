"""`portalmq zeromq`: MiniQ's three ports in front of a cluster. pyzmq is loaded only when the server runs."""

from __future__ import annotations

import logging
import signal
import sys
from pathlib import Path
from typing import Any, cast

import click

from portalmq import wire
from portalmq.broker.protocols.zeromq.protocol import PORTS, PortRole
from portalmq.cli.options import FiniteRange
from portalmq.cli.output import show_one
from portalmq.cli.session import Session, with_session
from portalmq.errors import PortalMQError
from portalmq.tokens import Tokens, is_loopback, tokens_in

EXIT_USAGE = 2
EXIT_PORT_TAKEN = 73
CHECK_WITHIN_S = 2.0
CLOSE_WITHIN_S = 5.0

_PORT: dict[str, Any] = {"type": click.IntRange(0, 65_535), "show_default": True}


@click.command(short_help="Serve MiniQ over ZeroMQ, in front of a cluster.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option("--command-port", "commands", default=PORTS["commands"], help="Commands; 0: a free one.", **_PORT)
@click.option("--producer-port", "producers", default=PORTS["producers"], help="Messages in.", **_PORT)
@click.option("--consumer-port", "consumers", default=PORTS["consumers"], help="Messages out.", **_PORT)
@click.option("--token", metavar="SECRET", help="The token to show to the brokers (better: --token-file).")
@click.option(
    "--require-token", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help='Let in clients that send a token of this file (one a line) as the member "token".',
)  # fmt: skip
@click.option(
    "--curve-key-file", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Encrypt by CURVE: this server's secret key (.key_secret, as zmq.auth.create_certificates writes it).",
)  # fmt: skip
@click.option(
    "--curve-clients", type=click.Path(path_type=Path, file_okay=False), metavar="DIRECTORY",
    help="The public keys (.key) of the clients that are let in; goes with --curve-key-file.",
)  # fmt: skip
@click.option("--insecure", is_flag=True, help="Let in every client that reaches the host.")
@click.option(
    "--timeout", "timeout_s", type=FiniteRange(0.1, 600), default=15.0, show_default=True, metavar="SECONDS",
    help="Longest time until a request is answered, possibly with an error.",
)  # fmt: skip
@click.option(
    "--lease", "lease_s", type=FiniteRange(0.001, wire.VISIBILITY_TIMEOUT_MS_MAX / 1000), metavar="SECONDS",
    help="Time after which a message that is not deleted is delivered again [the group's visibility timeout, 30].",
)  # fmt: skip
@click.option(
    "--max-message-bytes", type=click.IntRange(1, wire.BODY_BYTES_MAX // 2), default=wire.MESSAGE_BYTES_MAX,
    show_default=True, help="The largest message that is accepted.",
)  # fmt: skip
@with_session
def zeromq(
    session: Session,
    host: str,
    token: str | None,
    require_token: Path | None,
    curve_key_file: Path | None,
    curve_clients: Path | None,
    *,
    insecure: bool,
    timeout_s: float,
    lease_s: float | None,
    max_message_bytes: int,
    **ports: int,
) -> None:
    """Serve MiniQ over ZeroMQ (REQ/REP, JSON): commands, producers and consumers, each on a port.

    Example: portalmq zeromq --server http://localhost:5000,http://localhost:5001
    """
    logging.basicConfig(stream=sys.stderr, format="portalmq: %(message)s", level=logging.WARNING)
    try:
        if (curve_key_file is None) != (curve_clients is None):
            raise ValueError("--curve-key-file and --curve-clients go together: give both, or neither")
        tokens = tokens_for(require_token, host, insecure=insecure or curve_key_file is not None)
    except ValueError as fault:
        raise click.UsageError(str(fault)) from None
    try:
        from portalmq.broker.protocols.zeromq.cluster import ClusterClient
        from portalmq.broker.protocols.zeromq.curve import Curve
        from portalmq.broker.protocols.zeromq.server import PortTaken, Server, ServerLimits
    except ImportError as missing:
        click.echo(f"portalmq: {missing.name} is not installed: `pip install 'portalmq[zeromq]'`", err=True)
        sys.exit(EXIT_USAGE)
    limits = ServerLimits(timeout_s=timeout_s, message_bytes_max=max_message_bytes)
    try:
        cluster = ClusterClient(
            session.server,
            token=token or session.token,
            timeout_s=timeout_s,
            buffer_messages=limits.requests_max,
            buffer_bytes=2 * limits.request_bytes_max,
            visibility_timeout_s=lease_s,
        )
        curve = Curve(curve_key_file, curve_clients) if curve_key_file and curve_clients else None
    except ValueError as fault:
        raise click.UsageError(str(fault)) from None
    try:
        server = Server(cluster, tokens, host=host, ports=cast(dict[PortRole, int], ports), limits=limits, curve=curve)
    except PortTaken as taken:
        click.echo(f"portalmq: {taken}. Choose others with --command-port, --producer-port, --consumer-port.", err=True)
        sys.exit(EXIT_PORT_TAKEN)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: server.stop())
    # A signal may arrive at any thread, and does not wake the others.
    signal.set_wakeup_fd(server.wakeup, warn_on_full_buffer=False)
    try:
        try:
            cluster.check(CHECK_WITHIN_S)
        except PortalMQError as error:
            click.echo(f"portalmq: {error}. Until then requests are answered with an error.", err=True)
        show_one({str(role): endpoint for role, endpoint in server.endpoints.items()}, session.output)
        sys.stdout.flush()
        server.run()
    finally:
        signal.set_wakeup_fd(-1)
        cluster.close(CLOSE_WITHIN_S)


def tokens_for(file: Path | None, host: str, *, insecure: bool) -> Tokens:
    """Return the tokens of the clients that are let in. Raises ValueError when the file cannot be read or holds none,
    and when ports reachable from the network would be open to everyone."""
    if file is None and not insecure and not is_loopback(host):
        raise ValueError(
            f"without a token MiniQ listens on this machine only, and {host} is reachable from others: give "
            "--require-token FILE, or --insecure if everyone who reaches it may do everything"
        )
    return Tokens(() if file is None else tokens_in(file))


if __name__ == "__main__":
    zeromq(prog_name="portalmq zeromq")
