"""How cost grows with the size of messages and batches, and with the number of connections, partitions, topics, parked
receives, groups, waiting messages and replicas. A case measures the same figures at each of its points.
"""

from __future__ import annotations

import itertools
import re
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import click

from portalmq import Admin, Consumer, Producer
from portalmq.broker.bench import harness
from portalmq.broker.bench.comparison import Begin, consuming, producing, traffic
from portalmq.broker.bench.measure import Figures, Timed, cause, in_workers, summary
from portalmq.broker.bench.systems import OneBroker, Site, ThreeBrokers, running
from portalmq.system import raise_open_files_limit

SIZE = 100
BATCH = 1_000
BATCH_BYTES = 1_000_000
SETTLE_S = 10.0
IDLE_S = 5.0
# A broker with many replicas creates their files in the background, and closes those that were idle for 15 to 30 s.
FILES_CLOSED_S = 45.0
SCHEDULED_FOR_S = 36_000.0
WORKERS = 2
CREATORS = 16
# A slow machine fills a backlog at this rate at least.
FILLED_PER_S_MIN = 5_000
ASK_WITHIN_S = 30.0
MANY = {"PORTALMQ_TOPICS_MAX": "100000", "PORTALMQ_PARTITIONS_MAX": "100000", "PORTALMQ_PARKED_RECEIVES_MAX": "9000"}

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)

Measure = Callable[[Path, Sequence[int], float], Iterator[Figures]]


# --- one broker ------------------------------------------------------------------------------------------------------


def _sizes(directory: Path, points: Sequence[int], seconds: float) -> Iterator[Figures]:
    system = OneBroker()
    with running(system, directory) as site:
        for size in points:
            yield {
                "bytes": size,
                **_sent(system, site, f"size-{size}", size, max(1, min(BATCH, BATCH_BYTES // size)), seconds),
            }


def _sent(
    system: OneBroker, site: Site, topic: str, size: int, batch: int, seconds: float, replicas: int = 1
) -> Figures:
    """Return the figures of synchronous sends and of batches from one producer."""
    system.create(topic, replicas=replicas)
    single = traffic(site, [producing], (system, topic, size, 1, seconds), seconds)
    bulk = traffic(site, [producing], (system, topic, size, batch, seconds), seconds)
    system.drop(topic)
    return {
        "send_p50_ms": single["p50_ms"],
        "batches_per_s": bulk["per_s"],
        "batches_mb_per_s": bulk["per_s"] * size / 1e6,
        "cpu_s_per_million": bulk.get("cpu_s_per_million"),
    }


def _batches(directory: Path, points: Sequence[int], seconds: float) -> Iterator[Figures]:
    system = OneBroker()
    with running(system, directory) as site:
        for batch in points:
            topic = f"batch-{batch}"
            system.create(topic)
            sent = traffic(site, [producing], (system, topic, SIZE, batch, seconds), seconds)
            taken = traffic(site, [consuming], (system, topic, batch, seconds), seconds)
            system.drop(topic)
            yield {
                "batch": batch,
                "produce_per_s": sent["per_s"],
                "consume_per_s": taken["per_s"],
                "produce_p50_ms": sent["p50_ms"],
                "produce_cpu_s_per_million": sent.get("cpu_s_per_million"),
            }


def _connections(directory: Path, points: Sequence[int], seconds: float) -> Iterator[Figures]:
    system = OneBroker()
    with running(system, directory) as site:
        system.create("connections")
        for count in points:
            roles = [_asking] * min(count, WORKERS)
            shares = (system.urls[0], "connections", count // len(roles), seconds)
            taken = traffic(site, roles, shares, seconds)
            names = ("per_s", "p50_ms", "p99_ms", "cpu_s_per_million")
            yield {"connections": count, **{name: taken.get(name) for name in names}}


def _asking(begin: Begin, url: str, topic: str, connections: int, seconds: float) -> Timed:
    """Send one message at a time on each connection, with as little work as possible between the broker's."""
    host, _, port = url.removeprefix("http://").partition(":")
    head = f"POST /v1/topics/{topic}/messages HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: text/plain\r\n"
    request = f"{head}Content-Length: {SIZE}\r\n\r\n{'x' * SIZE}".encode()
    selector, calls_s = selectors.DefaultSelector(), list[float]()
    sockets = [socket.create_connection((host, int(port)), ASK_WITHIN_S) for _ in range(connections)]
    asked = dict.fromkeys(sockets, 0.0)
    heard = dict.fromkeys(sockets, b"")
    begin()
    began = now = time.monotonic()
    for each in sockets:
        selector.register(each, selectors.EVENT_READ, each)
        each.sendall(request)
        asked[each] = now
    while now < began + seconds:
        if not (ready := selector.select(ASK_WITHIN_S)):
            raise TimeoutError(f"no answer in {ASK_WITHIN_S:.0f} s")
        for key, _ in ready:
            each = key.data
            heard[each] += each.recv(65_536)
            if answer_is_whole(heard[each]):
                now = time.monotonic()
                calls_s.append(now - asked[each])
                asked[each], heard[each] = now, b""
                each.sendall(request)
    for each in sockets:
        each.close()
    return Timed(len(calls_s), began, now, calls_s)


def answer_is_whole(answer: bytes) -> bool:
    head, found, body = answer.partition(b"\r\n\r\n")
    if answer and not answer.startswith(b"HTTP/1.1 2"[: len(answer)]):
        raise ConnectionError(f"a send was answered {answer[:200]!r}")
    length = _LENGTH.search(head) if found else None
    return length is not None and len(body) >= int(length[1])


def _topics(directory: Path, points: Sequence[int], _: float) -> Iterator[Figures]:
    system = OneBroker(MANY)
    with running(system, directory) as site:
        known = 0
        for count in points:
            with Admin(system.urls, timeout_s=120) as admin, ThreadPoolExecutor(CREATORS) as pool:
                begin = time.monotonic()
                list(pool.map(lambda number: admin.create_topic(f"topic-{number}", partitions=1), range(known, count)))
                create_ms = 1000 * (time.monotonic() - begin) / max(1, count - known)
            known = count
            start_s = _restarted(system, site)
            metadata_ms, metadata_bytes = _metadata(system.urls[0])
            yield {
                "topics": count,
                "start_s": start_s,
                "idle_cpu_percent": _idle_cpu_percent(site.pids(), FILES_CLOSED_S),
                "rss_mb": site.rss_mb(),
                "metadata_ms": metadata_ms,
                "metadata_bytes": metadata_bytes,
                "create_ms": create_ms,
            }


def _metadata(url: str) -> tuple[float, int]:
    """Return how long the metadata of all topics take in milliseconds, and their bytes."""
    with closing(harness.connection_to(url)) as connection:
        begin = time.monotonic()
        connection.request("GET", "/v1/metadata")
        answer = connection.getresponse()
        size = len(answer.read())
        if answer.status != 200:
            raise click.ClickException(f"the metadata were answered {answer.status}")
        return 1000 * (time.monotonic() - begin), size


def _restarted(system: OneBroker, site: Site) -> float:
    """Return the seconds until the broker, started anew on its data, is ready."""
    site.stop()
    begin = time.monotonic()
    system.start(site)
    return time.monotonic() - begin


def _idle_cpu_percent(pids: Sequence[int], settle_s: float = SETTLE_S) -> float:
    """Return the processor time of the busiest of these servers, in percent of a core."""
    time.sleep(settle_s)
    before, begin = [harness.cpu_s(pid) for pid in pids], time.monotonic()
    time.sleep(IDLE_S)
    seconds = time.monotonic() - begin
    return max(100 * (harness.cpu_s(pid) - was) / seconds for pid, was in zip(pids, before, strict=True))


def _parked(directory: Path, points: Sequence[int], _: float) -> Iterator[Figures]:
    raise_open_files_limit()
    system = OneBroker(MANY)
    with running(system, directory) as site:
        idle_mb = site.rss_mb()
        waiting: list[HTTPConnection] = []
        try:
            for count in points:
                waiting += [harness.park(system.urls[0]) for _ in range(count - len(waiting))]
                harness.until_parked(system.urls[0], count)
                cpu_percent = _idle_cpu_percent(site.pids())
                rss_mb = site.rss_mb()
                yield {"parked": count, "rss_mb": rss_mb, "more_mb": rss_mb - idle_mb, "idle_cpu_percent": cpu_percent}
        finally:
            for each in waiting:
                each.close()


def _groups(directory: Path, points: Sequence[int], seconds: float) -> Iterator[Figures]:
    system = OneBroker(MANY)
    with running(system, directory) as site:
        for count in points:
            topic, groups = f"groups-{count}", [f"group-{count}-{number}" for number in range(count)]
            system.create(topic)
            for group in groups:
                with Consumer(topic, group=group, bootstrap=system.urls) as consumer:
                    consumer.poll(timeout_s=0)
            sent = traffic(site, [producing], (system, topic, SIZE, BATCH, seconds), seconds)
            roles = [_draining] * min(count, WORKERS)
            taken = traffic(site, roles, (system, topic, groups, seconds), seconds)
            yield {
                "groups": count,
                "produce_per_s": sent["per_s"],
                "delivered_per_s": taken["per_s"],
                "delivered_cpu_s_per_million": taken.get("cpu_s_per_million"),
                "rss_mb": site.rss_mb(),
            }
            system.drop(topic)


def _draining(begin: Begin, system: OneBroker, topic: str, groups: list[str], seconds: float) -> Timed:
    """Receive and ack batches of all groups in turn."""
    consumers = [Consumer(topic, group=group, bootstrap=system.urls, max_messages=BATCH) for group in groups]
    messages, calls_s = 0, list[float]()
    begin()
    began = now = time.monotonic()
    for consumer in itertools.cycle(consumers):
        messages += len(consumer.poll(timeout_s=0, max_messages=BATCH))
        was, now = now, time.monotonic()
        calls_s.append(now - was)
        if now > began + seconds:
            break
    for consumer in consumers:
        consumer.close()
    return Timed(messages, began, now, calls_s)


def _scheduled(directory: Path, points: Sequence[int], _: float) -> Iterator[Figures]:
    system = OneBroker()
    with running(system, directory) as site:
        known = 0
        for count in points:
            with Producer(system.urls, batch_messages=BATCH) as producer:
                for _unused in range(known, count):
                    producer.send("later", b"x" * SIZE, delay_s=SCHEDULED_FOR_S)
                producer.flush(timeout=60 + count / FILLED_PER_S_MIN)
            known = count
            with Consumer("later", group="bench", bootstrap=system.urls) as consumer:
                consumer.poll(timeout_s=SETTLE_S)
            yield {"scheduled": count, "rss_mb": site.rss_mb(), "idle_cpu_percent": _idle_cpu_percent(site.pids())}


def _backlog(directory: Path, points: Sequence[int], seconds: float) -> Iterator[Figures]:
    system = OneBroker()
    with running(system, directory) as site:
        system.create("backlog")
        waiting = 0
        for count in points:
            share = (count - waiting) // WORKERS
            fill = (system, "backlog", SIZE, BATCH, float("inf"), share)
            filled = summary(in_workers([producing] * WORKERS, *fill, within_s=60 + count / FILLED_PER_S_MIN), 0)
            waiting += filled["messages"] + WORKERS
            start_s = _restarted(system, site)
            rss_mb = site.rss_mb()
            with Consumer("backlog", group=f"first-{count}", bootstrap=system.urls) as consumer:
                begin = time.monotonic()
                if not consumer.poll(timeout_s=ASK_WITHIN_S, max_messages=1):
                    raise click.ClickException(f"no message of {waiting} came within {ASK_WITHIN_S:.0f} s")
                first_s = time.monotonic() - begin
            taken = traffic(site, [consuming], (system, "backlog", BATCH, seconds), seconds)
            disk = sum(file.stat().st_size for file in (site.directory / "data").rglob("*") if file.is_file())
            yield {
                "waiting": count,
                "produce_per_s": filled["per_s"],
                "consume_per_s": taken["per_s"],
                "rss_mb": rss_mb,
                "disk_bytes_per_message": disk / waiting,
                "start_s": start_s,
                "first_receive_ms": 1000 * first_s,
            }


# --- three brokers ---------------------------------------------------------------------------------------------------


def _partitions(directory: Path, points: Sequence[int], seconds: float) -> Iterator[Figures]:
    for count in points:
        system = ThreeBrokers()
        with running(system, directory) as site:
            begin = time.monotonic()
            system.create("many", partitions=count)
            create_s = time.monotonic() - begin
            brokers = [system.node_pid(site, node) for node in range(system.nodes)]
            idle = _idle_cpu_percent(brokers, FILES_CLOSED_S)
            rss_mb = mean(harness.rss_mb(pid) for pid in brokers)
            sent = traffic(site, [producing], (system, "many", SIZE, BATCH, seconds), seconds)
            single = traffic(site, [producing], (system, "many", SIZE, 1, seconds), seconds)
            yield {
                "partitions": count,
                "produce_per_s": sent["per_s"],
                "send_p50_ms": single["p50_ms"],
                "send_p99_ms": single["p99_ms"],
                "idle_cpu_percent": idle,
                "broker_rss_mb": rss_mb,
                "create_s": create_s,
                "failover_s": system.failover_s(site, "many"),
            }


def _replicas(directory: Path, points: Sequence[int], seconds: float) -> Iterator[Figures]:
    system = ThreeBrokers()
    with running(system, directory) as site:
        for count in points:
            yield {"replicas": count, **_sent(system, site, f"replicas-{count}", SIZE, BATCH, seconds, count)}


# --- the run ---------------------------------------------------------------------------------------------------------


class GrowthCase(NamedTuple):
    measure: Measure
    points: tuple[int, ...]
    at_most: int


CASES = {
    "size": GrowthCase(_sizes, (100, 1_000, 10_000, 100_000, 1_048_576), 1_048_576),
    "batch": GrowthCase(_batches, (1, 10, 100, 1_000, 10_000), 10_000),
    "connections": GrowthCase(_connections, (1, 4, 16, 64, 256), 9_000),
    "partitions": GrowthCase(_partitions, (1, 10, 100, 1_000), 1_000),
    "topics": GrowthCase(_topics, (100, 1_000, 10_000), 100_000),
    "parked": GrowthCase(_parked, (100, 1_000, 5_000), 9_000),
    "groups": GrowthCase(_groups, (1, 10, 100), 10_000),
    "scheduled": GrowthCase(_scheduled, (100_000, 1_000_000), 10**8),
    "backlog": GrowthCase(_backlog, (100_000, 1_000_000, 5_000_000), 10**9),
    "replicas": GrowthCase(_replicas, (1, 2, 3), 3),
}


def grown(
    cases: Sequence[str], points: Sequence[int], seconds: float, directory: Path, tell: Callable[[str], None]
) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """Measure the cases at these points, or each at its own, until the end or an interruption. Return the figures, and
    by case why it failed or was cut off, and after how many points."""
    figures: dict[str, list[Figures]] = {}
    failures: dict[str, str] = {}
    for name in cases:
        case = CASES[name]
        begin = time.monotonic()
        at = sorted(each for each in points or case.points if each <= case.at_most)
        try:
            for taken in case.measure(directory, at, seconds):
                figures.setdefault(name, []).append(taken)
                tell(f"{name} {next(iter(taken.values())):,} after {time.monotonic() - begin:.0f} s")
        except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - what is measured may fail in any way
            failures[name] = f"{cause(error)} after {len(figures.get(name, []))} of {len(at)} points"
            tell(f"{name}: {failures[name]}")
            if isinstance(error, KeyboardInterrupt):
                break
    return figures, failures
