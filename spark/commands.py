"""`portalmq report`: the throughput report of brokers' data directories.

This module is loaded for every `portalmq` command, so it imports its dependencies only when it runs.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from portalmq.spark.report.words import duration, plural, size

if TYPE_CHECKING:
    from portalmq.spark.report.model import Report


@click.command(short_help="Make a throughput report with Spark: HTML, JSON and Parquet.")
@click.option(
    "--data-dir",
    "data_dirs",
    multiple=True,
    required=True,
    type=click.Path(path_type=Path),
    help="a broker's data directory; one for each broker, so that every partition is there",
)
@click.option("--out", required=True, type=click.Path(path_type=Path), help="directory to put the report in")
@click.option("--topic", "topics", multiple=True, help="this topic alone; may be repeated [all but internal ones]")
@click.option("--master", help="Spark master, as spark-submit takes it [local[*]]")
@click.option(
    "-o", "--output", "form", default="table", show_default=True, type=click.Choice(["table", "json"]), help="summary"
)
def report(data_dirs: tuple[Path, ...], out: Path, topics: tuple[str, ...], master: str | None, form: str) -> None:
    """Report how much went through the queue, how evenly, and how fast it was delivered: OUT/report.html to look at,
    OUT/report.json with the same figures, OUT/parquet for further analysis.

    Brokers may keep running: only committed messages are read, each once.

    Example: portalmq report --data-dir data/5000 --data-dir data/5001 --data-dir data/5002 --out report
    """
    try:
        from portalmq.spark.analysis import analyse
        from portalmq.spark.errors import BadOption, NothingThere, SourceError
        from portalmq.spark.report import model
        from portalmq.spark.report.output import PAGE, OutputUnusable
        from portalmq.spark.session import SparkMissing
    except ImportError as missing:
        _end(f"{missing.name} is not installed: `pip install 'portalmq[spark]'`", 2)
    try:
        made = analyse(data_dirs, out, topics=topics or None, master=master)
    except (SparkMissing, OutputUnusable) as fault:
        _end(str(fault), fault.exit_code)
    except (BadOption, NothingThere) as fault:
        _end(str(fault), 2)
    except SourceError as fault:
        _end(str(fault), 1)
    if form == "json":
        click.echo(model.to_json(made))
    else:
        click.echo("\n".join(summary(made)))
    click.echo(f"report: {out / PAGE}", err=form == "json")


def _end(sentence: str, exit_code: int) -> None:
    click.echo(f"portalmq: {sentence}", err=True)
    sys.exit(exit_code)


def summary(made: Report) -> list[str]:
    """Return the main figures in five lines."""
    from portalmq.spark.report.view import changes_of_leaders

    totals = made.totals
    delivered = sum(group.delivered for group in made.groups)
    redelivered = sum(group.redelivered for group in made.groups)
    lag = sum(each.lag for each in made.lag)
    oldest = max((each.oldest_ms for each in made.lag if each.oldest_ms is not None), default=None)
    medians = [group.latency_ms.p50 for group in made.groups if group.latency_ms is not None]
    changes = changes_of_leaders(made.fail_overs)
    gaps = [each.gap_ms for each in changes if each.gap_ms is not None]
    partitions = f"{plural(totals.topics, 'topic')}, {plural(totals.partitions, 'partition')}"
    appended = f"{totals.messages:,} ({size(totals.bytes)}) in {partitions}, by {plural(totals.producers, 'producer')}"
    least = "at least " if "groups" in made.left_out else ""
    deliveries = f"{least}{delivered:,} to {plural(totals.groups, 'group')}, {redelivered:,} of them more than once"
    if medians:
        deliveries += f"; median {duration(min(medians))} to {duration(max(medians))}"
    lines = [
        f"messages    {appended}{_when(totals.first_ms, totals.last_ms)}",
        f"throughput  {totals.messages_per_s:,.0f}/s on average, {totals.peak_messages_per_s:,.0f}/s at best",
        f"delivered   {deliveries}",
        f"lag         {lag:,}" + ("" if oldest is None else f", the oldest for {duration(oldest)}"),
        f"fail-overs  {len(changes)}" + (f", at most {duration(max(gaps))} without an append" if gaps else ""),
    ]
    return [line.replace("\u00a0", " ") for line in lines]


def _when(first_ms: int | None, last_ms: int | None) -> str:
    if first_ms is None or last_ms is None:
        return ""
    first, last = (datetime.fromtimestamp(ms / 1000, UTC) for ms in (first_ms, last_ms))
    return f", {first:%Y-%m-%d %H:%M:%S} to {last:%Y-%m-%d %H:%M:%S} UTC"
