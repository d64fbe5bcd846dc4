"""`portalmq status`: brokers, controller, and partitions that need attention.

A partition needs attention if it has no leader (it can be neither sent to nor received from), or a replica is not in
sync (it survives one failure less than intended).
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import msgspec

from portalmq import wire
from portalmq.admin import Admin
from portalmq.cli.output import show_one, show_rows
from portalmq.cli.session import Session, fields, with_session
from portalmq.errors import TopicNotFound

DATA_DIR = Path("data/cluster")

WITHOUT_LEADER = "without leader"
UNDER_REPLICATED = "under-replicated"

Row = dict[str, Any]


def needing_attention(topic: wire.TopicDescription, brokers: int) -> Iterable[Row]:
    """Yield the topic's partitions that need attention, each with its problem; `missing` are the replicas not in sync.

    `brokers` is the cluster's number of brokers: more replicas than that are impossible, and do not count as missing.
    """
    for partition in topic.partitions:
        missing = sorted(set(partition.replicas) - set(partition.isr))
        too_few = len(partition.replicas) < min(topic.replication_factor, brokers)
        problem = WITHOUT_LEADER if partition.leader is None else UNDER_REPLICATED if missing or too_few else None
        if problem is not None:
            yield {
                "topic": topic.name,
                "partition": partition.partition,
                "problem": problem,
                "leader": partition.leader,
                "replicas": partition.replicas,
                "isr": partition.isr,
                "missing": missing,
            }


class _Running(msgspec.Struct):
    """The used part of the file that `portalmq up` writes."""

    urls: list[str]


def _running_here(data_dir: Path) -> str | None:
    """Return the brokers that `portalmq up` started from this directory, if any."""
    try:
        return ",".join(msgspec.json.decode((data_dir / "cluster.json").read_bytes(), type=_Running).urls) or None
    except (OSError, msgspec.DecodeError):
        return None


def _described(admin: Admin) -> Iterable[wire.TopicDescription]:
    for summary in admin.topics():
        with contextlib.suppress(TopicNotFound):  # deleted just now
            yield admin.describe(summary.name)


@click.command()
@click.option(
    "--data-dir", default=DATA_DIR, show_default=True, type=click.Path(path_type=Path, file_okay=False),
    help="Data directory of `portalmq up`, whose brokers are asked if none is named.",
)  # fmt: skip
@with_session
def status(session: Session, data_dir: Path) -> None:
    """Show the cluster: its brokers, its controller, and the partitions that need attention.

    Example: portalmq status -o json
    """
    if session.server is None and not os.environ.get("PORTALMQ_URL"):
        session.server = _running_here(data_dir)
    admin = session.admin
    cluster = admin.cluster()
    topics = list(_described(admin))
    leads = Counter(partition.leader for topic in topics for partition in topic.partitions)
    attention = [row for topic in topics for row in needing_attention(topic, len(cluster.brokers))]
    silent = sum(not broker.live for broker in cluster.brokers)
    summary = {
        "state": "needs attention" if silent or attention or cluster.controller is None else "healthy",
        "cluster_id": cluster.cluster_id,
        "controller": cluster.controller,
        "topics": len(topics),
        "partitions": leads.total(),
        "brokers_not_live": silent,
        "without_leader": sum(row["problem"] == WITHOUT_LEADER for row in attention),
        "under_replicated": sum(row["problem"] == UNDER_REPLICATED for row in attention),
    }
    brokers = [
        {**fields(broker), "controller": broker.id == cluster.controller, "leads": leads[broker.id]}
        for broker in cluster.brokers
    ]
    if session.output != "table":
        more = {"brokers": brokers, "attention": attention, "health": admin.health()}
        show_one({**summary, **more}, session.output)
        return
    show_one(summary, "table")
    click.echo()
    show_rows(brokers, "table", ["id", "url", "live", "controller", "leads"])
    if attention:
        click.echo()
        show_rows(attention, "table", ["topic", "partition", "problem", "leader", "replicas", "isr"])
    # This is the state of one broker, not of the cluster.
    click.echo("\nThe broker that answered:")
    show_one({name: value for name, value in admin.health().items() if name not in summary}, "table")
