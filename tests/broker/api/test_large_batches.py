"""Very many messages in a request or an answer: too many are refused at once, and others have their turn meanwhile."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from portalmq import wire
from portalmq.broker.api import incoming, outgoing
from portalmq.broker.api.incoming import decode_messages
from portalmq.broker.browsing import Page, Stored
from portalmq.broker.storage.batch import Record
from portalmq.broker.waiting import Delivered
from portalmq.errors import InvalidRequest, MessageTooLarge

MAX = wire.BATCH_MESSAGES_MAX
ENCODERS = {wire.BATCH_JSON: msgspec.json.encode, wire.BATCH_MSGPACK: msgspec.msgpack.encode}
both = pytest.mark.parametrize("kind", list(ENCODERS))


def body_of(kind: str, messages: int, **message: object) -> bytes:
    return ENCODERS[kind]({"messages": [message or {"value": 1}] * messages})


@both
def test_of_far_too_many_messages_no_more_than_a_batch_may_have_are_decoded(kind):
    body = body_of(kind, 300_000)
    tracemalloc.start()
    try:
        with pytest.raises(MessageTooLarge, match="more than 10000 messages"):
            decode_messages(kind, body, {}, 0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * 1024 * 1024


@both
def test_as_many_messages_as_a_batch_may_have_are_taken_and_one_more_is_not(kind):
    assert len(decode_messages(kind, body_of(kind, MAX), {}, 0).records) == MAX
    with pytest.raises(MessageTooLarge, match="10000"):
        decode_messages(kind, body_of(kind, MAX + 1), {}, 0)
    assert len(decode_messages(kind, body_of(kind, MAX), {}, 0).records) == MAX, "each batch is counted by itself"


@both
def test_what_is_wrong_in_a_large_batch_is_named(kind):
    with pytest.raises(InvalidRequest, match="prioritaet"):
        decode_messages(kind, body_of(kind, MAX, value=1, prioritaet=2), {}, 0)
    with pytest.raises(InvalidRequest, match="not valid"):
        decode_messages(kind, body_of(kind, MAX)[:-1], {}, 0)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (wire.BATCH_JSON, {"value": 1, "headers": {"a": "b"}}),
        (wire.BATCH_MSGPACK, {"value": 1, "delay_ms": 5}),
        (wire.BATCH_MSGPACK, {"value": b"x", "headers": {"a": "b"}}),
        (wire.NDJSON, {}),
    ],
)
def test_others_have_their_turn_after_each_thousand_messages(monkeypatch, kind, message):
    turns: list[None] = []
    monkeypatch.setattr("portalmq.broker.fairness.give_way", lambda: turns.append(None))
    body = b"1\n" * MAX if kind == wire.NDJSON else body_of(kind, MAX, **message)
    assert len(decode_messages(kind, body, {}, 0).records) == MAX
    assert len(turns) >= MAX // incoming.MESSAGES_A_TURN - 1


def test_others_have_their_turn_while_very_many_messages_are_shown(monkeypatch):
    turns: list[None] = []
    monkeypatch.setattr("portalmq.broker.fairness.give_way", lambda: turns.append(None))
    record = Record(b"{}", wire.JSON)
    delivered = [Delivered("t", 0, offset, 1, record, "receipt", 1, 2) for offset in range(MAX)]
    answer = msgspec.json.decode(outgoing.encode_received(delivered, [], packed=False))
    assert [each["offset"] for each in answer["messages"]] == list(range(MAX))
    assert len(turns) >= MAX // outgoing.MESSAGES_A_TURN - 1
    turns.clear()
    stored = [Stored("t", 0, offset, 1, record) for offset in range(MAX)]
    answer = msgspec.json.decode(outgoing.encode_page(Page(stored, MAX, 0, MAX), packed=False))
    assert [each["offset"] for each in answer["messages"]] == list(range(MAX))
    assert len(turns) >= MAX // outgoing.MESSAGES_A_TURN - 1
