"""Chaos on real processes: `python -m chaos.run --seed 1 --seconds 120`.

Three brokers, ZooKeeper, a proxy on each link and all kinds of clients, under faults that the seed decides; then all
faults end, everything has to come back, and the checker judges the histories and the files. Exits 1 on a violation; the
run's directory then keeps histories, logs and data.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaos.checker import Verdict, check
from chaos.clients import DRAIN, STOP
from chaos.evidence import Evidence, read_logs
from chaos.faults import Faults
from chaos.history import acts_in
from chaos.linked_cluster import BROKERS, SMALL_DISK, LinkedCluster, private_mounts
from chaos.planted import PLANTED
from chaos.processes import Processes
from chaos.report import as_text, report
from chaos.schedule import DECK, schedule
from chaos.workload import GROUP_SETTINGS, WORKLOAD
from support import ledger

from portalmq import PortalMQError

CONVERGED_WITHIN_S = 120.0
DRAINED_WITHIN_S = 240.0
WARM_UP_S = 3.0
STABLE_S = 2.0
STOP_WITHIN_S = 60.0


class Run:
    def __init__(self, arguments: argparse.Namespace, has_mounts: bool) -> None:
        self.entry = ledger.Run("chaos", arguments.seed, writes=arguments.ledger, otherwise=1)
        self.seed: int = self.entry.first
        self.seconds: float = arguments.seconds
        self.apart: bool = arguments.apart
        self.directory: Path = arguments.out / f"seed-{self.seed}"
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        self.schedule = schedule(self.seed, self.seconds, tuple(arguments.only))
        plant = PLANTED.get(arguments.plant, "")
        self.cluster = LinkedCluster(
            self.directory, zookeepers=arguments.zookeepers, has_mounts=has_mounts, plant=plant
        )
        self.liveness = {"the cluster comes back": Verdict(), "groups finish": Verdict(), "clients run": Verdict()}
        self.figures: dict[str, Any] = {}
        self._began = time.monotonic()

    def say(self, what: str) -> None:
        print(f"[{time.monotonic() - self._began:6.1f}] {what}", flush=True)

    def run(self) -> int:
        with self.entry, self.cluster:
            processes = Processes(self.directory, self.seed, self.cluster.client_urls)
            try:
                self._prepare()
                processes.start_all()
                time.sleep(WARM_UP_S)
                self.say(f"{len(self.schedule)} faults in {self.seconds:g} s")
                faults = Faults(self.cluster, processes)
                faults.run(self.schedule, self.say, self.seconds, apart=self.apart)
                self.liveness["clients run"].violations += faults.failures
                self._settle(processes)
            finally:
                processes.end()
            self._stop_brokers()
            try:
                found = self._judge(faults)
            except BaseException:
                self._save_small_disk()
                raise
            self._keep(found)
            self._enter(found)
        return 1 if found["violations"] else 0

    def _judge(self, faults: Faults) -> dict[str, Any]:
        self.say("reading the logs")
        data_dirs = {broker_id: broker.data_dir for broker_id, broker in self.cluster.brokers.items()}
        acts = acts_in(sorted(self.directory.glob("*.history")))
        evidence = Evidence(WORKLOAD, acts, read_logs(WORKLOAD, data_dirs), faults.clock_moved_at)
        self.say(f"checking {len(acts):,} calls")
        verdicts = {**check(evidence), **self.liveness}
        return report(self.seed, self.seconds, evidence, verdicts, faults.injected, self._more(faults))

    def _enter(self, found: dict[str, Any]) -> None:
        faults = sum(each["count"] for each in found["faults"].values())
        counts = {"faults": faults, "acknowledged": found["acknowledged"], "violations": found["violations"]}
        self.entry.add(self.seed, counts, failed=bool(found["violations"]))

    def _save_small_disk(self) -> None:
        """Copy what ends with this process."""
        if self.cluster.has_mounts:
            disk = self.cluster.brokers[SMALL_DISK].data_dir
            shutil.copytree(disk, disk.parents[1] / "kept-data", dirs_exist_ok=True)

    def _prepare(self) -> None:
        with self.cluster.admin() as admin:
            for topic, partitions in WORKLOAD.partitions.items():
                admin.create_topic(topic, partitions=partitions)
            for group, settings in GROUP_SETTINGS.items():
                admin.create_group(group, **settings)
        self._wait("in sync at the start", lambda: self.cluster.is_in_sync(WORKLOAD.partitions), CONVERGED_WITHIN_S)

    def _wait(self, what: str, holds: Callable[[], bool], within_s: float) -> float | None:
        """Return how long it took, or None if it did not hold in time."""
        began = time.monotonic()
        while not holds():
            if time.monotonic() - began > within_s:
                self.say(f"not within {within_s:g} s: {what}")
                return None
            time.sleep(0.25)
        self.say(f"{what} after {time.monotonic() - began:.1f} s")
        return round(time.monotonic() - began, 1)

    def _settle(self, processes: Processes) -> None:
        """Faults have ended: the cluster has to come back, and groups have to finish what there is."""
        back = self._wait("in sync", lambda: self.cluster.is_in_sync(WORKLOAD.partitions), CONVERGED_WITHIN_S)
        self.liveness["the cluster comes back"].unless(back is not None, lambda: f"not within {CONVERGED_WITHIN_S:g} s")
        time.sleep(WARM_UP_S)
        processes.set_phase(DRAIN)
        drained = self._wait("finished", self._is_finished, DRAINED_WITHIN_S)
        self.liveness["groups finish"].unless(drained is not None, lambda: f"{self._lags()}")
        processes.set_phase(STOP)
        for wrong in processes.wait():
            self.liveness["clients run"].violations.append(wrong)
        self.liveness["clients run"].checked += 1
        self.figures |= {"converged_s": back, "drained_s": drained}

    def _is_finished(self) -> bool:
        if any(self._lags().values()):
            return False
        before = self._high_watermarks()
        time.sleep(STABLE_S)
        return before == self._high_watermarks() and not any(self._lags().values())

    def _lags(self) -> dict[str, int]:
        lags = {}
        with self.cluster.admin(timeout_s=10) as admin:
            for group in (*WORKLOAD.queue_groups, *WORKLOAD.stream_groups):
                try:
                    is_queue = group in WORKLOAD.queue_groups
                    lags[group] = admin.lag(group) if is_queue else sum(each.lag for each in admin.offsets(group))
                except PortalMQError:
                    lags[group] = -1
        return lags

    def _high_watermarks(self) -> list[int]:
        found = []
        for topic in WORKLOAD.partitions:
            described = self.cluster.first_said(f"/v1/topics/{topic}")
            found += [each["high_watermark"] for each in described["partitions"]] if described else [-1]
        return found

    def _stop_brokers(self) -> None:
        self.cluster.down.update(BROKERS)
        for broker in self.cluster.brokers.values():
            broker.process.send_signal(signal.SIGTERM)
        for broker_id, broker in self.cluster.brokers.items():
            with suppress(Exception):
                broker.process.wait(STOP_WITHIN_S)
            if broker.runs:
                self.liveness["the cluster comes back"].violations.append(f"broker {broker_id} does not end")
                self.cluster.kill(broker_id)

    def _more(self, faults: Faults) -> dict[str, Any]:
        notes = [f"{fault.kind} was skipped: {fault.skipped}" for fault in faults.injected if fault.skipped]
        if faults.clock_moved_at < float("inf"):
            notes.append("once a clock was moved, delays are not checked")
        return {**self.figures, "notes": [*self.cluster.ended, *notes], "zookeepers": len(self.cluster.zookeeper.ports)}

    def _keep(self, found: dict[str, Any]) -> None:
        (self.directory / "report.json").write_text(json.dumps(found, indent=1))
        (self.directory / "report.txt").write_text(as_text(found))
        print(as_text(found), flush=True)
        if found["violations"]:
            self._save_small_disk()
            print(f"kept: {self.directory}", flush=True)
            return
        self.cluster.unmount()
        for kept in self.directory.glob("*"):
            if kept.name not in ("report.json", "report.txt"):
                shutil.rmtree(kept, ignore_errors=True) if kept.is_dir() else kept.unlink()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, help="default: 1, or the next one of the ledger")
    parser.add_argument("--ledger", action="store_true", help="enter the run")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long faults are injected")
    parser.add_argument("--zookeepers", type=int, choices=(1, 3), default=1)
    parser.add_argument("--only", action="append", default=[], choices=list(DECK), help="only faults of this kind")
    parser.add_argument("--apart", action="store_true", help="the next fault comes once all replicas are in sync")
    parser.add_argument("--plant", choices=list(PLANTED), help="a bug in the brokers, which the checker has to notice")
    parser.add_argument("--out", type=Path, default=Path("build/chaos"), help="%(default)s")
    given = parser.parse_args(arguments)
    given.out = given.out.resolve()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # whatever runs is ended
    return Run(given, private_mounts()).run()


if __name__ == "__main__":
    sys.exit(main())
