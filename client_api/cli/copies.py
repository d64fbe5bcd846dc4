"""`portalmq copy`: an edited copy of a message. `portalmq move`: messages of a topic to another one."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

import click
import msgspec

from portalmq import wire
from portalmq.cli.options import FiniteRange, duration, future_time, message_headers
from portalmq.cli.output import show_one
from portalmq.cli.session import Session, with_session

MOVED_PER_CALL = 1_000


@click.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@click.option("--to", "to_topic", metavar="TOPIC", help="Copy to this topic [the same].")
@click.option("--value", help="The copy's value: JSON where it can be read as such, else text [the same].")
@click.option("-k", "--key", help="The copy's key [the same].")
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", callback=message_headers,
    help="Set a header of the copy.",
)  # fmt: skip
@click.option("--without", multiple=True, metavar="NAME", help="Leave this header out.")
@click.option(
    "--delay", "delay_s", callback=duration, metavar="DURATION", help="Deliver after 500ms, 90s, 15m, 2h, 7d."
)
@click.option("--at", "deliver_at", callback=future_time, metavar="TIME", help="Deliver at a time (RFC 3339).")
@click.option("--priority", type=click.IntRange(0, 31), help="0 to 31; greater ones come first [the same].")
@with_session
def copy(
    session: Session,
    topic: str,
    message_id: str,
    headers: dict[str, str] | None,
    without: tuple[str, ...],
    delay_s: float | None,
    deliver_at: datetime | None,
    **options: Any,
) -> None:
    """Send a copy of message ID of TOPIC, with changes. Its header portalmq-copy-of names the original.

    Example: portalmq copy orders.dlq 0-17 --to orders --value '{"amount": 5}'
    """
    if delay_s is not None and deliver_at is not None:
        raise click.UsageError("give --delay, or --at, and not both")
    changes = {name: value for name, value in options.items() if value is not None}
    if "value" in changes:
        changes["value"] = _json_or_text(changes["value"])
    if headers or without:
        changes["headers"] = {**dict.fromkeys(without), **(headers or {})}
    if delay_s is not None:
        changes["delay_ms"] = round(delay_s * 1000)
    if deliver_at is not None:
        changes["deliver_at_ms"] = round(deliver_at.timestamp() * 1000)
    made = session.admin.copy_message(topic, message_id, **changes)
    show_one({"id": f"{made.partition}-{made.offset}", "topic": made.topic}, session.output)


@click.command()
@click.argument("topic")
@click.argument("to_topic")
@click.option("--group", default="default", show_default=True, help="What is ready for this queue group.")
@click.option("--limit", type=click.IntRange(1), help="How many at most [all].")
@click.option("--rate", "rate_per_s", type=FiniteRange(0, min_open=True), metavar="N", help="At most N a second.")
@click.option("--dry-run", is_flag=True, help="Count them, and change nothing.")
@with_session
def move(
    session: Session,
    topic: str,
    to_topic: str,
    group: str,
    limit: int | None,
    rate_per_s: float | None,
    dry_run: bool,
) -> None:
    """Move what is ready for a group in TOPIC to TO_TOPIC. The messages are done for that group, and others still have
    them. The header portalmq-copy-of of each copy names its original.

    Example: portalmq move orders.dlq orders --rate 100
    """
    matched, moved, refused = None, 0, wire.Moved(0, 0)
    while limit is None or moved < limit:
        part = MOVED_PER_CALL if limit is None else min(limit - moved, MOVED_PER_CALL)
        done = session.admin.move(group, topic, to_topic, limit=part, rate_per_s=rate_per_s, dry_run=dry_run)
        matched = done.matched if matched is None else matched
        moved += done.moved
        refused = done if done.refused else refused
        if not done.moved or done.moved >= done.matched:
            break
        if rate_per_s is not None:  # the next call's copies begin when these have been delivered
            time.sleep(done.moved / rate_per_s)
    shown = {"matched": max(matched or 0, moved), "moved": moved}
    if refused.refused:
        shown["refused"] = refused.refused
    show_one(shown, session.output)
    if refused.refusal:
        click.echo(f"{refused.refused} stay where they are: {refused.refusal}", err=True)
    if dry_run:
        click.echo("nothing was changed (--dry-run)", err=True)


def _json_or_text(given: str) -> Any:
    try:
        return msgspec.Raw(msgspec.json.format(given.encode(), indent=-1))
    except msgspec.DecodeError:
        return given
