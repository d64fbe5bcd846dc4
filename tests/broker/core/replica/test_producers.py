"""Idempotent producers: a batch is new, known, out of order, or fenced."""

from __future__ import annotations

import pytest

from portalmq.broker.core.replica.events import Stamp
from portalmq.broker.core.replica.producers import BATCHES_REMEMBERED, RECENT_MS, Producers
from portalmq.contract.schedules import SCHEDULE_IDS_FROM
from portalmq.errors import Backpressure, Fenced, OutOfOrderSequence


def with_batches(*batches: tuple[int, int]) -> Producers:
    producers = Producers([])
    for number, (sequence, count) in enumerate(batches):
        producers.add(Stamp(1, 0, sequence), count, 100 + number, 1_000 + number)
    return producers


def test_the_first_batch_of_a_producer_begins_at_zero():
    assert Producers([]).find_duplicate(Stamp(1, 0, 0), 5) is None
    with pytest.raises(OutOfOrderSequence, match="first sequence must be 0"):
        Producers([]).find_duplicate(Stamp(1, 0, 5), 5)
    with pytest.raises(OutOfOrderSequence, match="first sequence must be 0"):
        Producers([]).find_duplicate(Stamp(1, 0, -1), 5)


def test_the_next_batch_continues_the_last():
    producers = with_batches((0, 5))
    assert producers.find_duplicate(Stamp(1, 0, 5), 2) is None
    with pytest.raises(OutOfOrderSequence) as caught:
        producers.find_duplicate(Stamp(1, 0, 6), 2)
    assert caught.value.extra["expected_sequence"] == 5


def test_a_repeated_batch_is_answered_with_its_first_offset():
    producers = with_batches((0, 5), (5, 5), (10, 1))
    assert producers.find_duplicate(Stamp(1, 0, 5), 5) == (101, 1_001)
    assert producers.find_duplicate(Stamp(1, 0, 0), 5) == (100, 1_000)


def test_a_repeat_with_another_length_is_refused():
    with pytest.raises(OutOfOrderSequence):
        with_batches((0, 5), (5, 5)).find_duplicate(Stamp(1, 0, 5), 4)


def test_a_repeat_older_than_the_memory_is_refused():
    producers = with_batches(*((n, 1) for n in range(BATCHES_REMEMBERED + 1)))
    with pytest.raises(OutOfOrderSequence):
        producers.find_duplicate(Stamp(1, 0, 0), 1)
    assert producers.find_duplicate(Stamp(1, 0, 1), 1) is not None


def test_a_lower_epoch_is_fenced_and_a_higher_one_starts_over():
    producers = with_batches((0, 5))
    producers.add(Stamp(1, 3, 0), 1, 200, 2_000)
    with pytest.raises(Fenced):
        producers.find_duplicate(Stamp(1, 2, 5), 1)
    with pytest.raises(OutOfOrderSequence):
        producers.find_duplicate(Stamp(1, 4, 5), 1)
    assert producers.find_duplicate(Stamp(1, 4, 0), 1) is None


def test_producers_do_not_mix():
    assert with_batches((0, 5)).find_duplicate(Stamp(2, 0, 0), 5) is None


def test_idle_producers_are_forgotten_by_the_time_of_the_log():
    producers = with_batches((0, 5))
    producers.expire(before_ms=1_000)
    assert producers.find_duplicate(Stamp(1, 0, 0), 5) is not None
    producers.expire(before_ms=1_001)
    with pytest.raises(OutOfOrderSequence):
        producers.find_duplicate(Stamp(1, 0, 5), 5)


def test_a_snapshot_restores_everything_and_shares_nothing():
    producers = with_batches((0, 5), (5, 1))
    twin = Producers(producers.snapshot())
    twin.add(Stamp(1, 0, 6), 1, 300, 3_000)
    assert producers.find_duplicate(Stamp(1, 0, 6), 1) is None
    assert twin.find_duplicate(Stamp(1, 0, 6), 1) == (300, 3_000)


def test_of_very_many_producers_the_least_recent_are_forgotten(monkeypatch):
    monkeypatch.setattr("portalmq.broker.core.replica.producers.PRODUCERS_MAX", 3)
    known = Producers([])
    for number in range(6):
        known.add(Stamp(number, 0, 0), 1, number, number * RECENT_MS)
    known.expire(0)
    assert [fold.producer_id for fold in known.snapshot()] == [5, 4, 3]
    for number in range(6, 10):
        known.add(Stamp(number, 0, 0), 1, number, 5 * RECENT_MS + number)
    known.expire(0)
    assert {fold.producer_id for fold in known.snapshot()} == {5, 6, 7, 8, 9}, "they may still retry"


def test_a_new_producer_is_refused_where_far_too_many_are_known(monkeypatch):
    monkeypatch.setattr("portalmq.broker.core.replica.producers.PRODUCERS_FULL", 2)
    known = Producers([])
    for number in range(2):
        known.add(Stamp(number, 0, 0), 1, number, 0)
    with pytest.raises(Backpressure):
        known.find_duplicate(Stamp(7, 0, 0), 1)
    assert known.find_duplicate(Stamp(1, 1, 0), 1) is None, "a known producer continues, also in its next epoch"


def test_the_last_tick_of_a_schedule_is_never_forgotten():
    known = with_batches((0, 5))
    known.add(Stamp(SCHEDULE_IDS_FROM + 1, 7_000, 0), 1, 100, 1_000)
    known.expire(before_ms=10**15)
    assert known.epoch_of(1) is None
    assert (known.epoch_of(SCHEDULE_IDS_FROM + 1), known.last_offset_of(SCHEDULE_IDS_FROM + 1)) == (7_000, 100)
    assert known.find_duplicate(Stamp(SCHEDULE_IDS_FROM + 1, 7_000, 0), 1) == (100, 1_000)
    assert known.find_duplicate(Stamp(SCHEDULE_IDS_FROM + 1, 8_000, 0), 1) is None
    with pytest.raises(Fenced):
        known.find_duplicate(Stamp(SCHEDULE_IDS_FROM + 1, 6_999, 0), 1)


def test_of_far_too_many_schedules_the_least_recent_are_forgotten(monkeypatch):
    monkeypatch.setattr("portalmq.broker.core.replica.producers.SCHEDULES_REMEMBERED", 2)
    known = Producers([])
    for number in range(4):
        known.add(Stamp(SCHEDULE_IDS_FROM + number, 1, 0), 1, number, number)
    known.expire(before_ms=3)
    assert {fold.producer_id - SCHEDULE_IDS_FROM for fold in known.snapshot()} == {2, 3}


def test_schedules_do_not_count_among_the_producers_that_are_too_many(monkeypatch):
    monkeypatch.setattr("portalmq.broker.core.replica.producers.PRODUCERS_FULL", 2)
    monkeypatch.setattr("portalmq.broker.core.replica.producers.PRODUCERS_MAX", 2)
    known = Producers([])
    for number in range(2):
        known.add(Stamp(number, 0, 0), 1, number, RECENT_MS * 10)
    assert known.find_duplicate(Stamp(SCHEDULE_IDS_FROM, 1, 0), 1) is None
    for number in range(5):
        known.add(Stamp(SCHEDULE_IDS_FROM + number, 1, 0), 1, number, RECENT_MS * 20)
    known.expire(before_ms=0)
    assert known.epoch_of(0) is not None
    assert len(known.snapshot()) == 7
