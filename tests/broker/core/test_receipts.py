"""Receipts cannot be forged, moved or misread."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portalmq.broker.core.receipts import TAG_BYTES, TEXT_LENGTH, ReceiptBook, decode, topic_tag
from portalmq.errors import InvalidRequest

KEY = bytes(range(32))


@given(st.integers(0, 2**16 - 1), st.integers(0, 2**63), st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_receipt_says_what_was_written(partition, offset, delivery, epoch):
    book = ReceiptBook(KEY, "topic-id", "group")
    text = book.writer(partition, epoch)(offset, delivery)
    assert len(text) == TEXT_LENGTH
    assert book.check(decode(text)) == (topic_tag("topic-id"), partition, offset, delivery, epoch)
    assert decode(text)[:TAG_BYTES] == topic_tag("topic-id")


@pytest.mark.parametrize(
    "other",
    [
        ReceiptBook(KEY, "topic-id", "other"),
        ReceiptBook(KEY, "other", "group"),
        ReceiptBook(KEY[::-1], "topic-id", "group"),
    ],
    ids=["another group", "another topic", "another cluster"],
)
def test_a_receipt_counts_only_where_it_was_given(other):
    text = ReceiptBook(KEY, "topic-id", "group").writer(0, 1)(5, 1)
    with pytest.raises(InvalidRequest):
        other.check(decode(text))


@given(st.integers(0, TEXT_LENGTH - 1), st.sampled_from("AZaz09-_"))
def test_a_changed_receipt_is_refused(at, letter):
    book = ReceiptBook(KEY, "topic-id", "group")
    text = book.writer(3, 1)(5, 1)
    changed = text[:at] + letter + text[at + 1 :]
    if changed == text:
        assert book.check(decode(changed))
    else:
        with pytest.raises(InvalidRequest):
            book.check(decode(changed))


@given(st.text(max_size=80))
def test_any_other_text_is_refused_with_a_sentence(text):
    with pytest.raises(InvalidRequest, match="not a receipt"):
        ReceiptBook(KEY, "t", "g").check(decode(text))
