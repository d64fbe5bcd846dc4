"""A controller: `python controller.py temp_1` receives a sensor's readings and reports those that need attention.

It sleeps until a message arrives. Two controllers of one topic are one group, so they share its messages; the messages
of a controller that dies go to the other. It writes a message to its ledger before it acks it, so every acked message
is in the ledger.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from portalmq import Consumer, LeaseLost, Message, PortalMQError
from portalmq.demo_iot.ledger import Entry, Ledger
from portalmq.demo_iot.readings import KINDS


def verdict(reading: dict[str, Any]) -> str:
    """Return "ok", "missing", or the problem of a reading, which begins with ALERT."""
    kind, value = KINDS.get(reading.get("kind", "")), reading.get("value")
    if value is None:
        return "missing"
    if kind is None:
        return f"ALERT unknown kind of sensor {reading.get('kind')!r}"
    if value < kind.low:
        return f"ALERT below {kind.low:g} {kind.unit}"
    if value > kind.high:
        return f"ALERT above {kind.high:g} {kind.unit}"
    return "ok"


def reading_of(message: Message) -> dict[str, Any] | None:
    """Return the reading in a message; None if it is something else, which any program may send to the topic."""
    try:
        reading = message.json()
    except ValueError:
        return None
    if not isinstance(reading, dict) or not isinstance(reading.get("kind"), str) or "value" not in reading:
        return None
    return reading if isinstance(reading["value"], int | float | None) else None


def line(message: Message, reading: dict[str, Any]) -> str:
    again = f" (delivery {message.delivery_count})" if message.delivery_count > 1 else ""
    value = reading.get("value")
    shown = "-" if value is None else f"{value:g} {reading.get('unit', '')}"
    return f"{message.topic} #{reading.get('n')} {reading.get('measured_at')} {shown} {verdict(reading)}{again}"


def control(consumer: Consumer, ledger: Ledger, count: int | None) -> None:
    """Handle messages until the consumer is closed or `count` were handled."""
    for handled, message in enumerate(_messages(consumer), start=1):
        reading = reading_of(message)
        if reading is None:
            # Acked like the others: returned to the group, it would come again and stop every controller in turn.
            click.echo(f"{message.topic} {message.id} is no reading: skipped", err=True)
        else:
            click.echo(line(message, reading))
            ledger.write(Entry(time.monotonic(), message.topic, message.id, reading))
        if handled == count:
            message.ack()  # nothing asks for a next message, which would ack this one
            return


def _messages(consumer: Consumer) -> Iterator[Message]:
    """Yield messages, also after one that took longer than its lease, which another controller has then handled too."""
    while True:
        try:
            yield from consumer
            return
        except LeaseLost as lost:
            click.echo(f"{lost}", err=True)


def close_on_sigterm(consumer: Consumer) -> None:
    """Close the consumer on SIGTERM, in a thread of its own: the signal handler may run in any line of the loop."""
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=consumer.close).start())


@click.command()
@click.argument("topics", metavar="TOPIC...", nargs=-1, required=True)
@click.option("--server", envvar="PORTALMQ_URL", help="URL of a broker [PORTALMQ_URL; default http://localhost:5000]")
@click.option("--group", default="controllers", show_default=True, help="Controllers of one group share the messages.")
@click.option("--count", type=click.IntRange(min=1), help="Stop after so many readings.")
@click.option(
    "--lease",
    "lease_s",
    default=30.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Seconds after which a reading that was not done goes to another controller.",
)
@click.option("--ledger", type=click.Path(path_type=Path), help="Record each reading in this file.")
def main(
    topics: tuple[str, ...], server: str | None, group: str, count: int | None, lease_s: float, ledger: Path | None
) -> None:
    """Receive the readings in TOPIC and report each: `ok`, `missing`, or ALERT."""
    try:
        with (
            Ledger(ledger) as book,
            Consumer(*topics, group=group, bootstrap=server, visibility_timeout_s=lease_s) as consumer,
        ):
            close_on_sigterm(consumer)
            control(consumer, book, count)
    except PortalMQError as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
