"""A stream group on one partition: who may commit what, and where the group goes on."""

from __future__ import annotations

import pytest

from portalmq.broker.core.fold import StreamFold
from portalmq.broker.core.queue.records import Claim, Commit, CommitOffset, Seek
from portalmq.broker.core.stream.offsets import StreamOffsets, new_stream
from portalmq.errors import IllegalGeneration, OffsetMoved, OffsetOutOfRange


def owned(committed: int = 10, generation: int = 3, member: str = "a") -> StreamOffsets:
    return StreamOffsets(StreamFold("g", committed, generation, member, 0))


def test_a_group_begins_with_its_first_claim() -> None:
    stream = new_stream("g", Claim("a", 3, 10, 50), 7)
    assert stream.snapshot() == StreamFold("g", 10, 3, "a", 50)
    assert stream.moved_at == 7


@pytest.mark.parametrize(("offset", "moves"), [(10, False), (11, True), (20, True)])
def test_the_owner_commits_from_the_committed_offset_up_to_the_high_watermark(offset: int, moves: bool) -> None:
    assert owned().check_commit("a", 3, offset, 20) is moves


@pytest.mark.parametrize("offset", [-1, 9, 21])
def test_nothing_is_committed_below_the_committed_offset_or_above_the_high_watermark(offset: int) -> None:
    with pytest.raises(OffsetOutOfRange):
        owned().check_commit("a", 3, offset, 20)


def test_a_refusal_says_what_is_committed_and_what_is_readable() -> None:
    with pytest.raises(OffsetOutOfRange) as below:
        owned().check_commit("a", 3, 9, 20)
    assert below.value.extra == {"committed": 10}
    with pytest.raises(OffsetOutOfRange) as above:
        owned().check_commit("a", 3, 21, 20)
    assert above.value.extra == {"high_watermark": 20}
    assert owned(committed=0).check_commit("a", 3, 0, 0) is False


def test_only_the_owner_commits_in_its_generation_or_a_later_one() -> None:
    owned().check_owner("a", 3)
    owned().check_owner("a", 4)
    for member, generation in (("a", 2), ("b", 3), ("b", 4)):
        with pytest.raises(IllegalGeneration):
            owned().check_owner(member, generation)
        with pytest.raises(IllegalGeneration):
            owned().check_commit(member, generation, 11, 20)


def test_a_partition_is_claimed_in_its_generation_or_a_later_one() -> None:
    owned().check_claim(3)
    owned().check_claim(4)
    with pytest.raises(IllegalGeneration) as refused:
        owned().check_claim(2)
    assert refused.value.extra == {"generation": 3}


@pytest.mark.parametrize(("begin", "log_start", "holds"), [
    (10, 0, True), (9, 0, False), (11, 0, False),
    (10, 15, True), (15, 15, True), (9, 15, False), (16, 15, False),
])  # fmt: skip
def test_a_commit_begins_at_the_committed_offset_or_where_retention_moved_it(
    begin: int, log_start: int, holds: bool
) -> None:
    if holds:
        owned().check_begin(begin, log_start)
    else:
        with pytest.raises(OffsetMoved):
            owned().check_begin(begin, log_start)


def test_neither_offsets_nor_generations_fall_except_by_a_seek() -> None:
    stream = owned()
    stream.apply(CommitOffset(5, "a", 3, 1), 100)
    assert (stream.committed, stream.moved_at) == (10, -1)
    stream.apply(Commit(b"c", 1, (), offset=5, member="a", generation=3), 101)
    assert (stream.committed, stream.moved_at) == (10, -1)
    stream.apply(CommitOffset(12, "a", 3, 1), 102)
    assert (stream.committed, stream.moved_at) == (12, 102)
    stream.apply(Claim("b", 2, 0, 2), 103)
    assert (stream.member, stream.generation, stream.moved_at) == ("b", 3, 102)
    stream.apply(Seek(4, 2, 3, b"s"), 104)
    assert (stream.committed, stream.generation, stream.moved_at) == (4, 3, 104)
    assert stream.commits == {b"c": 101, b"s": 104}


def test_a_purge_moves_the_committed_offset_up_and_never_back() -> None:
    stream = owned()
    stream.purge(8)
    assert stream.committed == 10
    stream.purge(15)
    assert stream.committed == 15
