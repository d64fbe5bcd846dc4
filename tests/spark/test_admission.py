"""The division of a micro-batch's row limit between the logs."""

from __future__ import annotations

import random

from portalmq.spark.reading.admission import shares


def test_rows_are_shared_in_proportion_to_the_waiting_rows():
    assert shares({"a": 1_000, "b": 3_000, "c": 0}, 400) == {"a": 100, "b": 300}


def test_all_waiting_rows_are_taken_if_they_fit():
    assert shares({"a": 7, "b": 0, "c": 5}, 12) == {"a": 7, "c": 5}


def test_shares_exceed_neither_the_waiting_rows_nor_the_limit_and_include_every_log():
    chance = random.Random(5)
    for _ in range(2_000):
        waiting = {f"log-{n}": chance.choice((0, 1, 2, 10, 10**6, 10**12)) for n in range(chance.randint(1, 9))}
        rows_max = chance.choice((1, 2, 3, 9, 10, 11, 1_000, 10**7))
        given = shares(waiting, rows_max)
        busy = sum(count > 0 for count in waiting.values())
        assert sum(given.values()) == min(rows_max, sum(waiting.values()))
        assert all(0 < count <= waiting[name] for name, count in given.items())
        assert len(given) == min(busy, rows_max)
