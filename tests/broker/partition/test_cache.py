"""The cache holds batches by bytes, finds them by any offset inside, and forgets the least used first."""

from __future__ import annotations

from portalmq.broker.partition.cache import BATCH_COST_BYTES, RECORD_COST_BYTES, BatchCache, cost_bytes, payload_bytes
from portalmq.broker.storage.batch import Batch, BatchKind, Record


def batch(base: int, count: int = 2, value: bytes = b"x" * 100) -> Batch:
    return Batch(base, count, base, BatchKind.MESSAGES, 1, 1, records=tuple(Record(value) for _ in range(count)))


def put(cache: BatchCache, partition: int, it: Batch) -> None:
    cache.put(partition, it, payload_bytes(it))


COST = cost_bytes(batch(0), 200)


def test_a_batch_is_found_by_every_offset_in_it_and_no_other():
    cache = BatchCache(10 * COST)
    put(cache, 1, batch(10, 3))
    assert [cache.find(1, offset) is not None for offset in range(9, 14)] == [False, True, True, True, False]
    assert cache.find(2, 10) is None


def test_the_cost_counts_payloads_and_objects():
    assert COST == BATCH_COST_BYTES + 2 * (100 + RECORD_COST_BYTES)


def test_the_least_recently_used_batch_is_evicted_first():
    cache = BatchCache(2 * COST)
    put(cache, 1, batch(0))
    put(cache, 1, batch(2))
    cache.find(1, 0)
    put(cache, 1, batch(4))
    assert cache.find(1, 0) is not None
    assert cache.find(1, 2) is None
    assert cache.find(1, 4) is not None
    assert cache.bytes <= cache.bytes_max


def test_partitions_share_one_bound():
    cache = BatchCache(3 * COST)
    for partition in range(5):
        put(cache, partition, batch(0))
    assert [cache.find(partition, 0) is not None for partition in range(5)] == [False, False, True, True, True]


def test_a_batch_larger_than_the_cache_is_not_kept():
    cache = BatchCache(COST)
    put(cache, 1, batch(0, value=b"x" * 10_000))
    assert (cache.find(1, 0), cache.bytes) == (None, 0)


def test_batches_may_come_in_any_order_and_twice():
    cache = BatchCache(10 * COST)
    for base in (4, 0, 2, 2):
        put(cache, 1, batch(base))
    assert [cache.find(1, base).base_offset for base in range(6)] == [0, 0, 2, 2, 4, 4]
    assert cache.bytes == 3 * COST


def test_dropping_a_partition_frees_its_bytes():
    cache = BatchCache(10 * COST)
    put(cache, 1, batch(0))
    put(cache, 2, batch(0))
    cache.drop(1)
    assert cache.find(1, 0) is None
    assert cache.bytes == COST
