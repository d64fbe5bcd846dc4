"""Numbers that some JSON readers refuse are shown as text, so that clients can read the rest of the answer."""

from __future__ import annotations

import json

import pytest

from portalmq.broker.api import outgoing
from portalmq.broker.messages.browse import StoredMessage
from portalmq.broker.protocols.payload import message_member
from portalmq.broker.storage.batch import Record

POISON = [b"1" + b"0" * 5_000, b"1e999", b'{"a": [-1E+999]}', b"1" * 400 + b".5", b"1" * 250 + b"e99"]
SOUND = [b"1e99", b"1" + b"0" * 30, b'"1e999 and 1e400"', b'{"id": 12345678901234567890}', b"1e-999"]


def line_of(value: bytes) -> dict:
    record = Record(value, "application/json")
    return json.loads(outgoing.json_line(StoredMessage("t", 0, 0, 0, record)))


@pytest.mark.parametrize("value", POISON, ids=lambda value: value[:12].decode())
def test_a_number_that_some_readers_refuse_is_shown_as_text(value):
    assert line_of(value)["value"] == value.decode()
    assert message_member(Record(value, "application/json"))["message"] == value.decode()


@pytest.mark.parametrize("value", SOUND, ids=lambda value: value[:12].decode())
def test_a_number_that_all_readers_accept_is_shown_unchanged(value):
    assert line_of(value)["value"] == json.loads(value)
