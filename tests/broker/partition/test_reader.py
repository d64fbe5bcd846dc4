"""Reads of a partition's log after the log has changed."""

from __future__ import annotations

import pytest
from support.log_files import Writer, numbered, open_log

from portalmq.broker.partition.cache import BatchCache
from portalmq.broker.partition.reader import Reader


def test_a_longer_batch_may_take_the_place_of_one_that_was_read_and_cut_off(tmp_path):
    log = open_log(tmp_path)
    reader = Reader(log, BatchCache(1 << 20), 1, pytest.fail, pytest.fail)
    Writer(log).put(*numbered(2))
    assert [(piece.start, piece.end) for piece in reader.pieces(0, 2, 9)] == [(0, 2)]
    log.truncate(0)
    reader.forget()
    Writer(log).put(*numbered(5))
    (piece,) = reader.pieces(3, 4, 9)
    assert [record.value for record in piece.records()] == numbered(5)[3:4]
