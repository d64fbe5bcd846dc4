"""`portalmq sql`: one SELECT over the files of a broker."""

from __future__ import annotations

from typing import Any

import click

from portalmq.cli.options import SecondsRange
from portalmq.cli.output import show_rows
from portalmq.cli.session import Session, with_session


@click.command()
@click.argument("query")
@click.option("-n", "--count", type=click.IntRange(1, 10_000), default=1_000, show_default=True, help="The most rows.")
@click.option(
    "--timeout", "timeout_s", type=SecondsRange(0.001, 30), default="5s", show_default=True,
    help="When the broker gives up: 2s, 500ms, or a number of seconds.",
)  # fmt: skip
@with_session
def sql(session: Session, query: str, count: int, timeout_s: float) -> None:
    """Run one SELECT over the files of the broker at --server: tables messages, batches and group_records.

    Example: portalmq sql "SELECT topic, count(*) FROM messages GROUP BY topic"
    """
    if not query.strip():
        raise click.UsageError("the query is empty: write one SELECT")
    found = session.admin.sql(query, limit=count, timeout_s=timeout_s)
    columns = _told_apart(found.columns)
    show_rows((_row(columns, each) for each in found.rows), session.output, columns)
    if found.truncated:
        click.echo("... and more: -n shows more of them", err=True)


def _told_apart(columns: list[str]) -> list[str]:
    """Return the names of the columns; one that was there before gets its place too."""
    return [name if name not in columns[:at] else f"{name}:{at}" for at, name in enumerate(columns)]


def _row(columns: list[str], values: list[Any]) -> dict[str, Any]:
    return dict(zip(columns, values, strict=True))
