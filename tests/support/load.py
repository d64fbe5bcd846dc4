"""Producers that keep sending, and a checker of the result.

Each load is one idempotent producer whose messages are numbered; it notes each acknowledgement with its offset and
time. `check` asserts these rules over the messages read back afterwards:

    every acknowledged message is stored, at its acknowledged offset
    no message is stored twice, and none that was not sent
    within a producer and a partition the order of sending is the order of offsets
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

from portalmq import Admin, Producer, RecordMetadata

ACKED_WITHIN_S = 60.0


@dataclass(frozen=True, slots=True)
class Acked:
    """One acknowledged message. `at` is on the monotonic clock."""

    value: str
    partition: int
    offset: int
    at: float


class Load:
    """One idempotent producer; numbers its messages and spreads them over the partitions by number."""

    def __init__(
        self, urls: str | Sequence[str], name: str, *, topic: str, partitions: int = 1, pause_s: float = 0.0
    ) -> None:
        """`pause_s` is the pause between two messages: 0 sends as fast as a small buffer allows."""
        self.name = name
        self.topic = topic
        self.partitions = partitions
        self.sent: dict[int, list[str]] = defaultdict(list)
        self.acked: list[Acked] = []
        self.failures: list[BaseException] = []
        self._urls = [urls] if isinstance(urls, str) else list(urls)
        self._pause_s = pause_s
        self._progress = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"load-{name}")
        self._thread.start()

    def _run(self) -> None:
        with Producer(self._urls, linger_ms=1, batch_messages=50, buffer_messages=2_000) as producer:
            number = 0
            while not self._stopped.wait(self._pause_s):
                partition, value = number % self.partitions, f"{self.name}-{number}"
                self.sent[partition].append(value)
                future = producer.send(self.topic, value, partition=partition)
                future.add_done_callback(lambda done, value=value: self._note(done, value))
                number += 1

    def _note(self, future, value: str) -> None:
        at, error = time.monotonic(), future.exception()
        with self._progress:
            if error is None:
                place: RecordMetadata = future.result()
                self.acked.append(Acked(value, place.partition, place.offset, at))
            else:
                self.failures.append(error)
            self._progress.notify_all()

    def wait_for_acked(self, more: int, *, partition: int | None = None, within_s: float = ACKED_WITHIN_S) -> None:
        """Wait until `more` further messages are acknowledged."""
        with self._progress:
            start = len(self.acked)

            def got() -> bool:
                fresh = self.acked[start:]
                return bool(self.failures) or sum(partition in (None, each.partition) for each in fresh) >= more

            enough = self._progress.wait_for(got, timeout=within_s)
            count = len(self.acked) - start
        assert enough, f"{self.name}: only {count} of {more} were acked within {within_s:g} s"
        assert not self.failures, self.failures[:3]

    def stop(self) -> None:
        """Stop sending, and return when all messages are settled."""
        self._stopped.set()
        self._thread.join(150)
        assert not self._thread.is_alive(), f"{self.name} does not end"

    def longest_gap_s(self, since: float, partition: int | None = None) -> float:
        """The longest time between two acknowledgements of which the later is after `since`."""
        with self._progress:
            times = sorted(each.at for each in self.acked if partition in (None, each.partition))
        return max((later - earlier for earlier, later in pairwise(times) if later >= since), default=0.0)


@contextmanager
def loads(
    urls: str | Sequence[str],
    names: Iterable[str] = ("a", "b"),
    *,
    topic: str,
    partitions: int = 1,
    pause_s: float = 0.0,
    make: Callable[..., Load] = Load,
) -> Iterator[list[Load]]:
    """Run the loads during the block, and settle them afterwards."""
    running = [make(urls, name, topic=topic, partitions=partitions, pause_s=pause_s) for name in names]
    try:
        yield running
    finally:
        for load in running:
            load.stop()


Found = dict[int, list[tuple[int, str]]]


def everything_in(urls: str | Sequence[str], topic: str) -> Found:
    """The messages of each partition now, as (offset, value) in the order of reading."""
    found: Found = defaultdict(list)
    with Admin(urls if isinstance(urls, str) else list(urls)) as admin:
        for message in admin.read_all(topic):
            found[message.partition].append((message.offset, message.text))
    return dict(found)


def check(loads: Sequence[Load], found: Found) -> None:
    """Raise AssertionError with examples when a rule does not hold."""
    for places in found.values():
        assert all(before < after for (before, _), (after, _) in pairwise(places)), "offsets rise"
    everything = [value for places in found.values() for _, value in places]
    there = set(everything)
    assert len(everything) == len(there), "an idempotent producer's message is there twice"
    where = {value: (partition, offset) for partition, places in found.items() for offset, value in places}
    for load in loads:
        assert not load.failures, load.failures[:3]
        assert load.acked, f"{load.name} sent nothing, so nothing was checked"
        lost = [each for each in load.acked if each.value not in there]
        assert not lost, f"{len(lost)} acked and lost: {lost[:5]}"
        moved = [each for each in load.acked if where[each.value] != (each.partition, each.offset)]
        assert not moved, f"acked at another place than it is: {moved[:5]}"
        for partition, sent in load.sent.items():
            mine = [value for _, value in found.get(partition, []) if value.startswith(f"{load.name}-")]
            kept = set(mine)
            assert mine == [value for value in sent if value in kept], "order of sending is the order of offsets"
    unknown = there - {value for load in loads for values in load.sent.values() for value in values}
    assert not unknown, f"nobody sent {sorted(unknown)[:5]}"
