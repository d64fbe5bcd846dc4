"""The demo: a year of weather goes from sensors to controllers while the broker is killed half way.

Twelve sensors (four kinds at three airports) send each reading of 2013; for each kind two controllers share the three
topics. When half is sent the broker gets SIGKILL and is started again on the same data. At the end the books are
compared: each reading that was acknowledged to a sensor has to be in the ledger of a controller. The last line says
DEMO OK, and the exit code is 0, only if that is true.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from portalmq import Admin, PortalMQError
from portalmq.demo_iot import ledger
from portalmq.demo_iot.controller import verdict
from portalmq.demo_iot.crew import Broker, Crew, DemoFailed, Worker, wait_for
from portalmq.demo_iot.ledger import Comparison, Entry, Tally
from portalmq.demo_iot.readings import KINDS, STATIONS, topic_of, year

GROUP = "controllers"
CONTROLLERS_PER_KIND = 2
SENSOR_IDS = range(1, len(STATIONS) + 1)
# A reading that a controller had in hand when the broker was killed is delivered again after this time.
LEASE_S = 5.0
SEND_WITHIN_S = 300.0
DRAIN_WITHIN_S = 90.0
# Nothing sent and nothing delivered for so long means that somebody hangs.
STALLED_AFTER_S = 45.0
PROGRESS_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class Books:
    """Where everybody in a demo writes to."""

    directory: Path

    def sent(self, kind: str, number: int) -> Path:
        return self.directory / f"sent-{topic_of(kind, number)}.jsonl"

    def delivered(self, kind: str, number: int) -> Path:
        return self.directory / f"delivered-{kind}-{number}.jsonl"

    @property
    def all_sent(self) -> list[Path]:
        return [self.sent(kind, number) for kind in KINDS for number in SENSOR_IDS]

    @property
    def all_delivered(self) -> list[Path]:
        return [self.delivered(kind, number) for kind in KINDS for number in range(1, CONTROLLERS_PER_KIND + 1)]


class Demo:
    """One run. `counts` says how many readings each sensor sends, `seconds` how long that takes if nothing is in the
    way."""

    def __init__(self, crew: Crew, counts: dict[tuple[str, int], int], seconds: float) -> None:
        self._crew = crew
        self._counts = counts
        self._seconds = seconds
        self._books = Books(crew.directory)
        self._total = sum(counts.values())
        self._sent = Tally(self._books.all_sent)
        self._delivered = Tally(self._books.all_delivered)
        self._began = self._told_at = time.monotonic()

    def run(self) -> float:
        """All of it, up to a clean end of every process; answers when the broker was killed (monotonic clock)."""
        broker = Broker(self._crew)
        broker.wait_until_ready()
        self._tell(f"broker at {broker.url}, data in {self._crew.directory}")
        with Admin(broker.url) as admin:
            for kind, number in self._counts:
                admin.create_topic(topic_of(kind, number))
        controllers, sensors = self._start_controllers(broker.url), self._start_sensors(broker.url)
        self._tell(f"{len(sensors)} sensors send {self._total:,} readings to {len(controllers)} controllers")

        self._wait(lambda: self._sent.count() * 2 >= self._total, [*sensors, *controllers], "half was not sent")
        killed_at = broker.kill_and_restart()
        self._tell("half is sent: SIGKILL for the broker, and a new one on the same data")
        broker.wait_until_ready()
        self._tell(f"the broker is ready again, {time.monotonic() - killed_at:.1f} s later")

        self._wait(
            lambda: all(sensor.exit_code == 0 for sensor in sensors), [*sensors, *controllers], "not all was sent"
        )
        self._tell("all is sent, the controllers drain the topics")
        with Admin(broker.url) as admin:
            self._wait(Drained(admin, self._delivered, self._total), controllers, "not all was drained", DRAIN_WITHIN_S)
        for controller in controllers:
            controller.end_well()
        broker.end_well()
        self._tell("all processes have ended, the books are compared")
        return killed_at

    def _start_controllers(self, url: str) -> list[Worker]:
        return [
            self._crew.start(
                f"controller-{kind}-{number}",
                *("-m", "portalmq.demo_iot.controller"),
                *(topic_of(kind, sensor) for sensor in SENSOR_IDS),
                *("--server", url, "--group", GROUP, "--lease", str(LEASE_S)),
                *("--ledger", str(self._books.delivered(kind, number))),
            )
            for kind in KINDS
            for number in range(1, CONTROLLERS_PER_KIND + 1)
        ]

    def _start_sensors(self, url: str) -> list[Worker]:
        return [
            self._crew.start(
                f"sensor-{topic_of(kind, number)}",
                *("-m", "portalmq.demo_iot.sensor", kind, str(number), str(self._seconds / count)),
                *("--server", url, "--count", str(count)),
                *("--ledger", str(self._books.sent(kind, number))),
            )
            for (kind, number), count in self._counts.items()
        ]

    def _wait(
        self, done: Callable[[], bool], workers: Sequence[Worker], otherwise: str, within_s: float = SEND_WITHIN_S
    ) -> None:
        """Wait for `done`, telling how far things are; a worker that fails, or a standstill, ends the waiting."""
        progress, moved_at = (0, 0), time.monotonic()

        def look() -> bool:
            nonlocal progress, moved_at
            for worker in workers:
                worker.check_not_failed()
            before, progress = progress, (self._sent.count(), self._delivered.count())
            if progress != before:
                moved_at = time.monotonic()
            elif time.monotonic() > moved_at + STALLED_AFTER_S:
                running = ", ".join(worker.name for worker in workers if worker.exit_code is None)
                raise DemoFailed(f"{otherwise}: nothing moved for {STALLED_AFTER_S:g} s; still running: {running}")
            if time.monotonic() >= self._told_at + PROGRESS_EVERY_S:
                self._tell(f"sent {progress[0]:>7,}   delivered {progress[1]:>7,}")
            return done()

        wait_for(look, within_s, otherwise)

    def _tell(self, what: str) -> None:
        self._told_at = time.monotonic()
        click.echo(f"{self._told_at - self._began:5.1f} s  {what}")


class Drained:
    """True when the group has nothing left and the controllers have written as much down as was sent; or, if that does
    not come, when the group has had nothing left for longer than a lease: then something is lost, and comparing tells
    what."""

    def __init__(self, admin: Admin, delivered: Tally, total: int) -> None:
        self._admin = admin
        self._delivered = delivered
        self._total = total
        self._empty_since: float | None = None

    def __call__(self) -> bool:
        if self._admin.lag(GROUP) > 0:
            self._empty_since = None
            return False
        now = time.monotonic()
        self._empty_since = self._empty_since or now
        return self._delivered.count() >= self._total or now - self._empty_since > 2 * LEASE_S


def counts_of_a_year(at_most: int | None) -> dict[tuple[str, int], int]:
    """How many readings each sensor sends: a year, or `at_most`."""
    return {
        (kind, number): min(at_most or sys.maxsize, sum(1 for _ in year(kind, number)))
        for kind in KINDS
        for number in SENSOR_IDS
    }


def table(sent: Sequence[Entry], delivered: Sequence[Entry]) -> str:
    """What came of each kind, one line a kind."""
    rows: list[tuple[str, ...]] = [("kind", "sent", "deliveries", "gaps", "alerts")]
    by_kind = Counter(entry.message["kind"] for entry in sent)
    deliveries = Counter(entry.message["kind"] for entry in delivered)
    verdicts = Counter((entry.message["kind"], verdict(entry.message).partition(" ")[0]) for entry in sent)
    for kind in KINDS:
        figures = by_kind[kind], deliveries[kind], verdicts[kind, "missing"], verdicts[kind, "ALERT"]
        rows.append((kind, *(f"{figure:,}" for figure in figures)))
    return "\n".join(f"  {row[0]:<10}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows)


def last_line(found: Comparison, failover_ms: int) -> str:
    """The line that the demo is known by. It says OK only when nothing that was acknowledged is missing."""
    return (
        f"DEMO {'OK' if found.is_clean else 'FAILED'} sent={found.sent} delivered={found.delivered} "
        f"lost={len(found.lost)} duplicates={found.duplicates} failover_ms={failover_ms}"
    )


def conclude(books: Books, killed_at: float) -> bool:
    """Compare the books and print the summary; True when all is well."""
    sent, delivered = list(ledger.read(books.all_sent)), list(ledger.read(books.all_delivered))
    found = ledger.compare(sent, delivered)
    click.echo(f"\n{table(sent, delivered)}\n")
    for sentence in found.faults():
        click.echo(sentence)
    if not found.is_clean:
        click.echo(f"what everybody wrote is in {books.directory}")
    click.echo(last_line(found, ledger.longest_gap_ms((entry.at for entry in sent), around=killed_at)))
    return found.is_clean


@click.command()
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(min=1), help="How long to send.")
@click.option("--count", type=click.IntRange(min=1), help="Readings of each sensor (default: all of the year).")
def main(seconds: float, count: int | None) -> None:
    """Replay a year of weather from sensors to controllers, kill the broker half way, and compare the books."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    directory = Path(tempfile.mkdtemp(prefix="portalmq-demo-"))
    is_worth_keeping = False
    try:
        with Crew(directory) as crew:
            killed_at = Demo(crew, counts_of_a_year(count), seconds).run()
        is_worth_keeping = not conclude(Books(directory), killed_at)
    except (DemoFailed, PortalMQError) as fault:
        is_worth_keeping = True
        click.echo(f"what everybody wrote is in {directory}\nDEMO FAILED {fault}")
    except KeyboardInterrupt:
        click.echo("\nstopped, no process is left")
        sys.exit(128 + signal.SIGINT)
    finally:
        if not is_worth_keeping:
            shutil.rmtree(directory)
    sys.exit(1 if is_worth_keeping else 0)


if __name__ == "__main__":
    main()
