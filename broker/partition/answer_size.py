"""The size of one answer. A request for a thousand messages may ask for gigabytes, so memory is bounded in bytes.

Every answer with messages says where to continue, or can be requested again. So each ends once it has
ANSWER_BYTES_MAX, with at least one message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from portalmq.broker.storage.batch import Record

ANSWER_BYTES_MAX = 16 * 1024 * 1024
# How much of a continuous stream is written at a time.
BLOCK_BYTES = 1024 * 1024

T = TypeVar("T")


def size_of(record: Record) -> int:
    """Return the bytes that a client gave."""
    size = len(record.value)
    if record.key is not None:
        size += len(record.key)
    if record.headers:
        size += sum([len(name) + len(value) for name, value in record.headers.items()])
    return size


def sizes_of(records: Iterable[Record]) -> int:
    return sum([size_of(record) if record.headers or record.key else len(record.value) for record in records])


def fitting(records: Iterable[Record], left: int) -> int:
    """Return how many of the first records have no more than `left` bytes."""
    count = 0
    for record in records:
        left -= size_of(record)
        if left < 0:
            break
        count += 1
    return count


def first_of(
    found: Iterable[T], record_of: Callable[[T], Record], at_most: int, bytes_max: int | None = None
) -> tuple[list[T], bool]:
    """Return the first items, as many as fit one answer, and whether there are more."""
    first: list[T] = []
    left = ANSWER_BYTES_MAX if bytes_max is None else bytes_max
    for each in found:
        if len(first) >= at_most or (first and left <= 0):
            return first, True
        first.append(each)
        left -= size_of(record_of(each))
    return first, False


def blocks_of(found: Iterator[T], record_of: Callable[[T], Record], at_most: int) -> Iterator[list[T]]:
    """Yield all items, in blocks that are written at a time."""
    block: list[T] = []
    left = BLOCK_BYTES
    for each in found:
        block.append(each)
        left -= size_of(record_of(each))
        if len(block) >= at_most or left <= 0:
            yield block
            block, left = [], BLOCK_BYTES
    if block:
        yield block
