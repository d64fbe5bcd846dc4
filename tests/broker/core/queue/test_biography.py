"""The life of a message, read block by block. The simulator compares lives with its models in seeds with groups."""

from __future__ import annotations

from portalmq.broker.core.queue.biography import Biography, RecordOrigin, summary_of
from portalmq.broker.core.queue.records import Claim, CommitOffset


def origin(offset: int) -> RecordOrigin:
    return RecordOrigin(offset, 1, offset, "s")


def test_a_block_that_says_where_a_stream_group_began_is_read() -> None:
    """Found by `make simulate SEED=801447`: a later claim, after a purge, was taken for the group's beginning."""
    blocks = [[Claim("m", 1, 0, 5)], [Claim("m", 2, 4, 6), CommitOffset(5, "m", 2, 7)]]
    life = Biography(3, RecordOrigin(3, 1, 0, ""), None, None)
    for at, block in enumerate(blocks):
        assert life.concerns(summary_of(("s", record) for record in block))
        for record in block:
            life.take(record, origin(10 + at))
    assert [each.event for each in life.events] == ["appended", "acked"]
