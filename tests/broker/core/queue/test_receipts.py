"""Receipts cannot be forged, moved or misread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portalmq.broker.core.queue.receipts import (
    COUNT_MAX,
    HEAD_LENGTH,
    ReceiptSigner,
    nth_text,
    offset_of,
    offsets_of,
    tag_of,
    topic_tag,
)
from portalmq.errors import InvalidRequest

KEY = bytes(range(32))
SIGNER = ReceiptSigner(KEY, "topic-id", "group")


def read(signer: ReceiptSigner, text: str) -> tuple[int, int, int, int]:
    lease = signer.check(text[:HEAD_LENGTH])
    return lease.partition, offset_of(text, lease), lease.delivery, lease.leader_epoch


@given(
    st.integers(0, 2**16 - 1),
    st.integers(0, 2**62),
    st.integers(0, COUNT_MAX - 1),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**32 - 1),
)
def test_a_receipt_reads_as_it_was_written(partition, first, nth, delivery, epoch):
    text = SIGNER.head(partition, first, nth + 1, delivery, epoch) + nth_text(nth)
    assert len(text) == 64
    assert read(SIGNER, text) == (partition, first + nth, delivery, epoch)
    assert tag_of(text[:HEAD_LENGTH]) == topic_tag("topic-id")


@pytest.mark.parametrize(
    "other",
    [
        ReceiptSigner(KEY, "topic-id", "other"),
        ReceiptSigner(KEY, "other", "group"),
        ReceiptSigner(KEY[::-1], "topic-id", "group"),
    ],
    ids=["another group", "another topic", "another cluster"],
)
def test_a_receipt_counts_only_where_it_was_issued(other):
    text = SIGNER.head(0, 5, 1, 1, 1) + nth_text(0)
    with pytest.raises(InvalidRequest):
        read(other, text)


@given(st.integers(0, HEAD_LENGTH - 1), st.sampled_from("AZaz09-_"))
def test_a_changed_head_is_refused(at, letter):
    text = SIGNER.head(3, 5, 1, 1, 1) + nth_text(0)
    changed = text[:at] + letter + text[at + 1 :]
    if changed != text:
        with pytest.raises(InvalidRequest):
            read(SIGNER, changed)


def test_no_receipt_can_be_forged_for_a_message_outside_the_lease():
    head = SIGNER.head(0, 5, 3, 1, 1)
    assert read(SIGNER, head + nth_text(2)) == (0, 7, 1, 1)
    with pytest.raises(InvalidRequest):
        read(SIGNER, head + nth_text(3))


@given(st.integers(0, 20), st.lists(st.integers(0, 20), max_size=20))
def test_receipts_of_a_lease_read_as_each_of_them_does(start, more):
    head = SIGNER.head(0, 5, 41, 1, 1)
    lease = SIGNER.check(head)
    for numbers in (range(start, start + 1 + len(more)), [start, *more], [start, *more][::-1]):
        texts = [head + nth_text(nth) for nth in numbers]
        assert list(offsets_of(texts, head, lease)) == [offset_of(text, lease) for text in texts]
    assert isinstance(offsets_of([head + nth_text(nth) for nth in range(41)], head, lease), range)
    with pytest.raises(InvalidRequest, match="not a receipt"):
        offsets_of([head + nth_text(nth) for nth in range(start, 42)], head, lease)


@given(st.text(max_size=80))
def test_any_other_text_is_refused_with_a_sentence(text):
    with pytest.raises(InvalidRequest, match="not a receipt"):
        read(SIGNER, text)
    with pytest.raises(InvalidRequest, match="not a receipt"):
        tag_of(text[:HEAD_LENGTH])
