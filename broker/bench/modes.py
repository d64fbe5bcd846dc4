"""Options of `portalmq bench --peers`, and the run: what to measure, within which time, and where reports go."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from portalmq.broker.bench.systems import System

Command = TypeVar("Command", bound=Callable[..., Any])

QUICK_SECONDS = 0.5
QUICK_GROWTH = ("size", "batch", "connections")


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


_FILE = click.Path(path_type=Path, dir_okay=False)

_OPTIONS = (
    click.option("--systems", callback=_names, help="With --peers: only these systems (default: all)."),
    click.option("--cases", callback=_names, help="Only these cases of --peers or --growth."),
    click.option("--sizes", callback=_numbers, default="100,1024", show_default=True, help="Bytes of a message."),
    click.option("--batches", callback=_numbers, default="1,100,1000", show_default=True, help="Messages of a batch."),
    click.option("--processes", callback=_numbers, default="1,4", show_default=True, help="Clients at a time."),
    click.option("--seconds", type=click.FloatRange(0.1), default=2.0, show_default=True, help="Time of each case."),
    click.option("--kills", type=click.IntRange(1), default=3, show_default=True, help="Leaders to kill and to stop."),
    click.option("--outage", type=click.FloatRange(1), default=10.0, show_default=True, help="Seconds after a signal."),
    click.option("--points", callback=_numbers, help="With --growth: where to measure (default: each case's own)."),
    click.option("--plots", type=click.Path(path_type=Path, file_okay=False), help="With --growth: a folder for SVGs."),
    click.option("--quick", is_flag=True, help="Measure less, in about a minute."),
    click.option("--json", "json_file", type=_FILE, help="Write all results to this file."),
    click.option("--markdown", "markdown_file", type=_FILE, help="Write the tables to this file."),
)


def options(command: Command) -> Command:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def compare(
    directory: Path,
    rounds: int,
    *,
    systems: Sequence[str],
    cases: Sequence[str],
    sizes: Sequence[int],
    batches: Sequence[int],
    processes: Sequence[int],
    seconds: float,
    kills: int,
    outage: float,
    quick: bool,
    json_file: Path | None,
    markdown_file: Path | None,
    **_: Any,
) -> None:
    """Measure PortalMQ beside its peers, and report."""
    from portalmq.broker.bench import report
    from portalmq.broker.bench.comparison import CASES, CasePlan, compared
    from portalmq.broker.bench.measure import machine
    from portalmq.broker.bench.peers import PEERS
    from portalmq.broker.bench.systems import OneBroker, ThreeBrokers

    kinds: tuple[type[System], ...] = (OneBroker, ThreeBrokers, *PEERS)
    known = {kind.name: kind() for kind in kinds}
    chosen = _chosen("system", systems, list(known))
    plan = CasePlan(_chosen("case", cases, list(CASES)), sizes, batches, processes, seconds, rounds, kills, outage)
    left_out: dict[str, str] = {name: why for name in chosen if (why := known[name].left_out())}
    if quick:
        plan = CasePlan([case for case in plan.cases if case != "gap"], [100], [1, 100], [1], QUICK_SECONDS, 1, 0, 0)
        left_out |= {name: "not with --quick" for name in chosen if known[name].nodes > 1}
    measurable: list[System] = [known[name] for name in chosen if name not in left_out]
    begin = time.time()
    with ended_by_sigterm():
        results, calibrations, failures = compared(measurable, plan, directory, _tell)
    about = {
        each.name: {"nodes": each.nodes, "promise": each.promise, "version": each.version()} for each in measurable
    }
    found = {"machine": machine(), "began": begin, "took_s": time.time() - begin, "systems": about}
    found |= {"results": results, "calibrations": calibrations, "left_out": left_out | failures}
    tables = report.comparison_tables(found)
    click.echo(report.as_text(tables))
    report.write(found, tables, json_file, markdown_file)
    if failures:
        sys.exit(1)


def grow(
    directory: Path,
    *,
    cases: Sequence[str],
    points: Sequence[int],
    seconds: float,
    quick: bool,
    plots: Path | None,
    json_file: Path | None,
    markdown_file: Path | None,
    **_: Any,
) -> None:
    """Measure how cost grows, and report. With `quick` on one broker, at the first points."""
    from portalmq.broker.bench import report
    from portalmq.broker.bench.growth import CASES, grown
    from portalmq.broker.bench.measure import calibration, machine

    chosen = _chosen("case", cases, list(CASES))
    if len(chosen) > 1 and points:
        raise click.UsageError("--points are those of one case: name it with --cases")
    if quick:
        chosen, seconds = [name for name in chosen if name in QUICK_GROWTH], QUICK_SECONDS
    begin, noise = time.time(), [calibration(directory)]
    with ended_by_sigterm():
        figures, failures = grown(chosen, points, seconds, directory, _tell)
    noise.append(calibration(directory))
    found = {"machine": machine(), "began": begin, "took_s": time.time() - begin, "calibrations": noise}
    found |= {"cases": figures, "left_out": failures}
    tables = report.growth_tables(found)
    click.echo(report.as_text(tables))
    report.write(found, tables, json_file, markdown_file)
    if plots is not None:
        plots.mkdir(parents=True, exist_ok=True)
        for name, taken in figures.items():
            (plots / f"growth-{name}.svg").write_text(report.plot(name, taken), "utf-8")
    if failures:
        sys.exit(1)


def _chosen(kind: str, names: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise click.UsageError(f"no {kind} {', '.join(unknown)}: there are {', '.join(known)}")
    return names or known


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
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
