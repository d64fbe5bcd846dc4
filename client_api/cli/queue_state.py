"""`portalmq queue`: the messages that a queue group has not finished, and their states."""

from __future__ import annotations

from itertools import islice
from typing import Any

import click

from portalmq.admin import Unfinished
from portalmq.cli.output import message_row, show_one, show_rows, time_text
from portalmq.cli.session import Session, fields, with_session

_COLUMNS = ["id", "state", "deliveries", "sent", "available", "key", "value"]


@click.command()
@click.option("--topic", default="default", show_default=True, help="The queue.")
@click.option("--group", default="default", show_default=True, help="The group that consumes it.")
@click.option(
    "-n", "--count", type=click.IntRange(0), default=100, show_default=True, help="How many messages at most."
)
@with_session
def queue(session: Session, topic: str, group: str, count: int) -> None:
    """Show a queue's state: its messages by state, and each one that is not finished.

    Messages are in log order, partition by partition. This consumes and changes nothing; a group that was never used
    has every message before it.

    Example: portalmq queue --topic orders --group billing -n 20
    """
    with session.admin() as admin:
        counts = fields(admin.queue_counts(group, topic))
        found = admin.unfinished(group, topic, limit=count + 1)
        rows = list(map(_row, islice(found, count + 1))) if count else []
    shown, more = rows[:count], len(rows) > count
    if session.output == "json":
        show_one({"topic": topic, "group": group, **counts, "messages": shown, "more": more}, "json")
        return
    click.echo("  ".join(f"{name} {number}" for name, number in counts.items()), err=True)
    show_rows(shown, session.output, _COLUMNS)
    if more:
        click.echo("... and more: -n shows another number of them", err=True)


def _row(unfinished: Unfinished) -> dict[str, Any]:
    row = message_row(unfinished.message)
    row.pop("delivery_count", None)
    return {
        **row,
        "state": unfinished.state,
        "deliveries": unfinished.message.delivery_count,
        "sent": time_text(unfinished.message.timestamp_ms),
        "available_at_ms": unfinished.available_at_ms,
        "available": None if unfinished.available_at_ms is None else time_text(unfinished.available_at_ms),
    }
