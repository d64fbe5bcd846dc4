"""Locks on real processes: brokers and holders are killed and paused, and a row of SQLite must stay correct."""

from __future__ import annotations

import itertools
import os
import re
import runpy
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.broker_process import BrokerProcess
from support.cluster import Cluster, wait_until

from portalmq import Fenced, Lock, LockHeld, Unavailable, wire

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "lock_fencing_sqlite.py"
# The full run: PORTALMQ_LOCK_ROUNDS=400 PORTALMQ_LOCK_KILLS=6.
ROUNDS = int(os.environ.get("PORTALMQ_LOCK_ROUNDS", "40"))
KILLS = int(os.environ.get("PORTALMQ_LOCK_KILLS", "2"))
WORKERS = 3
SECONDS_A_ROUND = 2.0
# The lease of a holder that must keep its lock through the pauses of a test; it renews three times as often.
TTL_S = 12.0
HOLD_S = 3.25
# The example's first holder stops itself in its first round, between the read and the write.
STOPS_ITSELF = f"""
import os, signal, sys, time
sleep = time.sleep
def stop(seconds):
    if seconds == {HOLD_S}:
        time.sleep = sleep
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        sleep(seconds)
time.sleep = stop
"""


@contextmanager
def worker(
    cluster: Cluster, db: Path, rounds: int, *options: str, prelude: str = ""
) -> Iterator[subprocess.Popen[str]]:
    program = f"{prelude}\nimport runpy; runpy.run_path({str(EXAMPLE)!r}, run_name='__main__')"
    command = [sys.executable, "-c", program, "work", "--server", ",".join(cluster.urls), "--db", str(db)]
    child = subprocess.Popen([*command, "--rounds", str(rounds), *options], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGCONT)
            child.kill()
        child.wait()
        if child.stdout is not None:
            child.stdout.close()


def deposits(db: Path) -> list[tuple[int, int]]:
    """(token, balance) in the order of the writes."""
    with sqlite3.connect(db, timeout=30) as connection:
        return connection.execute("SELECT token, balance FROM deposits ORDER BY rowid").fetchall()


def check(db: Path) -> int:
    """Assert that no deposit is lost and that no token wrote after a greater one. Return the number of tokens that
    wrote."""
    written = deposits(db)
    assert [balance for _, balance in written] == list(range(1, len(written) + 1))
    tokens = [token for token, _ in written]
    assert all(earlier < later for earlier, later in itertools.pairwise(tokens))
    return len(written)


def stands_still(child: subprocess.Popen[str]) -> bool:
    return child.poll() is None and psutil.Process(child.pid).status() == psutil.STATUS_STOPPED


def stop_between_writes(child: subprocess.Popen[str], db: Path) -> None:
    """Stop the process outside of a write: a process stopped during a write would block the database for all others,
    with or without the lock. A process that has done all its rounds has ended."""

    def does_not_write() -> bool:
        child.send_signal(signal.SIGSTOP)
        wait_until(lambda: stands_still(child) or child.poll() is not None, "it is stopped")
        with closing(sqlite3.connect(db, timeout=1, isolation_level=None)) as connection:
            try:
                connection.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                child.send_signal(signal.SIGCONT)
                return False
            connection.execute("ROLLBACK")
            return True

    wait_until(does_not_write, "it is stopped between two writes")


def described(cluster: Cluster, name: str, broker_id: int | None = None) -> dict[str, Any]:
    """Return the lock, as a broker that can answer describes it."""
    told: dict[str, Any] = wait_until(
        lambda: cluster.ask(f"/v1/locks/{name}", broker_id), "a broker describes the lock"
    )
    return told


def test_a_lock_outlives_the_broker_that_granted_it(cluster: Cluster, topic: str) -> None:
    lock = Lock(topic, cluster.urls, ttl_s=TTL_S)
    other = Lock(topic, cluster.urls, ttl_s=TTL_S)
    token = lock.acquire()
    try:
        for broker_id in (1, 2):
            cluster.kill(broker_id)
            left_ms = described(cluster, topic)["expires_in_ms"]
            wait_until(lambda left_ms=left_ms: described(cluster, topic)["expires_in_ms"] > left_ms, "it is renewed")
            with pytest.raises(LockHeld):
                other.acquire(timeout_s=1.5)
            assert lock.check() == token
            cluster.heal()
        lock.renew()
        lock.release()
        assert other.acquire(timeout_s=60) == token + 1
    finally:
        lock.close()
        other.close()


def test_a_killed_broker_shortens_no_lease_and_its_waiters_keep_their_turns(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits at a broker of its own. The broker of the first in the queue dies, and the waiter continues at
    another."""
    # No wait ends by its time limit during the test: a waiter that repeats its call late may lose its position.
    monkeypatch.setattr("portalmq.lock.POLL_WAIT_S", 60.0)
    monkeypatch.setattr("portalmq.lock.KEEP_PLACE_MS", wire.LOCK_PLACE_MS_MAX)
    holder = Lock(topic, cluster.brokers[1].url, ttl_s=30)
    token = holder.acquire()
    order: list[str] = []
    waiting = []
    for name, url in (
        ("first", [cluster.brokers[2].url, cluster.brokers[1].url]),
        ("second", [cluster.brokers[3].url]),
    ):
        lock = Lock(topic, url, ttl_s=30)

        def wait(name: str = name, lock: Lock = lock) -> None:
            with lock:
                order.append(name)
            lock.close()

        thread = threading.Thread(target=wait)
        thread.start()
        waiting.append(thread)
        wanted = len(waiting)
        wait_until(lambda wanted=wanted: described(cluster, topic)["waiters"] == wanted, "a place in the queue")
    cluster.kill(2)
    try:
        wait_until(lambda: waits_at(cluster, 1) == 1, "the client of the killed broker waits at another one")
        wait_until(lambda: described(cluster, topic, 3)["waiters"] == 2, "both have a place")
        assert holder.check() == token
        holder.release()
        for thread in waiting:
            thread.join(60)
    finally:
        holder.close()
    assert order == ["first", "second"]
    assert described(cluster, topic, 3)["fencing_token"] == token + 2


def waits_at(cluster: Cluster, broker_id: int) -> int:
    """The number of calls that wait at a broker."""
    metrics = cluster.brokers[broker_id].request("GET", "/metrics").body.decode()
    return int(float(re.search(r"^portalmq_waiting_calls (\S+)", metrics, re.MULTILINE)[1]))  # type: ignore[index]


def test_a_holder_that_is_stopped_loses_the_lock_and_its_late_write_is_refused(
    cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    db = tmp_path / "account.db"
    with worker(cluster, db, 1, "--ttl", "1", "--hold", str(HOLD_S), prelude=STOPS_ITSELF) as slow:
        wait_until(lambda: stands_still(slow), "the first holder has claimed the row, and is stopped")
        assert fence(db) > 0
        with worker(cluster, db, 3, "--ttl", "5") as quick:
            assert quick.stdout is not None
            tokens = [int(line) for line in quick.stdout]
            assert quick.wait(60) == 0
        assert len(tokens) == 3
        slow.send_signal(signal.SIGCONT)
        assert slow.wait(60) == 0  # it loses its round, and repeats it under a new token
    assert check(db) == 4
    assert deposits(db)[-1][0] > max(tokens)


def fence(db: Path) -> int:
    try:
        with sqlite3.connect(db, timeout=30) as connection:
            return int(connection.execute("SELECT fence FROM account").fetchone()[0])
    except (sqlite3.OperationalError, TypeError):
        return 0  # the database is being created


def test_kills_and_pauses_of_brokers_and_holders_lose_no_deposit(cluster: Cluster, tmp_path: Path) -> None:
    """Workers deposit under the lock; brokers are killed, and a worker is paused repeatedly."""
    db = tmp_path / "account.db"
    each = ROUNDS // WORKERS + 1
    deadline = time.monotonic() + SECONDS_A_ROUND * ROUNDS + 60
    with (
        worker(cluster, db, each) as first,
        worker(cluster, db, each) as second,
        worker(cluster, db, each) as paused,
    ):
        workers = [first, second, paused]
        wait_until(lambda: db.exists() and fence(db) > 0, "a worker makes deposits")
        for number in range(KILLS):
            victim = 1 + number % 3
            stop_between_writes(paused, db)
            before = len(deposits(db))
            cluster.kill(victim)
            wait_until(
                lambda before=before: len(deposits(db)) > before + 2 or all(w.poll() is not None for w in workers[:2]),
                "others go on while a holder is paused and a broker is dead",
            )
            paused.send_signal(signal.SIGCONT)
            cluster.heal()
        for child in workers:
            assert child.wait(max(1.0, deadline - time.monotonic())) == 0
    assert check(db) == WORKERS * each


def test_the_examples_workers_may_begin_at_the_same_moment(tmp_path: Path) -> None:
    account = runpy.run_path(str(EXAMPLE))["Account"]
    together = threading.Barrier(6)

    def begin(db: Path) -> int:
        together.wait()
        return int(account(db).balance())

    with ThreadPoolExecutor(6) as workers:
        for number in range(60):
            assert set(workers.map(begin, [tmp_path / f"{number}.db"] * 6)) == {0}


def test_the_example_shows_what_it_says(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", command=("dev",))
    broker.start()
    try:
        command = [sys.executable, str(EXAMPLE), "demo", "--server", broker.url, "--db", str(tmp_path / "account.db")]
        told = subprocess.run(command, capture_output=True, text=True, timeout=90, check=True).stdout
    finally:
        broker.end()
    assert "its write is refused" in told
    assert told.endswith("balance: 100\n")


def test_a_zombie_is_fenced_over_the_restart_of_all_brokers(cluster: Cluster, topic: str) -> None:
    zombie = Lock(topic, cluster.urls, ttl_s=1)
    token = zombie.acquire()
    zombie.close()  # it stops renewing, and does not notice
    cluster.kill(1, 2, 3)
    cluster.heal()
    with Lock(topic, cluster.urls, ttl_s=TTL_S) as newer:
        assert newer > token
        admin = cluster.admin()
        with pytest.raises(Fenced):
            admin.release_lock(topic, zombie.owner or "", token)
        admin.close()


def test_without_zookeeper_no_lock_is_granted_and_holders_lose_theirs_in_time(
    cluster: Cluster, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("portalmq.lock.REACH_TIMEOUT_S", 3.0)
    lock, other = Lock(topic, cluster.urls, ttl_s=2), Lock(topic, cluster.urls, ttl_s=2)
    token = lock.acquire()
    cluster.zookeeper.kill()
    try:
        assert lock.wait_lost(60)
        with pytest.raises(Fenced):
            lock.check()
        with pytest.raises(Unavailable):
            other.acquire(timeout_s=0)
    finally:
        cluster.zookeeper.start()
        lock.close()
    try:
        assert other.acquire(timeout_s=60) > token
    finally:
        other.close()
