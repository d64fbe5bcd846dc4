"""Compaction of a live cluster: under load, with leaders killed, the last value of every key survives at its offset,
and a queue group that consumes during the compaction receives it.

`PORTALMQ_COMPACTION_KILLS` sets the number of killed leaders (the suite: 1; the full run: 5).
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Sequence

import pytest
from support.cluster import Cluster, wait_until

from portalmq import Consumer, Producer

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

KILLS = int(os.environ.get("PORTALMQ_COMPACTION_KILLS", "1"))
KEYS = 100
PADDING = "." * 1_500
PAUSE_S = 0.002
LEASE_S = 20.0
CONFIG = {"cleanup": "compact", "segment_bytes": 1024 * 1024}


class KeyedLoad:
    """A producer that sets its keys repeatedly. `acked` is offset -> (key, value)."""

    def __init__(self, urls: Sequence[str], name: str, topic: str) -> None:
        self.acked: dict[int, tuple[str, str]] = {}
        self.failures: list[BaseException] = []
        self._urls, self._name, self._topic = list(urls), name, topic
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"load-{name}")
        self._thread.start()

    def _run(self) -> None:
        with Producer(self._urls, linger_ms=1, batch_messages=20, buffer_messages=500) as producer:
            number = 0
            while not self._stopped.wait(PAUSE_S):
                key, value = f"{self._name}-{number % KEYS}", f"{number}{PADDING}"
                future = producer.send(self._topic, value, key=key)
                future.add_done_callback(lambda done, key=key, value=value: self._note(done, key, value))
                number += 1

    def _note(self, future, key: str, value: str) -> None:
        error = future.exception()
        if error is not None:
            self.failures.append(error)
        else:
            self.acked[future.result().offset] = (key, value)

    def wait_for_acked(self, more: int) -> None:
        start = len(self.acked)
        wait_until(lambda: self.failures or len(self.acked) >= start + more, f"{more} more are acked", 60)
        assert not self.failures, self.failures[:3]

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(150)
        assert not self._thread.is_alive()


class Worker:
    """A consumer of a queue group. `seen` is offset -> (key, value) of the messages that it received."""

    def __init__(self, urls: Sequence[str], topic: str) -> None:
        self.seen: dict[int, tuple[str, str]] = {}
        self._urls, self._topic = list(urls), topic
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="worker")
        self._thread.start()

    def _run(self) -> None:
        with Consumer(self._topic, group="workers", bootstrap=self._urls, visibility_timeout_s=LEASE_S) as consumer:
            while not self._stopped.is_set():
                messages = consumer.poll(0.5)
                self.seen.update({message.offset: (message.key.decode(), message.text) for message in messages})
                consumer.ack(messages)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def in_files(cluster: Cluster, broker_id: int, topic: str) -> dict[int, tuple[bytes, bytes]] | None:
    """offset -> (key, value) of the messages in a broker's files; None when the files change during the reading."""
    found: dict[int, tuple[bytes, bytes]] = {}
    directories = list((cluster.brokers[broker_id].data_dir / "partitions").glob(f"{topic}@*/0"))
    try:
        for path in sorted(path for directory in directories for path in directory.glob("0*.sqlite")):
            file = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            try:
                for offset, key, value in file.execute("SELECT offset, CAST(key AS BLOB), value FROM messages"):
                    found[offset] = (key, value)
            finally:
                file.close()
    except sqlite3.Error:
        return None
    return found


def removed(cluster: Cluster, topic: str, loads: Sequence[KeyedLoad]) -> int:
    """The number of acknowledged messages that the leader no longer has; 0 while that is unknown."""
    leader = cluster.leader(topic)
    acked = [offset for load in loads for offset in tuple(load.acked)]
    found = in_files(cluster, leader, topic) if leader is not None else None
    end = max(found) if found else 0
    return sum(offset < end and offset not in found for offset in acked) if found else 0


@pytest.mark.prove
def test_live_compaction_under_load_with_leaders_killed(cluster: Cluster, topic: str):
    admin = cluster.admin()
    admin.create_topic(topic, config=CONFIG)
    cluster.wait_in_sync(topic)
    loads = [KeyedLoad(cluster.urls, name, topic) for name in ("a", "b")]
    worker = Worker(cluster.urls, topic)
    try:
        for _ in range(KILLS):
            wait_until(lambda: removed(cluster, topic, loads) > 300, "the first half is compacted", 60)
            killed = cluster.wait_for_leader(topic)
            cluster.kill(killed)
            for load in loads:
                load.wait_for_acked(100)
            cluster.start(killed)
            cluster.wait_in_sync(topic)
            before = removed(cluster, topic, loads)
            wait_until(
                lambda before=before: removed(cluster, topic, loads) > before + 300, "a new leader compacts too", 60
            )
        for load in loads:
            load.stop()
        last_offsets = {key: offset for load in loads for offset, (key, _) in sorted(load.acked.items())}
        wait_until(
            lambda: set(last_offsets.values()) <= worker.seen.keys(), "the worker has all last values", 3 * LEASE_S
        )
    finally:
        for each in (*loads, worker):
            each.stop()
    acked = {offset: message for load in loads for offset, message in load.acked.items()}
    assert not [failure for load in loads for failure in load.failures]
    there = {message.offset: (message.key.decode(), message.text) for message in admin.read_all(topic)}
    assert len(there) < len(acked) - 500
    assert there.items() <= acked.items(), "every message is at its acknowledged offset"
    last = dict(message for _, message in sorted(acked.items()))
    assert len(last) == 2 * KEYS
    assert worker.seen.items() <= acked.items()
    assert dict(message for _, message in sorted(there.items())) == last, "the last value of every key survives"
    print(f"{len(acked)} sent, {len(there)} left of {len(last)} keys, {KILLS} leaders killed")

    def alike() -> bool:
        files = [in_files(cluster, broker_id, topic) for broker_id in cluster.brokers]
        return None not in files and all(each == files[0] for each in files)

    wait_until(alike, "all replicas have compacted alike", 60)
