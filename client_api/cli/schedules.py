"""`portalmq schedule`: create, list, show, pause, resume, delete recurring messages."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import click
import msgspec

from portalmq.cli.options import duration, message_headers
from portalmq.cli.output import show_one, show_rows
from portalmq.cli.session import Session, fields, with_session
from portalmq.contract.schedules import EVERY_MS_MIN

_COLUMNS = ["name", "topic", "cron", "every_ms", "timezone", "paused", "next_tick"]


@click.group("schedule")
def schedule_commands() -> None:
    """Publish messages at recurring times."""


@schedule_commands.command()
@click.argument("name")
@click.option("--topic", required=True, help="Publish to this topic.")
@click.option(
    "--cron", metavar="LINE", help="Minute, hour, day of month, month, day of week; six fields: with seconds."
)
@click.option("--every", callback=duration, metavar="DURATION", help="Instead of --cron: each 10s, 15m, 2h.")
@click.option("--timezone", default="UTC", show_default=True, metavar="ZONE", help="Of --cron, as Europe/Berlin.")
@click.option("--value", default="", help="The message.")
@click.option("--json", "as_json", is_flag=True, help="The message is JSON (checked, and sent as application/json).")
@click.option("-k", "--key", help="The message's key.")
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", callback=message_headers,
    help="A header of the message.",
)  # fmt: skip
@click.option("--paused", is_flag=True, help="Create it paused.")
@click.option("--no-catch-up", is_flag=True, help="Publish nothing for times at which no broker was up.")
@with_session
def create(
    session: Session, name: str, topic: str, every: float | None, value: str, *, as_json: bool, no_catch_up: bool,
    **options: Any,
) -> None:  # fmt: skip
    """Create schedule NAME, or replace it.

    Example: portalmq schedule create report --topic reports --cron '0 6 * * 1-5' --timezone Europe/Berlin --value go
    """
    if (options["cron"] is None) == (every is None):
        raise click.UsageError("give --cron, or --every")
    if every is not None and every * 1000 < EVERY_MS_MIN:
        raise click.UsageError("--every is at least 1s")
    message: Any = value
    if as_json:
        try:
            message = msgspec.json.decode(value)
        except msgspec.DecodeError as fault:
            raise click.UsageError(f"--value is no JSON: {fault}") from None
        options["content_type"] = "application/json"
    made = session.admin.create_schedule(
        name,
        topic,
        message,
        every=None if every is None else timedelta(seconds=every),
        catch_up=not no_catch_up,
        **options,
    )
    show_one(fields(made), session.output)


@schedule_commands.command("list")
@with_session
def list_schedules(session: Session) -> None:
    """List all schedules with their next times."""
    show_rows(map(fields, session.admin.schedules()), session.output, _COLUMNS)


@schedule_commands.command()
@click.argument("name")
@with_session
def show(session: Session, name: str) -> None:
    """Show schedule NAME."""
    show_one(fields(session.admin.schedule(name)), session.output)


@schedule_commands.command()
@click.argument("name")
@with_session
def pause(session: Session, name: str) -> None:
    """Pause schedule NAME: its times pass without a message."""
    session.admin.pause_schedule(name)
    click.echo(f"schedule {name} is paused", err=True)


@schedule_commands.command()
@click.argument("name")
@with_session
def resume(session: Session, name: str) -> None:
    """Resume schedule NAME."""
    session.admin.resume_schedule(name)
    click.echo(f"schedule {name} is resumed", err=True)


@schedule_commands.command()
@click.argument("name")
@with_session
def delete(session: Session, name: str) -> None:
    """Delete schedule NAME."""
    session.admin.delete_schedule(name)
    click.echo(f"schedule {name} is deleted", err=True)
