"""What open pages cost a broker with many topics.

    cd tests && ../.venv/bin/python -m support.dashboard_cost --topics 1000
    cd tests && ../.venv/bin/python -m support.dashboard_cost --topics 1000 --produce

The first prints the time and the bytes of the overview, which is the shell, its files and the first event, of a page of
the list of topics, and the processor time of 20 open pages, as a part of one core, while all topics have some messages.
The second produces all the time, and prints what it gets done while 20 pages are open over what it gets done while none
is: a ratio for each pair of periods, in the order none, open, open, none, and their median.
"""

from __future__ import annotations

import http.client
import re
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import click
from support.broker_process import BrokerProcess

from portalmq.broker.bench.harness import connection_to, cpu_s

PAGES = 20
REPEATS = 15
MESSAGE = b"x" * 200
# Topics that --produce sends to; otherwise all have messages, so many a second.
BUSY_TOPICS = 4
MESSAGES_PER_S = 50
# Whether pages are open.
ORDERS = ((False, True), (True, False))


def get(connection: http.client.HTTPConnection, path: str) -> tuple[float, bytes]:
    """Return the ms until the whole answer is there, and its body as it was sent."""
    started = time.perf_counter()
    connection.request("GET", path, headers={"Accept-Encoding": "gzip"})
    answer = connection.getresponse()
    body = answer.read()
    assert answer.status == 200, (path, answer.status)
    return (time.perf_counter() - started) * 1_000, body


class OpenPage:
    """The stream of one open page, which is read all the time. `first`: ms and bytes of its first event."""

    def __init__(self, url: str) -> None:
        self._connection = connection_to(url)
        started = time.perf_counter()
        self._connection.request("GET", "/ui/events")
        self._answer = self._connection.getresponse()
        size = 0
        blank = 0
        while blank < 2:  # after `retry:`, and after the event
            line = self._answer.readline()
            size += len(line)
            blank += line == b"\n"
        self.first = ((time.perf_counter() - started) * 1_000, size)
        self._ended = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        while not self._ended:
            try:
                if not self._answer.readline():
                    return
            except (OSError, ValueError, AttributeError, http.client.HTTPException):
                return

    def close(self) -> None:
        self._ended = True
        if self._connection.sock is not None:
            self._connection.sock.shutdown(2)
        self._reader.join(10)
        self._connection.close()


def create(url: str, count: int) -> None:
    def some(first: int) -> None:
        connection = connection_to(url)
        for number in range(first, count, 8):
            status = 503  # the topic is made, and not known yet: the same call again finds it
            while status == 503:
                connection.request("PUT", f"/v1/topics/topic-{number:05d}", b"{}", {"Content-Type": "application/json"})
                answer = connection.getresponse()
                status, body = answer.status, answer.read()
            assert status in {200, 201}, body
        connection.close()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(some, range(8)))


def open_pages(url: str, stack: ExitStack) -> None:
    for _ in range(PAGES):
        stack.callback(OpenPage(url).close)


def load_of(broker: BrokerProcess, seconds: float) -> float:
    """Return the processor time of the broker over a period, in percent of one core."""
    started, used = time.perf_counter(), cpu_s(broker.process.pid)
    time.sleep(seconds)
    return (cpu_s(broker.process.pid) - used) / (time.perf_counter() - started) * 100


def figures(broker: BrokerProcess, seconds: float) -> None:
    connection = connection_to(broker.url)
    shell = [get(connection, "/ui/") for _ in range(REPEATS)]
    static = re.search(rb"/ui/static/\w+", shell[0][1])
    assert static is not None
    files = Path(__file__).parents[2] / "broker" / "dashboard" / "static"
    names = [each.relative_to(files).as_posix() for each in files.rglob("*") if each.suffix in {".js", ".css", ".svg"}]
    sizes = {name: len(get(connection, f"{static[0].decode()}/{name}")[1]) for name in names}
    events: list[tuple[float, int]] = []
    for _ in range(REPEATS):
        page = OpenPage(broker.url)
        events.append(page.first)
        page.close()
    lists = [get(connection, "/ui/data/topics") for _ in range(REPEATS)]
    shell_ms, event_ms, list_ms = (statistics.median(ms for ms, _ in each) for each in (shell, events, lists))
    total = len(shell[0][1]) + sum(sizes.values()) + events[-1][1]
    print(f"shell           {shell_ms:8.1f} ms {len(shell[0][1]):8} bytes")
    print(f"files                       {sum(sizes.values()):8} bytes, compressed, kept by browsers")
    print(f"first event     {event_ms:8.1f} ms {events[-1][1]:8} bytes")
    print(f"overview        {shell_ms + event_ms:8.1f} ms {total:8} bytes")
    print(f"list of topics  {list_ms:8.1f} ms {len(lists[0][1]):8} bytes")
    costs = []
    for order in 2 * ORDERS:
        used = dict(in_order(broker, order, lambda: load_of(broker, seconds)))
        costs.append(used[True] - used[False])
    shown = ", ".join(f"{each:.1f}" for each in costs)
    print(f"{PAGES} open pages   {statistics.median(costs):8.1f} % of a core, the median of {shown}")


def in_order(
    broker: BrokerProcess, order: tuple[bool, ...], measure: Callable[[], float]
) -> Iterator[tuple[bool, float]]:
    """Yield what is measured while pages are open, and while none is."""
    for is_open in order:
        with ExitStack() as stack:
            if is_open:
                open_pages(broker.url, stack)
            time.sleep(1)
            yield is_open, measure()


class Load:
    """Produces one message after the other to all topics in turn, in some threads: as fast as it can, or with a pause
    after each. `done`: how many were acknowledged."""

    def __init__(self, url: str, topics: int, threads: int = 4, pause_s: float = 0.0) -> None:
        self.done = 0
        self._topics = topics
        self._pause_s = pause_s
        self._ended = False
        self._threads = [threading.Thread(target=self._run, args=(url, number)) for number in range(threads)]
        for thread in self._threads:
            thread.start()

    def _run(self, url: str, number: int) -> None:
        connection = connection_to(url)
        while not self._ended:
            number = (number + len(self._threads)) % self._topics
            connection.request("POST", f"/v1/topics/topic-{number:05d}/messages", MESSAGE)
            answer = connection.getresponse()
            answer.read()
            assert answer.status < 300, answer.status
            self.done += 1
            time.sleep(self._pause_s)
        connection.close()

    def rate(self, seconds: float) -> float:
        started, before = time.perf_counter(), self.done
        time.sleep(seconds)
        return (self.done - before) / (time.perf_counter() - started)

    def close(self) -> None:
        self._ended = True
        for thread in self._threads:
            thread.join()


def ratios(broker: BrokerProcess, seconds: float, rounds: int) -> None:
    load = Load(broker.url, BUSY_TOPICS)
    found = []
    try:
        load.rate(seconds)
        for _ in range(rounds):
            for order in ORDERS:
                rates = dict(in_order(broker, order, lambda: load.rate(seconds)))
                found.append(rates[True] / rates[False])
                print(
                    f"{rates[False]:8.0f}/s without, {rates[True]:8.0f}/s with {PAGES} pages: {found[-1]:.4f}",
                    flush=True,
                )
    finally:
        load.close()
    spread = f"from {min(found):.4f} to {max(found):.4f}"
    print(f"median ratio    {statistics.median(found):.4f} of {len(found)} pairs, {spread}")


def _broker(directory: Path, topics: int) -> BrokerProcess:
    return BrokerProcess(directory, "--partitions-max", str(max(4_000, topics)), command=("dev",))


@click.command()
@click.option("--topics", default=1_000, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="Length of a period.")
@click.option("--rounds", default=5, show_default=True, help="Of --produce: two pairs each.")
@click.option("--produce", is_flag=True, help="Measure what pages cost producers.")
def main(topics: int, seconds: float, rounds: int, produce: bool) -> None:
    with tempfile.TemporaryDirectory() as directory, _broker(Path(directory), topics) as broker:
        started = time.perf_counter()
        create(broker.url, topics)
        print(f"{topics} topics made in {time.perf_counter() - started:.1f} s", flush=True)
        if produce:
            ratios(broker, seconds, rounds)
        else:
            load = Load(broker.url, topics, threads=2, pause_s=2 / MESSAGES_PER_S)
            try:
                time.sleep(seconds)
                figures(broker, seconds)
            finally:
                load.close()


if __name__ == "__main__":
    main()
