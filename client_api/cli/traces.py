"""`portalmq message`: one message by its id, and its life."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
import msgspec

from portalmq.admin import MessageLife
from portalmq.cli.output import message_row, show_one, show_rows, time_text
from portalmq.cli.session import Session, with_session

_COLUMNS = ["at", "event", "group", "consumer", "delivery", "until", "broker", "offset", "details"]


@click.group("message")
def message_commands() -> None:
    """Show a message, and what happened to it."""


@message_commands.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@with_session
def show(session: Session, topic: str, message_id: str) -> None:
    """Show message ID (PARTITION-OFFSET) of TOPIC. Consumes nothing."""
    show_one(message_row(session.admin.message(topic, message_id)), session.output)


@message_commands.command()
@click.argument("topic")
@click.argument("message_id", metavar="ID")
@click.option("--local", is_flag=True, help="As the broker that answers knows it from its own replica.")
@with_session
def trace(session: Session, topic: str, message_id: str, local: bool) -> None:
    """Tell the life of message ID (PARTITION-OFFSET) of TOPIC: appended, delivered, acked or dead, when and by whom.

    Example: portalmq message trace orders 0-17
    """
    life = session.admin.trace(topic, message_id, local=local)
    if session.output == "json":
        show_one(_whole(life), "json")
        return
    events: Iterable[dict[str, Any]] = map(msgspec.to_builtins, life.events)
    if session.output == "table":
        events = map(_row, events)
    show_rows(events, session.output, _COLUMNS)
    role = "the leader" if life.as_of.is_leader else "a follower"
    click.echo(
        f"as broker {life.as_of.broker}, {role}, knows it at {time_text(life.as_of.at_ms)}: committed below offset"
        f" {life.as_of.offset}; in sync {life.replicas.isr} of {life.replicas.replicas}",
        err=True,
    )
    if life.incomplete_below is not None:
        click.echo(f"records below offset {life.incomplete_below} were compacted away: events may be missing", err=True)


def _whole(life: MessageLife) -> dict[str, Any]:
    return {**msgspec.to_builtins(life._asdict() | {"message": None}), "message": message_row(life.message)}


def _row(event: dict[str, Any]) -> dict[str, Any]:
    details = [f"{name}={event[name]}" for name in ("to_topic", "to_id", "outputs") if name in event]
    details += ["unseen"] if event.get("unseen") else []
    details += [event["reason"]] if "reason" in event else []
    until_ms = event.get("until_ms")
    return {
        **event,
        "at": time_text(event["at_ms"]),
        "delivery": event.get("delivery_count"),
        "until": None if until_ms is None else time_text(until_ms),
        "details": " ".join(details) or None,
    }
