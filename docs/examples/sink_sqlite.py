"""Readings from a queue into SQLite, each counted once, however often it is delivered.

    portalmq dev 5000 &
    python docs/examples/sink_sqlite.py http://localhost:5000 readings.db

The effect (the sum of a sensor) and the note that a message is handled stand in one transaction. Kill this program at
any moment and start it again: what was handled and not acked is delivered again, and does nothing.
"""

from __future__ import annotations

import sqlite3
import sys

from portalmq import Consumer, Producer
from portalmq.sink import TransactionalSink


def count(bootstrap: str, database: str, *, topic: str = "readings", group: str = "totals") -> dict[str, int]:
    """Handle what is there; the totals of all sensors."""
    connection = sqlite3.connect(database)
    connection.execute("CREATE TABLE IF NOT EXISTS totals (sensor TEXT PRIMARY KEY, total INTEGER NOT NULL)")
    sink = TransactionalSink(connection, group=group)
    with Consumer(topic, group=group, bootstrap=bootstrap, idle_timeout_s=2) as consumer:
        for message in consumer:
            reading = message.json()
            with sink.handle(message) as cursor:
                if cursor is not None:  # None: it was handled before
                    cursor.execute(
                        "INSERT INTO totals VALUES (?, ?)"
                        " ON CONFLICT (sensor) DO UPDATE SET total = totals.total + excluded.total",
                        (reading["sensor"], reading["value"]),
                    )
    totals = dict(connection.execute("SELECT sensor, total FROM totals ORDER BY sensor"))
    connection.close()
    return totals


def main(bootstrap: str, database: str) -> None:
    with Producer(bootstrap) as producer:
        for number in range(100):
            producer.send("readings", {"sensor": f"sensor-{number % 3}", "value": number})
    print(count(bootstrap, database))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python sink_sqlite.py BOOTSTRAP_URL DATABASE_FILE")
    main(*sys.argv[1:])
