"""A batch read, through Spark and without it."""

from __future__ import annotations

import pytest


@pytest.mark.spark
def test_every_message_is_a_row_once(spark, data):
    rows = spark.read.format("portalmq").load(str(data)).collect()
    assert sorted((row.topic, row.partition, row.value) for row in rows) == sorted(
        ("t", number, bytearray(b"%d" % value)) for number in range(2) for value in range(30)
    )
