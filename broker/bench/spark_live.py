"""Benchmark of reading from a broker that is written to: `python -m portalmq.spark.bench --live`.

One producer sends as fast as it can; two processes read all committed messages repeatedly, as Spark's workers do.
Windows with and without readers alternate, and the messages that the broker acknowledged in each are compared:

    as it is    everything on all cores: the readers take CPU from the broker, as any program would
    apart       broker and producer on one half of the cores, readers on the other: only waiting remains

Readers read the files, and over HTTP, where the broker does the work. The messages read are counted too, to weigh a
loss against them. For comparison, the messages of another broker are read in the same way: that takes the same CPU, and
nothing else from the measured broker.

The sizes of the write-ahead logs are recorded, and how long a full segment waits to be sealed. The offsets of each pass
of a reader are checked: every message once, up to the high watermark at its start.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np

from portalmq import Admin, Producer, system
from portalmq.broker.bench.spark_harness import BATCH_MESSAGES, MESSAGE_BYTES, PARTITIONS, fill
from portalmq.broker.bench.systems import broker
from portalmq.spark.columns import COLUMNS
from portalmq.spark.errors import DataLoss, NothingThere, Unreachable
from portalmq.spark.files.directories import Directories
from portalmq.spark.http_api.brokers import Brokers
from portalmq.spark.origin import Origin

TOPIC = "live"
END_WITHIN_S = 30.0
READERS = 2
SEGMENT_BYTES = 32 * 1024 * 1024
RETENTION_BYTES = 512 * 1024 * 1024
SAMPLE_S = 0.05
READERS_START_S = 2.0
OTHER_MESSAGES = 2_000_000


class Load:
    """Sends continuously in a thread, and counts acknowledged messages."""

    def __init__(self, url: str) -> None:
        self.acknowledged = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(url,), daemon=True)
        self._thread.start()

    def _send(self, url: str) -> None:
        payload = os.urandom(MESSAGE_BYTES // 2).hex().encode()
        number = 0
        waiting: deque[Future[object]] = deque()
        with Producer(url, batch_messages=BATCH_MESSAGES, linger_ms=20) as producer:
            while not self._ending.is_set():
                for _ in range(BATCH_MESSAGES):
                    last = producer.send(TOPIC, payload, partition=number // BATCH_MESSAGES % PARTITIONS)
                    number += 1
                waiting.append(last)  # type: ignore[arg-type]
                while waiting and (waiting[0].done() or len(waiting) > 64):
                    waiting.popleft().result(60)
                    self.acknowledged += BATCH_MESSAGES

    def end(self) -> None:
        self._ending.set()
        self._thread.join(60)


class FileWatch:
    """Samples the files in a thread: the size of the longest write-ahead log, and how long a full segment waits."""

    def __init__(self, directory: Path) -> None:
        self.wal_bytes_max = 0
        self.seal_wait_max_s = 0.0
        self._directory = directory
        self._since: dict[Path, float] = {}
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._look_on, daemon=True)
        self._thread.start()

    def _look_on(self) -> None:
        while not self._ending.wait(SAMPLE_S):
            now = time.monotonic()
            for partition in self._directory.glob(f"partitions/{TOPIC}@*/*/"):
                paths = sorted(partition.glob("0*.sqlite"))
                for path in paths:
                    self.wal_bytes_max = max(self.wal_bytes_max, _size(Path(f"{path}-wal")))
                for path in paths[:-1]:
                    if _is_writable(path):
                        since = self._since.setdefault(path, now)
                        self.seal_wait_max_s = max(self.seal_wait_max_s, now - since)

    def take(self) -> tuple[int, float]:
        """Return the maxima since the last call: (bytes, seconds)."""
        found = self.wal_bytes_max, self.seal_wait_max_s
        self.wal_bytes_max, self.seal_wait_max_s = 0, 0.0
        return found

    def end(self) -> None:
        self._ending.set()
        self._thread.join(10)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _is_writable(path: Path) -> bool:
    """Return whether a segment is sealed: its file has mode 0444 then."""
    try:
        return bool(path.stat().st_mode & 0o200)
    except FileNotFoundError:
        return False


def read_on(where: str, share: int) -> None:
    """Read a reader's partitions repeatedly until it is killed, and write how much it has read."""
    count = 0
    while True:
        try:
            for rows in passed(where, share):
                count += rows
                print(count, flush=True)
        except (NothingThere, DataLoss, Unreachable):  # not written yet; removed by retention
            time.sleep(SAMPLE_S)


def passed(where: str, share: int) -> Iterator[int]:
    """Yield the batch sizes of a reader's partitions. Checks that each message comes once: offsets rise by one, apart
    from the leader's own records. `where`: a data directory, or a broker's URL."""
    origin: Origin = Brokers([where], [TOPIC]) if "://" in where else Directories([where], [TOPIC])
    for log in origin.logs():
        if log.partition % READERS != share:
            continue
        reached = log.start_offset
        for span in origin.spans(log, log.start_offset, log.end_offset):
            for batch in span.batches(tuple(COLUMNS)):
                offsets = batch.column("offset").to_numpy()
                if offsets[0] < reached or (np.diff(offsets) < 1).any():
                    raise AssertionError(f"{log.name}: an offset came twice, at {offsets[0]} after {reached}")
                reached = int(offsets[-1]) + 1
                yield len(offsets)


@contextmanager
def reading(where: str | None, cores: Sequence[int], said: Path) -> Iterator[Callable[[], int]]:
    """Run readers on these cores, each of which writes its count to its own file in `said`. Yield a function that
    returns approximately how many messages they have read. None: no readers."""
    paths = [said / f"reader-{share}" for share in range(READERS if where is not None else 0)]
    processes = []

    def rows() -> int:
        last = [path.read_bytes().rpartition(b"\n")[0].rpartition(b"\n")[2] for path in paths]
        return sum(int(line) for line in last if line.isdigit())

    try:
        for share, path in enumerate(paths):
            command = [sys.executable, "-m", "portalmq.broker.bench.spark_live", str(where), str(share)]
            with path.open("wb") as output:
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output))
            system.pin(processes[-1].pid, cores)
        yield rows
        for process in processes:
            if process.poll() is not None:
                raise SystemExit(f"a reader ended with {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait(END_WITHIN_S)


def pin(pid: int, cores: Sequence[int]) -> None:
    """Pin a process, all its threads and its children to cores."""
    for thread in system.threads_of(pid):
        system.pin(thread, cores)
    for child in system.children_of(pid):
        pin(child, cores)


def run(rounds: int, seconds: float, folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    cores = system.cores()
    half = len(cores) // 2 or 1
    other = folder / "other"
    with broker(other) as (other_url, other_pid):
        fill(other_url, TOPIC, iter(lambda: b"x" * MESSAGE_BYTES, None), OTHER_MESSAGES, segment_bytes=SEGMENT_BYTES)
        for name, writing_cores, reading_cores in (
            ("as it is", cores, cores),
            ("apart", cores[:half], cores[half:] or cores),
        ):
            data = folder / name.replace(" ", "-")
            with broker(data) as (url, broker_pid):
                for pid in (broker_pid, other_pid, os.getpid()):
                    pin(pid, writing_cores)
                kinds = {
                    "alone": None,
                    "other files": str(other),
                    "files": str(data),
                    "other HTTP": other_url,
                    "HTTP": url,
                }
                found = windows(url, data, kinds, rounds, seconds, reading_cores)
            pin(os.getpid(), cores)
            shutil.rmtree(data)
            figures |= {f"{name}: {key}": value for key, value in found.items()}
    return figures


def windows(
    url: str, data: Path, kinds: dict[str, str | None], rounds: int, seconds: float, reading_cores: Sequence[int]
) -> dict[str, float]:
    """Run the windows. `data` is the broker's directory; `kinds` maps the name of a window to what is read in it."""
    with closing(Admin(url)) as admin:
        config = {"segment_bytes": SEGMENT_BYTES, "retention_bytes": RETENTION_BYTES}
        admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=1, config=config)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    read: dict[str, list[float]] = {kind: [] for kind in kinds}
    wal: dict[str, int] = dict.fromkeys(kinds, 0)
    waits: dict[str, float] = dict.fromkeys(kinds, 0.0)
    load, watch = Load(url), FileWatch(data)
    try:
        time.sleep(seconds)  # excludes the start, and the first segments
        for _ in range(rounds):
            for kind, where in kinds.items():
                with reading(where, reading_cores, data.parent) as rows:
                    time.sleep(READERS_START_S)  # excludes the start of the readers
                    before = rows()
                    rates[kind].append(_rate(load, watch, seconds))
                    read[kind].append((rows() - before) / seconds)
                wal_bytes, wait_s = watch.take()
                wal[kind], waits[kind] = max(wal[kind], wal_bytes), max(waits[kind], wait_s)
                print(f"  {kind:11} {rates[kind][-1]:12,.0f} messages/s, read {read[kind][-1]:12,.0f}/s", flush=True)
    finally:
        load.end()
        watch.end()
    rate = {kind: statistics.median(measured) for kind, measured in rates.items()}
    figures: dict[str, float] = {f"messages/s, {kind}": round(rate[kind]) for kind in kinds}
    figures |= {f"rows/s read, {kind}": round(statistics.median(read[kind])) for kind in kinds if kinds[kind]}
    for source_kind in ("files", "HTTP"):
        if source_kind in kinds:
            figures[f"loss by reading, {source_kind}, %"] = round(100 * (1 - rate[source_kind] / rate["alone"]), 1)
            figures[f"loss besides the CPU, {source_kind}, %"] = round(
                100 * (1 - rate[source_kind] / rate[f"other {source_kind}"]), 1
            )
    figures |= {f"longest WAL, {kind}, MB": round(wal[kind] / 1e6) for kind in kinds}
    return figures | {f"longest wait to be sealed, {kind}, s": round(waits[kind], 1) for kind in kinds}


def _rate(load: Load, watch: FileWatch, seconds: float) -> float:
    watch.take()
    before, began = load.acknowledged, time.monotonic()
    time.sleep(seconds)
    return (load.acknowledged - before) / (time.monotonic() - began)


if __name__ == "__main__":
    read_on(sys.argv[1], int(sys.argv[2]))
