"""Benchmark of delivery by one broker without replicas; each rate is compared with produce in the same run.

receive     queue mode: receive and ack in batches of 100 by four consumers, beside produce in batches of exactly 100
fetch       stream mode: reading a topic from its beginning, beside the fastest produce
scheduled   the memory of a million scheduled messages
ack         the ack of a single message
wake        the time from send() until a waiting consumer has the message
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from statistics import median

import click
import msgspec

from portalmq import Consumer, Producer
from portalmq.broker.bench import harness

CONSUMERS = 4
SCHEDULED = 1_000_000
SCHEDULED_FOR_S = 3600.0
FETCH_BYTES = 1_000_000
PARKED_EVERY_S = 0.002


def measured(directory: Path, messages: int, singles: int, rounds: int) -> dict[str, float]:
    """Return all figures, each the median over `rounds`; the memory is measured once."""
    figures = harness.medians(rounds, lambda number: _round(directory / str(number), messages, singles))
    figures |= _scheduled(directory / "scheduled")
    return figures | {
        "receive_ack_to_produce_small": figures["receive_ack_per_s"] / figures["produce_small_per_s"],
        "fetch_to_produce": figures["fetch_per_s"] / figures["produce_per_s"],
        "stream_consumer_to_produce": figures["stream_consumer_per_s"] / figures["produce_per_s"],
    }


def _round(directory: Path, messages: int, singles: int) -> dict[str, float]:
    directory.mkdir(parents=True)
    with harness.broker(directory) as (url, _):
        return {
            "produce_per_s": harness.produce_rate(url, "bulk", messages, harness.BATCH_MESSAGES),
            "produce_small_per_s": harness.produce_rate(
                url, "small", messages // 4, harness.RECEIVE_MESSAGES, grow=False
            ),
            "receive_ack_per_s": harness.receive_rate(url, "small", messages // 4, consumers=CONSUMERS),
            "fetch_per_s": _fetch_rate(url, "bulk", messages),
            "stream_consumer_per_s": _stream_rate(url, "bulk", messages),
            "ack_p50_ms": _ack_p50_ms(url, "singles", singles),
            "wake_p50_ms": _wake_p50_ms(url, "wake", singles),
        }


def _fetch_rate(url: str, topic: str, messages: int) -> float:
    """Return the messages per second of a stream reader over HTTP: the whole topic, from its beginning."""
    connection = harness.connection_to(url)
    offset, begin = 0, time.perf_counter()
    while True:
        asked = {"topic": topic, "partition": 0, "offset": offset}
        body = msgspec.json.encode({"partitions": [asked], "max_bytes": FETCH_BYTES, "wait_ms": 0})
        connection.request("POST", "/v1/fetch", body, {"Content-Type": "application/json"})
        answer = msgspec.msgpack.decode(connection.getresponse().read())
        (got,) = answer["partitions"]
        if got.get("error") or got["next_offset"] == offset:
            break
        offset = got["next_offset"]
    if offset < messages:
        raise click.ClickException(f"the fetch ended at offset {offset} of {messages} messages: {answer}")
    return messages / (time.perf_counter() - begin)


def _stream_rate(url: str, topic: str, messages: int) -> float:
    """Return the same rate for the client's Consumer, which decodes messages and commits offsets."""
    with Consumer(topic, group="bench-stream", bootstrap=url, mode="stream") as consumer:
        count = len(consumer.poll(timeout_s=harness.WITHIN_S, max_messages=1))
        begin = time.perf_counter()
        while count < messages:
            batch = consumer.poll(timeout_s=harness.WITHIN_S, max_messages=harness.BATCH_MESSAGES)
            if not batch:
                raise click.ClickException(f"{count} of {messages} messages were read")
            count += len(batch)
        return count / (time.perf_counter() - begin)


def _ack_p50_ms(url: str, topic: str, times: int) -> float:
    with Producer(url) as producer:
        for _ in range(times):
            producer.send(topic, harness.VALUE)
    durations: list[float] = []
    with Consumer(topic, group="bench", bootstrap=url, manual_ack=True) as consumer:
        while len(durations) < times:
            for message in consumer.poll(timeout_s=harness.WITHIN_S):
                begin = time.perf_counter()
                message.ack()
                durations.append(time.perf_counter() - begin)
    return median(durations) * 1000


def _wake_p50_ms(url: str, topic: str, times: int) -> float:
    """Return the latency from send to receive. Before each send, the broker reports that the consumer waits."""
    arrived: list[float] = []
    wakeup = threading.Semaphore(0)

    def consume() -> None:
        with Consumer(topic, group="bench", bootstrap=url) as consumer:
            for _ in range(times + 1):
                consumer.poll(timeout_s=harness.WITHIN_S, max_messages=1)
                arrived.append(time.perf_counter())
                wakeup.release()

    thread = threading.Thread(target=consume)
    durations: list[float] = []
    with Producer(url) as producer:
        producer.send(topic, harness.VALUE).result(timeout=harness.WITHIN_S)
        thread.start()
        wakeup.acquire(timeout=harness.WITHIN_S)
        for _ in range(times):
            harness.until_parked(url, 1, PARKED_EVERY_S)
            begin = time.perf_counter()
            producer.send(topic, harness.VALUE).result(timeout=harness.WITHIN_S)
            wakeup.acquire(timeout=harness.WITHIN_S)
            durations.append(arrived[-1] - begin)
    thread.join()
    return median(durations) * 1000


def _scheduled(directory: Path) -> dict[str, float]:
    """Return the memory of a broker with a million messages due in an hour, and a group that waits for them."""
    with harness.broker(directory) as (url, pid):
        idle_mb = harness.rss_mb(pid)
        with Producer(url, batch_messages=harness.BATCH_MESSAGES) as producer:
            for _ in range(SCHEDULED):
                producer.send("later", harness.VALUE, delay_s=SCHEDULED_FOR_S)
            producer.flush(timeout=300)
        with Consumer("later", group="bench", bootstrap=url) as consumer:
            if consumer.poll(timeout_s=2):
                raise click.ClickException("a scheduled message came before its time")
        return {"idle_rss_mb": idle_mb, "scheduled_rss_mb": harness.rss_mb(pid)}


def show(figures: dict[str, float], output: str) -> None:
    rows = [
        ("produce in batches of exactly 100", _rate(figures["produce_small_per_s"])),
        ("receive and ack in batches of 100, 4 consumers", _rate(figures["receive_ack_per_s"])),
        ("  ratio (at least 0.5)", f"{figures['receive_ack_to_produce_small']:.2f}"),
        ("produce, growing batches", _rate(figures["produce_per_s"])),
        ("stream fetch over HTTP", _rate(figures["fetch_per_s"])),
        ("  ratio (at least 1.0)", f"{figures['fetch_to_produce']:.2f}"),
        ("stream Consumer in Python", _rate(figures["stream_consumer_per_s"])),
        ("  ratio", f"{figures['stream_consumer_to_produce']:.2f}"),
        ("ack of one message, p50 (at most 1.2)", f"{figures['ack_p50_ms']:.2f} ms"),
        ("send to a consumer that waits, p50 (at most 3)", f"{figures['wake_p50_ms']:.2f} ms"),
        ("memory when idle", f"{figures['idle_rss_mb']:.0f} MB"),
        ("memory with a million scheduled messages (at most 250)", f"{figures['scheduled_rss_mb']:.0f} MB"),
    ]
    harness.show(figures, output, rows)


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f} messages/s"
