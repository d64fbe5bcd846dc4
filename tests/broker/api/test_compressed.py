"""Produce requests with compressed values: what is stored, and every malformed frame refused before anything is."""

from __future__ import annotations

import msgspec
import pytest
from support.compressed import data_of, reading_records, readings
from support.fake_broker import NOW_MS

from portalmq import wire
from portalmq.broker.api import incoming
from portalmq.broker.api.body import BodiesInFlight
from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.api.incoming import decode_messages
from portalmq.broker.partition import native
from portalmq.broker.storage.batch import Record
from portalmq.compression import zstd
from portalmq.errors import Backpressure, MessageTooLarge

URL = "/v1/topics/t/messages?partition=0"
RECORDS = reading_records(20)
GOOD = data_of(RECORDS)


def frame_of(value: object, **more: object) -> bytes:
    return zstd.compress(msgspec.msgpack.encode(value), **more)


def body_of(data: object, messages: list[dict[str, object]], **values: object) -> bytes:
    return msgspec.msgpack.encode({"messages": messages, "values": {"codec": "zstd", "data": data, **values}})


def post(client, data=GOOD, messages=None, **values):
    body = body_of(data, [{}] * 20 if messages is None else messages, **values)
    return client.post(URL, data=body, content_type=wire.BATCH_MSGPACK)


def stored(broker):
    return broker.logs["t"][0]


def test_compressed_values_become_the_values_of_the_messages(client, broker):
    assert post(client, content_type="application/json").status_code == 200
    assert stored(broker) == RECORDS


def test_each_message_has_its_own_other_fields(client, broker):
    messages = [{} for _ in range(20)]
    messages[1] = {"key": b"k", "headers": {"A": "b"}, "content_type": "text/plain"}
    post(client, messages=messages)
    assert stored(broker)[1] == Record(readings(2)[1], "text/plain", b"k", {"a": "b"})
    assert stored(broker)[2] == Record(readings(3)[2])


def test_messages_with_options_are_decoded_one_by_one(client, broker):
    messages = [{"key": "text", "delay_ms": 5, "priority": 3}] * 20
    post(client, messages=messages, content_type="application/json")
    assert stored(broker)[19] == Record(readings(20)[19], wire.JSON, b"text", None, NOW_MS + 5, None, 3)


@pytest.mark.parametrize("message", [{}, {"priority": 1}])
def test_the_values_are_kept_as_they_came(message):
    request = decode_messages(wire.BATCH_MSGPACK, body_of(GOOD, [message] * 20), {}, 0)
    assert request.compressed == GOOD


@pytest.mark.parametrize("message", [{}, {"priority": 1}])
def test_values_among_which_one_is_empty_are_stored_plain(message):
    data = frame_of([b"a", b"", b"c"])
    request = decode_messages(wire.BATCH_MSGPACK, body_of(data, [message] * 3), {}, 0)
    assert [record.value for record in request.records] == [b"a", b"", b"c"]
    assert request.compressed == b""


def test_a_large_batch_is_decoded_in_parts(monkeypatch):
    monkeypatch.setattr(incoming, "_PACK", incoming._PACK._replace(parts_from_bytes=1))
    request = decode_messages(wire.BATCH_MSGPACK, body_of(GOOD, [{"priority": 1}] * 20), {}, 0)
    assert [record.value for record in request.records] == readings(20)


def test_large_values_are_decompressed_on_a_native_thread(monkeypatch):
    called = []
    work = native._values_or_fault
    monkeypatch.setattr(native, "_values_or_fault", lambda *arguments: called.append(1) or work(*arguments))
    big = [b"%d" % number * 20_000 for number in range(10)]
    request = decode_messages(wire.BATCH_MSGPACK, body_of(frame_of(big), [{}] * 10), {}, 0)
    assert ([record.value for record in request.records], called) == (big, [])
    big *= 4
    request = decode_messages(wire.BATCH_MSGPACK, body_of(frame_of(big), [{}] * 40), {}, 0)
    assert ([record.value for record in request.records], called) == (big, [1])


def test_an_error_on_the_native_thread_is_raised(monkeypatch):
    monkeypatch.setattr(native, "LARGE_VALUES_BYTES", 1)
    with pytest.raises(ValueError, match="19 values for 20"):
        decode_messages(wire.BATCH_MSGPACK, body_of(frame_of(readings(19)), [{}] * 20), {}, 0)


# --- refusals ---------------------------------------------------------------------------------------------------------

STREAMED = zstd.ZstdCompressor()
UNSIZED = STREAMED.compress(msgspec.msgpack.encode(readings(20))) + STREAMED.flush()
SKIPPABLE = b"\x50\x2a\x4d\x18\x04\x00\x00\x00abcd"
CHECKSUMMED = frame_of(readings(20), options={zstd.CompressionParameter.checksum_flag: 1})


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "no zstd frame"),
        (b"nonsense", "no zstd frame"),
        (GOOD[:-1], "no zstd frame"),
        (GOOD[:3], "no zstd frame"),
        (GOOD + b"\0", "ends after"),
        (GOOD + GOOD, "ends after"),
        (GOOD + SKIPPABLE, "ends after"),
        (SKIPPABLE, "not a zstd frame of"),
        (SKIPPABLE + GOOD, "ends after"),
        (UNSIZED, "does not tell its content size"),
        (CHECKSUMMED[:-1] + bytes([CHECKSUMMED[-1] ^ 1]), "not a zstd frame of"),
        (frame_of(readings(19)), "19 values for 20 messages"),
        (frame_of(readings(21)), "21 values for 20 messages"),
        (frame_of([value.decode() for value in readings(20)]), "Expected `bytes`, got `str`"),
        (frame_of({}), "Expected `array`"),
        (zstd.compress(b"\xdd\xff\xff\xff\xff"), "length <= 10000"),
        (zstd.compress(msgspec.msgpack.encode(readings(20)) + b"\0"), "trailing characters"),
        (zstd.compress(b""), "not a zstd frame of"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("message", [{}, {"priority": 1}], ids=["plain", "with options"])
def test_a_bad_frame_is_refused_before_anything_is_stored(client, broker, problem_of, data, says, message):
    problem = problem_of(post(client, data, [message] * 20), 400, "invalid_request")
    assert says in problem["detail"]
    assert not broker.logs.get("t")


def test_every_flipped_bit_is_refused_or_gives_as_many_bytes(client, broker):
    for at in range(len(GOOD) * 8):
        flipped = bytearray(GOOD)
        flipped[at // 8] ^= 1 << at % 8
        assert post(client, bytes(flipped)).status_code in (200, 400, 413)


@pytest.mark.parametrize("message", [{"value": b"x"}, {"value": None}, {"value_base64": "eA=="}])
def test_a_message_with_a_value_beside_compressed_ones_is_refused(client, broker, problem_of, message):
    problem = problem_of(post(client, messages=[*[{}] * 19, message]), 400, "invalid_request")
    assert "message 19 has a value" in problem["detail"]


def test_a_message_without_a_value_is_refused_as_before(client, problem_of):
    body = msgspec.msgpack.encode({"messages": [{"value": b"x"}, {}]})
    answer = client.post(URL, data=body, content_type=wire.BATCH_MSGPACK)
    assert "message 1 has no value" in problem_of(answer, 400, "invalid_request")["detail"]


@pytest.mark.parametrize("values", [{"codec": "gzip"}, {"level": 3}, {"content_type": "x" * 256}, {"content_type": ""}])
def test_other_codecs_and_fields_are_refused(client, broker, problem_of, values):
    problem_of(post(client, **values), 400, "invalid_request")
    assert not broker.logs.get("t")


def test_a_content_type_with_a_line_break_is_refused(client, problem_of):
    problem_of(post(client, content_type="a\nb"), 400, "invalid_request")


def test_a_json_batch_takes_no_compressed_values(client, problem_of):
    values = {"codec": "zstd", "data": "AAAA"}
    answer = client.post(URL, json={"messages": [], "values": values}, content_type=wire.BATCH_JSON)
    problem_of(answer, 400, "invalid_request")


# --- limits (the client's broker takes bodies of 100,000 bytes) -------------------------------------------------------


def test_what_decompresses_to_more_than_a_body_may_have_is_refused_unread(client, broker, problem_of, monkeypatch):
    monkeypatch.setattr(zstd, "ZstdDecompressor", None)
    bomb = frame_of([b"\0" * 1_000_000])
    assert len(bomb) < 100
    problem = problem_of(post(client, bomb, [{}]), 413, "message_too_large")
    assert "the limit is 100000" in problem["detail"]
    assert not broker.logs.get("t")


def test_a_frame_that_holds_more_than_it_says_is_refused(client, broker, problem_of):
    plain = msgspec.msgpack.encode([b"\0" * 200_000])
    honest = zstd.compress(plain)
    size = len(plain)
    at = honest.index(size.to_bytes(4, "little"))
    liar = honest[:at] + (1_000).to_bytes(4, "little") + honest[at + 4 :]
    problem_of(post(client, liar, [{}]), 400, "invalid_request")
    assert not broker.logs.get("t")


def test_what_values_decompress_to_counts_as_bytes_in_flight(client, monkeypatch):
    held = []
    monkeypatch.setattr(BodiesInFlight, "hold_also", lambda bodies, request, size: held.append(size))
    assert post(client, frame_of([b"x" * 40_000]), [{}]).status_code == 200
    assert held == [len(msgspec.msgpack.encode([b"x" * 40_000]))]


def test_a_body_grows_only_while_there_is_room_for_it():
    bodies = BodiesInFlight(50_000)
    one, two = HttpRequest("POST", "/", "", {}), HttpRequest("POST", "/", "", {})
    bodies.hold(one, 10_000)
    bodies.hold_also(one, 20_000)
    assert bodies.bytes == 30_000
    bodies.hold(two, 5_000)
    with pytest.raises(Backpressure):
        bodies.hold_also(two, 20_000)
    bodies.release(one)
    bodies.hold_also(two, 20_000)
    bodies.release(two)
    assert bodies.bytes == 0


def test_too_many_messages_are_refused_before_anything_is_decompressed(monkeypatch):
    monkeypatch.setattr(zstd, "ZstdDecompressor", None)
    with pytest.raises(MessageTooLarge, match="10000"):
        decode_messages(wire.BATCH_MSGPACK, body_of(GOOD, [{}] * 10_001), {}, 0)
