"""The cost of an NDJSON body depends on its messages, not on its lines."""

from __future__ import annotations

import tracemalloc

import pytest

from portalmq import wire
from portalmq.broker.api.incoming import decode_messages
from portalmq.errors import InvalidRequest, MessageTooLarge


def test_lines_are_counted_before_they_are_collected():
    """A body of 8 MiB may hold four million lines, each of which would be an object."""
    tracemalloc.start()
    try:
        assert len(decode_messages(wire.NDJSON, b"\n" * 1_000_000 + b"1\n", {}, 0).records) == 1
        with pytest.raises(MessageTooLarge, match="10000"):
            decode_messages(wire.NDJSON, b"1\n" * 500_000, {}, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * 1024 * 1024


def test_a_body_with_as_many_lines_as_a_batch_may_have_is_accepted():
    assert len(decode_messages(wire.NDJSON, b"1\n" * wire.BATCH_MESSAGES_MAX, {}, 0).records) == wire.BATCH_MESSAGES_MAX


def test_the_line_that_is_not_json_is_named():
    with pytest.raises(InvalidRequest, match="line 5 "):
        decode_messages(wire.NDJSON, b"1\n\n \n2\n{\n", {}, 0)
