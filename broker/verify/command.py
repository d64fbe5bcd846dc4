"""`portalmq verify`: what was asked for, what was found, and the exit code.

The parts that read files need the packages of a broker, and are loaded for --data-dir alone.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import msgspec

from portalmq.broker.verify.compare import WRONG, PartitionFinding
from portalmq.broker.verify.live import LivePartition, partitions_of
from portalmq.broker.verify.receipts import Receipts, ReceiptsFinding
from portalmq.cli.output import show_one, show_rows, write_no_more
from portalmq.cli.receipts import BadReceipts
from portalmq.cli.session import Session, with_session
from portalmq.errors import TopicNotFound, Unavailable

EXIT_WRONG = 3
EXIT_UNKNOWN = 4
HASH_SHOWN = 12


class VerifyReport(msgspec.Struct):
    """All that was found. `state`: "ok", "wrong" or "unknown"."""

    state: str
    replicas: dict[str, int]
    partitions: list[PartitionFinding]
    receipts: ReceiptsFinding | None = None


@click.command()
@click.argument("topics", nargs=-1, metavar="[TOPIC]...")
@click.option(
    "--data-dir", "directories", multiple=True, type=click.Path(path_type=Path), metavar="DIR",
    help="Data directory of a stopped broker, in place of a running cluster; give those of all brokers.",
)  # fmt: skip
@click.option(
    "--receipts", "receipts_path", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE",
    help="Receipts of `portalmq produce --receipts`: look for each message, and compare it.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="The same as -o json.")
@with_session
def verify(
    session: Session, topics: tuple[str, ...], directories: tuple[Path, ...], receipts_path: Path | None, as_json: bool
) -> None:
    """Compare all replicas of each TOPIC (default: of those in the receipts, else of all) up to what is committed.

    Checks the checksums of all batches and files, too. Exit code 0: all is well. 3: something is different, damaged or
    missing. 4: nothing wrong was found, and not everything could be compared.

    Examples: portalmq verify; portalmq verify --data-dir data/5000 --data-dir data/5001 --data-dir data/5002
    """
    try:
        receipts = None if receipts_path is None else Receipts(receipts_path)
    except BadReceipts as fault:
        raise click.UsageError(str(fault)) from None
    wanted = sorted(set(topics) or {topic for topic, _ in (receipts.partitions if receipts else [])})
    found = _in_directories(directories, wanted, receipts) if directories else _live(session, wanted, receipts)
    report = _report(list(found), receipts)
    try:
        _show(report, "json" if as_json else session.output)
        sys.stdout.flush()
    except BrokenPipeError:  # a reader that has enough (`| head`) does not change what was found
        write_no_more()
    if report.state != "ok":
        click.get_current_context().exit(EXIT_WRONG if report.state == "wrong" else EXIT_UNKNOWN)


def _live(session: Session, wanted: list[str], receipts: Receipts | None) -> Iterator[PartitionFinding]:
    admin = session.admin
    brokers = len(admin.cluster().brokers)
    silent: dict[int, Unavailable] = {}
    named = wanted or [summary.name for summary in admin.topics()]
    for name in named:
        keys = [key for key in (receipts.partitions if receipts else []) if key[0] == name]
        try:
            topic = admin.describe(name)
        except TopicNotFound as gone:
            for key in keys:
                assert receipts is not None
                receipts.fail(key, "missing", gone.detail)
            if wanted and not keys:
                raise
            continue
        yield from partitions_of(admin, topic, brokers, silent)
        for key in keys:
            assert receipts is not None
            receipts.check(key, LivePartition(admin, *key, topic.config))


def _in_directories(
    paths: tuple[Path, ...], wanted: list[str], receipts: Receipts | None
) -> Iterator[PartitionFinding]:
    from portalmq.broker.verify.directories import opened

    with opened(paths) as directories:
        names = {topic.name for topic, _ in directories.partitions}
        left = set(receipts.partitions if receipts else ())
        if missing := [name for name in wanted if name not in names | {topic for topic, _ in left}]:
            raise TopicNotFound(f"there is no topic {missing[0]!r} in these directories")
        for topic, number in directories.partitions:
            if wanted and topic.name not in wanted:
                continue
            yield directories.compare(topic, number)
            if (key := (topic.name, number)) in left:
                assert receipts is not None
                left.discard(key)
                with directories.replicas(topic, number) as replicas:
                    for replica in replicas:
                        receipts.check(key, replica, directories.unsettled(topic, replica, replicas))
        for key in sorted(left):
            assert receipts is not None
            receipts.fail(key, "missing", "it is in none of the directories")


def _report(partitions: list[PartitionFinding], receipts: Receipts | None) -> VerifyReport:
    states: Counter[str] = Counter(each.state for found in partitions for each in found.replicas)
    outcomes = receipts.found.outcomes if receipts else {}
    is_wrong = any(states[state] for state in WRONG) or "missing" in outcomes or "different" in outcomes
    is_unknown = states.keys() - {"same"} or outcomes.keys() - {"present"}
    state = "wrong" if is_wrong else "unknown" if is_unknown else "ok"
    return VerifyReport(state, dict(states), partitions, receipts.found if receipts else None)


def _show(report: VerifyReport, form: Any) -> None:
    if form != "table":
        show_one(msgspec.to_builtins(report), form)
        return
    summary: dict[str, Any] = {"state": report.state, "partitions": len(report.partitions)}
    summary |= {f"replicas {state}": count for state, count in sorted(report.replicas.items())}
    if report.receipts is not None:
        summary["receipts"] = report.receipts.receipts
        summary |= {f"messages {outcome}": count for outcome, count in sorted(report.receipts.outcomes.items())}
    show_one(summary, "table")
    rows = [
        {
            "partition": f"{found.topic}/{found.partition}",
            **msgspec.to_builtins(each),
            "broker": each.broker if each.broker >= 0 else "?",
            "compared": f"{found.start} to {each.compared_to}",
            "sha256": each.sha256[:HASH_SHOWN],
        }
        for found in report.partitions
        for each in found.replicas
    ]
    if rows:
        click.echo()
        show_rows(rows, "table", ["partition", "broker", "state", "compared", "sha256"])
        for row in rows:
            if row["problem"]:
                click.echo(f"\n{row['partition']} on broker {row['broker']}: {row['problem']}")
    if report.receipts is not None and report.receipts.problems:
        click.echo()
        problems = [msgspec.to_builtins(each) for each in report.receipts.problems]
        show_rows(problems, "table", ["topic", "partition", "offset", "outcome", "where"])
        if report.receipts.not_named:
            click.echo(f"and {report.receipts.not_named} more", err=True)
    for reason in report.receipts.reasons if report.receipts else ():
        click.echo(reason, err=True)
