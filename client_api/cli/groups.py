"""`portalmq group`: list, show, lag, create, alter, pause, resume, seek, delete."""

from __future__ import annotations

import getpass
import platform
from datetime import datetime
from typing import Any

import click
import msgspec

from portalmq import wire
from portalmq.admin import SeekTarget
from portalmq.cli.options import config_option, moment_ago, past_time
from portalmq.cli.output import show_one, show_rows, time_text
from portalmq.cli.session import Session, fields, with_session

_COLUMNS = ["group", "mode", "ready", "in_flight", "scheduled", "dead", "lag", "oldest_unacked_ms", "paused"]
_OFFSET_COLUMNS = ["topic", "partition", "committed", "high_watermark", "lag", "lag_ms"]


@click.group("group")
def group_commands() -> None:
    """Show and change consumer groups."""


@group_commands.command("list")
@with_session
def list_groups(session: Session) -> None:
    """List all groups."""
    show_rows(map(fields, session.admin.groups()), session.output, _COLUMNS)


@group_commands.command()
@click.argument("name")
@click.option("--at", callback=past_time, metavar="TIME", help="As it was then: a time (RFC 3339), or 15m, 2h, 7d ago.")
@with_session
def show(session: Session, name: str, at: datetime | None) -> None:
    """Show group NAME: its messages by state, its consumers, its settings. With --at as it was."""
    if at is None:
        _show(session, fields(session.admin.group(name)))
        return
    past = fields(session.admin.group_at(name, at))
    if session.output == "table":
        past["at"] = time_text(past.pop("at_ms"))
        del past["partitions"]
    show_one(past, session.output)


def _show(session: Session, group: dict[str, Any]) -> None:
    if session.output == "table":
        config = group.pop("config")
        group = {**group, **config}
    show_one(group, session.output)


@group_commands.command()
@click.argument("name")
@with_session
def lag(session: Session, name: str) -> None:
    """Show how many messages group NAME is behind, and for how long; for a stream group by partition."""
    group = session.admin.group(name)
    if group.mode == "stream":
        show_rows(map(fields, session.admin.offsets(name)), session.output, _OFFSET_COLUMNS)
        return
    show_one({"group": name, "lag": group.lag, "oldest_unacked_ms": group.oldest_unacked_ms}, session.output)


@group_commands.command()
@click.argument("name")
@click.option("--mode", type=click.Choice(["queue", "stream"]), help="How messages are shared [queue].")
@config_option("max_deliveries=3")
@with_session
def create(session: Session, name: str, mode: str | None, config: dict[str, Any] | None) -> None:
    """Create group NAME. If it exists, the given settings are changed.

    Example: portalmq group create billing -c max_deliveries=3 -c retry_backoff_ms=[1000,10000]
    """
    settings = _checked(config or {})
    if mode is not None:
        settings["mode"] = mode
    group = fields(session.admin.create_group(name, **settings))
    click.echo(f"group {name} is there", err=True)
    _show(session, group)


@group_commands.command()
@click.argument("name")
@config_option("max_deliveries=3")
@with_session
def alter(session: Session, name: str, config: dict[str, Any] | None) -> None:
    """Change settings of group NAME, which must exist."""
    if config is None:
        raise click.UsageError("nothing to change: give --config NAME=VALUE")
    settings = _checked(config)
    session.admin.group(name)
    group = fields(session.admin.create_group(name, **settings))
    click.echo(f"group {name} is changed", err=True)
    _show(session, group)


def _checked(config: dict[str, Any]) -> dict[str, Any]:
    known = [field.encode_name for field in msgspec.structs.fields(wire.GroupConfig)]
    for name in config:
        if name not in known:
            raise click.UsageError(f"a group has no setting {name!r}; it has {', '.join(known)}")
    return config


@group_commands.command()
@click.argument("name")
@click.option("--reason", default="", help="Shown with the group.")
@click.option("--by", default=None, help="Who asks [user@host].")
@with_session
def pause(session: Session, name: str, reason: str, by: str | None) -> None:
    """Deliver no messages to queue group NAME until it is resumed. Receives wait; leases that run can be settled.

    Example: portalmq group pause billing --reason "the database moves"
    """
    session.admin.pause_group(name, reason, by=_user() if by is None else by)
    click.echo(f"group {name} is paused", err=True)


@group_commands.command()
@click.argument("name")
@click.option("--by", default=None, help="Who asks [user@host].")
@with_session
def resume(session: Session, name: str, by: str | None) -> None:
    """Deliver messages to group NAME again."""
    session.admin.resume_group(name, by=_user() if by is None else by)
    click.echo(f"group {name} is resumed", err=True)


def _user() -> str:
    try:
        return f"{getpass.getuser()}@{platform.node()}"
    except (KeyError, OSError):  # a container's user may have no name
        return platform.node()


@group_commands.command()
@click.argument("name")
@click.argument("topic")
@click.option(
    "--to", required=True, metavar="PLACE", help="earliest, latest, an offset, a time (RFC 3339), or 15m, 2h, 7d ago."
)
@click.option("--partition", type=click.IntRange(0), help="Only this partition; an offset needs it.")
@click.option("--dry-run", is_flag=True, help="Show what would change, and change nothing.")
@with_session
def seek(session: Session, name: str, topic: str, to: str, partition: int | None, dry_run: bool) -> None:
    """Move stream group NAME to another position in TOPIC.

    Example: portalmq group seek audit orders --to 2h --dry-run
    """
    sought = session.admin.seek(name, topic, _place(to), partition=partition, dry_run=dry_run)
    rows = [{"topic": topic, **fields(each)} for each in sought.offsets]
    show_rows(rows, session.output, ["topic", "partition", "from", "to"])
    click.echo("nothing was changed (--dry-run)" if sought.dry_run else f"group {name} continues there", err=True)


def _place(given: str) -> SeekTarget:
    if given == "earliest":
        return "earliest"
    if given == "latest":
        return "latest"
    if given.isascii() and given.isdigit():
        return int(given)
    return moment_ago(given)


@group_commands.command()
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@with_session
def delete(session: Session, name: str, yes: bool) -> None:
    """Delete group NAME: its position, its leases and its dead letters. Messages stay."""
    if not yes:
        click.confirm(f"Delete group {name}? A new group of that name starts from its beginning.", abort=True, err=True)
    session.admin.delete_group(name)
    click.echo(f"group {name} is deleted", err=True)
