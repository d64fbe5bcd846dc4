"""How a micro-batch that may hold only so many rows is shared out."""

from __future__ import annotations

import random

from portalmq.spark.reading.admission import shares


def test_rows_are_shared_in_proportion_to_what_waits():
    assert shares({"a": 1_000, "b": 3_000, "c": 0}, 400) == {"a": 100, "b": 300}


def test_all_that_waits_is_taken_when_there_is_room():
    assert shares({"a": 7, "b": 0, "c": 5}, 12) == {"a": 7, "c": 5}


def test_shares_never_exceed_what_waits_nor_the_limit_and_leave_no_log_out():
    chance = random.Random(5)
    for _ in range(2_000):
        waiting = {f"log-{n}": chance.choice((0, 1, 2, 10, 10**6, 10**12)) for n in range(chance.randint(1, 9))}
        rows_max = chance.choice((1, 2, 3, 9, 10, 11, 1_000, 10**7))
        given = shares(waiting, rows_max)
        busy = sum(count > 0 for count in waiting.values())
        assert sum(given.values()) == min(rows_max, sum(waiting.values()))
        assert all(0 < count <= waiting[name] for name, count in given.items())
        assert len(given) == min(busy, rows_max)
