"""`portalmq bench`: what to measure, within which time, and where reports go.

On a shared machine only ratios of one run are meaningful, so PortalMQ is measured beside bare SQLite and a bare POST
and, on request, beside its peers. Loaded for every `portalmq` command, so it imports the measurements when they run.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from portalmq.broker.bench.systems import System

QUICK_SECONDS = 0.5
QUICK_GROWTH = ("size", "batch", "connections")
_FILE = click.Path(path_type=Path, dir_okay=False, writable=True)
_FOLDER = click.Path(path_type=Path, file_okay=False)


def _numbers(_: click.Context, option: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Read positive whole numbers with commas between them."""
    try:
        numbers = tuple(int(each) for each in value.split(",")) if value else ()
    except ValueError:
        numbers = (0,)
    if min(numbers, default=1) < 1:
        raise click.BadParameter(f"{value!r} is not a list of positive whole numbers such as 1,100,1000", param=option)
    return numbers


def _names(_: click.Context, option: click.Parameter, value: str | None) -> tuple[str, ...]:
    return tuple(each.strip() for each in value.split(",")) if value else ()


def _in_a_folder(_: click.Context, option: click.Parameter, file: Path | None) -> Path | None:
    """Refuse a file that could not be written in the end."""
    if file is not None and not file.parent.is_dir():
        raise click.BadParameter(f"there is no folder {file.parent}", param=option)
    if file is not None and not os.access(file.parent, os.W_OK) and not file.exists():
        raise click.BadParameter(f"the folder {file.parent} is not writable", param=option)
    return file


@click.command()
@click.option("--peers", is_flag=True, help="Measure Redis, RabbitMQ and NATS too, those that are installed.")
@click.option("--growth", is_flag=True, help="Measure how cost grows with sizes and numbers of all kinds.")
@click.option("--seeds", is_flag=True, help="Measure the older queues' protocols, ZeroMQ and HTTP side by side.")
@click.option("--quick", is_flag=True, help="Measure less, in about a minute.")
@click.option("--systems", callback=_names, help="Only these systems.")
@click.option("--cases", callback=_names, help="Only these of produce, consume, wake, gap, or of --growth.")
@click.option("--points", callback=_numbers, help="With --growth: where to measure (default: each case's own).")
@click.option("--sizes", callback=_numbers, default="100", show_default=True, help="Bytes of a message.")
@click.option("--batches", callback=_numbers, default="1,100,1000", show_default=True, help="Messages of a batch.")
@click.option("--processes", callback=_numbers, default="1,4", show_default=True, help="Clients at a time.")
@click.option("--seconds", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Time of each case.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Rounds; medians are shown.")
@click.option("--kills", type=click.IntRange(1), default=3, show_default=True, help="Leaders to kill and to stop.")
@click.option(
    "--outage", "after_s", type=click.FloatRange(1), default=10.0, show_default=True, help="Seconds after a signal."
)
@click.option("--data-dir", type=_FOLDER, help="Where to measure (default: a temporary directory).")
@click.option("--json", "json_file", type=_FILE, callback=_in_a_folder, help="Write all results to this file.")
@click.option("--markdown", "markdown_file", type=_FILE, callback=_in_a_folder, help="Write the tables to this file.")
@click.option("--plots", type=_FOLDER, help="With --growth: write SVGs to this folder.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
def bench(
    *,
    peers: bool,
    growth: bool,
    seeds: bool,
    points: tuple[int, ...],
    data_dir: Path | None,
    json_file: Path | None,
    markdown_file: Path | None,
    plots: Path | None,
    output: str,
    **chosen: Any,
) -> None:
    """Measure PortalMQ on this machine, compared with bare SQLite, a bare POST and, with --peers, other systems."""
    from portalmq.broker.bench import report

    if data_dir is not None:
        data_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=data_dir) as temporary, _ended_by_sigterm():
        directory = Path(temporary)
        if seeds:
            from portalmq.broker.bench import protocols

            found: dict[str, Any] = protocols.measured(directory, chosen["rounds"])
            tables = protocols.tables(found)
        elif growth:
            found = _reported(_growth, directory, points=points, **chosen)
            tables = report.growth_tables(found)
        else:
            found = _reported(_comparison, directory, peers=peers, **chosen)
            tables = report.comparison_tables(found)
    click.echo(json.dumps(found, indent=2) if output == "json" else report.as_text(tables))
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=2) + "\n", "utf-8")
    if markdown_file is not None:
        markdown_file.write_text(report.as_markdown(tables), "utf-8")
    if growth and plots is not None:
        report.write_plots(found, plots)
    if failed := found.get("failed"):
        for what, why in failed.items():
            _tell(f"{what}: {why}")
        sys.exit(1)


def _reported(measure: Callable[..., dict[str, Any]], directory: Path, **chosen: Any) -> dict[str, Any]:
    from portalmq.broker.bench.measure import machine

    begin = time.time()
    found = measure(directory, **chosen)
    return {"machine": machine(), "began": begin, "took_s": time.time() - begin, **found}


def _comparison(
    directory: Path, peers: bool, quick: bool, systems: Sequence[str], cases: Sequence[str], **timing: Any
) -> dict[str, Any]:
    from portalmq.broker.bench.comparison import CASES, CasePlan, compared
    from portalmq.broker.bench.peers import PEERS
    from portalmq.broker.bench.systems import SYSTEMS

    known: dict[str, System] = {kind.name: kind() for kind in (*SYSTEMS, *(PEERS if peers else ()))}
    plan = CasePlan(_known("case", cases, CASES), **timing)
    chosen = _known("system", systems, list(known))
    left_out = {name: why for name in chosen if (why := known[name].left_out())}
    if quick:
        plan = CasePlan([case for case in plan.cases if case != "gap"], [100], [1, 100], [1], QUICK_SECONDS, 1, 0, 0)
        left_out |= {name: "not with --quick" for name in chosen if known[name].nodes > 1}
    measurable = [known[name] for name in chosen if name not in left_out]
    results, noise, failed = compared(measurable, plan, directory, _tell)
    about = {each.name: {"nodes": each.nodes, "ack": each.promise, "version": each.version()} for each in measurable}
    return {"systems": about, "results": results, "calibrations": noise, "left_out": left_out, "failed": failed}


def _growth(
    directory: Path, quick: bool, cases: Sequence[str], points: Sequence[int], seconds: float, **_: Any
) -> dict[str, Any]:
    from portalmq.broker.bench.growth import CASES, grown
    from portalmq.broker.bench.measure import calibration

    chosen = _known("case", cases, list(CASES))
    if len(chosen) > 1 and points:
        raise click.UsageError("--points are those of one case: name it with --cases")
    if quick:
        chosen, seconds = [name for name in chosen if name in QUICK_GROWTH], QUICK_SECONDS
    noise = [{"before": "the first case", **calibration(directory)}]
    figures, failed = grown(chosen, points, seconds, directory, _tell)
    noise.append({"before": "the end", **calibration(directory)})
    return {"calibrations": noise, "cases": figures, "left_out": {}, "failed": failed}


def _known(kind: str, names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """Return the names, or all that are known without any."""
    if unknown := [name for name in names if name not in known]:
        raise click.UsageError(f"no {kind} {', '.join(unknown)}: there are {', '.join(known)}")
    return names or known


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """End servers and workers on SIGTERM as on Ctrl-C."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(line: str) -> None:
    click.echo(line, err=True)
