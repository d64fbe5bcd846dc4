"""A real cluster for tests: one ZooKeeper (or three) and some brokers, each a process, on free ports, always ended.

    with Cluster(directory) as cluster:
        cluster.admin().create_topic("t")
        cluster.kill(cluster.wait_for_leader("t"))
        cluster.wait_for_leader("t")

Brokers are named by their ids, 1 to `brokers`. Every wait is bounded, and polls a condition.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from support.broker_process import BrokerProcess, wait_until_gone

from portalmq import Admin
from portalmq.control_plane.embedded import EmbeddedZooKeeper

T = TypeVar("T")

WITHIN_S = 30.0
POLL_S = 0.02
ASK_TIMEOUT_S = 3.0


def wait_until(condition: Callable[[], T], what: str, within_s: float = WITHIN_S) -> T:
    """Return the condition's value, once it is true. Raise AssertionError, with `what`, after `within_s`."""
    deadline = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what}: not within {within_s:g} s"
        time.sleep(POLL_S)
    return value


class Cluster:
    """`options` are those of every broker; `preludes` (by broker id) is Python that runs first in that process."""

    def __init__(
        self,
        directory: Path,
        *options: str,
        brokers: int = 3,
        zookeepers: int = 1,
        preludes: dict[int, str] | None = None,
    ) -> None:
        self.directory = directory
        self.zookeeper = EmbeddedZooKeeper(directory / "zookeeper", servers=zookeepers)
        self.brokers: dict[int, BrokerProcess] = {}
        self._options = options
        self._ids = range(1, brokers + 1)
        self._preludes = preludes or {}
        self._paused: set[int] = set()

    # --- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Cluster:
        try:
            self.zookeeper.start()
            for broker_id in self._ids:
                self.add(broker_id)
            self.start(*self._ids)
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        if fault is not None:
            self._tell()
        self.end()

    def end(self) -> None:
        for broker in self.brokers.values():
            broker.end()
        self.zookeeper.kill()
        self.zookeeper.stop()

    def add(self, broker_id: int, *options: str, prelude: str = "", directory: Path | None = None) -> BrokerProcess:
        """Add a broker to this cluster without starting it."""
        broker = BrokerProcess(
            directory or self.directory / f"broker-{broker_id}",
            *("--broker-id", str(broker_id)),
            *self._options,
            *options,
            command=("broker", "--zookeeper", self.zookeeper.hosts),
            prelude=prelude or self._preludes.get(broker_id, ""),
        )
        self.brokers[broker_id] = broker
        return broker

    def start(self, *broker_ids: int) -> None:
        """Start these brokers at the same time, and return once all are ready."""
        for broker_id in broker_ids:
            self.brokers[broker_id].launch()
        for broker_id in broker_ids:
            self.brokers[broker_id].wait_ready()

    def kill(self, *broker_ids: int) -> None:
        """Send SIGKILL to these brokers, all at once; on return none of their processes runs."""
        gone = [process for broker_id in broker_ids for process in self.brokers[broker_id].strike()]
        for broker_id in broker_ids:
            self._paused.discard(broker_id)
            self.brokers[broker_id].wait()
        for process in gone:
            wait_until_gone(process)

    def pause(self, broker_id: int) -> None:
        self._paused.add(broker_id)
        self.brokers[broker_id].pause()

    def resume(self, broker_id: int) -> None:
        self.brokers[broker_id].resume()
        self._paused.discard(broker_id)

    def empty_disk(self, broker_id: int) -> None:
        """Delete all data of a broker that does not run."""
        assert not self.brokers[broker_id].runs
        shutil.rmtree(self.brokers[broker_id].data_dir)

    def heal(self) -> None:
        """Continue paused brokers, start stopped ones, and wait until every broker lists all of them as live."""
        self.zookeeper.start()
        for broker_id in list(self._paused):
            self.resume(broker_id)
        self.start(*(broker_id for broker_id, broker in self.brokers.items() if not broker.runs))
        self.wait_for_controller()
        everyone = set(self.brokers)
        wait_until(lambda: all(self.live(asked) == everyone for asked in everyone), "every broker is live")

    # --- state -------------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[int]:
        """The brokers that can answer."""
        return [
            broker_id for broker_id, broker in self.brokers.items() if broker.runs and broker_id not in self._paused
        ]

    @property
    def urls(self) -> list[str]:
        """The URLs of all brokers that were ever started, including those that are down."""
        return [broker.url for broker in self.brokers.values() if broker.port]

    def admin(self, *, timeout_s: float = WITHIN_S) -> Admin:
        return Admin(self.urls, timeout_s=timeout_s)

    def ask(self, path: str, broker_id: int | None = None) -> Any:
        """GET from one broker, or from the first that answers; None if it answers no 200."""
        for asked in [broker_id] if broker_id is not None else self.running:
            try:
                answer = self.brokers[asked].request("GET", path, timeout_s=ASK_TIMEOUT_S)
            except (OSError, HTTPException):  # the broker dies during an answer
                continue
            if answer.status == 200:
                return answer.json()
        return None

    def partitions(self, topic: str, broker_id: int | None = None) -> list[dict[str, Any]]:
        """The partitions as `GET /v1/topics/{topic}` lists them; none when no broker answers."""
        described = self.ask(f"/v1/topics/{topic}", broker_id)
        return described["partitions"] if described else []

    def leader(self, topic: str, partition: int = 0) -> int | None:
        """The leader as the brokers that can answer name it: None unless they agree."""
        said = {self._leader_says(broker_id, topic, partition) for broker_id in self.running}
        return said.pop() if len(said) == 1 else None

    def _leader_says(self, broker_id: int, topic: str, partition: int) -> int | None:
        metadata = self.ask(f"/v1/metadata?topics={topic}", broker_id)
        partitions = [each for known in (metadata or {"topics": []})["topics"] for each in known["partitions"]]
        return next((each["leader"] for each in partitions if each["partition"] == partition), None)

    def live(self, asked: int | None = None) -> set[int]:
        """The brokers that are registered."""
        cluster = self.ask("/v1/cluster", asked)
        return {broker["id"] for broker in cluster["brokers"] if broker["live"]} if cluster else set()

    def led_by(self, broker_id: int, topic: str) -> list[int]:
        """The partitions of the topic that a broker leads."""
        described = wait_until(lambda: self.partitions(topic), f"a broker describes {topic}")
        return [each["partition"] for each in described if each["leader"] == broker_id]

    def controller(self) -> int | None:
        cluster = self.ask("/v1/cluster")
        return cluster["controller"] if cluster else None

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait_for_leader(
        self, topic: str, partition: int = 0, *, other_than: int | None = None, within_s: float = WITHIN_S
    ) -> int:
        """Return the broker that leads and that all brokers name."""

        def found() -> int | None:
            leader = self.leader(topic, partition)
            return None if leader == other_than else leader

        return wait_until(found, f"a leader of {topic}-{partition} other than {other_than}", within_s)

    def wait_for_controller(self, *, other_than: int | None = None, within_s: float = WITHIN_S) -> int:
        def found() -> int | None:
            controller = self.controller()
            return None if controller == other_than else controller

        return wait_until(found, f"a controller other than {other_than}", within_s)

    def wait_in_sync(self, *topics: str, members: Iterable[int] | None = None, within_s: float = 2 * WITHIN_S) -> None:
        """Wait until each partition of the topics has a leader and all of `members` (default: all running brokers) in
        sync."""
        wanted = set(self.running if members is None else members)

        def all_in_sync() -> bool:
            described = [partition for topic in topics for partition in self.partitions(topic)]
            return bool(described) and all(
                partition["leader"] is not None and wanted & set(partition["replicas"]) <= set(partition["isr"])
                for partition in described
            )

        wait_until(all_in_sync, f"brokers {sorted(wanted)} in sync on {', '.join(topics)}", within_s)

    def wait_out_of_sync(self, broker_id: int, topic: str, *, within_s: float = WITHIN_S) -> None:
        """Wait until a broker is not in the ISR of the topic's first partition, as another broker reports."""

        def has_left() -> bool:
            described = self.partitions(topic)
            return bool(described) and broker_id not in described[0]["isr"]

        wait_until(has_left, f"broker {broker_id} leaves the ISR of {topic}", within_s)

    def _tell(self) -> None:
        """Print the brokers' output for the report of a failed test."""
        for broker_id, broker in self.brokers.items():
            state = "runs" if broker.runs else "does not run"
            print(f"--- broker {broker_id} ({state}), its last lines:")
            print("\n".join(broker.stderr().splitlines()[-30:]) if broker.has_started else "(never started)")
