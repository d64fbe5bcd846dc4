"""A program that adds up numbers in SQLite, each once, through a TransactionalSink. It runs until it is killed.

python counter.py URLS TOPIC GROUP MODE DATABASE
"""

from __future__ import annotations

import sqlite3
import sys

from portalmq import Consumer, PortalMQError
from portalmq.sink import TransactionalSink

LEASE_S = 2.0


def main(urls: str, topic: str, group: str, mode: str, database: str) -> None:
    connection = sqlite3.connect(database, timeout=20)
    sink = TransactionalSink(connection, group=group, mode=mode)  # type: ignore[arg-type]
    with Consumer(
        topic,
        group=group,
        bootstrap=urls.split(","),
        mode=mode,  # type: ignore[arg-type]
        visibility_timeout_s=LEASE_S,
        session_timeout_s=LEASE_S,
    ) as consumer:
        while True:
            try:
                for message in consumer:
                    with sink.handle(message) as cursor:
                        if cursor is not None:
                            cursor.execute("INSERT INTO effects VALUES (?)", (int(message.text),))
            except PortalMQError as error:
                print(f"goes on after {error.code}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
