"""`portalmq dlq`: list, redrive, drop dead letters. `portalmq scheduled`: messages that are not due yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import click

from portalmq import wire
from portalmq.cli.options import FiniteRange, duration, future_time, message_ids, where_given
from portalmq.cli.output import message_row, show_one, show_rows
from portalmq.cli.session import Session, fields, with_session
from portalmq.message import Message

_COLUMNS = ["id", "dead_at", "deliveries", "reason", "key", "value"]


@click.group("dlq")
def dead_letter_commands() -> None:
    """List dead letters, deliver them again, drop them."""


_ids_option = click.option(
    "--ids", callback=message_ids, metavar="ID,ID…", help="Only these, as `dlq list` shows them; - reads stdin."
)


@dead_letter_commands.command("list")
@click.argument("group")
@click.argument("topic")
@click.option("-n", "--count", type=click.IntRange(1), help="How many at most [all].")
@with_session
def list_some(session: Session, group: str, topic: str, count: int | None) -> None:
    """List the dead letters of TOPIC in GROUP, with how often, when and why they failed."""
    show_rows(map(_row, session.admin.dead_letters(group, topic, limit=count)), session.output, _COLUMNS)


def _row(message: Message) -> dict[str, Any]:
    row = message_row(message)
    headers = message.headers
    row["deliveries"] = _number(headers.get("portalmq-delivery-count"))
    row["reason"] = headers.get("portalmq-dead-reason")
    dead_at_ms = _number(headers.get("portalmq-dead-at-ms"))
    row["dead_at"] = None if dead_at_ms is None else datetime.fromtimestamp(dead_at_ms // 1000, UTC).isoformat()
    return row


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


@dead_letter_commands.command()
@click.argument("group")
@click.argument("topic")
@_ids_option
@click.option(
    "--where", callback=where_given, metavar="JSON", help='Only these, e.g. {"reason":{"contains":"timeout"}}.'
)
@click.option("--rate", "rate_per_s", type=FiniteRange(0, min_open=True), metavar="N", help="At most N a second.")
@click.option("--dry-run", is_flag=True, help="Count them, and change nothing.")
@with_session
def redrive(session: Session, group: str, topic: str, **options: Any) -> None:
    """Deliver dead letters of TOPIC to GROUP again, with delivery counts from zero: all, or the selected ones.

    Example: portalmq dlq redrive billing orders --where '{"reason":{"contains":"timeout"}}' --rate 100
    """
    if options["ids"] is not None and options["where"] is not None:
        raise click.UsageError("give --ids, or --where, and not both")
    redriven = session.admin.redrive(group, topic, **options)
    show_one(fields(redriven), session.output)
    if options["dry_run"]:
        click.echo("nothing was changed (--dry-run)", err=True)


@dead_letter_commands.command()
@click.argument("group")
@click.argument("topic")
@_ids_option
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@with_session
def drop(session: Session, group: str, topic: str, ids: list[str] | None, yes: bool) -> None:
    """Drop dead letters of TOPIC: all of GROUP, or the selected ones. Copies in other topics stay."""
    if not yes:
        which = "all dead letters" if ids is None else f"{len(ids)} dead letters"
        click.confirm(f"Drop {which} of {topic} for group {group}?", abort=True, err=True)
    dropped = session.admin.drop_dead_letters(group, topic, ids=ids)
    show_one({"dropped": dropped}, session.output)


# --- scheduled messages ----------------------------------------------------------------------------------------------


@click.group("scheduled")
def scheduled_commands() -> None:
    """List messages that are not due yet, run them now, move them to another time, cancel them."""


@scheduled_commands.command("list")
@click.argument("topic")
@click.option("-n", "--count", type=click.IntRange(1), help="How many at most [all].")
@with_session
def list_scheduled(session: Session, topic: str, count: int | None) -> None:
    """List the messages of TOPIC that are not due yet, the next one first."""
    rows = _due_rows(session.admin.scheduled(topic, limit=count))
    show_rows(rows, session.output, ["id", "due", "key", "content_type", "value"])


def _due_rows(messages: Iterator[Message]) -> Iterator[dict[str, Any]]:
    for message in messages:
        due = message.deliver_at_ms
        shown = None if due is None else datetime.fromtimestamp(due / 1000, UTC).isoformat(timespec="milliseconds")
        yield {**message_row(message), "due": shown}


def _selection(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the arguments that select scheduled messages."""
    for add in (
        click.option("--dry-run", is_flag=True, help="Count them, and change nothing."),
        click.option("--limit", type=click.IntRange(1, wire.BATCH_MESSAGES_MAX), default=1_000, show_default=True,
                     help="At most so many, the next due first."),
        click.option("--all", "everything", is_flag=True, help="All that is scheduled."),
        click.option("--where", callback=where_given, metavar="JSON", help='Only these, e.g. {"value.user":{"eq":7}}.'),
        click.argument("ids", nargs=-1),
        click.argument("topic"),
    ):  # fmt: skip
        command = add(command)
    return command


@scheduled_commands.command()
@_selection
@click.option("-y", "--yes", is_flag=True, help="Do not ask (--all asks).")
@with_session
def cancel(session: Session, topic: str, ids: tuple[str, ...], yes: bool, **options: Any) -> None:
    """Cancel messages of TOPIC that are not due yet: those with IDS, or --where, or --all.

    Example: portalmq scheduled cancel reminders --where '{"value.user":{"eq":7}}' --dry-run
    """
    _check_selection(ids, options)
    if options["everything"] and not yes and not options["dry_run"]:
        click.confirm(f"Cancel all scheduled messages of {topic} (at most {options['limit']})?", abort=True, err=True)
    if ids and not options["dry_run"]:
        for each in ids:
            session.admin.cancel_scheduled(topic, each)
            click.echo(f"message {each} of {topic} is cancelled", err=True)
        return
    _change(session, topic, "cancel", ids, options)


@scheduled_commands.command()
@_selection
@with_session
def run(session: Session, topic: str, ids: tuple[str, ...], **options: Any) -> None:
    """Deliver scheduled messages of TOPIC now: those with IDS, or --where, or --all. Copies with new ids are delivered.

    Example: portalmq scheduled run reminders 0-17
    """
    _change(session, topic, "run", ids, options)


@scheduled_commands.command()
@_selection
@click.option("--at", "deliver_at", callback=future_time, metavar="TIME", help="Deliver at a time (RFC 3339).")
@click.option("--delay", "delay_s", callback=duration, metavar="DURATION", help="Deliver after 90s, 15m, 2h, 7d.")
@with_session
def move(
    session: Session,
    topic: str,
    ids: tuple[str, ...],
    deliver_at: datetime | None,
    delay_s: float | None,
    **options: Any,
) -> None:
    """Deliver scheduled messages of TOPIC at another time: those with IDS, or --where, or --all. Copies with new ids
    are delivered.

    Example: portalmq scheduled move reminders --all --delay 2h
    """
    if (deliver_at is None) == (delay_s is None):
        raise click.UsageError("give --at, or --delay")
    if delay_s is not None:
        deliver_at = datetime.now(UTC) + timedelta(seconds=delay_s)
    _change(session, topic, "move", ids, options, deliver_at)


def _change(
    session: Session,
    topic: str,
    action: Literal["run", "move", "cancel"],
    ids: tuple[str, ...],
    options: dict[str, Any],
    deliver_at: datetime | None = None,
) -> None:
    _check_selection(ids, options)
    del options["everything"]
    changed = session.admin.change_scheduled(topic, action, ids=ids or None, deliver_at=deliver_at, **options)
    show_one(changed, session.output)
    if options["dry_run"]:
        click.echo("nothing was changed (--dry-run)", err=True)


def _check_selection(ids: tuple[str, ...], options: dict[str, Any]) -> None:
    if bool(ids) + (options["where"] is not None) + options["everything"] != 1:
        raise click.UsageError("give ids, or --where, or --all")
