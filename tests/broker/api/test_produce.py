"""Every format of a produce request: stored records, answers, and refusals that store nothing."""

from __future__ import annotations

import base64
import json

import msgspec
import pytest
from support.fake_broker import NOW_MS

from portalmq import wire
from portalmq.broker.storage.batch import Record
from portalmq.errors import Backpressure, MessageTooLarge, RequestInProgress

URL = "/v1/topics/t/messages"
YEAR_MS = 366 * wire.DAY_MS
BYTES = "application/octet-stream"


def post_json(client, batch, url=URL, **options):
    return client.post(url, data=json.dumps(batch), content_type=wire.BATCH_JSON, **options)


def post_pack(client, batch, url=URL, **options):
    return client.post(url, data=msgspec.msgpack.encode(batch), content_type=wire.BATCH_MSGPACK, **options)


def stored(broker, topic="t", partition=0):
    return broker.logs[topic][partition]


# --- one message as the body ---


def test_any_body_is_one_message_with_its_content_type(client, broker):
    answer = client.post(URL, data=b"hello", content_type="text/plain")
    assert answer.status_code == 200
    assert answer.get_json() == {
        "id": "0-0",
        "topic": "t",
        "partition": 0,
        "offset": 0,
        "timestamp_ms": 1_700_000_000_000,
    }
    assert stored(broker) == [Record(b"hello", "text/plain")]


def test_an_empty_body_is_an_empty_message_and_no_type_means_bytes(client, broker):
    assert client.post(URL).status_code == 200
    assert stored(broker) == [Record(b"", BYTES)]


def test_a_body_sent_with_curl_d_is_stored_unchanged(client, broker):
    client.post(URL, data=b"a=1&b=2", content_type="application/x-www-form-urlencoded")
    assert stored(broker) == [Record(b"a=1&b=2", "application/x-www-form-urlencoded")]


def test_headers_of_the_request_become_headers_of_the_message_in_lower_case(client, broker):
    headers = {
        "PortalMQ-Header-Trace-Id": "Abc",
        "ce-id": "1",
        "CE-Source": "/sensor",
        "traceparent": "00-aa-bb-01",
        "tracestate": "x=1",
        "X-Other": "not kept",
    }
    client.post(URL, data=b"x", headers=headers)
    assert stored(broker)[0].headers == {
        "trace-id": "Abc",
        "ce-id": "1",
        "ce-source": "/sensor",
        "traceparent": "00-aa-bb-01",
        "tracestate": "x=1",
    }


def test_key_and_headers_are_utf_8(client, broker):
    as_wsgi_gives_it = "Zürich ❄".encode().decode("latin-1")
    client.post(URL, data=b"x", headers={"PortalMQ-Key": as_wsgi_gives_it, "PortalMQ-Header-City": as_wsgi_gives_it})
    assert stored(broker)[0].key == "Zürich ❄".encode()
    assert stored(broker)[0].headers == {"city": "Zürich ❄"}


def test_a_key_that_is_not_utf_8_is_refused(client, broker, problem_of):
    problem_of(client.post(URL, data=b"x", headers={"PortalMQ-Key": "caf\xe9"}), 400, "invalid_request")
    assert broker.logs == {}


def test_a_json_body_must_be_json(client, broker, problem_of):
    assert client.post(URL, data=b' {"a": 1}', content_type="application/json").status_code == 200
    assert stored(broker)[0].value == b' {"a": 1}'
    for body in (b"{", b'"\xff"', b"[" * 90_000):
        problem_of(client.post(URL, data=body, content_type="application/cloudevents+json"), 400, "invalid_request")
    assert len(stored(broker)) == 1


@pytest.mark.parametrize(("sent", "meant"), [("abc-1", "abc-1"), ('"abc-1"', "abc-1"), (r'"a\"b"', 'a"b')])
def test_an_idempotency_key_is_accepted_bare_and_quoted(client, broker, sent, meant):
    assert client.post(URL, data=b"x", headers={"Idempotency-Key": sent}).status_code == 200
    assert broker.last("produce")["idempotency_key"] == meant


@pytest.mark.parametrize("sent", ["", '"', '""', '"open', "x" * 256])
def test_a_malformed_idempotency_key_is_refused(client, problem_of, sent):
    problem_of(client.post(URL, data=b"x", headers={"Idempotency-Key": sent}), 400, "invalid_request")


def test_a_repeat_during_the_first_request_must_be_sent_again_later(client, broker, problem_of):
    broker.refuse = RequestInProgress("the first request is still being appended", retry_after_s=0.2)
    answer = client.post(URL, data=b"x", headers={"Idempotency-Key": "k"})
    assert problem_of(answer, 409, "request_in_progress")["retryable"] is True
    assert answer.headers["Retry-After"] == "1"


def test_an_idempotency_key_on_a_batch_is_refused(client, problem_of):
    answer = post_json(client, {"messages": [{"value": 1}]}, headers={"Idempotency-Key": "k"})
    assert "producer" in problem_of(answer, 400, "invalid_request")["detail"]


@pytest.mark.parametrize("post", [post_json, post_pack])
def test_each_message_of_a_batch_may_have_a_key_of_its_own(client, broker, post):
    messages = [
        {"value": "a", "idempotency_key": "one"},
        {"value": "b"},
        {"value": "c", "idempotency_key": "three", "delay_ms": 5, "priority": 2},
    ]
    url = f"{URL}?partition=0"
    assert post(client, {"messages": messages}, url, headers={"Prefer": "return=minimal"}).status_code == 200
    assert broker.last("produce")["keys"] == [("one", ()), None, ("three", (5, None, None, 2))]
    post(client, {"messages": [{"value": "a"}]})
    assert broker.last("produce")["keys"] is None


def test_a_messagepack_batch_takes_keys(client, broker):
    post_pack(client, {"messages": [{"value": b"a", "idempotency_key": "job/1"}, {"value": b"b"}]})
    assert broker.last("produce")["keys"] == [("job/1", ()), None]
    assert stored(broker) == [Record(b"a", BYTES), Record(b"b", BYTES)]


@pytest.mark.parametrize("key", ["", "x" * 256, "caf\u00e9", "a\nb", "a\n"])
@pytest.mark.parametrize("value", ["text", b"bytes"])
def test_a_malformed_key_of_a_message_is_refused_and_names_it(client, problem_of, key, value):
    batch = {"messages": [{"value": value}, {"value": value, "idempotency_key": key}]}
    problem = problem_of(post_pack(client, batch), 400, "invalid_request")
    assert "idempotency_key of message 1 must be 1 to 255 printable ASCII characters" in problem["detail"]


@pytest.mark.parametrize(
    "name",
    [
        "PortalMQ-Key",
        "PortalMQ-Delay-Ms",
        "PortalMQ-Deliver-At",
        "PortalMQ-Ttl-Ms",
        "PortalMQ-Priority",
        "PortalMQ-Header-A",
    ],
)
@pytest.mark.parametrize(
    ("content_type", "body"), [(wire.NDJSON, b"1\n2\n"), (wire.BATCH_JSON, b'{"messages":[{"value":1}]}')]
)
def test_a_batch_with_message_options_in_headers_is_refused(client, broker, problem_of, name, content_type, body):
    answer = client.post(URL, data=body, content_type=content_type, headers={name: "7"})
    assert name.lower() in problem_of(answer, 400, "invalid_request")["detail"]
    assert client.post(URL, data=body, content_type=content_type, headers={"traceparent": "00-1"}).status_code == 200


@pytest.mark.parametrize(
    "option",
    ["key", "key_base64", "headers", "partition", "delay_ms", "deliver_at_ms", "ttl_ms", "priority", "content_type"],
)
def test_an_option_that_is_null_counts_as_absent(client, broker, option):
    assert post_json(client, {"messages": [{"value": 1, option: None}]}).status_code == 200
    (record,) = stored(broker)
    assert (record.key, record.deliver_at_ms, record.expires_at_ms, record.priority) == (None, None, None, 0)


def test_acks_none_answers_202_without_an_offset(client):
    answer = client.post(f"{URL}?acks=none", data=b"x")
    assert (answer.status_code, "offset" in answer.get_json()) == (202, False)


def test_a_single_message_that_is_refused_is_a_problem(client, broker, problem_of):
    broker.refuse_records[0] = MessageTooLarge("the message has 9 bytes, the limit is 8")
    problem_of(client.post(URL, data=b"123456789"), 413, "message_too_large")


# --- JSON batches ---


def test_a_json_batch_keeps_each_value_as_the_json_text_that_was_sent(client, broker):
    body = b'{"messages":[{"value": {"b": 1.50, "a": [1, 2]}},{"value":null},{"value":"text"},{"value_base64":"AP8="}]}'
    answer = client.post(URL, data=body, content_type=wire.BATCH_JSON)
    assert answer.get_json() == {
        "results": [{"partition": 0, "offset": n, "timestamp_ms": 1_700_000_000_000} for n in range(4)]
    }
    assert stored(broker) == [
        Record(b'{"b": 1.50, "a": [1, 2]}', "application/json"),
        Record(b"null", "application/json"),
        Record(b'"text"', "application/json"),
        Record(b"\x00\xff", BYTES),
    ]


def test_text_in_a_json_batch_is_text_when_its_content_type_says_so(client, broker):
    message = {"value": 'say "hi"\n', "content_type": "text/plain; charset=utf-8"}
    post_json(client, {"messages": [message]})
    assert stored(broker) == [Record(b'say "hi"\n', "text/plain; charset=utf-8")]


def test_keys_headers_and_partitions_of_a_json_batch(client, broker):
    broker.logs["t"] = [[], [], []]
    batch = {
        "messages": [
            {"value": 1, "key": "k", "headers": {"A-B": "c"}, "partition": 2},
            {"value": 2, "key_base64": "/w=="},
        ]
    }
    assert post_json(client, batch).status_code == 200
    assert stored(broker, partition=2) == [Record(b"1", "application/json", b"k", {"a-b": "c"})]
    assert stored(broker) == [Record(b"2", "application/json", b"\xff")]
    assert broker.last("produce")["partitions"] == [2, None]


WRONG_JSON_MESSAGES = [
    {},
    {"value": 1, "value_base64": "AA=="},
    {"value_base64": "not base64!"},
    {"value": 1, "key": "a", "key_base64": "AA=="},
    {"value": 1, "key": 5},
    {"value": 1, "key": "k" * 5000},
    {"value": 1, "headers": {"a": 1}},
    {"value": 1, "headers": {"a": "1", "A": "2"}},
    {"value": 1, "headers": {"": "x"}},
    {"value": 1, "headers": {"bad\nname": "x"}},
    {"value": 1, "headers": {"a: b\r\nc": "x"}},
    {"value": 1, "headers": {"a b": "x"}},
    {"value": 1, "headers": {"a": "x\r\nb: y"}},
    {"value": 1, "headers": {"a": "\x00"}},
    {"value": 1, "headers": {f"h{n}": "x" for n in range(65)}},
    {"value": 1, "headers": {"h": "x" * 9000}},
    {"value": 1, "partition": -1},
    {"value": 1, "partition": "0"},
    {"value": 1, "partition": 2**63},
    {"value": 1, "delay_ms": -5},
    {"value": 1, "delay_ms": "5"},
    {"value": 1, "delay_ms": 1.5},
    {"value": 1, "delay_ms": 11 * YEAR_MS},
    {"value": 1, "deliver_at_ms": -1},
    {"value": 1, "deliver_at_ms": "2030-01-01T00:00:00Z"},
    {"value": 1, "deliver_at_ms": NOW_MS + 11 * YEAR_MS},
    {"value": 1, "deliver_at_ms": 5, "delay_ms": 5},
    {"value": 1, "deliver_at_ms": 5, "delay_ms": 0},
    {"value": 1, "ttl_ms": 0},
    {"value": 1, "ttl_ms": -5},
    {"value": 1, "ttl_ms": 2**53},
    {"value": 1, "priority": "high"},
    {"value": 1, "priority": True},
    {"value": 1, "priority": 1.5},
    {"value": 1, "priority": 32},
    {"value": 1, "priority": -1},
    {"value": 1, "content_type": ""},
    {"value": 1, "content_type": "text/plain\r\na: b"},
    {"value": 1, "content_type": "x" * 300},
    {"value": 1, "valeu": 2},
]


@pytest.mark.parametrize("wrong", WRONG_JSON_MESSAGES, ids=lambda wrong: str(wrong)[:40])
def test_a_batch_with_one_wrong_message_is_refused_whole_and_the_message_is_named(client, broker, problem_of, wrong):
    detail = problem_of(post_json(client, {"messages": [{"value": 0}, wrong]}), 400, "invalid_request")["detail"]
    assert "message 1" in detail or "messages[" in detail
    assert broker.logs == {}


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"messages":5}',
        b'{"messages":[5]}',
        b'{"messages":[{"value":}]}',
        b'{"messages":[{"value":"\xff"}]}',
    ]
    + [b'{"massages":[]}', b"{}", b"", b'{"messages":[{"value":' + b"[" * 50_000],
)
def test_broken_json_is_refused(client, broker, problem_of, body):
    problem_of(client.post(URL, data=body, content_type=wire.BATCH_JSON), 400, "invalid_request")
    assert broker.logs == {}


def test_an_empty_batch_has_no_results(client, broker):
    assert post_json(client, {"messages": []}).get_json() == {"results": []}
    assert broker.logs == {}


def test_too_many_messages_are_too_large(client, broker, problem_of):
    message = b'{"value":1}'
    body = b'{"messages":[' + b",".join([message] * 10_001) + b"]}"
    assert len(body) > 100_000  # its size alone would refuse it, so use NDJSON, which is denser
    answer = client.post(URL, data=b"1\n" * 10_001, content_type=wire.NDJSON)
    problem_of(answer, 413, "message_too_large")
    assert broker.logs == {}


def test_results_carry_the_error_of_a_single_message(client, broker):
    broker.refuse_records[1] = Backpressure("too much", retry_after_s=1)
    results = post_json(client, {"messages": [{"value": 1}, {"value": 2}]}).get_json()["results"]
    assert results[0]["offset"] == 0
    assert results[1]["error"]["code"] == "backpressure"
    assert results[1]["error"]["outcome"] == "not_applied"


def test_a_producers_stamp_reaches_the_domain(client, broker):
    post_json(client, {"messages": [{"value": 1}], "producer": {"id": 3, "epoch": 1, "sequence": 9}})
    assert broker.last("produce")["producer"] == wire.ProducerStamp(3, 1, 9)


# --- MessagePack ---


def test_a_messagepack_batch_of_bytes_is_stored_as_sent(client, broker):
    messages = [
        {"value": b"\x00\x01", "content_type": "image/png", "key": b"k"},
        {"value": b"", "content_type": BYTES, "headers": {"A": "1"}},
    ]
    assert post_pack(client, {"messages": messages}).status_code == 200
    assert stored(broker) == [Record(b"\x00\x01", "image/png", b"k"), Record(b"", BYTES, None, {"a": "1"})]


def test_values_that_are_not_bytes_are_stored_as_json(client, broker):
    messages = [
        {"value": {"a": [1, None]}},
        {"value": "text"},
        {"value": "text", "content_type": "text/plain"},
        {"value": None},
        {"value": b"raw"},
        {"value_base64": "AA==", "key": "text key", "partition": 0},
        {"value": 1, "key_base64": "/w=="},
    ]
    assert post_pack(client, {"messages": messages}).status_code == 200
    assert stored(broker) == [
        Record(b'{"a":[1,null]}', "application/json"),
        Record(b'"text"', "application/json"),
        Record(b"text", "text/plain"),
        Record(b"null", "application/json"),
        Record(b"raw", BYTES),
        Record(b"\x00", BYTES, b"text key"),
        Record(b"1", "application/json", b"\xff"),
    ]


def test_both_decoders_of_a_messagepack_batch_store_the_same(client, broker):
    messages = [{"value": b"x", "content_type": BYTES, "key": b"k", "headers": {"H": "v"}}]
    post_pack(client, {"messages": messages})
    post_pack(client, {"messages": [{**messages[0], "priority": 0}]})
    assert stored(broker)[0] == stored(broker)[1]


@pytest.mark.parametrize(
    "wrong", [*WRONG_JSON_MESSAGES[:2], *WRONG_JSON_MESSAGES[3:]], ids=lambda wrong: str(wrong)[:40]
)
def test_a_messagepack_batch_is_checked_as_a_json_batch_is(client, broker, problem_of, wrong):
    messages = [{"value": b"x", "content_type": BYTES}, wrong]
    problem_of(post_pack(client, {"messages": messages}), 400, "invalid_request")
    assert broker.logs == {}


@pytest.mark.parametrize(
    "wrong",
    [
        {"headers": {"bad\nname": "x"}},
        {"headers": {"a": "x\r\nb: y"}},
        {"content_type": "text/plain\r\na: b"},
    ],
)
def test_a_batch_of_bytes_is_checked_for_line_breaks_too(client, broker, problem_of, wrong):
    problem_of(post_pack(client, {"messages": [{"value": b"x"}, {"value": b"x", **wrong}]}), 400, "invalid_request")
    assert broker.logs == {}


def test_header_values_may_be_empty_and_of_any_language(client, broker):
    headers = {"city": "Zürich ❄", "empty": "", "tab": "a\tb", "größe": "5"}
    assert post_json(client, {"messages": [{"value": 1, "headers": headers}]}).status_code == 200
    assert stored(broker)[0].headers == headers


@pytest.mark.parametrize("field", ["id", "epoch", "sequence"])
@pytest.mark.parametrize("number", [2**53, 2**63, 2**64 - 1, -1])
@pytest.mark.parametrize("post", [post_json, post_pack])
def test_a_producers_numbers_are_whole_numbers_that_every_reader_keeps(client, broker, problem_of, post, field, number):
    stamp = {"id": 1, "epoch": 0, "sequence": 0, field: number}
    problem_of(post(client, {"messages": [{"value": 1}], "producer": stamp}), 400, "invalid_request")
    assert broker.logs == {}


@pytest.mark.parametrize(
    "body", [b"", b"\xc1", b"\x80", b"\x81\xa8messages\x01", b"\x81\xa8messages\xdd\xff\xff\xff\xff", b"\x91" * 50_000]
)
def test_broken_messagepack_is_refused(client, broker, problem_of, body):
    problem_of(client.post(URL, data=body, content_type=wire.BATCH_MSGPACK), 400, "invalid_request")
    assert broker.logs == {}


def test_a_value_that_json_cannot_express_is_refused(client, problem_of):
    batch = {"messages": [{"value": msgspec.msgpack.Ext(5, b"x")}]}
    problem_of(post_pack(client, batch), 400, "invalid_request")


def test_results_come_as_messagepack_when_asked_for(client):
    answer = post_pack(client, {"messages": [{"value": b"x"}]}, headers={"Accept": wire.BATCH_MSGPACK})
    assert answer.content_type == wire.BATCH_MSGPACK
    assert msgspec.msgpack.decode(answer.data) == {
        "results": [{"partition": 0, "offset": 0, "timestamp_ms": 1_700_000_000_000}]
    }


def test_a_short_answer_is_given_when_preferred_and_the_partition_is_named(client, broker):
    answer = post_pack(
        client, {"messages": [{"value": b"x"}] * 3}, url=f"{URL}?partition=0", headers={"Prefer": "return=minimal"}
    )
    assert answer.get_json() == {"partition": 0, "base_offset": 0, "count": 3, "timestamp_ms": 1_700_000_000_000}
    assert answer.headers["Preference-Applied"] == "return=minimal"
    assert broker.made[-1][0] == "produce_range"


def test_without_a_partition_the_preference_is_ignored(client):
    answer = post_pack(client, {"messages": [{"value": b"x"}] * 2}, headers={"Prefer": "return=minimal"})
    assert len(answer.get_json()["results"]) == 2
    assert "Preference-Applied" not in answer.headers


# --- NDJSON ---


def test_each_line_of_ndjson_is_one_value(client, broker):
    answer = client.post(URL, data=b'{"a":1}\n\n 5 \r\n"x"', content_type="application/x-ndjson; charset=utf-8")
    assert len(answer.get_json()["results"]) == 3
    assert [record.value for record in stored(broker)] == [b'{"a":1}', b"5", b'"x"']
    assert {record.content_type for record in stored(broker)} == {"application/json"}


def test_a_line_that_is_not_json_is_named(client, broker, problem_of):
    answer = client.post(URL, data=b"1\n2\n{oops\n", content_type=wire.NDJSON)
    assert "line 3" in problem_of(answer, 400, "invalid_request")["detail"]
    assert broker.logs == {}


# --- the query ---


@pytest.mark.parametrize(
    "query",
    ["partition=-1", "partition=x", "partition=", "partition=1.5", "acks=some", "ack=none", "partition=0&partition=1"],
)
def test_wrong_query_parameters_are_refused(client, broker, problem_of, query):
    problem_of(client.post(f"{URL}?{query}", data=b"x"), 400, "invalid_request")
    assert broker.logs == {}


def test_an_unknown_partition_is_not_found(client, problem_of):
    problem_of(client.post(f"{URL}?partition=5", data=b"x"), 404, "partition_not_found")


def test_a_message_must_not_contradict_the_query(client, broker, problem_of):
    broker.logs["t"] = [[], []]
    batch = {"messages": [{"value": 1, "partition": 0}]}
    problem_of(post_json(client, batch, url=f"{URL}?partition=1"), 400, "invalid_request")
    assert post_json(client, batch, url=f"{URL}?partition=0").status_code == 200


@pytest.mark.parametrize("name", ["a b", "ä", "x" * 191, "..", ".", "a:b"])
def test_a_name_outside_the_pattern_is_refused(client, broker, problem_of, name):
    problem_of(client.post(f"/v1/topics/{name}/messages", data=b"x"), 400, "invalid_request")
    assert broker.logs == {}


def test_a_new_producer_gets_an_identity(client, broker, problem_of):
    assert client.post("/v1/producers", data=b'{"name":"p"}').get_json() == {"id": 5, "epoch": 2}
    assert client.post("/v1/producers").get_json() == {"id": 5, "epoch": 2}
    assert broker.last("new_producer") == {"name": None, "instance": "", "renews": False}
    problem_of(client.post("/v1/producers", data=b'{"name":"a b"}'), 400, "invalid_request")


def test_a_named_producer_names_its_instance(client, broker):
    client.post("/v1/producers", json={"name": "p", "instance": "i", "renews": True})
    assert broker.last("new_producer") == {"name": "p", "instance": "i", "renews": True}


@pytest.mark.parametrize(
    "asked",
    [
        {"instance": "i"},
        {"renews": True},
        {"name": "p", "instance": "i" * 101},
        {"name": "p", "instance": 5},
        {"name": "p", "renews": "yes"},
        {"name": "p", "epoch": 5},
        {"name": ""},
        [],
    ],
)
def test_an_invalid_request_for_an_identity_is_refused(client, broker, problem_of, asked):
    problem_of(client.post("/v1/producers", json=asked), 400, "invalid_request")
    assert not broker.calls_made("new_producer")


def test_base64_of_a_value_is_decoded_strictly(client, problem_of):
    urlsafe = base64.urlsafe_b64encode(b"\xff\xfe\xfd").decode()
    problem_of(post_json(client, {"messages": [{"value_base64": urlsafe}]}), 400, "invalid_request")
