"""Very many messages in a request or an answer: too many are refused at once, and other greenlets run between parts."""

from __future__ import annotations

import gc
import tracemalloc

import msgspec
import pytest

from portalmq import wire
from portalmq.broker.api import incoming, outgoing, record_fields
from portalmq.broker.api.incoming import decode_messages
from portalmq.broker.messages.browse import StoredMessage, StoredPage
from portalmq.broker.partition.long_poll import LeasedMessage
from portalmq.broker.storage.batch import Record
from portalmq.errors import InvalidRequest, MessageTooLarge

MAX = wire.BATCH_MESSAGES_MAX
ENCODERS = {wire.BATCH_JSON: msgspec.json.encode, wire.BATCH_MSGPACK: msgspec.msgpack.encode}
both = pytest.mark.parametrize("kind", list(ENCODERS))


def body_of(kind: str, messages: int, **message: object) -> bytes:
    return ENCODERS[kind]({"messages": [message or {"value": 1}] * messages})


@both
def test_decoding_stops_at_the_limit_of_a_batch(kind):
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
def test_a_batch_at_the_limit_is_accepted_and_one_more_message_is_refused(kind):
    assert len(decode_messages(kind, body_of(kind, MAX), {}, 0).records) == MAX
    with pytest.raises(MessageTooLarge, match="10000"):
        decode_messages(kind, body_of(kind, MAX + 1), {}, 0)
    assert len(decode_messages(kind, body_of(kind, MAX), {}, 0).records) == MAX, "each batch is counted by itself"


@both
def test_an_error_in_a_large_batch_is_named(kind):
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
def test_other_greenlets_run_after_each_thousand_messages(monkeypatch, kind, message):
    turns: list[None] = []
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: turns.append(None))
    body = b"1\n" * MAX if kind == wire.NDJSON else body_of(kind, MAX, **message)
    assert len(decode_messages(kind, body, {}, 0).records) == MAX
    assert len(turns) >= MAX // incoming.MESSAGES_A_TURN - 1


def test_other_greenlets_run_while_very_many_messages_are_encoded(monkeypatch):
    turns: list[None] = []
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: turns.append(None))
    record = Record(b"{}", wire.JSON)
    delivered = [LeasedMessage("t", 0, offset, 1, record, "receipt", 1, 2) for offset in range(MAX)]
    answer = msgspec.json.decode(outgoing.encode_received(delivered, None, packed=False))
    assert [each["offset"] for each in answer["messages"]] == list(range(MAX))
    assert len(turns) >= MAX // outgoing.MESSAGES_A_TURN - 1
    turns.clear()
    stored = [StoredMessage("t", 0, offset, 1, record) for offset in range(MAX)]
    answer = msgspec.json.decode(outgoing.encode_page(StoredPage(stored, MAX, 0, MAX), packed=False))
    assert [each["offset"] for each in answer["messages"]] == list(range(MAX))
    assert len(turns) >= MAX // outgoing.MESSAGES_A_TURN - 1


LARGE = {
    "base64": (wire.BATCH_JSON, {"value_base64": "eHh4" * 2_000}),
    "json": (wire.BATCH_JSON, {"value": {"text": "ä" * 3_000}, "key": "k", "headers": {"a": "b"}}),
    "msgpack": (wire.BATCH_MSGPACK, {"value": [[]] * 6_000, "key": b"k", "priority": 3}),
}


@pytest.mark.parametrize("name", list(LARGE))
def test_a_large_body_is_decoded_in_parts_and_is_the_same(monkeypatch, name):
    """Other greenlets run after each part, however few messages the body has."""
    turns: list[None] = []
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: turns.append(None))
    kind, message = LARGE[name]
    count = 3 * incoming.LARGE_BYTES // len(ENCODERS[kind](message))
    body = ENCODERS[kind]({"messages": [message] * count, "producer": {"id": 1, "epoch": 2, "sequence": 3}})
    in_parts = decode_messages(kind, body, {}, 0)
    assert len(turns) >= 2 * (len(body) // incoming.BYTES_A_TURN - 1)
    for name in ("_JSON", "_PACK"):
        monkeypatch.setattr(incoming, name, getattr(incoming, name)._replace(parts_from_bytes=1 << 40))
    assert decode_messages(kind, body, {}, 0) == in_parts


@pytest.mark.parametrize("messages", [1, 8])
def test_a_dense_value_is_decoded_without_garbage_collection_and_encoded_in_its_own_turn(monkeypatch, messages):
    body = msgspec.msgpack.encode({"messages": [{"value": [[]] * 300_000}] * messages})
    steps: list[str] = []
    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: None)
    monkeypatch.setattr("portalmq.broker.api.incoming.give_way", lambda: steps.append("pause"))
    encode = record_fields._as_json
    monkeypatch.setattr(record_fields, "_as_json", lambda *args: steps.append("encode") or encode(*args))
    collections = gc.get_stats()[0]["collections"]
    records = decode_messages(wire.BATCH_MSGPACK, body, {}, 0).records
    assert gc.get_stats()[0]["collections"] - collections < 50, "with collection there are hundreds or thousands"
    assert [record.value for record in records] == [b"[" + b",".join([b"[]"] * 300_000) + b"]"] * messages
    assert steps[-messages - 1 :] == ["pause", *["encode"] * messages]
    assert gc.isenabled()
    with pytest.raises(InvalidRequest, match="not valid"):
        decode_messages(wire.BATCH_MSGPACK, body[:-1], {}, 0)
    assert gc.isenabled()


def test_dense_values_are_decoded_encoded_and_released_one_a_turn(monkeypatch):
    steps: list[str] = []

    def noted(what: str, do):
        return lambda *args: (do(*args), steps.append(what))[0]

    monkeypatch.setattr("portalmq.broker.partition.yielding.give_way", lambda: steps.append("pause"))
    monkeypatch.setattr(incoming, "give_way", lambda: steps.append("pause"))
    decode = noted("decode", incoming._PACK.decode_message)
    monkeypatch.setattr(incoming, "_PACK", incoming._PACK._replace(decode_message=decode))
    monkeypatch.setattr(record_fields, "_as_json", noted("encode", record_fields._as_json))
    body = msgspec.msgpack.encode({"messages": [{"value": [[]] * 100_000}] * 3})
    assert incoming.DENSE_BYTES < len(body) < incoming.LARGE_BYTES
    assert len(decode_messages(wire.BATCH_MSGPACK, body, {}, 0).records) == 3
    assert steps == ["decode", "pause"] * 3 + ["encode", "pause"] * 2 + ["encode"]
    message = wire.PackMessage(value=[[]])
    assert record_fields.record_of_pack(message, "a message", 0).value == b"[[]]"
    assert message.value is msgspec.UNSET


@both
def test_an_error_in_a_large_body_names_its_place(kind):
    body = body_of(kind, 200, value="x" * 8_000, headers={"a": 1})
    assert len(body) > incoming.LARGE_BYTES
    with pytest.raises(InvalidRequest, match=r"`\$\.messages\[\.\.\.\]\.headers"):
        decode_messages(kind, body, {}, 0)
    with pytest.raises(InvalidRequest, match="not valid"):
        decode_messages(kind, body[:-1], {}, 0)
    both_named = ENCODERS[kind]({"messages": [{"value": "x" * 2_000_000}], "producer": 5})
    with pytest.raises(InvalidRequest, match=r"`\$\.producer"):
        decode_messages(kind, both_named, {}, 0)
