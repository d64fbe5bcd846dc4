"""What each view of the dashboard costs a broker with many topics, and how long others wait meanwhile.

    portalmq dev 5000 --data-dir DIRECTORY --partitions-max 12000
    cd tests && ../.venv/bin/python -m support.dashboard_views http://localhost:5000 --make 10000
    cd tests && ../.venv/bin/python -m support.dashboard_views http://localhost:5000

The first call makes topics, some messages, and a group for each hundred topics. Either prints for each view the median
and the longest time of its answer, its bytes, and the longest that a small request of another process waited
meanwhile: the stall of the broker's event loop, and at least as long as the machine makes any process wait.
"""

from __future__ import annotations

import http.client
import json
import multiprocessing
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import click
from support.dashboard_cost import create

from portalmq.broker.bench.harness import connection_to

REPEATS = 9
TEXT = b'"%s"' % (b"x" * 200)
GROUP_TOPICS = 100
PROBE_EVERY_S = 0.002
VIEWS: tuple[tuple[str, str, Any], ...] = (
    ("nothing", "", None),
    ("topics", "/ui/data/topics", None),
    ("topics, the last", "/ui/data/topics?page=200", None),
    ("topics, searched", "/ui/data/topics?search=99", None),
    ("topics, busiest first", "/ui/data/topics?sort=rate", None),
    ("topics, delayed", "/ui/data/topics?sort=scheduled", None),
    ("a topic", "/v1/topics/topic-00001", None),
    ("its messages", "/ui/data/messages?topic=topic-00001", None),
    ("groups", "/ui/data/groups", None),
    ("groups, furthest first", "/ui/data/groups?sort=lag", None),
    ("a group", "/v1/groups/group-00000", None),
    ("a group, its topics", "/ui/data/groups/group-00000", None),
    ("a group, its messages", "/v1/groups/group-00000/messages?topic=topic-00001&limit=50", None),
    ("dead letters", "/ui/data/groups?sort=dead", None),
    ("schedules", "/ui/data/schedules", None),
    ("cluster", "/ui/data/cluster", None),
    ("cluster, the last", "/ui/data/cluster?page=200", None),
    ("cluster, offline", "/ui/data/cluster?show=offline", None),
    ("day", "/ui/data/minutes", None),
    ("first event", "/ui/events", None),
    ("SQL", "/v1/sql", {"query": "SELECT count(*) FROM messages WHERE topic = 'topic-00001' AND partition = 0"}),
    ("metrics", "/metrics", None),
)


def fill(url: str, topics: int) -> None:
    """Make topics with two messages each, and a group for each GROUP_TOPICS of them, which has received one."""
    create(url, topics)

    def some(first: int) -> None:
        with closing(connection_to(url)) as connection:
            for number in range(first, topics, 4):
                for _ in range(2):
                    _answer(connection, "POST", f"/v1/topics/topic-{number:05d}/messages", TEXT)
            for group in range(first, -(-topics // GROUP_TOPICS), 4):
                its = range(GROUP_TOPICS * group, min(GROUP_TOPICS * (group + 1), topics))
                names = [f"topic-{each:05d}" for each in its]
                body = json.dumps({"topics": names, "max_messages": 1}).encode()
                _answer(connection, "POST", f"/v1/groups/group-{group:05d}/receive", body)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(some, range(4)))


def _answer(connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None) -> int:
    """Return the bytes of an answer; those of the first event of a stream."""
    connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
    answer = connection.getresponse()
    assert answer.status < 300, (path, answer.status, answer.read())
    if path != "/ui/events":
        return len(answer.read())
    size = blank = 0
    while blank < 2:
        line = answer.readline()
        size += len(line)
        blank += line == b"\n"
    connection.close()
    return size


def probe(url: str, longest: Any) -> None:
    with closing(connection_to(url)) as connection:
        while True:
            started = time.perf_counter()
            _answer(connection, "GET", "/livez")
            longest.value = max(longest.value, time.perf_counter() - started)
            time.sleep(PROBE_EVERY_S)


def measure(url: str, path: str, body: Any, longest: Any) -> tuple[list[float], int, list[float]]:
    """Return the ms of each answer, its bytes, and the ms of the longest wait of the probe during each."""
    taken, waits, size = [], [], 0
    connection = connection_to(url)
    for _ in range(REPEATS):
        time.sleep(0.1)
        longest.value = 0.0
        started = time.perf_counter()
        if path:
            size = _answer(connection, "POST" if body else "GET", path, json.dumps(body).encode() if body else None)
        else:
            time.sleep(0.5)
        taken.append((time.perf_counter() - started) * 1_000)
        time.sleep(0.02)
        waits.append(longest.value * 1_000)
    connection.close()
    return taken, size, waits


@click.command()
@click.argument("url")
@click.option("--make", default=0, help="Topics to make first.")
@click.option("--only", default="", help="Views whose names have this in them.")
def main(url: str, make: int, only: str) -> None:
    if make:
        started = time.perf_counter()
        fill(url, make)
        print(f"{make} topics made in {time.perf_counter() - started:.1f} s", flush=True)
    longest = multiprocessing.Value("d", 0.0)
    asking = multiprocessing.Process(target=probe, args=(url, longest), daemon=True)
    asking.start()
    try:
        print(f"{'view':24} {'median':>8} {'longest':>8} ms {'bytes':>9} {'others wait':>12}, median and longest ms")
        for name, path, body in VIEWS:
            if only in name:
                taken, size, waits = measure(url, path, body, longest)
                shown = f"{statistics.median(waits):12.1f} {max(waits):8.1f}"
                print(f"{name:24} {statistics.median(taken):8.1f} {max(taken):8.1f}    {size:9} {shown}", flush=True)
    finally:
        asking.terminate()
        asking.join()


if __name__ == "__main__":
    main()
