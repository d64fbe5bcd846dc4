"""A sensor: `python sensor.py temp 1 5` sends the temperature at EWR to the topic temp_1, every 5 seconds.

It replays real readings (see readings.py), for ever or --count of them. Sending survives the restart of a broker; a
line is printed, and written to the ledger, when the broker has acknowledged.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import click

from portalmq import PortalMQError, Producer
from portalmq.demo_iot.ledger import Entry, Ledger
from portalmq.demo_iot.readings import KINDS, Reading, replay, topic_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from portalmq import RecordMetadata

# The longest time for which a reading waits to share a batch.
LINGER_MS_MAX = 50.0


class Sensor:
    """Sends readings at their times, and records acknowledgements as they arrive."""

    def __init__(self, producer: Producer, ledger: Ledger) -> None:
        self._producer = producer
        self._ledger = ledger
        # Filled by the producer's threads, emptied by this one; bounded by the producer's buffer.
        self._settled: SimpleQueue[tuple[Reading, float, Future[RecordMetadata]]] = SimpleQueue()
        self._waiting = 0
        self.failed = 0

    def run(self, readings: Iterable[Reading], interval_s: float) -> None:
        due = time.monotonic()
        for reading in readings:
            self._note_until(due)
            future = self._producer.send(reading.sensor, reading.message(), key=reading.sensor)
            self._waiting += 1
            future.add_done_callback(partial(self._settle, reading))
            due += interval_s
        while self._waiting:
            self._note(self._settled.get())

    def _settle(self, reading: Reading, future: Future[RecordMetadata]) -> None:
        self._settled.put((reading, time.monotonic(), future))

    def _note_until(self, due: float) -> None:
        """Record acknowledgements until the time `due`."""
        while True:
            try:
                self._note(self._settled.get(timeout=max(0.0, due - time.monotonic())))
            except Empty:
                return

    def _note(self, settled: tuple[Reading, float, Future[RecordMetadata]]) -> None:
        reading, at, future = settled
        self._waiting -= 1
        fault = future.exception()
        if fault:
            self.failed += 1
            click.echo(f"{reading.sensor} #{reading.n} was not acknowledged: {fault}", err=True)
            return
        where = future.result()
        self._ledger.write(Entry(at, reading.sensor, f"{where.partition}-{where.offset}", reading.message()))
        value = "missing" if reading.value is None else f"{reading.value:g} {reading.unit}"
        click.echo(
            f"{reading.sensor} #{reading.n} {reading.measured_at} {reading.station} {value} at offset {where.offset}"
        )


@click.command()
@click.argument("kind", type=click.Choice(list(KINDS)))
@click.argument("sensor_id", metavar="ID", type=click.IntRange(min=1))
@click.argument("interval_s", metavar="SECONDS", type=click.FloatRange(min=0))
@click.option("--server", envvar="PORTALMQ_URL", help="URL of a broker [PORTALMQ_URL; default http://localhost:5000]")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many readings.")
@click.option("--ledger", type=click.Path(path_type=Path), help="Record each acknowledged reading in this file.")
def main(
    kind: str, sensor_id: int, interval_s: float, server: str | None, count: int | None, ledger: Path | None
) -> None:
    """Replay the readings of a sensor of KIND with number ID, one every SECONDS (a fraction is allowed; 0: no
    pause)."""
    linger_ms = min(LINGER_MS_MAX, 1000 * interval_s) if interval_s else LINGER_MS_MAX
    try:
        with Ledger(ledger) as book, Producer(server, linger_ms=linger_ms) as producer:
            sensor = Sensor(producer, book)
            click.echo(f"sending to topic {topic_of(kind, sensor_id)}")
            sensor.run(islice(replay(kind, sensor_id), count), interval_s)
    except PortalMQError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(1 if sensor.failed else 0)


if __name__ == "__main__":
    main()
