"""What reading costs a broker that is being written to: `python -m portalmq.spark.bench --live`.

One producer sends as fast as it can; two processes read whatever is committed, from the beginning, over and over, as
Spark's workers do. Windows with and without them take turns, and what the broker acknowledged in each is compared:

    as it is    everything on all cores: the readers take CPU from the broker, as any program would
    apart       the broker and the producer on one half of the cores, the readers on the other: what is left is waiting

Meanwhile the write-ahead logs are measured, and how long a full segment waits to be sealed. The offsets that each pass
of a reader gave are checked: every message once, up to where it was committed when the pass began.
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
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager, nullcontext
from pathlib import Path

import numpy as np

from portalmq import Admin, Producer
from portalmq.spark.bench import BATCH_MESSAGES, END_WITHIN_S, MESSAGE_BYTES, PARTITIONS, broker, fill
from portalmq.spark.columns import COLUMNS
from portalmq.spark.directories import Directories
from portalmq.spark.errors import DataLoss, NothingThere

TOPIC = "live"
READERS = 2
SEGMENT_BYTES = 32 * 1024 * 1024
RETENTION_BYTES = 512 * 1024 * 1024
SAMPLE_S = 0.05
OTHER_MESSAGES = 2_000_000


class Load:
    """Sends for ever, in a thread, and counts what was acknowledged."""

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


class Watch:
    """Looks at the files, in a thread: how long the longest write-ahead log gets, and how long a full segment waits."""

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
        """What was seen since it was taken last: (bytes, seconds)."""
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
    """A sealed file has mode 0444."""
    try:
        return bool(path.stat().st_mode & 0o200)
    except FileNotFoundError:
        return False


def read_on(directory: Path, share: int) -> None:
    """Pass after pass over the share of a reader, until it is killed."""
    while True:
        try:
            one_pass(directory, share, READERS)
        except (NothingThere, DataLoss):  # not written yet; removed by retention
            time.sleep(SAMPLE_S)


def one_pass(directory: Path, share: int = 0, readers: int = 1) -> int:
    """How many messages there are in a reader's partitions. Each must come once: their offsets rise by one, but where
    the leader's own records stand."""
    origin = Directories([str(directory)], [TOPIC])
    count = 0
    for log in origin.logs():
        if log.partition % readers != share:
            continue
        reached = log.start_offset
        for span in origin.spans(log, log.start_offset, log.end_offset):
            for batch in span.batches(tuple(COLUMNS)):
                offsets = batch.column("offset").to_numpy()
                if offsets[0] < reached or (np.diff(offsets) < 1).any():
                    raise AssertionError(f"{log.name}: an offset came twice, at {offsets[0]} after {reached}")
                reached = int(offsets[-1]) + 1
                count += len(offsets)
    return count


@contextmanager
def reading(directory: Path, cores: Sequence[int]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Readers at work on these cores, ended at the end."""
    command = [sys.executable, "-m", "portalmq.spark.bench_live", str(directory)]
    processes = [
        subprocess.Popen([*command, str(share)], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        for share in range(READERS)
    ]
    try:
        for process in processes:
            os.sched_setaffinity(process.pid, cores)
        yield processes
        for process in processes:
            if process.poll() is not None:
                raise SystemExit(f"a reader ended with {process.returncode}")
    finally:
        for process in processes:
            process.kill()
            process.wait(END_WITHIN_S)


def pin(pid: int, cores: Sequence[int]) -> None:
    """The process, all its threads, and its children."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)
        for child in map(int, (task / "children").read_text().split()):
            pin(child, cores)


def run(rounds: int, seconds: float, folder: Path) -> dict[str, float]:
    figures: dict[str, float] = {}
    cores = sorted(os.sched_getaffinity(0))
    half = len(cores) // 2 or 1
    other = folder / "other"
    with broker(other) as (url, _):
        fill(url, TOPIC, iter(lambda: b"x" * MESSAGE_BYTES, None), OTHER_MESSAGES, segment_bytes=SEGMENT_BYTES)
    for name, writing_cores, reading_cores in (
        ("as it is", cores, cores),
        ("apart", cores[:half], cores[half:] or cores),
    ):
        data = folder / name.replace(" ", "-")
        with broker(data) as (url, process):
            pin(process.pid, writing_cores)
            pin(os.getpid(), writing_cores)
            found = windows(url, {"alone": None, "other": other, "read": data}, rounds, seconds, reading_cores)
        pin(os.getpid(), cores)
        shutil.rmtree(data)
        figures |= {f"{name}: {key}": value for key, value in found.items()}
    return figures


def windows(
    url: str, kinds: dict[str, Path | None], rounds: int, seconds: float, reading_cores: Sequence[int]
) -> dict[str, float]:
    """`kinds`: what is read meanwhile, by the name of the window."""
    data = kinds["read"]
    assert data is not None
    with closing(Admin(url)) as admin:
        config = {"segment_bytes": SEGMENT_BYTES, "retention_bytes": RETENTION_BYTES}
        admin.create_topic(TOPIC, partitions=PARTITIONS, replication_factor=1, config=config)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    wal: dict[str, int] = dict.fromkeys(kinds, 0)
    waits: dict[str, float] = dict.fromkeys(kinds, 0.0)
    load, watch = Load(url), Watch(data)
    try:
        time.sleep(seconds)  # the first segments, and what a start costs
        for _ in range(rounds):
            for kind, directory in kinds.items():
                with reading(directory, reading_cores) if directory is not None else nullcontext():
                    time.sleep(1)  # the readers' own start is not what is measured
                    rates[kind].append(_rate(load, watch, seconds))
                wal_bytes, wait_s = watch.take()
                wal[kind], waits[kind] = max(wal[kind], wal_bytes), max(waits[kind], wait_s)
                print(f"  {kind:5} {rates[kind][-1]:12,.0f} messages/s", flush=True)
    finally:
        load.end()
        watch.end()
    rate = {kind: statistics.median(measured) for kind, measured in rates.items()}
    return {
        "messages/s alone": round(rate["alone"]),
        "messages/s while other files are read": round(rate["other"]),
        "messages/s while its files are read": round(rate["read"]),
        "loss by reading, %": round(100 * (1 - rate["read"] / rate["alone"]), 1),
        "loss besides the CPU, %": round(100 * (1 - rate["read"] / rate["other"]), 1),
        **{f"longest WAL, {kind}, MB": round(wal[kind] / 1e6) for kind in kinds},
        **{f"longest wait to be sealed, {kind}, s": round(waits[kind], 1) for kind in kinds},
    }


def _rate(load: Load, watch: Watch, seconds: float) -> float:
    watch.take()
    before, began = load.acknowledged, time.monotonic()
    time.sleep(seconds)
    return (load.acknowledged - before) / (time.monotonic() - began)


if __name__ == "__main__":
    read_on(Path(sys.argv[1]), int(sys.argv[2]))
