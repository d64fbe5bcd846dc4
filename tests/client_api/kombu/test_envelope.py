"""What a kombu message becomes, and when it is delivered."""

from __future__ import annotations

import json
from typing import Any

import pytest

from portalmq.kombu.envelope import decode, encode, send_options

NOW = 1_800_000_000.0


def task(eta: object = None, **properties: Any) -> dict[str, Any]:
    headers = {} if eta is None else {"eta": eta}
    return {"body": "[]", "headers": headers, "properties": {"delivery_info": {}, **properties}}


def test_a_message_comes_back_as_it_was_with_where_it_was_published() -> None:
    sent = {**task(), "content-type": "application/json", "content-encoding": "utf-8"}
    got = decode(encode(sent, "bus", "a.b"), 7, redelivered=False)
    info = {"exchange": "bus", "routing_key": "a.b"}
    assert got == {**sent, "properties": {"delivery_info": info, "delivery_tag": 7}}


def test_a_property_that_json_cannot_carry_is_left_out() -> None:
    got = decode(encode(task(signal=object(), priority=3), "", "q"), 1, redelivered=False)
    assert got["properties"]["priority"] == 3
    assert "signal" not in got["properties"]
    with pytest.raises(TypeError):
        encode({**task(), "headers": {"signal": object()}}, "", "q")


def test_a_message_that_was_delivered_before_says_so() -> None:
    got = decode(encode(task(), "", "q"), 1, redelivered=True)
    assert got["properties"]["delivery_info"]["redelivered"] is True


@pytest.mark.parametrize("value", [b'{"celsius": 20}', b"[1, 2]", b'"text"', b'{"properties": 1, "body": 2}'])
def test_json_of_other_programs_is_a_body(value: bytes) -> None:
    got = decode(value, 1, redelivered=False)
    assert got["content-type"] == "application/json"
    assert json.loads(got["body"]) == json.loads(value)


def test_bytes_of_other_programs_are_a_body() -> None:
    got = decode(b"\xff\x00", 1, redelivered=False)
    assert (got["body"], got["content-type"]) == (b"\xff\x00", "application/data")


@pytest.mark.parametrize(
    ("eta", "deliver_at"),
    [
        ("2027-01-15T08:01:00+00:00", NOW + 60),
        ("2027-01-15T09:01:00+01:00", NOW + 60),
        ("2027-01-15T08:00:00.500000+00:00", NOW + 0.5),
        ("2037-01-15T08:00:00Z", 2_115_619_200.0),
        ("2027-01-15T07:59:00+00:00", None),  # due
        ("2027-01-15T08:01:00", None),  # the worker knows its time zone
        ("soon", None),
        (17, None),
        (None, None),
    ],
)
def test_an_eta_is_the_time_of_delivery(eta: object, deliver_at: float | None) -> None:
    assert send_options(task(eta), NOW).deliver_at == deliver_at


@pytest.mark.parametrize(
    ("expiration", "eta", "ttl_s"),
    [
        (None, None, None),
        ("2000", None, 2.0),
        (1500, None, 1.5),
        ("0", None, 0.001),
        ("90000", "2027-01-15T08:01:00+00:00", 30.0),  # counted from the delivery
        ("30000", "2027-01-15T08:01:00+00:00", 0.001),
    ],
)
def test_an_expiration_counts_from_now(expiration: object, eta: str | None, ttl_s: float | None) -> None:
    assert send_options(task(eta, expiration=expiration), NOW).ttl_s == ttl_s


@pytest.mark.parametrize(
    ("given", "kept"), [(None, 0), (0, 0), (9, 9), (31, 31), (255, 31), (-1, 0), ("5", 5), ("x", 0)]
)
def test_a_greater_priority_is_served_first_as_in_amqp(given: object, kept: int) -> None:
    assert send_options(task(priority=given), NOW).priority == kept
