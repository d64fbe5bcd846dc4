"""An edited copy of a message: what is changed, what is kept, and what is refused."""

from __future__ import annotations

import pytest
from support.fake_broker import NOW_MS

from portalmq import wire
from portalmq.broker.storage.batch import Record

HOUR_MS = 3_600_000
PATH = "/v1/topics/t/messages/0-0/copy"


@pytest.fixture
def copied(client, broker):
    """Return the record of the copy that a body makes of a stored one."""

    def copied(record, path=PATH, **changes):
        broker.logs["t"] = [[record]]
        answer = client.post(path, json=changes)
        assert answer.status_code == 200, answer.get_data(as_text=True)
        assert answer.get_json()["topic"] == changes.get("to_topic", "t")
        return broker.last("produce")["records"][0]

    return copied


def test_what_is_left_out_is_kept_and_the_original_is_named(copied):
    record = Record(b"\x00raw", "image/png", b"key", {"trace": "x"}, priority=3)
    copy = copied(record)
    assert (copy.value, copy.content_type, copy.key, copy.priority) == (b"\x00raw", "image/png", b"key", 3)
    assert copy.headers == {"trace": "x", "portalmq-copy-of": "t/0-0"}


def test_value_key_headers_and_topic_are_changed(copied):
    record = Record(b'{"a":1}', wire.JSON, b"key", {"kept": "1", "gone": "2", "new": "old"})
    copy = copied(record, to_topic="u", value={"a": 2}, key="other", headers={"gone": None, "New": "3"}, priority=1)
    assert (copy.value, copy.content_type, copy.key, copy.priority) == (b'{"a": 2}', wire.JSON, b"other", 1)
    assert copy.headers == {"kept": "1", "new": "3", "portalmq-copy-of": "t/0-0"}
    assert copied(record, key=None).key is None
    assert copied(record, key_base64="AP8=").key == b"\x00\xff"


@pytest.mark.parametrize(
    ("kind", "changes", "value", "its_kind"),
    [
        (wire.TEXT, {"value": "new"}, b"new", wire.TEXT),
        (wire.TEXT, {"value": {"a": 1}}, b'{"a": 1}', wire.JSON),
        (wire.JSON, {"value": "new"}, b'"new"', wire.JSON),
        (wire.JSON, {"value": None}, b"null", wire.JSON),
        ("image/png", {"value_base64": "AP8="}, b"\x00\xff", "image/png"),
        (wire.BYTES, {"content_type": "image/png"}, b"old", "image/png"),
        (wire.JSON, {"value": "new", "content_type": "text/html"}, b"new", "text/html"),
    ],
    ids=str,
)
def test_the_type_follows_the_value(copied, kind, changes, value, its_kind):
    copy = copied(Record(b"old", kind), **changes)
    assert (copy.value, copy.content_type) == (value, its_kind)


def test_times_are_kept_where_they_make_sense(copied):
    waiting = Record(b"1", wire.JSON, deliver_at_ms=NOW_MS + HOUR_MS, expires_at_ms=NOW_MS + HOUR_MS + 500)
    assert (copied(waiting).deliver_at_ms, copied(waiting).expires_at_ms) == (NOW_MS + HOUR_MS, NOW_MS + HOUR_MS + 500)
    now = copied(waiting, delay_ms=0)
    assert (now.deliver_at_ms, now.expires_at_ms) == (None, NOW_MS + 500)
    later = copied(waiting, deliver_at_ms=NOW_MS + 9_000, ttl_ms=7)
    assert (later.deliver_at_ms, later.expires_at_ms) == (NOW_MS + 9_000, NOW_MS + 9_007)
    was_due = Record(b"1", wire.JSON, deliver_at_ms=NOW_MS - 5, expires_at_ms=NOW_MS - 1)
    assert copied(was_due).deliver_at_ms is None


def test_an_idempotency_key_counts_with_the_options_as_sent(client, broker):
    broker.logs["t"] = [[Record(b"1", wire.JSON)]]
    client.post(PATH, json={"delay_ms": 5}, headers={"Idempotency-Key": "k"})
    request = broker.last("produce")
    assert (request["idempotency_key"], request["as_sent"]) == ("k", ("copy", 5, None, None, None))


@pytest.mark.parametrize("message_id", ["0-1", "0-9", "7-0"])
def test_a_message_that_is_not_there_is_not_found(client, broker, problem_of, message_id):
    broker.logs["t"] = [[Record(b"1", wire.JSON)]]
    problem_of(client.post(f"/v1/topics/t/messages/{message_id}/copy"), 404, "message_not_found")


@pytest.mark.parametrize(
    "body",
    [{"to_topic": "a b"}, {"value": 1, "value_base64": ""}, {"key": "k", "key_base64": ""}, {"headers": {"a b": "1"}}]
    + [{"delay_ms": 1, "deliver_at_ms": 1}, {"priority": 32}, {"vlaue": 1}, {"key": 1}, {"content_type": "\n"}],
    ids=str,
)
def test_a_wrong_change_is_refused(client, broker, problem_of, body):
    broker.logs["t"] = [[Record(b"1", wire.JSON)]]
    problem_of(client.post(PATH, json=body), 400, "invalid_request")
    assert not broker.calls_made("produce")
    problem_of(client.post("/v1/topics/t/messages/first/copy"), 400, "invalid_request")
