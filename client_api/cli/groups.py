"""`portalmq group`: list, show, lag."""

from __future__ import annotations

import click

from portalmq.cli.output import show_one, show_rows
from portalmq.cli.session import Session, fields, with_session

_COLUMNS = ["group", "mode", "ready", "in_flight", "scheduled", "dead", "lag", "oldest_unacked_ms"]


@click.group("group")
def group_commands() -> None:
    """Show consumer groups."""


@group_commands.command("list")
@with_session
def list_groups(session: Session) -> None:
    """List all groups."""
    with session.admin() as admin:
        show_rows(map(fields, admin.groups()), session.output, _COLUMNS)


@group_commands.command()
@click.argument("name")
@with_session
def show(session: Session, name: str) -> None:
    """Show group NAME: its messages by state, its consumers, its settings."""
    with session.admin() as admin:
        group = fields(admin.group(name))
    if session.output == "table":
        config = group.pop("config")
        group = {**group, **config}
    show_one(group, session.output)


@group_commands.command()
@click.argument("name")
@with_session
def lag(session: Session, name: str) -> None:
    """Show how many messages group NAME has not yet acked, and how old the oldest is."""
    with session.admin() as admin:
        group = admin.group(name)
    show_one({"group": name, "lag": group.lag, "oldest_unacked_ms": group.oldest_unacked_ms}, session.output)
