"""`portalmq topic`: create, list, show, alter, delete, purge."""

from __future__ import annotations

from typing import Any

import click

from portalmq.cli.options import config_option
from portalmq.cli.output import show_one, show_rows
from portalmq.cli.session import Session, fields, with_session

_PARTITION_COLUMNS = ["partition", "leader", "leader_epoch", "replicas", "isr"]
_PARTITION_COLUMNS += ["log_start_offset", "high_watermark", "size_bytes"]


@click.group("topic")
def topic_commands() -> None:
    """Create, show and change topics."""


@topic_commands.command()
@click.argument("name")
@click.option("-p", "--partitions", type=click.IntRange(1), help="How many partitions [1].")
@click.option("-r", "--replication-factor", type=click.IntRange(1), help="How many brokers store each partition.")
@config_option("retention_ms=3600000")
@with_session
def create(session: Session, name: str, **options: Any) -> None:
    """Create topic NAME. Succeeds if it exists with the given partitions, replicas and settings."""
    session.admin.create_topic(name, **options)
    click.echo(f"topic {name} is there", err=True)


@topic_commands.command("list")
@with_session
def list_topics(session: Session) -> None:
    """List all topics."""
    show_rows(map(fields, session.admin.topics()), session.output, ["name", "partitions", "replication_factor"])


@topic_commands.command()
@click.argument("name")
@with_session
def show(session: Session, name: str) -> None:
    """Show topic NAME: its partitions and settings."""
    topic = fields(session.admin.describe(name))
    if session.output == "table":
        partitions = topic.pop("partitions")
        config = topic.pop("config")
        show_one({**topic, **config}, session.output)
        show_rows(partitions, session.output, _PARTITION_COLUMNS)
    else:
        show_one(topic, session.output)


@topic_commands.command()
@click.argument("name")
@click.option("-p", "--partitions", type=click.IntRange(1), help="The new number of partitions; it only grows.")
@config_option("retention_ms=3600000")
@click.option("--force", is_flag=True, help="Add partitions though a group reads the topic in key order.")
@with_session
def alter(session: Session, name: str, partitions: int | None, config: dict[str, Any] | None, force: bool) -> None:
    """Change settings of topic NAME (NAME=null restores the default), or add partitions."""
    if partitions is None and config is None:
        raise click.UsageError("nothing to change: give --partitions or --config")
    session.admin.alter_topic(name, partitions=partitions, config=config, force=force)
    click.echo(f"topic {name} is changed", err=True)


@topic_commands.command()
@click.argument("name")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--force", is_flag=True, help="Also while outputs of its commits are on their way: they are lost.")
@with_session
def delete(session: Session, name: str, yes: bool, force: bool) -> None:
    """Delete topic NAME with all its messages."""
    if not yes:
        click.confirm(f"Delete topic {name} and all its messages?", abort=True, err=True)
    session.admin.delete_topic(name, force=force)
    click.echo(f"topic {name} is deleted", err=True)


@topic_commands.command()
@click.argument("name")
@click.option("--partition", type=click.IntRange(0), help="Only this partition.")
@click.option("--before-offset", type=click.IntRange(0), help="Only messages below this offset.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@with_session
def purge(session: Session, name: str, partition: int | None, before_offset: int | None, yes: bool) -> None:
    """Delete the messages of topic NAME, but not the topic."""
    if not yes:
        click.confirm(f"Delete the messages of topic {name}?", abort=True, err=True)
    session.admin.purge(name, partition=partition, before_offset=before_offset)
    click.echo(f"topic {name} is purged", err=True)
