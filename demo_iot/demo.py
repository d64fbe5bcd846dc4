"""The demo: a year of weather goes from sensors to controllers, and a leader is killed half way.

It starts ZooKeeper and three brokers. Twelve sensors (four kinds at three airports) send each reading of 2013; two
controllers of each kind share its three topics. When half is sent, the broker that leads most partitions gets SIGKILL.
The others take over; it is restarted on its data, and catches up. At the end the ledgers are compared: each reading
that was acknowledged to a sensor must be in the ledger of a controller. With --report, Spark then reads the brokers'
files and draws the run. The last line is DEMO OK, and the exit code 0, only if all of this is true.
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
from functools import partial
from pathlib import Path

import click

from portalmq import Admin, PortalMQError
from portalmq.demo_iot import ledger, report
from portalmq.demo_iot.controller import verdict
from portalmq.demo_iot.ledger import Comparison, Entry, EntryCount
from portalmq.demo_iot.processes import DemoCluster, DemoFailed, DemoProcess, ProcessGroup, broker_name, wait_for
from portalmq.demo_iot.readings import KINDS, STATIONS, topic_of, year

GROUP = "controllers"
CONTROLLERS_PER_KIND = 2
BROKERS = 3
SENSOR_IDS = range(1, len(STATIONS) + 1)
# A reading that a controller had in hand when its broker was killed is delivered again after this time.
LEASE_S = 5.0
SEND_WITHIN_S = 300.0
DRAIN_WITHIN_S = 90.0
# If nothing is sent or delivered for this long, some process hangs.
STALLED_AFTER_S = 45.0
PROGRESS_EVERY_S = 2.0
LEADERS_WITHIN_S = 30.0
IN_SYNC_WITHIN_S = 60.0
LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class LedgerFiles:
    """The ledgers' paths."""

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


@dataclass(frozen=True, slots=True)
class Outage:
    """The moment when a broker was killed (monotonic clock), and the topics that it led then."""

    killed_at: float
    topics: frozenset[str]

    def longest_ms(self, sent: Sequence[Entry]) -> int:
        """Return the longest time in which a sensor of these topics got no acknowledgement."""
        return max(
            ledger.longest_gap_ms((entry.at for entry in sent if entry.topic == topic), around=self.killed_at)
            for topic in self.topics
        )


class Demo:
    """One run. `counts` is the number of readings of each sensor, `seconds` how long sending takes if nothing delays
    it."""

    def __init__(self, processes: ProcessGroup, counts: dict[tuple[str, int], int], seconds: float) -> None:
        self._processes = processes
        self._counts = counts
        self._seconds = seconds
        self._ledgers = LedgerFiles(processes.directory)
        self._total = sum(counts.values())
        self._sent = EntryCount(self._ledgers.all_sent)
        self._delivered = EntryCount(self._ledgers.all_delivered)
        self._began = self._printed_at = time.monotonic()

    def run(self) -> Outage:
        """Run the demo, up to a clean end of every process."""
        cluster = DemoCluster(self._processes, BROKERS)
        for broker in cluster.brokers.values():
            broker.wait_until_ready()
        self._print(f"ZooKeeper serves at {cluster.zookeeper}, data and logs are in {self._processes.directory}")
        with Admin(cluster.urls) as admin:
            for kind, number in self._counts:
                admin.create_topic(topic_of(kind, number), replication_factor=BROKERS)
            self._tell_who_leads(cluster, admin)
            servers = ",".join(cluster.urls)
            controllers, sensors = self._start_controllers(servers), self._start_sensors(servers)
            processes = [*sensors, *controllers]
            self._print(f"{len(sensors)} sensors send {self._total:,} readings to {len(controllers)} controllers")

            self._wait(lambda: self._sent.count() * 2 >= self._total, processes, "half was not sent")
            killed, outage = self._kill_a_leader(cluster)
            cluster.brokers[killed].start()
            self._print(f"broker {killed} is restarted on its data")
            in_sync = InSyncCheck(admin, self._topics, killed)
            self._wait(in_sync, processes, f"broker {killed} did not catch up", IN_SYNC_WITHIN_S)
            self._print(f"broker {killed} has caught up: every topic is on {BROKERS} brokers again")

            self._wait(lambda: all(sensor.exit_code == 0 for sensor in sensors), processes, "not all was sent")
            self._print("all is sent, the controllers drain the topics")
            self._wait(
                DrainCheck(admin, self._delivered, self._total), controllers, "not all was drained", DRAIN_WITHIN_S
            )
        for controller in controllers:
            controller.end_well()
        cluster.check_not_failed()
        cluster.end_well()
        self._print("all processes have ended, the ledgers are compared")
        return outage

    def report(self, out: Path) -> None:
        """Make the report about a run that has ended."""
        directories = [self._processes.directory / broker_name(number) for number in range(1, BROKERS + 1)]
        summary = report.make(self._processes, directories, out, self._print)
        click.echo("\n".join(["", *(f"  {line}" for line in summary), ""]))

    @property
    def _topics(self) -> list[str]:
        return [topic_of(kind, number) for kind, number in self._counts]

    def _tell_who_leads(self, cluster: DemoCluster, admin: Admin) -> None:
        controller = admin.cluster().controller
        leads = led_by(admin, self._topics)
        for number, broker in cluster.brokers.items():
            elects = ", and is the controller" if number == controller else ""
            self._print(
                f"broker {number} at {broker.url} leads {', '.join(leads.get(number, [])) or 'nothing'}{elects}"
            )

    def _kill_a_leader(self, cluster: DemoCluster) -> tuple[int, Outage]:
        """Kill the broker that leads most partitions; return when each of its topics has another leader."""
        with Admin(cluster.urls) as admin:
            leads = led_by(admin, self._topics)
        killed = max((number for number in leads if number is not None), key=lambda number: len(leads[number]))
        outage = Outage(time.monotonic(), frozenset(leads[killed]))
        cluster.brokers[killed].process.kill()
        self._print(f"half is sent: SIGKILL for broker {killed}, which leads {', '.join(leads[killed])}")
        orphans = set(outage.topics)

        with Admin([broker.url for number, broker in cluster.brokers.items() if number != killed]) as admin:

            def found() -> bool:
                now = led_by(admin, sorted(orphans))
                took_ms = round(1000 * (time.monotonic() - outage.killed_at))
                for number, topics in now.items():
                    if number not in {None, killed}:
                        orphans.difference_update(topics)
                        self._print(f"broker {number} leads {', '.join(topics)}, {took_ms} ms after the kill")
                return not orphans

            wait_for(found, LEADERS_WITHIN_S, f"{', '.join(sorted(orphans))} got no other leader")
        return killed, outage

    def _start_controllers(self, servers: str) -> list[DemoProcess]:
        return [
            self._processes.start(
                f"controller-{kind}-{number}",
                *("-m", "portalmq.demo_iot.controller"),
                *(topic_of(kind, sensor) for sensor in SENSOR_IDS),
                *("--server", servers, "--group", GROUP, "--lease", str(LEASE_S)),
                *("--ledger", str(self._ledgers.delivered(kind, number))),
            )
            for kind in KINDS
            for number in range(1, CONTROLLERS_PER_KIND + 1)
        ]

    def _start_sensors(self, servers: str) -> list[DemoProcess]:
        return [
            self._processes.start(
                f"sensor-{topic_of(kind, number)}",
                *("-m", "portalmq.demo_iot.sensor", kind, str(number), str(self._seconds / count)),
                *("--server", servers, "--count", str(count)),
                *("--ledger", str(self._ledgers.sent(kind, number))),
            )
            for (kind, number), count in self._counts.items()
        ]

    def _wait(
        self,
        done: Callable[[], bool],
        processes_running: Sequence[DemoProcess],
        otherwise: str,
        within_s: float = SEND_WITHIN_S,
    ) -> None:
        """Wait for `done` and print the progress. Raises DemoFailed if a process fails, or nothing moves."""
        progress, moved_at = (0, 0), time.monotonic()

        def look() -> bool:
            nonlocal progress, moved_at
            for process in processes_running:
                process.check_not_failed()
            before, progress = progress, (self._sent.count(), self._delivered.count())
            if progress != before:
                moved_at = time.monotonic()
            elif time.monotonic() > moved_at + STALLED_AFTER_S:
                running = ", ".join(process.name for process in processes_running if process.exit_code is None)
                raise DemoFailed(f"{otherwise}: nothing moved for {STALLED_AFTER_S:g} s; still running: {running}")
            if time.monotonic() >= self._printed_at + PROGRESS_EVERY_S:
                self._print(f"sent {progress[0]:>7,}   delivered {progress[1]:>7,}")
            return done()

        wait_for(look, within_s, otherwise)

    def _print(self, what: str) -> None:
        self._printed_at = time.monotonic()
        click.echo(f"{self._printed_at - self._began:5.1f} s  {what}")


class DrainCheck:
    """True when the group has nothing left and the controllers have recorded as much as was sent; or when the group has
    had nothing left for longer than a lease: then something is lost, and the comparison says what."""

    def __init__(self, admin: Admin, delivered: EntryCount, total: int) -> None:
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


class InSyncCheck:
    """True when a broker is in sync on each of its topics. Polls rarely, as the brokers have other work."""

    def __init__(self, admin: Admin, topics: Sequence[str], broker: int) -> None:
        self._admin = admin
        self._missing = list(topics)
        self._broker = broker
        self._look_at = 0.0

    def __call__(self) -> bool:
        if time.monotonic() >= self._look_at:
            self._missing = [topic for topic in self._missing if not self._is_in_sync(topic)]
            self._look_at = time.monotonic() + LOOK_EVERY_S
        return not self._missing

    def _is_in_sync(self, topic: str) -> bool:
        return all(self._broker in partition.isr for partition in self._admin.describe(topic).partitions)


def led_by(admin: Admin, topics: Sequence[str]) -> dict[int | None, list[str]]:
    """Return the topics, which have one partition each, by the broker that leads them."""
    leads: dict[int | None, list[str]] = {}
    for topic in admin.metadata(topics).topics:
        leads.setdefault(topic.partitions[0].leader, []).append(topic.name)
    return leads


def counts_of_a_year(at_most: int | None) -> dict[tuple[str, int], int]:
    """Return how many readings each sensor sends: a year, or `at_most`."""
    return {
        (kind, number): min(at_most or sys.maxsize, sum(1 for _ in year(kind, number)))
        for kind in KINDS
        for number in SENSOR_IDS
    }


def table(sent: Sequence[Entry], delivered: Sequence[Entry]) -> str:
    """Return the figures of each kind, one on each line."""
    rows: list[tuple[str, ...]] = [("kind", "sent", "deliveries", "gaps", "alerts")]
    by_kind = Counter(entry.message["kind"] for entry in sent)
    deliveries = Counter(entry.message["kind"] for entry in delivered)
    verdicts = Counter((entry.message["kind"], verdict(entry.message).partition(" ")[0]) for entry in sent)
    for kind in KINDS:
        figures = by_kind[kind], deliveries[kind], verdicts[kind, "missing"], verdicts[kind, "ALERT"]
        rows.append((kind, *(f"{figure:,}" for figure in figures)))
    return "\n".join(f"  {row[0]:<10}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in rows)


def last_line(found: Comparison, failover_ms: int) -> str:
    """Return the last line of the demo. It says OK only if nothing that was acknowledged is missing."""
    return (
        f"DEMO {'OK' if found.is_clean else 'FAILED'} sent={found.sent} delivered={found.delivered} "
        f"lost={len(found.lost)} duplicates={found.duplicates} failover_ms={failover_ms}"
    )


def conclude(ledgers: LedgerFiles, outage: Outage, report_it: Callable[[], None] | None = None) -> bool:
    """Compare the ledgers, print the summary, and make the report of a clean run; return True if it is clean."""
    sent, delivered = list(ledger.read(ledgers.all_sent)), list(ledger.read(ledgers.all_delivered))
    found = ledger.compare(sent, delivered)
    click.echo(f"\n{table(sent, delivered)}\n")
    for sentence in found.faults():
        click.echo(sentence)
    if not found.is_clean:
        click.echo(f"ledgers and logs are in {ledgers.directory}")
    elif report_it:
        report_it()
    click.echo(last_line(found, outage.longest_ms(sent)))
    return found.is_clean


@click.command()
@click.option("--seconds", default=30.0, show_default=True, type=click.FloatRange(min=1), help="How long to send.")
@click.option("--count", type=click.IntRange(min=1), help="Readings of each sensor (default: all of the year).")
@click.option(
    "--report",
    "out",
    type=click.Path(file_okay=False, path_type=Path),
    help="A folder for a throughput report over the run, made by Spark (without: none is made).",
)
def main(seconds: float, count: int | None, out: Path | None) -> None:
    """Replay a year of weather from sensors to controllers, kill a leader half way, and compare the ledgers."""
    if out and (lack := report.missing()):
        raise click.UsageError(f"No report can be made: {lack}. The demo runs without one when --report is left out.")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    directory = Path(tempfile.mkdtemp(prefix="portalmq-demo-"))
    is_worth_keeping = False
    try:
        with ProcessGroup(directory) as processes:
            demo = Demo(processes, counts_of_a_year(count), seconds)
            outage = demo.run()
            is_worth_keeping = not conclude(LedgerFiles(directory), outage, partial(demo.report, out) if out else None)
    except (DemoFailed, PortalMQError) as fault:
        is_worth_keeping = True
        click.echo(f"ledgers and logs are in {directory}\nDEMO FAILED {fault}")
    except KeyboardInterrupt:
        click.echo("\nstopped, no process is left")
        sys.exit(128 + signal.SIGINT)
    finally:
        if not is_worth_keeping:
            shutil.rmtree(directory)
    sys.exit(1 if is_worth_keeping else 0)


if __name__ == "__main__":
    main()
