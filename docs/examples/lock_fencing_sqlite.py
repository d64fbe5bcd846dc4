"""A lock that fences a row of SQLite: a holder that was paused for too long cannot spoil what the next one wrote.

    portalmq dev 5000 --data-dir ./data/dev &
    python docs/examples/lock_fencing_sqlite.py demo --db /tmp/account.db
    python docs/examples/lock_fencing_sqlite.py work --db /tmp/account.db --rounds 20     # in several terminals at once

The row carries `fence`, the highest fencing token that has touched it. Two rules make it safe, and both are needed:

1. Who takes the lock raises the fence *before it reads* (`claim`). From then on no earlier holder can write.
2. Every write names its token and is refused when the fence is higher. Look and write are one statement: between two of
   them a process can be paused for an hour.

Without the first one an earlier holder could still write between the next one's read and its write, and that write
would then be lost.
"""

from __future__ import annotations

import argparse
import os
import sqlite3
import sys
import time
from pathlib import Path

from portalmq import Fenced, Lock, PortalMQError

SCHEMA = """
CREATE TABLE IF NOT EXISTS account (id INTEGER PRIMARY KEY, balance INTEGER NOT NULL, fence INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS deposits (token INTEGER NOT NULL, worker TEXT NOT NULL, balance INTEGER NOT NULL);
INSERT OR IGNORE INTO account VALUES (1, 0, 0);
"""
BUSY_TIMEOUT_S = 30.0


class Stale(Exception):
    """A greater fencing token has been here: whoever holds this one has lost the lock."""


class Account:
    """One row, written only by the holder of the newest token."""

    def __init__(self, path: Path) -> None:
        self._db = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        self._write_ahead()
        self._db.executescript(SCHEMA)

    def _write_ahead(self) -> None:
        """Readers and a writer do not wait for each other. Of connections that ask for it at the same moment, in a new
        file, SQLite refuses all but one without a wait."""
        deadline = time.monotonic() + BUSY_TIMEOUT_S
        while True:
            try:
                self._db.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def claim(self, token: int) -> int:
        """Raise the fence, then read the balance. Raises Stale."""
        raised = self._db.execute("UPDATE account SET fence = ? WHERE id = 1 AND fence <= ?", (token, token))
        if raised.rowcount == 0:
            raise Stale(f"token {token} is too old")
        return int(self._db.execute("SELECT balance FROM account WHERE id = 1").fetchone()[0])

    def write(self, token: int, balance: int, worker: str) -> None:
        """Set the balance, and note who did. Raises Stale, with nothing written."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            written = self._db.execute(
                "UPDATE account SET balance = ?, fence = ? WHERE id = 1 AND fence <= ?", (balance, token, token)
            )
            if written.rowcount == 0:
                raise Stale(f"token {token} is too old")
            self._db.execute("INSERT INTO deposits VALUES (?, ?, ?)", (token, worker, balance))
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise

    def balance(self) -> int:
        return int(self._db.execute("SELECT balance FROM account WHERE id = 1").fetchone()[0])


def demo(server: str | None, db: Path) -> None:
    """Two holders, the first of which sleeps through the end of its ttl."""
    account = Account(db)
    slow = Lock("account", server, ttl_s=1)
    token = slow.acquire()
    try:
        balance = account.claim(token)
    except Stale as refused:  # tokens rise for ever, but each cluster has its own
        sys.exit(f"{db} was written under another cluster's tokens ({refused}): give another --db")
    print(f"first holder:  token {token}, reads {balance}, and falls asleep")
    slow.close()  # nothing renews it any more, as when the process is paused

    with Lock("account", server, ttl_s=10) as newer:
        fresh = account.claim(newer)
        account.write(newer, fresh + 100, "second")
        print(f"second holder: token {newer}, reads {fresh}, writes {fresh + 100}")

    try:
        account.write(token, balance + 1, "first")
    except Stale as refused:
        print(f"first holder:  wakes, and its write is refused: {refused}")
    print(f"balance: {account.balance()}")


def work(server: str | None, db: Path, rounds: int, ttl_s: float, hold_s: float) -> None:
    """Deposit 1 in each round: read, think, write. Whoever loses the lock in between tries the round again."""
    account, worker, done = Account(db), f"worker-{os.getpid()}", 0
    while done < rounds:
        lock = Lock("account", server, ttl_s=ttl_s)
        try:
            with lock as token:
                balance = account.claim(token)
                time.sleep(hold_s)
                account.write(token, balance + 1, worker)
                done += 1
                print(token, flush=True)
        except (Stale, Fenced) as lost:
            # Fenced may come after the write: then it counted, since the row took it.
            print(f"lost the lock: {lost}", file=sys.stderr, flush=True)
        except PortalMQError as error:
            if not error.retryable:
                raise
            print(f"trying again: {error}", file=sys.stderr, flush=True)
        finally:
            lock.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["demo", "work"])
    parser.add_argument("--server", help="PORTALMQ_URL or http://localhost:5000 when it is not given")
    parser.add_argument("--db", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ttl", type=float, default=2.0)
    parser.add_argument("--hold", type=float, default=0.005, help="seconds between the read and the write")
    given = parser.parse_args()
    if given.what == "demo":
        demo(given.server, given.db)
    else:
        work(given.server, given.db, given.rounds, given.ttl, given.hold)


if __name__ == "__main__":
    main()
