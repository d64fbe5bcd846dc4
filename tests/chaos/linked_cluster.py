"""A cluster of real brokers whose every connection goes through a proxy: clients to brokers, brokers to each other, and
brokers to ZooKeeper. Each broker has a clock that can be moved, and the last one a disk that can be filled.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any

from chaos.links import Links
from support.broker_process import BrokerProcess
from support.cluster import Cluster
from support.faults import AT_ITS_END, clock_moved_by, disk_that_fills
from support.ports import kept_port, number_of

BROKERS = (1, 2, 3)
SMALL_DISK = 3
DISK_BYTES = 1 << 30
LOW_WATER_BYTES = 32 << 20
ASK_TIMEOUT_S = 1.5
RESTART_AFTER_S = 1.0
CLONE_NEWNS = 0x00020000


def private_mounts() -> bool:
    """Give this process, which has one thread, mounts of its own: they end with it. False where that is not allowed."""
    try:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS) != 0:
            return False
        return subprocess.run(["mount", "--make-rprivate", "/"], capture_output=True, check=False).returncode == 0
    except (OSError, AttributeError):
        return False


def redirected(ports: dict[int, int]) -> str:
    """Python for a broker's process: its connections to these ports go to the others instead."""
    return f"""
import socket as _socket
import gevent.socket as _gevent_socket
_ports = {ports!r}
def _redirected(connect):
    def connect_there(address, *more, **named):
        return connect((address[0], _ports.get(address[1], address[1])), *more, **named)
    return connect_there
for _module in (_socket, _gevent_socket):
    _module.create_connection = _redirected(_module.create_connection)
"""


class LinkedCluster(Cluster):
    """`down` are the brokers that a fault keeps down; any other that ends is started again, and counted in `ended`.
    `plant` is Python that runs first in each broker."""

    def __init__(self, directory: Path, *, zookeepers: int = 1, has_mounts: bool = False, plant: str = "") -> None:
        super().__init__(directory, zookeepers=zookeepers)
        self.down: set[int] = set()
        self.ended: list[str] = []
        self.has_mounts = has_mounts
        self._plant = plant
        self._stack = ExitStack()
        # ZooKeeper's servers end with the thread that starts them.
        self._starter = ThreadPoolExecutor(1)
        self._ports = {broker_id: number_of(self._stack.enter_context(kept_port())) for broker_id in BROKERS}
        self._over = threading.Event()
        self._lock = threading.RLock()

    def __enter__(self) -> LinkedCluster:
        try:
            self.start_zookeeper()
            targets = {f"client>{to}": port for to, port in self._ports.items()}
            targets |= {f"{a}>{b}": self._ports[b] for a, b in itertools.permutations(BROKERS, 2)}
            targets |= {
                f"{broker_id}>zookeeper-{number}": port
                for broker_id in BROKERS
                for number, port in enumerate(self.zookeeper.ports)
            }
            self.links = Links(targets, self.directory / "links.log")
            for broker_id in BROKERS:
                self._add(broker_id)
            self.start(*BROKERS)
        except BaseException:
            self.end()
            raise
        threading.Thread(target=self._supervise, daemon=True).start()
        return self

    def end(self) -> None:
        self._over.set()
        super().end()
        if hasattr(self, "links"):
            self.links.close()
        self._starter.shutdown()
        self._stack.close()

    @property
    def client_urls(self) -> list[str]:
        return [f"http://127.0.0.1:{self.links.ports[f'client>{broker_id}']}" for broker_id in BROKERS]

    def _add(self, broker_id: int) -> None:
        directory = self.directory / f"broker-{broker_id}"
        directory.mkdir(parents=True)
        ports = self.links.ports
        others = [other for other in BROKERS if other != broker_id]
        prelude = redirected({ports[f"client>{other}"]: ports[f"{broker_id}>{other}"] for other in others})
        prelude += clock_moved_by(self.clock_file(broker_id)) + disk_that_fills(self.full_file(broker_id)) + self._plant
        hosts = ",".join(
            f"127.0.0.1:{ports[f'{broker_id}>zookeeper-{number}']}" for number in range(len(self.zookeeper.ports))
        )
        broker = BrokerProcess(
            directory,
            *("--broker-id", str(broker_id), "--disk-low-water-bytes", str(LOW_WATER_BYTES)),
            *("--advertised-url", f"http://127.0.0.1:{ports[f'client>{broker_id}']}"),
            command=("broker", "--zookeeper", hosts),
            prelude=prelude,
            port=self._ports[broker_id],
        )
        disk = directory / "disk"
        disk.mkdir()
        if self.has_mounts and broker_id == SMALL_DISK:
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(disk)], check=True)
        broker.data_dir = disk / "data"
        self.brokers[broker_id] = broker

    def unmount(self) -> None:
        """Give up the small disk, with all that is on it."""
        if self.has_mounts:
            disk = self.brokers[SMALL_DISK].data_dir.parent
            subprocess.run(["umount", "--lazy", str(disk)], check=False)

    def clock_file(self, broker_id: int) -> Path:
        return self.directory / f"clock-{broker_id}"

    def full_file(self, broker_id: int) -> Path:
        return self.directory / f"full-{broker_id}"

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_zookeeper(self) -> None:
        self._starter.submit(self.zookeeper.start).result()

    def take_down(self, *broker_ids: int) -> None:
        with self._lock:
            self.down.update(broker_ids)
            self.kill(*(broker_id for broker_id in broker_ids if self.brokers[broker_id].runs))

    def bring_up(self, *broker_ids: int) -> None:
        with self._lock:
            for broker_id in broker_ids:
                self.down.discard(broker_id)
                if not self.brokers[broker_id].runs:
                    self.brokers[broker_id].launch()

    def _supervise(self) -> None:
        """Start brokers that have ended by themselves, as systemd does."""
        while not self._over.wait(0.2):
            for broker_id, broker in self.brokers.items():
                with self._lock:
                    if broker_id in self.down or broker.runs:
                        continue
                    self.down.add(broker_id)
                    last = " | ".join(broker.stderr().strip().splitlines()[-3:])[-300:]
                    self.ended.append(f"broker {broker_id} ended with {broker.process.returncode}: {last}")
                timer = threading.Timer(RESTART_AFTER_S, self.bring_up, (broker_id,))
                timer.daemon = True
                timer.start()

    # --- state -------------------------------------------------------------------------------------------------------

    def said_by(self, broker_id: int, path: str) -> Any:
        """The JSON that a broker answers, or None."""
        with suppress(OSError, HTTPException, ValueError):
            answer = self.brokers[broker_id].request("GET", path, timeout_s=ASK_TIMEOUT_S)
            return answer.json() if answer.status == 200 else None
        return None

    def first_said(self, path: str) -> Any:
        candidates = [broker_id for broker_id in BROKERS if broker_id not in self.down]
        return next((said for said in (self.said_by(broker_id, path) for broker_id in candidates) if said), None)

    def zookeeper_leader(self) -> int | None:
        """The number of the server that leads the ensemble; None for a single server, and while there is no leader."""
        for number, port in enumerate(self.zookeeper.ports):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=ASK_TIMEOUT_S) as asked:
                asked.sendall(b"srvr")
                if b"Mode: leader" in asked.makefile("rb").read():
                    return number
        return None

    def leader_now(self, topic: str, partition: int) -> int | None:
        described = self.first_said(f"/v1/topics/{topic}")
        return described["partitions"][partition]["leader"] if described else None

    def controller_now(self) -> int | None:
        described = self.first_said("/v1/cluster")
        return described["controller"] if described else None

    def is_in_sync(self, topics: dict[str, int]) -> bool:
        """Every broker is ready, and says of every partition that all replicas are in sync, under the same leader."""
        for topic, count in topics.items():
            said = [self.said_by(broker_id, f"/v1/topics/{topic}") for broker_id in BROKERS]
            states = {
                (each["partition"], each["leader"], each["leader_epoch"], tuple(sorted(each["isr"])))
                for described in said
                for each in (described["partitions"] if described else ())
            }
            if None in said or len(states) != count or any(len(isr) < len(BROKERS) for *_, isr in states):
                return False
        return all(self.said_by(broker_id, "/readyz") for broker_id in BROKERS)

    # --- disks -------------------------------------------------------------------------------------------------------

    def fill_disk(self, to: str, length_s: float) -> None:
        """Take all free space of the small disk, but half of what is below its low water, or to the last byte."""
        if not self.has_mounts:
            self.full_file(SMALL_DISK).write_text("" if to == "low water" else AT_ITS_END)
            time.sleep(length_s)
            self.full_file(SMALL_DISK).unlink()
            return
        ballast = self.brokers[SMALL_DISK].data_dir.parent / "ballast"
        left = LOW_WATER_BYTES // 2 if to == "low water" else 0
        ends_at = time.monotonic() + length_s
        try:
            with ballast.open("ab") as file:
                while time.monotonic() < ends_at:
                    free = os.statvfs(ballast.parent)
                    more = free.f_bavail * free.f_frsize - left
                    if more > 0:
                        with suppress(OSError):
                            os.posix_fallocate(file.fileno(), file.tell(), more)
                            file.seek(0, os.SEEK_END)
                    time.sleep(0.2)
        finally:
            ballast.unlink(missing_ok=True)
