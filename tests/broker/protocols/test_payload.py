"""Unusual messages through each of the older protocols: each is delivered unchanged, or refused."""

from __future__ import annotations

import base64

import pytest
from flask.testing import FlaskClient

WRITTEN = [
    b'"text"',
    b'""',
    b'"a\\u0000b"',
    b'"\\ud83d\\ude00"',
    b"null",
    b"1.10",
    b"12345678901234567890123",
    b'{"a" : [1, 2.50]}',
]


def through_portal(client: FlaskClient, written: bytes) -> bytes:
    assert client.post("/publish", data=b'{"name": "t", "id": "p", "message": %s}' % written).status_code == 200
    return client.post("/read", json={"name": "t", "id": "c"}).data


def through_miniq(client: FlaskClient, written: bytes) -> bytes:
    assert client.post("/message", data=b'{"Message": %s}' % written).status_code == 200
    return client.get("/message").data


def through_wonderq(client: FlaskClient, written: bytes) -> bytes:
    assert client.post("/v1/publish", data=b'{"message": %s}' % written).status_code == 200
    return client.get("/v1/consumer?cid=1&limit=1").data


DOORS = {"Portal MQ": through_portal, "MiniQ": through_miniq, "WonderQ": through_wonderq}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("written", WRITTEN)
def test_a_message_is_delivered_as_written(client: FlaskClient, door: str, written: bytes) -> None:
    expected = written.decode("unicode_escape").encode("utf-16", "surrogatepass").decode("utf-16").encode()
    answer = DOORS[door](client, written)
    # Text may be escaped differently, so compare it as text. Any other value keeps its digits and spaces.
    assert b'"message":%s' % (written if written[:1] != b'"' else expected) in answer.replace(b"\\u0000", b"\x00")


@pytest.mark.parametrize("path", ["/publish", "/v1/publish"])
def test_bytes_are_sent_and_delivered_as_base64(client: FlaskClient, path: str) -> None:
    body = {"name": "default", "id": "p", "message_base64": base64.b64encode(b"\xff\x00").decode()}
    assert client.post(path, json=body).status_code == 200
    shown = client.post("/read", json={"name": "default", "id": "c"}).get_json()
    assert base64.b64decode(shown["message_base64"]) == b"\xff\x00"
    (listed,) = client.get("/v1/consumer?cid=1").get_json()["messages"]
    assert listed["message_base64"] == shown["message_base64"]
    assert client.post(path, json={**body, "message": "too"}).status_code == 400, "two values for one message"
    assert client.post(path, json={"name": "default", "message_base64": "/"}).status_code == 400


@pytest.mark.parametrize("path", ["/publish", "/v1/publish"])
@pytest.mark.parametrize(
    "written", [b"1e999", b'"\xff"', b'{"a": "\xff"}', b'"\\ud800"', b"[" * 5_000 + b"]" * 5_000, b""]
)
def test_malformed_json_is_refused(client: FlaskClient, path: str, written: bytes) -> None:
    refused = client.post(path, data=b'{"name": "default", "message": %s}' % written)
    assert (refused.status_code, refused.get_json()["code"]) == (400, "invalid_request")
    assert client.post("/topic/exists", json={"name": "default"}).status_code == 404, "nothing was appended"


@pytest.mark.parametrize("body", [b'{"Message": 1e999}', b"[" * 5_000, b'"', b""])
def test_miniq_takes_any_other_body_as_the_message(client: FlaskClient, body: bytes) -> None:
    assert client.post("/message", data=body).status_code == 200
    assert client.get("/message").get_json()["message"] == body.decode()


@pytest.mark.parametrize("door", DOORS)
def test_a_message_of_a_mebibyte_passes_and_one_more_byte_does_not(client: FlaskClient, door: str) -> None:
    text = "x" * (1 << 20)
    assert text.encode() in DOORS[door](client, b'"%s"' % text.encode())
    path, body = {
        "Portal MQ": ("/publish", {"name": "t", "message": text + "x"}),
        "MiniQ": ("/message", {"Message": text + "x"}),
        "WonderQ": ("/v1/publish", {"message": text + "x"}),
    }[door]
    refused = client.post(path, json=body)
    assert (refused.status_code, refused.get_json()["code"]) == (413, "message_too_large")
