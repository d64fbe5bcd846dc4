"""Reading the files of a broker during writes: every message once, without an effect on the broker.

PORTALMQ_LIVE_S=60 reads for a minute. `python -m portalmq.spark.bench --live` measures the broker's cost.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from support.broker_process import BrokerProcess
from support.cluster import wait_until

from portalmq import Admin, Producer
from portalmq.spark.files.directories import Directories

pytestmark = pytest.mark.cluster

LIVE_S = float(os.environ.get("PORTALMQ_LIVE_S", "4"))
WITHIN_S = 60.0
# An append that finds a longer write-ahead log checkpoints it (storage/log.py).
WAL_BYTES_MAX = 64 * 1024 * 1024
BATCH = 1_000
# Full segments are sealed every ten seconds, which is too long for the tests.
SEAL_OFTEN = "import portalmq.broker.cluster.maintenance as h; h.RETAIN_EVERY_S = 0.5"


def value_of(number: int) -> bytes:
    return b"%0100d" % number


class Writing:
    """Writes to one partition without a pause: message n is `value_of(n)`."""

    def __init__(self, url: str, topic: str) -> None:
        self.sent = 0
        self._ending = threading.Event()
        self._url, self._topic = url, topic

    def go(self) -> int:
        """Send and wait for all acknowledgements; return the number of messages."""
        with Producer(self._url, batch_messages=BATCH) as producer:
            waiting: deque[Future] = deque()
            while not self._ending.is_set():
                for _ in range(BATCH):
                    last = producer.send(self._topic, value_of(self.sent), partition=0)
                    self.sent += 1
                waiting.append(last)
                while len(waiting) > 20:
                    waiting.popleft().result(30)
            producer.flush(60)
        return self.sent

    def end(self) -> None:
        self._ending.set()


@contextmanager
def written(url: str, topic: str, **config: int) -> Iterator[tuple[Writing, Future]]:
    with closing(Admin(url)) as admin:
        admin.create_topic(topic, partitions=1, replication_factor=1, config=config)
    writing = Writing(url, topic)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(writing.go)
        try:
            yield writing, sent
        finally:
            writing.end()


def numbers_read(data: Path, topic: str) -> int:
    """Return the number of messages that a pass finds: the first ones, in order, each once."""
    origin = Directories([str(data)], [topic])
    (log,) = origin.logs()
    number = 0
    for span in origin.spans(log, log.start_offset, log.end_offset):
        for batch in span.batches(("value",)):
            assert batch.column("value").to_pylist() == [value_of(number + n) for n in range(batch.num_rows)]
            number += batch.num_rows
    return number


def files(data: Path, topic: str) -> list[Path]:
    return sorted(data.glob(f"partitions/{topic}@*/0/0*.sqlite"))


def is_sealed(path: Path) -> bool:
    return not path.stat().st_mode & 0o200


def test_each_pass_over_a_live_partition_finds_each_message_once(tmp_path):
    with BrokerProcess(tmp_path) as broker, written(broker.url, "t", segment_bytes=4 << 20) as (writing, sent):
        wait_until(lambda: writing.sent > 10 * BATCH, "some messages", WITHIN_S)
        passes = [numbers_read(broker.data_dir, "t")]
        deadline = time.monotonic() + LIVE_S
        while time.monotonic() < deadline or passes[-1] == passes[0]:
            assert time.monotonic() < deadline + WITHIN_S, f"{len(passes)} passes without a new message"
            passes.append(numbers_read(broker.data_dir, "t"))
        writing.end()
        total = sent.result(60)
        assert passes == sorted(passes)
        # The state of the partition may be a second old.
        wait_until(lambda: numbers_read(broker.data_dir, "t") == total, "all that was acked", WITHIN_S)


def test_the_write_ahead_log_stays_short_while_the_file_is_read_without_a_pause(tmp_path):
    longest = 0
    with BrokerProcess(tmp_path) as broker, written(broker.url, "t") as (writing, sent):
        wait_until(lambda: writing.sent > 10 * BATCH, "some messages", WITHIN_S)
        has_read, ending = threading.Event(), threading.Event()

        def read() -> None:
            while not ending.is_set():
                numbers_read(broker.data_dir, "t")
                has_read.set()

        with ThreadPoolExecutor(1) as pool:
            reader = pool.submit(read)
            try:
                assert has_read.wait(WITHIN_S)
                deadline = time.monotonic() + LIVE_S
                while time.monotonic() < deadline or not longest:
                    assert time.monotonic() < deadline + WITHIN_S, "there is no write-ahead log"
                    for path in files(broker.data_dir, "t"):
                        with suppress(FileNotFoundError):  # sealing the file removes it
                            longest = max(longest, Path(f"{path}-wal").stat().st_size)
                    time.sleep(0.02)
            finally:
                ending.set()
            reader.result(60)
        writing.end()
        sent.result(60)
    print(f"the write-ahead log was {longest:,} bytes long at most")
    assert longest <= WAL_BYTES_MAX


def test_full_segments_are_sealed_while_they_are_read_without_a_pause(tmp_path):
    sealing = BrokerProcess(tmp_path, prelude=SEAL_OFTEN)
    with sealing as broker, written(broker.url, "t", segment_bytes=1 << 20) as (writing, sent):
        wait_until(lambda: len(files(broker.data_dir, "t")) > 5, "five full segments", WITHIN_S)
        writing.end()
        sent.result(60)
        *full, _active = files(broker.data_dir, "t")

        def read_and_look() -> bool:
            numbers_read(broker.data_dir, "t")
            return all(is_sealed(path) for path in full)

        wait_until(read_and_look, "the full segments are sealed", WITHIN_S)


def test_a_slow_reader_holds_no_lock_on_the_file(tmp_path):
    """Spark may be busy for minutes between two batches: the reader holds no lock during this time."""
    sealing = BrokerProcess(tmp_path, prelude=SEAL_OFTEN)
    with sealing as broker, written(broker.url, "t", segment_bytes=1 << 20) as (writing, sent):
        wait_until(lambda: numbers_read(broker.data_dir, "t") > 10 * BATCH, "some messages", WITHIN_S)
        origin = Directories([str(broker.data_dir)], ["t"])
        (log,) = origin.logs()
        spans = [span.batches(("value",)) for span in origin.spans(log, log.start_offset, log.end_offset)]
        slow = [next(batches).num_rows for batches in spans]  # each has returned its first batch, none has ended
        wait_until(lambda: len(files(broker.data_dir, "t")) > len(spans) + 1, "more files", WITHIN_S)
        writing.end()
        total = sent.result(60)
        *full, _active = files(broker.data_dir, "t")
        wait_until(lambda: all(is_sealed(path) for path in full), "the full segments are sealed", WITHIN_S)
        for batches in spans:
            slow.append(sum(batch.num_rows for batch in batches))
        assert 10 * BATCH < sum(slow) <= total
