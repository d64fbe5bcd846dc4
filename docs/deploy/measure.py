"""What to plan with, measured on your machines: bytes per message, and how busy a broker is at which load.

    portalmq dev 5000
    python docs/deploy/measure.py bytes http://localhost:5000 --messages 1000000 --size 200
    python docs/deploy/measure.py load http://localhost:5000

It uses topics of its own, `measure-...`, and deletes them. Ask one broker alone, and while nobody else works on it.
"""

from __future__ import annotations

import argparse
import http.client
import os
import statistics
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

from portalmq import Admin, Producer

STEPS = (1, 2, 4, 8, 16, 32, 64)
STEP_S = 5.0
BODY = b"m" * 200


def metric(url: str, name: str) -> float:
    """The sum of a metric's series, as the broker shows it."""
    request = urllib.request.Request(f"{url}/metrics", headers=_authorization())
    with urllib.request.urlopen(request, timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
    if not found:
        sys.exit(f"{url}/metrics shows no {name}: is it a PortalMQ broker?")
    return sum(float(line.rpartition(" ")[2]) for line in found)


def _authorization() -> dict[str, str]:
    token = os.environ.get("PORTALMQ_TOKEN")
    return {"Authorization": f"Bearer {token}"} if token else {}


@contextmanager
def topic_of_its_own(url: str) -> Iterator[str]:
    name = f"measure-{os.getpid()}"
    with Admin(url, token=os.environ.get("PORTALMQ_TOKEN")) as admin:
        admin.create_topic(name)
        try:
            yield name
        finally:
            admin.delete_topic(name)


def measure_bytes(url: str, messages: int, size: int, *, singly: bool) -> None:
    with topic_of_its_own(url) as topic, Producer(url, token=os.environ.get("PORTALMQ_TOKEN")) as producer:
        producer.send(topic, os.urandom(size)).result(timeout=30)
        disk, memory = metric(url, "portalmq_storage_bytes"), metric(url, "portalmq_memory_bytes")
        began = time.perf_counter()
        if singly:
            messages = len(_send(url, topic, 16, os.urandom(size)))
        else:
            _send_batches(producer, topic, messages, size)
        took_s = time.perf_counter() - began
        disk, memory = metric(url, "portalmq_storage_bytes") - disk, metric(url, "portalmq_memory_bytes") - memory
    how = "one in a request" if singly else "in batches"
    print(f"{messages:,} messages of {size} bytes, {how}, {messages / took_s:,.0f}/s")
    print(f"on disk    {disk / 1e6:8.1f} MB  {disk / messages:7.1f} bytes a message, on each replica")
    print(f"in memory  {memory / 1e6:8.1f} MB  {memory / messages:7.1f} bytes a message")


def _send_batches(producer: Producer, topic: str, messages: int, size: int) -> None:
    for number in range(messages):
        producer.send(topic, os.urandom(size))
        if number % 10_000 == 0:
            producer.flush(timeout=120)
    producer.flush(timeout=120)


def measure_load(url: str) -> None:
    print("clients  messages/s   p50 ms   p99 ms  busy")
    with topic_of_its_own(url) as topic:
        for clients in STEPS:
            cpu, began = metric(url, "portalmq_cpu_seconds_total"), time.perf_counter()
            taken_ms = _send(url, topic, clients, BODY)
            took_s = time.perf_counter() - began
            busy = (metric(url, "portalmq_cpu_seconds_total") - cpu) / took_s
            cuts = statistics.quantiles(taken_ms, n=100)
            print(f"{clients:7}  {len(taken_ms) / took_s:10,.0f}  {cuts[49]:7.1f}  {cuts[98]:7.1f}  {busy:4.0%}")


def _send(url: str, topic: str, clients: int, body: bytes) -> list[float]:
    """How long each request took. Each client has one on its way at a time."""
    place, taken_ms = urlsplit(url), list[float]()
    ends_at = time.perf_counter() + STEP_S

    def work() -> None:
        connection = http.client.HTTPConnection(place.hostname or "localhost", place.port, timeout=30)
        while (began := time.perf_counter()) < ends_at:
            connection.request("POST", f"/v1/topics/{topic}/messages", body, _authorization())
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                sys.exit(f"the broker answered {answer.status}")
            taken_ms.append((time.perf_counter() - began) * 1000)
        connection.close()

    threads = [threading.Thread(target=work) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return taken_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["bytes", "load"])
    parser.add_argument("url")
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--size", type=int, default=200)
    parser.add_argument("--singly", action="store_true", help="bytes: one message in a request, for some seconds")
    given = parser.parse_args()
    if given.what == "bytes":
        measure_bytes(given.url.rstrip("/"), given.messages, given.size, singly=given.singly)
    else:
        measure_load(given.url.rstrip("/"))


if __name__ == "__main__":
    main()
