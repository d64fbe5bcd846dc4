"""Carries out a schedule of faults on a cluster, its links and its clients, and records what it did."""

from __future__ import annotations

import itertools
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from subprocess import TimeoutExpired

from chaos.linked_cluster import BROKERS, SMALL_DISK, LinkedCluster
from chaos.processes import Processes
from chaos.schedule import Fault
from chaos.workload import WORKLOAD

FREE_WITHIN_S = 20.0
IN_SYNC_WITHIN_S = 30.0
STOPPED_WITHIN_S = 45.0
RESTARTED_WITHIN_S = 30.0
HOUR_S = 3600.0
CLOCKS_COMPARED_S = 5.0  # two comparisons


@dataclass
class Injected:
    """A fault that was carried out. A fault without a target that is free was not: `skipped` says why."""

    kind: str
    what: str = ""
    began: float = 0.0
    ended: float = 0.0
    skipped: str = ""


class Skipped(Exception):
    pass


class Faults:
    """Each process, link, disk and clock is the target of one fault at a time; a fault waits for its targets."""

    def __init__(self, cluster: LinkedCluster, processes: Processes) -> None:
        self.cluster = cluster
        self.processes = processes
        self.injected: list[Injected] = []
        self.failures: list[str] = []
        self.clock_moved_at = float("inf")
        self._taken: set[str] = set()
        self._freed = threading.Condition()
        self._kinds: dict[str, Callable[[Fault, Injected], None]] = {
            "kill the leader": self._kill_leader,
            "kill the controller": self._kill_controller,
            "kill a follower": self._kill_follower,
            "kill all brokers": self._kill_all,
            "stop a broker (SIGSTOP)": self._stop_broker,
            "restart one after another (SIGTERM)": self._restart_each,
            "restart ZooKeeper": self._zookeeper_down,
            "ZooKeeper gone for 30 s": self._zookeeper_down,
            "cut one way": self._link,
            "black hole": self._link,
            "refuse connections": self._link,
            "slow link": self._link,
            "fill the disk": self._fill_disk,
            "empty a disk": self._empty_disk,
            "move a clock": self._move_clock,
            "kill a client": self._client,
            "stop a client (SIGSTOP)": self._client,
        }

    def run(self, faults: Iterable[Fault], say: Callable[[str], None], seconds: float, *, apart: bool) -> None:
        """Inject the faults at their times; or, `apart`, each once the one before is over and all are in sync. A disk
        is emptied apart in any case: what is on two disks alone may not lose one of them."""
        start = origin = time.monotonic()
        threads: list[threading.Thread] = []
        for fault in faults:
            if apart or fault.kind == "empty a disk":
                self._join(threads)
                self._wait_in_sync()
                origin = max(origin, time.monotonic() - fault.at_s)  # the pauses between later faults stay
            time.sleep(max(0.0, origin + fault.at_s - time.monotonic()))
            if time.monotonic() - start > seconds:
                break
            injected = Injected(fault.kind)
            self.injected.append(injected)
            threads.append(threading.Thread(target=self._perform, args=(fault, injected, say), daemon=True))
            threads[-1].start()
        self._join(threads)

    def _join(self, threads: list[threading.Thread]) -> None:
        while threads:
            thread = threads.pop()
            thread.join(3 * FREE_WITHIN_S + IN_SYNC_WITHIN_S + 3 * (STOPPED_WITHIN_S + RESTARTED_WITHIN_S))
            if thread.is_alive():
                self.failures.append("a fault does not end")

    def _perform(self, fault: Fault, injected: Injected, say: Callable[[str], None]) -> None:
        injected.began = time.monotonic()
        try:
            self._kinds[fault.kind](fault, injected)
        except Skipped as reason:
            injected.skipped = str(reason)
        except BaseException:  # noqa: BLE001 - the run goes on, and reports it
            self.failures.append(f"{fault.kind}: {traceback.format_exc()[-1_500:]}")
        injected.ended = time.monotonic()
        say(f"{fault.kind}: {injected.what or 'skipped: ' + injected.skipped}")

    # --- targets -----------------------------------------------------------------------------------------------------

    def _take(self, injected: Injected, *names: str) -> None:
        """Make these targets this fault's own, once the faults that have them end. The fault begins now."""
        with self._freed:
            if not self._freed.wait_for(lambda: not self._taken & set(names), FREE_WITHIN_S):
                raise Skipped(f"{', '.join(sorted(self._taken & set(names)))} has another fault")
            self._taken.update(names)
        if not injected.what:  # the first of its targets
            injected.began = time.monotonic()

    def _wait_in_sync(self) -> bool:
        until = time.monotonic() + IN_SYNC_WITHIN_S
        while not self.cluster.is_in_sync(WORKLOAD.partitions):
            if time.monotonic() > until:
                return False
            time.sleep(0.3)
        return True

    def _free(self, *names: str) -> None:
        with self._freed:
            self._taken.difference_update(names)
            self._freed.notify_all()

    def _some(self, choices: Iterable, choice: float):
        listed = list(choices)
        return listed[int(choice * len(listed))]

    def _some_leader(self, choice: float) -> int:
        places = [(topic, number) for topic, count in WORKLOAD.partitions.items() for number in range(count)]
        first = int(choice * len(places))
        for topic, partition in places[first:] + places[:first]:
            leader = self.cluster.leader_now(topic, partition)
            if leader is not None:
                return leader
        raise Skipped("no partition has a leader")

    # --- brokers -----------------------------------------------------------------------------------------------------

    def _kill_leader(self, fault: Fault, injected: Injected) -> None:
        self._kill([self._some_leader(fault.choice)], fault, injected)

    def _kill_controller(self, fault: Fault, injected: Injected) -> None:
        controller = self.cluster.controller_now()
        if controller is None:
            raise Skipped("there is no controller")
        self._kill([controller], fault, injected)

    def _kill_follower(self, fault: Fault, injected: Injected) -> None:
        leader = self._some_leader(fault.choice)
        followers = [broker_id for broker_id in BROKERS if broker_id != leader]
        self._kill([self._some(followers, fault.choice * 10 % 1)], fault, injected)

    def _kill_all(self, fault: Fault, injected: Injected) -> None:
        """Kill all brokers; if one has another fault for long, the other two."""
        try:
            self._kill(list(BROKERS), fault, injected)
        except Skipped:
            free = [broker_id for broker_id in BROKERS if f"broker {broker_id}" not in self._taken]
            if len(free) < 2:
                raise
            self._kill(free, fault, injected)

    def _kill(self, broker_ids: list[int], fault: Fault, injected: Injected) -> None:
        names = [f"broker {broker_id}" for broker_id in broker_ids]
        self._take(injected, *names)
        try:
            injected.what = f"{', '.join(names)} for {fault.length_s} s"
            self.cluster.take_down(*broker_ids)
            time.sleep(fault.length_s)
            self.cluster.bring_up(*broker_ids)
        finally:
            self._free(*names)

    def _stop_broker(self, fault: Fault, injected: Injected) -> None:
        broker_id = self._some(BROKERS, fault.choice)
        name = f"broker {broker_id}"
        self._take(injected, name)
        try:
            injected.what = f"{name} for {fault.length_s} s"
            with suppress(Exception):  # it may be starting
                self.cluster.brokers[broker_id].pause()
            time.sleep(fault.length_s)
            with suppress(Exception):
                self.cluster.brokers[broker_id].resume()
        finally:
            self._free(name)

    def _restart_each(self, fault: Fault, injected: Injected) -> None:
        injected.what = "all brokers"
        for broker_id in sorted(BROKERS, key=lambda each: (each + int(fault.choice * 3)) % 3):
            name = f"broker {broker_id}"
            try:
                self._take(injected, name)
            except Skipped:
                injected.what += f" but {broker_id}"
                continue
            try:
                self._restart(broker_id)
            finally:
                self._free(name)

    def _restart(self, broker_id: int) -> None:
        broker = self.cluster.brokers[broker_id]
        self.cluster.down.add(broker_id)
        if broker.runs:
            broker.process.send_signal(signal.SIGTERM)
            try:
                broker.process.wait(STOPPED_WITHIN_S)
            except TimeoutExpired:
                self.failures.append(f"broker {broker_id} still runs {STOPPED_WITHIN_S:g} s after SIGTERM")
        self.cluster.take_down(broker_id)
        self.cluster.bring_up(broker_id)
        self._wait_ready(broker_id)

    def _wait_ready(self, broker_id: int) -> bool:
        ready_by = time.monotonic() + RESTARTED_WITHIN_S
        while not self.cluster.said_by(broker_id, "/readyz"):
            if time.monotonic() > ready_by:
                return False
            time.sleep(0.2)
        return True

    # --- ZooKeeper, links ---------------------------------------------------------------------------------------------

    def _zookeeper_down(self, fault: Fault, injected: Injected) -> None:
        """All servers; of three, a restart is of their leader."""
        self._take(injected, "zookeeper")
        try:
            number = self.cluster.zookeeper_leader() if fault.kind == "restart ZooKeeper" else None
            injected.what = f"{'all servers' if number is None else f'server {number}'} for {fault.length_s} s"
            self.cluster.zookeeper.kill(number)
            time.sleep(fault.length_s)
            self.cluster.start_zookeeper()
        finally:
            self._free("zookeeper")

    def _link(self, fault: Fault, injected: Injected) -> None:
        states = self._states(fault)
        names = [f"link {link}" for link in states]
        self._take(injected, *names)
        try:
            injected.what = f"{', '.join(f'{link} {state}' for link, state in states.items())} for {fault.length_s} s"
            for link, state in states.items():
                self.cluster.links.set(link, **state)
            time.sleep(fault.length_s)
            for link in states:
                self.cluster.links.set(link)
        finally:
            self._free(*names)

    def _states(self, fault: Fault) -> dict[str, dict]:
        """The links of a fault, and their states. Between two brokers there are two links: calls of either."""
        if fault.details["link"] == "broker-broker":
            a, b = self._some(itertools.permutations(BROKERS, 2), fault.choice)
            ways = {f"{a}>{b}": fault.details["way"], f"{b}>{a}": "in" if fault.details["way"] == "out" else "out"}
        elif fault.details["link"] == "client-broker":
            ways = {f"client>{self._some(BROKERS, fault.choice)}": fault.details["way"]}
        else:
            servers = range(len(self.cluster.zookeeper.ports))
            broker_id = self._some(BROKERS, fault.choice)
            ways = {f"{broker_id}>zookeeper-{number}": fault.details["way"] for number in servers}
        state = {
            "cut one way": lambda way: {"hold": way},
            "black hole": lambda way: {"lose": True},
            "refuse connections": lambda way: {"refuse": True},
            "slow link": lambda way: {"slow_s": fault.details["slow_s"]},
        }[fault.kind]
        return {link: state(way) for link, way in ways.items()}

    # --- disks, clocks, clients ---------------------------------------------------------------------------------------

    def _fill_disk(self, fault: Fault, injected: Injected) -> None:
        self._take(injected, "disk")
        try:
            injected.what = f"of broker {SMALL_DISK}, to {fault.details['to']}, for {fault.length_s} s"
            self.cluster.fill_disk(fault.details["to"], fault.length_s)
        finally:
            self._free("disk")

    def _empty_disk(self, fault: Fault, injected: Injected) -> None:
        broker_id = self._some(BROKERS, fault.choice)
        names = ("disk", f"broker {broker_id}")
        self._take(injected, *names)
        try:
            if not self._wait_in_sync():
                raise Skipped("not all replicas are in sync")
            injected.what = f"that of broker {broker_id}, {fault.length_s} s down"
            self.cluster.take_down(broker_id)
            shutil.rmtree(self.cluster.brokers[broker_id].data_dir)
            time.sleep(fault.length_s)
            self.cluster.bring_up(broker_id)
        finally:
            self._free(*names)

    def _move_clock(self, fault: Fault, injected: Injected) -> None:
        """Of a broker that runs, and has compared its clock with others: one that starts uses its own until then."""
        broker_id = self._some(BROKERS, fault.choice)
        name = f"broker {broker_id}"
        self._take(injected, name)
        try:
            if not self._wait_ready(broker_id):
                raise Skipped(f"{name} is not ready")
            time.sleep(CLOCKS_COMPARED_S)
            hours = fault.details["hours"]
            injected.began = time.monotonic()
            injected.what = f"that of {name} by {hours:+g} h for {fault.length_s} s"
            self.clock_moved_at = min(self.clock_moved_at, time.monotonic())
            self.cluster.clock_file(broker_id).write_text(str(hours * HOUR_S))
            time.sleep(fault.length_s)
            self.cluster.clock_file(broker_id).write_text("0")
        finally:
            self._free(name)

    def _client(self, fault: Fault, injected: Injected) -> None:
        process = self._some(self.processes.mortal, fault.choice)
        self._take(injected, process)
        try:
            injected.what = f"{process} for {fault.length_s} s"
            if fault.kind == "kill a client":
                self.processes.kill(process)
                time.sleep(fault.length_s)
                self.processes.start(process)
            else:
                self.processes.signal(process, signal.SIGSTOP)
                time.sleep(fault.length_s)
                self.processes.signal(process, signal.SIGCONT)
        finally:
            self._free(process)
