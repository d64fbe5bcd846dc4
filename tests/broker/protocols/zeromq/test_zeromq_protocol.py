"""MiniQ's frames, in and out."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from portalmq import wire
from portalmq.broker.core.queue.receipts import ReceiptSigner, mark_in, nth_text, topic_mark
from portalmq.broker.protocols.zeromq import protocol
from portalmq.broker.protocols.zeromq.protocol import (
    Malformed,
    ReceivedMessage,
    parse_command,
    parse_receive,
    parse_send,
    split_frames,
)
from portalmq.errors import Backpressure, InvalidRequest, MessageTooLarge, PortalMQError

MIB = 1024 * 1024


def test_the_envelope_is_all_frames_before_the_body():
    assert split_frames([b"me", b"", b"body"]) == ((b"me", b""), b"body")
    assert split_frames([b"me", b"id-1", b"", b"body"]) == ((b"me", b"id-1", b""), b"body")
    assert split_frames([b"me", b"body"]) == ((b"me",), b"body")
    assert split_frames([b"me", b"", b""]) == ((b"me", b""), b""), "an empty body is a body"


@pytest.mark.parametrize("frames", [[b"me"], [b"me", b""], [b"me", b"", b"a", b"b"], [b"me", *[b"x"] * 20, b"", b"y"]])
def test_a_request_is_one_frame(frames: list[bytes]):
    with pytest.raises(Malformed) as caught:
        split_frames(frames)
    assert caught.value.envelope[0] == b"me"
    assert len(caught.value.envelope) <= 2, "no extra frames are sent back"


def posted(body: Any) -> tuple[str, Any, Any]:
    found = parse_send(body if isinstance(body, bytes) else json.dumps(body).encode(), MIB)
    return found.queue, found.value, found.content_type


def test_text_is_stored_as_text_and_anything_else_as_the_json_that_was_sent():
    assert posted({"queue": "q", "message": "hello"}) == ("q", "hello", None)
    assert posted({"queue": "q", "message": {"n": 1}}) == ("q", b'{"n": 1}', wire.JSON)
    assert posted({"queue": "q", "message": None}) == ("q", b"null", wire.JSON)
    assert posted({"message": "x"}) == ("default", "x", None)
    digits = b"3.14159265358979323846264338327950288"
    assert posted(b'{"message": ' + digits + b"}")[1] == digits


@pytest.mark.parametrize("body", [b"hello", b"", b"[1, 2]", b'"text"', b"17", b"{not json", b'{"queue": 5', b"null"])
def test_a_body_that_is_not_a_json_object_is_a_message_for_the_default_queue(body: bytes):
    assert posted(body) == ("default", body.decode(), None)


def test_bytes_that_are_not_text_stay_bytes():
    assert posted(b"\xff\x00") == ("default", b"\xff\x00", None)
    assert posted(b'{"message": "\xff"}') == ("default", b'{"message": "\xff"}', None)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"{}", "there is no message"),
        (b'{"queue": 5, "message": 1}', "queue"),
        (b'{"queue": "a/b", "message": 1}', "cannot name a queue"),
        (b'{"queue": "", "message": 1}', "cannot name a queue"),
        (b'{"message": "\\ud800"}', "not valid"),
        (b'{"queue": "q", "message": NaN}', "not valid"),
        # Mistakes of programs that build JSON by hand: C's end of a string, an unescaped tab or line break, a number
        # with too many digits, a byte order mark.
        (b'{"queue": "q", "message": 1}\0', "not valid"),
        (b'{"queue": "q", "message": "1\t2\n"}', "not valid"),
        (b'{"queue": "q", "message": ' + b"1" * 5_000 + b"}", "not valid"),
        (b'\xef\xbb\xbf{"queue": "q", "message": 1}', "not valid"),
        (b'{"message": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "deep"),
        (b'{"message": 1, "token": 7}', "token"),
    ],
)
def test_an_object_that_makes_no_sense_is_refused_with_a_reason(body: bytes, told: str):
    with pytest.raises(InvalidRequest, match=told):
        parse_send(body, MIB)


def test_a_message_that_is_too_large_is_refused_by_its_size_and_not_by_its_escapes():
    assert parse_send(json.dumps({"message": "\x00" * 100}).encode(), 100).value == "\x00" * 100
    with pytest.raises(MessageTooLarge, match="101 bytes, 100 at most"):
        parse_send(b"x" * 101, 100)


def test_a_request_names_a_queue_or_gets_the_default_one():
    assert parse_receive(b'{"queue": "q"}').queue == "q"
    assert parse_receive(b"{}").queue == "default"
    assert parse_receive(b"next please").queue == "default"
    with pytest.raises(InvalidRequest):
        parse_receive(b'{"queue": null}')


@pytest.mark.parametrize("body", [b'{"queue": "q"}\0', b'\xef\xbb\xbf{"queue": "q"}'])
def test_a_request_for_one_queue_gets_no_message_of_another(body: bytes):
    with pytest.raises(InvalidRequest, match="not valid"):
        parse_receive(body)


def test_a_command_is_passed_on_without_its_token():
    told = parse_command(b'{"type": "QUEUE_SIZE", "payload": {"queue": "q", "n": 1.50}, "token": "secret"}')
    assert (told.kind, told.queue, told.message_id, told.token) == ("QUEUE_SIZE", "q", None, "secret")
    assert told.body == b'{"type":"QUEUE_SIZE","payload":{"queue": "q", "n": 1.50}}'
    assert parse_command(b'{"type": "X"}').queue == "default"


def test_only_a_plain_deletion_is_carried_out_together_with_others():
    def message_id(**payload: Any) -> str | None:
        return parse_command(json.dumps({"type": "DELETE_MSG", "payload": payload}).encode()).message_id

    assert message_id(id="3-17") == "3-17"
    assert message_id(id="00ff00ff-3-17") == "00ff00ff-3-17"
    assert [protocol.partition_of(each) for each in ("3-17", "00ff00ff-4-17")] == [3, 4]
    for odd in ("x", "1-", "-1", "1-2-3", 7, None, "٣-١", "1-" + "9" * 50):
        assert message_id(id=odd) is None, "the broker reports the error"
    assert message_id(id="3-17", ids=["3-17"]) is None


@pytest.mark.parametrize("body", [b"QUEUE_SIZE", b"[]", b"{}", b'{"type": 5}', b'{"type": "X", "payload": []}', b""])
def test_an_unknown_command_is_refused(body: bytes):
    with pytest.raises(InvalidRequest):
        parse_command(body)


def test_ids_carry_the_mark_that_the_brokers_give_a_queue():
    topic_id = "5f0c7c5e6a7d4b0f8f5d3d1f6c2b9a10"
    receipt = ReceiptSigner(b"k" * 32, topic_id, "default").head(3, 17, 1, 1, 1) + nth_text(0)
    assert (
        protocol.topic_mark(topic_id) == protocol.mark_of_receipt(receipt) == topic_mark(topic_id) == mark_in(receipt)
    )
    assert protocol.message_id_of("", 3, 17) == "3-17"
    assert (
        parse_command(
            json.dumps(
                {
                    "type": "DELETE_MSG",
                    "payload": {"id": protocol.message_id_of(protocol.mark_of_receipt(receipt), 3, 17)},
                }
            ).encode()
        ).message_id
        == f"{topic_mark(topic_id)}-3-17"
    )


def test_answers_report_the_outcome():
    assert json.loads(protocol.stored(1, 7, "q", 17)) == {"id": "1-7", "queue": "q", "timestamp": 17, "status": "ok"}
    told = json.loads(protocol.stored(1, 7, "q", 17, "topic id"))
    assert told["id"] == f"{topic_mark('topic id')}-1-7"
    assert json.loads(protocol.empty("q")) == {"status": "ok", "queue": "q", "id": None, "message": None}
    text = json.loads(protocol.handed("q", ReceivedMessage("0-1", "r", 17, 2, protocol.msgspec.Raw(b'"a"'))))
    assert text == {"id": "0-1", "queue": "q", "timestamp": 17, "deliveries": 2, "message": "a", "status": "ok"}
    raw = json.loads(protocol.handed("q", ReceivedMessage("0-1", "r", 17, value_base64="/wA=")))
    assert (raw["message_base64"], "message" in raw) == ("/wA=", False)
    assert protocol.message_of(raw) == b"\xff\x00"
    refused = json.loads(protocol.refusal(Backpressure("wait")))
    assert (refused["status"], refused["detail"], refused["code"]) == ("error", "wait", "backpressure")
    assert (refused["retryable"], refused["outcome"]) == (True, "not_applied")


near_json = st.one_of(
    st.binary(max_size=200),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=20),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from(["queue", "message", "token", "type", "payload", "id", "ids"]), inner, max_size=4
            )
        ),
        max_leaves=10,
    ).map(lambda value: json.dumps(value).encode()),
)


@given(frames=st.lists(near_json, min_size=1, max_size=12))
@settings(max_examples=500, deadline=None)
def test_any_input_is_parsed_or_refused_with_a_defined_error(frames: list[bytes]):
    try:
        way, body = split_frames([b"me", *frames])
    except Malformed:
        return
    assert way[0] == b"me"
    for read in (lambda: parse_send(body, MIB), lambda: parse_receive(body), lambda: parse_command(body)):
        with contextlib.suppress(PortalMQError):
            found = read()
            assert wire.check_name(found.queue, "queue")


@given(st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists, max_leaves=10))
@settings(max_examples=200, deadline=None)
def test_any_message_is_parsed_unchanged(message: Any):
    queue, value, content_type = posted({"queue": "q", "message": message})
    assert queue == "q"
    assert (value if content_type is None else json.loads(value)) == message
