"""`portalmq produce`, `consume`, `peek` and `queue`: messages as lines.

For pipes, produce sends one message for each line, and consume prints one on each line. With `-o ndjson` a message is
printed as a whole, as in the HTTP API.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal

import click
import msgspec

from portalmq import wire
from portalmq.admin import Admin, Position, Unfinished
from portalmq.cli.options import duration, future_time, message_headers, past_time, where_given
from portalmq.cli.output import message_row, show_one, show_rows, show_value, time_text
from portalmq.cli.receipts import checksum_to_send, open_receipts, receipt_line
from portalmq.cli.session import Session, fields, with_session
from portalmq.compression import HAS_ZSTD, NEEDS_ZSTD
from portalmq.consumer import Consumer
from portalmq.errors import PortalMQError
from portalmq.message import Message, message_from_wire
from portalmq.producer import Producer
from portalmq.producers.batching import SendFuture

UNCONFIRMED_MAX = 20_000
TAIL_WAIT_S = 10.0
ROUND_WAIT_S = 0.2
END_WAIT_S = 1.0
# A new member may have to wait until others release its partitions.
STREAM_END_WAIT_S = 3.0

_QUEUE_COLUMNS = ["id", "state", "deliveries", "sent", "available", "key", "value"]


# --- produce ---------------------------------------------------------------------------------------------------------


@click.command()
@click.argument("topic")
@click.option("-k", "--key", help="Key of every message: they go to one partition, in order.")
@click.option(
    "-H", "--header", "headers", multiple=True, metavar="NAME=VALUE", callback=message_headers,
    help="A header of every message.",
)  # fmt: skip
@click.option("--ndjson", is_flag=True, help="Each line is a JSON value (checked, and sent as application/json).")
@click.option("--partition", type=click.IntRange(0), help="Send to this partition.")
@click.option(
    "--delay", "delay_s", callback=duration, metavar="DURATION", help="Deliver after 500ms, 90s, 15m, 2h, 7d."
)
@click.option("--at", "deliver_at", callback=future_time, metavar="TIME", help="Deliver at a time (RFC 3339).")
@click.option("--ttl", "ttl_s", callback=duration, metavar="DURATION", help="Do not deliver later than this.")
@click.option("--priority", type=click.IntRange(0, 31), default=0, help="0 to 31; greater ones come first.")
@click.option("--acks", type=click.Choice(["all", "leader", "none"]), default="all", show_default=True)
@click.option("--compression", type=click.Choice(["zstd"]), help="Send, replicate and store batches compressed.")
@click.option(
    "--receipts", "receipts_path", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE",
    help="Append a line for each acknowledged message, for `portalmq verify --receipts`.",
)  # fmt: skip
@with_session
def produce(
    session: Session,
    topic: str,
    ndjson: bool,
    acks: wire.Acks,
    compression: Literal["zstd"] | None,
    receipts_path: Path | None,
    **options: Any,
) -> None:
    """Send each line of stdin to TOPIC as one message.

    Examples: seq 1000 | portalmq produce numbers; echo tea | portalmq produce reminders --delay 15m
    """
    if options["delay_s"] is not None and options["deliver_at"] is not None:
        raise click.UsageError("give --delay, or --at, and not both")
    if compression is not None and not HAS_ZSTD:
        raise click.UsageError(NEEDS_ZSTD)
    if receipts_path is not None and acks == "none":
        raise click.UsageError("without acknowledgements there are no receipts: leave --acks none out")
    session.check()
    started = time.monotonic()
    is_interrupted = False
    with (
        contextlib.nullcontext() if receipts_path is None else _open_receipts(receipts_path) as receipts,
        Producer(session.server, token=session.token, acks=acks, compression=compression) as producer,
    ):
        counts = _Counts(receipts)
        try:
            for number, line in enumerate(_lines(), start=1):
                try:
                    value, content_type = _value_of(line.rstrip(b"\r\n"), ndjson)
                except ValueError as fault:
                    counts.refuse(f"line {number}: {fault}")
                    continue
                kept = receipts and checksum_to_send(options["key"], value, content_type, options["headers"])
                counts.expect(producer.send(topic, value, content_type=content_type, **options), kept or "")
        except KeyboardInterrupt:  # lines read so far are sent and counted; a second interrupt ends at once
            is_interrupted = True
        producer.flush()
        counts.settle(0)
    seconds = time.monotonic() - started
    click.echo(f"sent {_messages(counts.sent)} to {topic} in {seconds:.2f} s", err=True)
    if is_interrupted:
        raise KeyboardInterrupt
    if counts.failed:
        raise click.ClickException(f"{_messages(counts.failed)} not sent; the first: {counts.first_failure}")


def _open_receipts(path: Path) -> IO[bytes]:
    try:
        return open_receipts(path)
    except OSError as fault:
        raise click.UsageError(f"{path} cannot be written: {fault.strerror}") from None


def _lines() -> Iterator[bytes]:
    return iter(sys.stdin.buffer)


def _value_of(line: bytes, ndjson: bool) -> tuple[bytes | str, str | None]:
    if ndjson:
        try:
            msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as fault:
            raise ValueError(f"not JSON: {fault}") from None
        return line, wire.JSON
    try:
        return line.decode("utf-8"), None
    except UnicodeDecodeError:
        return line, None


def _messages(number: int) -> str:
    return f"{number} message{'' if number == 1 else 's'}"


class _Counts:
    """Counts the outcomes of the sends, and writes their `receipts`. Keeps at most UNCONFIRMED_MAX futures."""

    def __init__(self, receipts: IO[bytes] | None) -> None:
        self.sent = 0
        self.failed = 0
        self.first_failure = ""
        self._receipts = receipts
        self._unconfirmed: list[tuple[SendFuture, str]] = []

    def expect(self, future: SendFuture, checksum: str) -> None:
        self._unconfirmed.append((future, checksum))
        if len(self._unconfirmed) >= UNCONFIRMED_MAX:
            self.settle(UNCONFIRMED_MAX // 2)

    def settle(self, keep: int) -> None:
        """Wait for all but the newest `keep`."""
        done = self._unconfirmed[: len(self._unconfirmed) - keep]
        self._unconfirmed = self._unconfirmed[len(done) :]
        for future, checksum in done:
            try:
                place = future.result()
            except PortalMQError as error:
                self.refuse(error.detail)
                continue
            self.sent += 1
            if self._receipts is not None:
                self._receipts.write(receipt_line(place, checksum))
        if self._receipts is not None:
            self._receipts.flush()

    def refuse(self, reason: str) -> None:
        self.failed += 1
        self.first_failure = self.first_failure or reason


# --- consume and peek ------------------------------------------------------------------------------------------------


@click.command()
@click.argument("topic")
@click.option("-g", "--group", help="Consume as this group: each message goes to one of its consumers, and is acked.")
@click.option(
    "--mode",
    type=click.Choice(["queue", "stream"]),
    default="queue",
    show_default=True,
    help="Mode of the group: its consumers share messages, or partitions.",
)
@click.option("--from-beginning", is_flag=True, help="Start with the oldest message.")
@click.option(
    "--offset", type=click.IntRange(0), help="Start at this offset (needs --partition on a partitioned topic)."
)
@click.option("--since", callback=past_time, metavar="TIME", help="Start at a time: RFC 3339, or 15m, 2h, 7d ago.")
@click.option("--partition", type=click.IntRange(0), help="Read this partition only (not with --group).")
@click.option("-n", "--count", type=click.IntRange(1), help="Stop after so many messages.")
@click.option("--exit-at-end", is_flag=True, help="Stop at the end of the topic.")
@with_session
def consume(
    session: Session,
    topic: str,
    group: str | None,
    mode: Literal["queue", "stream"],
    from_beginning: bool,
    offset: int | None,
    since: datetime | None,
    partition: int | None,
    count: int | None,
    exit_at_end: bool,
) -> None:
    """Print the messages of TOPIC, one on each line, and wait for more.

    Without --group it consumes nothing, and starts with the next message that arrives.
    """
    if sum([from_beginning, offset is not None, since is not None]) > 1:
        raise click.UsageError("give one of --from-beginning, --offset and --since")
    if group is None and mode == "stream":
        raise click.UsageError("--mode stream goes with --group: without one, nothing is consumed")
    if group is not None and (offset is not None or since is not None or partition is not None):
        raise click.UsageError(
            "a group keeps its own position: --offset, --since and --partition do not go with --group"
        )
    if group is not None:
        if not session.admin.metadata([topic]).topics:
            click.echo(f"there is no topic {topic} yet: it is created now, and its messages are awaited", err=True)
        end_wait_s = STREAM_END_WAIT_S if mode == "stream" else END_WAIT_S
        # Printed messages are acked; one that could not be printed goes back.
        with Consumer(
            topic,
            group=group,
            mode=mode,
            bootstrap=session.server,
            token=session.token,
            max_messages=min(count or 100, 100),
            idle_timeout_s=end_wait_s if exit_at_end else None,
        ) as consumer:
            shown = _print(consumer, session.output, count)
            # Asking for the next message acks the one before, but nothing asks after the last one.
            consumer.commit()
    else:
        start: Position = offset if offset is not None else "earliest" if from_beginning or exit_at_end else "latest"
        shown = _print(_of_topic(session.admin, topic, partition, start, since, exit_at_end), session.output, count)
    click.echo(_messages(shown), err=True)


def _print(messages: Iterable[Message], form: str, count: int | None) -> int:
    """Print up to `count` messages as they arrive; return their number."""
    shown = 0
    for message in messages:
        _show(message, form)
        shown += 1
        if shown == count:
            break
    return shown


def _show(message: Message, form: str) -> None:
    if form == "table":
        show_value(message)
    else:
        sys.stdout.write(msgspec.json.encode(message_row(message)).decode() + "\n")
        sys.stdout.flush()


def _of_topic(
    admin: Admin, topic: str, partition: int | None, start: Position, since: datetime | None, exit_at_end: bool
) -> Iterator[Message]:
    """Yield messages of all the partitions in turn; for ever, or up to the end of each."""
    if partition is None:
        places: dict[int, Position] = {each.partition: start for each in admin.describe(topic).partitions}
    else:
        places = {partition: start}
    if isinstance(start, int) and len(places) > 1:
        raise click.UsageError(
            f"{topic} has {len(places)} partitions: say which one the offset is in, with --partition"
        )
    begun: set[int] = set()
    wait_s = 0.0
    while places:
        found = False
        for each, place in list(places.items()):
            at = since if each not in begun else None
            page = admin.browse(topic, each, offset=place, at=at, limit=wire.BROWSE_MESSAGES_MAX, wait_s=wait_s)
            begun.add(each)
            places[each] = page.next_offset
            for packed in page.messages:
                found = True
                yield message_from_wire(packed, topic)
            if exit_at_end and page.next_offset >= page.high_watermark:
                del places[each]
        wait_s = 0.0 if found else (TAIL_WAIT_S if len(places) == 1 else ROUND_WAIT_S)


@click.command()
@click.argument("topic")
@click.option("-n", "--count", type=click.IntRange(1), default=10, show_default=True, help="How many messages.")
@click.option("--partition", type=click.IntRange(0), help="Look into this partition only.")
@click.option("--offset", type=click.IntRange(0), help="Start at this offset.")
@click.option("--since", callback=past_time, metavar="TIME", help="Start at a time: RFC 3339, or 15m, 2h, 7d ago.")
@click.option(
    "--where", callback=where_given, metavar="JSON",
    help='Only these, e.g. {"value.total":{"gt":100}}: the newest first, or from --since on.',
)  # fmt: skip
@click.option("--newest", is_flag=True, help="The newest first, over all partitions.")
@with_session
def peek(
    session: Session,
    topic: str,
    count: int,
    partition: int | None,
    offset: int | None,
    since: datetime | None,
    where: dict[str, Any] | None,
    newest: bool,
) -> None:
    """Show messages of TOPIC with their keys, headers and times. Consumes nothing."""
    is_search = newest or where is not None
    if (is_search and offset is not None) or (newest and since is not None):
        raise click.UsageError("--offset goes with neither --where nor --newest, nor --since with --newest")
    start: Position = "earliest" if offset is None else offset
    if not is_search:
        messages = session.admin.peek(topic, partition=partition, offset=start, at=since, limit=count)
    else:
        messages = islice(session.admin.search(topic, where, partition=partition, at=since), count)
    rows = ({**message_row(each), "time": time_text(each.timestamp_ms)} for each in messages)
    show_rows(rows, session.output, ["id", "time", "key", "content_type", "value"])


# --- queue -----------------------------------------------------------------------------------------------------------


@click.command()
@click.option("--topic", default="default", show_default=True, help="The queue.")
@click.option("--group", default="default", show_default=True, help="The group that consumes it.")
@click.option(
    "-n", "--count", type=click.IntRange(0), default=100, show_default=True, help="How many messages at most."
)
@with_session
def queue(session: Session, topic: str, group: str, count: int) -> None:
    """Show a queue's state: its messages by state, and each one that is not finished.

    Messages are in log order, partition by partition. This consumes and changes nothing; a group that was never used
    has every message before it.

    Example: portalmq queue --topic orders --group billing -n 20
    """
    counts = fields(session.admin.queue_counts(group, topic))
    found = session.admin.unfinished(group, topic, limit=count + 1)
    rows = list(map(_unfinished_row, islice(found, count + 1))) if count else []
    shown, more = rows[:count], len(rows) > count
    if session.output == "json":
        show_one({"topic": topic, "group": group, **counts, "messages": shown, "more": more}, "json")
        return
    click.echo("  ".join(f"{name} {number}" for name, number in counts.items()), err=True)
    show_rows(shown, session.output, _QUEUE_COLUMNS)
    if more:
        click.echo("... and more: -n shows another number of them", err=True)


def _unfinished_row(unfinished: Unfinished) -> dict[str, Any]:
    row = message_row(unfinished.message)
    row.pop("delivery_count", None)
    return {
        **row,
        "state": unfinished.state,
        "deliveries": unfinished.message.delivery_count,
        "sent": time_text(unfinished.message.timestamp_ms),
        "available_at_ms": unfinished.available_at_ms,
        "available": None if unfinished.available_at_ms is None else time_text(unfinished.available_at_ms),
    }
