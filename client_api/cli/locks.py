"""`portalmq lock`: run a command under a lock; acquire, release, show and list by hand."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from types import FrameType

import click

from portalmq import wire
from portalmq.cli.options import duration
from portalmq.cli.output import show_one, show_rows
from portalmq.cli.session import Session, fields, with_session
from portalmq.errors import Fenced, LockHeld, PortalMQError
from portalmq.lock import Lock

# EX_TEMPFAIL of sysexits.h: the lock was held, or was lost and the command stopped; a retry may work.
EXIT_TEMPORARY = 75
EXIT_NOT_FOUND = 127
EXIT_NOT_EXECUTABLE = 126
STOP_GRACE_S = 5.0
POLL_S = 0.2

_COLUMNS = ["name", "owner", "fencing_token", "expires_in_ms", "waiters"]

_ttl_option = click.option(
    "--ttl", default="30s", show_default=True, callback=duration, metavar="DURATION",
    help="How long the lock lasts after its latest renewal.",
)  # fmt: skip
_wait_option = click.option(
    "--wait", callback=duration, metavar="DURATION", help="How long to wait for the lock [for ever]; 0s asks once."
)


@click.group("lock")
def lock_commands() -> None:
    """Acquire, renew and release locks; run a command under one."""


@lock_commands.command("list")
@with_session
def list_locks(session: Session) -> None:
    """List the locks that are held, or were held recently."""
    show_rows(map(fields, session.admin.locks()), session.output, _COLUMNS)


@lock_commands.command()
@click.argument("name")
@with_session
def show(session: Session, name: str) -> None:
    """Show the owner, the fencing token and the number of waiters of lock NAME."""
    show_one(fields(session.admin.lock(name)), session.output)


def _lock(session: Session, name: str, ttl: float, owner: str | None) -> Lock:
    session.check()
    try:
        return Lock(name, session.server, ttl_s=ttl, owner=owner, token=session.token)
    except ValueError as fault:
        raise click.UsageError(str(fault)) from None


@lock_commands.command()
@click.argument("name")
@click.option("--owner", required=True, help="The owner; release needs the same one.")
@_ttl_option
@_wait_option
@with_session
def acquire(session: Session, name: str, owner: str, ttl: float, wait: float | None) -> None:
    """Acquire lock NAME for --ttl, and print its fencing token. Nothing renews it: `lock run` does.

    The same owner gets the same token again, and its ttl starts over.
    """
    lock = _lock(session, name, ttl, owner)
    try:
        token = lock.acquire(wait)
    finally:
        lock.close()
    show_one(fields(wire.LockGrant(owner, token, round(ttl * 1000))), session.output)


@lock_commands.command()
@click.argument("name")
@click.option("--owner", required=True)
@click.option("--token", "fencing_token", required=True, type=click.IntRange(0), help="The fencing token.")
@with_session
def release(session: Session, name: str, owner: str, fencing_token: int) -> None:
    """Release lock NAME."""
    session.admin.release_lock(name, owner, fencing_token)
    click.echo(f"lock {name} is free", err=True)


@lock_commands.command()
@click.argument("name")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.option("--owner", help="The owner, for others to see [host, process, and a random part].")
@_ttl_option
@_wait_option
@with_session
def run(
    session: Session, name: str, command: tuple[str, ...], owner: str | None, ttl: float, wait: float | None
) -> None:
    """Run COMMAND, which follows --, under lock NAME, renewed as long as it runs.

    The command finds the token in PORTALMQ_FENCING_TOKEN. Its exit code is this command's; if the lock is lost it is
    stopped (SIGTERM, after 5 s SIGKILL), and the exit code is 75. It is also 75 if the lock was not free within --wait,
    and the command did not run.

    Example: portalmq lock run nightly --wait 0s -- ./report.sh
    """
    lock = _lock(session, name, ttl, owner)
    try:
        token = lock.acquire(wait)
    except LockHeld as held:
        click.echo(f"portalmq: {held.detail}", err=True)
        raise click.exceptions.Exit(EXIT_TEMPORARY) from None
    environment = {**os.environ, "PORTALMQ_FENCING_TOKEN": str(token), "PORTALMQ_LOCK": name}
    try:
        code = _run_under(lock, command, environment)
    finally:
        lock.close()
    if code:
        raise click.exceptions.Exit(code)


def _run_under(lock: Lock, command: tuple[str, ...], environment: dict[str, str]) -> int:
    with _signals_forwarded() as forward_to:
        try:
            child = subprocess.Popen(command, env=environment)
        except OSError as fault:
            lock.release()
            click.echo(f"portalmq: {command[0]}: {fault.strerror or fault}", err=True)
            return EXIT_NOT_FOUND if isinstance(fault, FileNotFoundError) else EXIT_NOT_EXECUTABLE
        try:
            forward_to(child)
            is_lost = _wait_and_release(lock, child, command[0])
        finally:
            if child.poll() is None:
                _stop(child)
    if is_lost:
        return EXIT_TEMPORARY
    return 128 - child.returncode if child.returncode < 0 else child.returncode


def _wait_and_release(lock: Lock, child: subprocess.Popen[bytes], name: str) -> bool:
    """Wait for the command's end and release the lock. Stop the command if the lock is lost. Return True if it was
    lost."""
    is_lost = False
    while child.poll() is None:
        try:
            child.wait(POLL_S)
        except subprocess.TimeoutExpired:
            if lock.lost and not is_lost:
                is_lost = True
                click.echo(f"portalmq: lock {lock.name} is lost: {name} is stopped", err=True)
                _stop(child)
    try:
        if lock.held:
            lock.release()
        else:
            is_lost = is_lost or lock.lost
    except Fenced:
        is_lost = True
    except PortalMQError as error:
        click.echo(f"portalmq: lock {lock.name} could not be released, and expires by itself: {error}", err=True)
    return is_lost


@contextlib.contextmanager
def _signals_forwarded() -> Iterator[Callable[[subprocess.Popen[bytes]], None]]:
    """Forward signals to the command that is given to the result. Those that arrive before are forwarded then: ending
    this process at that moment would leave a command under a lock without renewals."""
    command: subprocess.Popen[bytes] | None = None
    early: list[int] = []

    def forward(number: int, frame: FrameType | None) -> None:
        if command is None:
            early.append(number)
        elif number != signal.SIGINT or not _is_in_foreground():
            command.send_signal(number)

    def begin(child: subprocess.Popen[bytes]) -> None:
        nonlocal command
        command = child
        for number in early:
            child.send_signal(number)

    handlers = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    try:
        yield begin
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _is_in_foreground() -> bool:
    """Return whether a terminal sends Ctrl-C to this process and the command: forwarded, it would arrive twice."""
    try:
        with open("/dev/tty", "rb", buffering=0) as terminal:
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:
        return False


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.terminate()
    try:
        child.wait(STOP_GRACE_S)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
    sys.stderr.flush()
