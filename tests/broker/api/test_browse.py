"""Reading messages as JSON, NDJSON, MessagePack and server-sent events."""

from __future__ import annotations

import json

import msgspec
import pytest

from portalmq import wire
from portalmq.broker.api.app import create_app
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.broker.storage.batch import Record
from portalmq.errors import Unavailable

URL = "/v1/topics/t/partitions/0/messages"


@pytest.fixture
def log(broker):
    broker.logs["t"] = [[]]
    return broker.logs["t"][0]


def shown(client, log, record):
    log[:] = [record]
    return client.get(URL).get_json()["messages"][0]


def test_a_page_has_the_offset_of_the_next(client, log):
    log += [Record(str(n).encode(), "text/plain") for n in range(5)]
    page = client.get(f"{URL}?offset=1&limit=2").get_json()
    assert [message["value"] for message in page["messages"]] == ["1", "2"]
    assert (page["next_offset"], page["log_start_offset"], page["high_watermark"]) == (3, 0, 5)


def test_a_message_is_shown_with_all_its_parts(client, log):
    record = Record(b'{"a": 1}', "application/json", b"k", {"h": "v"})
    assert shown(client, log, record) == {
        "id": "0-0",
        "topic": "t",
        "partition": 0,
        "offset": 0,
        "key": "k",
        "value": {"a": 1},
        "content_type": "application/json",
        "headers": {"h": "v"},
        "timestamp_ms": 1_700_000_000_000,
    }


@pytest.mark.parametrize(
    ("record", "members"),
    [
        (Record(b"text", "application/octet-stream"), {"value": "text", "key": None}),
        (Record("é\n".encode(), "text/plain"), {"value": "é\n"}),
        (Record(b"\xff\x00"), {"value_base64": "/wA="}),
        (Record(b"", "application/octet-stream"), {"value": ""}),
        (Record(b"", "application/json"), {"value": ""}),
        (Record(b"{oops", "application/json"), {"value": "{oops"}),
        (Record(b'"\xff"', "application/json"), {"value_base64": "Iv8i"}),
        (Record(b'[1,\n 2.50,\r\n "a\\nb"]', "application/cloudevents+json"), {"value": [1, 2.5, "a\nb"]}),
        (Record(b"null", "application/json; charset=utf-8"), {"value": None}),
        (Record(b"x", key=b"\xff"), {"key": None, "key_base64": "/w=="}),
    ],
)
def test_a_value_is_json_text_or_base64(client, log, record, members):
    message = shown(client, log, record)
    assert {name: message[name] for name in members} == members
    assert not {"value", "value_base64"} <= message.keys()


def test_numbers_in_json_are_delivered_unchanged(client, log):
    log.append(Record(b"12345678901234567890.10", "application/json"))
    assert b'"value":12345678901234567890.10' in client.get(URL).data


def test_ndjson_is_one_line_a_message_even_if_its_json_has_several(client, log):
    log += [Record(b'{\n"a":\n1}', "application/json"), Record(b"two\nlines", "text/plain")]
    answer = client.get(URL, headers={"Accept": wire.NDJSON})
    lines = answer.data.splitlines()
    assert answer.content_type == wire.NDJSON
    assert [json.loads(line)["value"] for line in lines] == [{"a": 1}, "two\nlines"]
    assert (answer.headers["PortalMQ-Next-Offset"], answer.headers["PortalMQ-High-Watermark"]) == ("2", "2")


def test_messagepack_delivers_the_bytes_as_sent(client, log):
    log.append(Record(b"\x00", "image/png", b"\xff", {"h": "v"}))
    answer = client.get(URL, headers={"Accept": wire.BATCH_MSGPACK})
    page = msgspec.msgpack.decode(answer.data, type=wire.PackBrowsePage)
    message = page.messages[0]
    assert (message.value, message.key, message.content_type, message.headers) == (
        b"\x00",
        b"\xff",
        "image/png",
        {"h": "v"},
    )
    assert (page.next_offset, page.high_watermark) == (1, 1)


def test_start_positions_reach_the_domain(client, broker, log):
    for query, offset, position, at_ms in [
        ("", None, None, None),
        ("?offset=earliest", None, "earliest", None),
        ("?offset=latest", None, "latest", None),
        ("?offset=0", 0, None, None),
        ("?at=1970-01-01T00:00:01.500Z", None, None, 1500),
        ("?at=1970-01-01T01:00:00%2B01:00", None, None, 0),
        ("?at=1970-01-01T01:00:00+01:00", None, None, 0),
        ("?at=1970-01-01t00:00:00z", None, None, 0),
    ]:
        assert client.get(URL + query).status_code == 200
        call = broker.last("browse")
        assert (call["offset"], call["position"], call["at_ms"]) == (offset, position, at_ms)


def test_a_limit_above_the_maximum_is_lowered_to_it(client, broker, log):
    client.get(f"{URL}?limit=5000&wait_ms=60000")
    assert (broker.last("browse")["limit"], broker.last("browse")["wait_ms"]) == (1000, 60_000)


@pytest.mark.parametrize(
    "query",
    ["offset=-1", "offset=x", "offset=99999999999999999999", "limit=0", "limit=-5", "limit=a", "wait_ms=-1"]
    + ["wait_ms=60001", "at=yesterday", "at=2026-01-01T00:00:00", "offset=1&at=2026-01-01T00:00:00Z", "offest=1"],
)
def test_wrong_parameters_are_refused(client, broker, log, problem_of, query):
    problem_of(client.get(f"{URL}?{query}"), 400, "invalid_request")
    assert broker.made == []


def test_unknown_topics_and_partitions_are_not_found(client, log, problem_of):
    problem_of(client.get("/v1/topics/none/partitions/0/messages"), 404, "topic_not_found")
    problem_of(client.get("/v1/topics/t/partitions/1/messages"), 404, "partition_not_found")
    problem_of(client.get("/v1/topics/t/partitions/x/messages"), 400, "invalid_request")
    problem_of(client.get("/v1/topics/t/partitions/-1/messages"), 400, "invalid_request")
    problem_of(client.get(f"{URL}?offset=5"), 416, "offset_out_of_range")


def events(answer, count):
    """Read the first events of a stream and close it."""
    text = b""
    for chunk in answer.response:
        text += chunk
        if text.count(b"\n\n") >= count:
            break
    answer.close()
    return [event for event in text.decode().split("\n\n") if event]


def test_the_tail_is_a_stream_of_events_with_offsets_as_ids(client, log):
    log += [Record(b"1", "application/json"), Record(b"two\n", "text/plain")]
    answer = client.get(URL, headers={"Accept": "text/event-stream"})
    assert answer.content_type.startswith("text/event-stream")
    assert answer.headers["Cache-Control"] == "no-store"
    retry, first, second, waiting = events(answer, 4)[:4]
    assert retry == "retry: 1000"
    assert first.startswith("id: 0\ndata: {")
    assert json.loads(second.partition("\ndata: ")[2])["value"] == "two\n"
    assert waiting.startswith(":")


def test_a_tail_resumes_behind_the_last_event(client, broker, log):
    log += [Record(b"%d" % n, "application/json") for n in range(3)]
    answer = client.get(f"{URL}?offset=earliest", headers={"Accept": "text/event-stream", "Last-Event-ID": "1"})
    assert events(answer, 2)[1].startswith("id: 2\n")


def test_a_tail_ends_when_the_broker_drains(client, broker, log):
    answer = client.get(URL, headers={"Accept": "text/event-stream"})
    stream = iter(answer.response)
    assert next(stream).startswith(b"retry")
    broker.ready = False
    assert list(stream) == []


def test_a_tail_that_is_cut_by_the_broker_ends_without_an_error(client, broker, log):
    answer = client.get(URL, headers={"Accept": "text/event-stream"})
    stream = iter(answer.response)
    next(stream)
    broker.refuse = Unavailable("draining")
    assert all(chunk.startswith(b":") for chunk in stream)


def test_a_tail_of_an_unknown_topic_is_a_problem(client, problem_of):
    answer = client.get("/v1/topics/none/partitions/0/messages", headers={"Accept": "text/event-stream"})
    problem_of(answer, 404, "topic_not_found")


def test_a_head_of_a_tail_has_no_body(client, log):
    answer = client.head(URL, headers={"Accept": "text/event-stream"})
    assert (answer.status_code, answer.data) == (200, b"")


def test_a_whole_topic_is_read_as_a_page_or_as_lines(client, broker):
    broker.logs["t"] = [[Record(b"1", "application/json")], [Record(b"2", "application/json")]]
    page = client.get("/v1/topics/t/messages").get_json()
    assert ([message["id"] for message in page["messages"]], page["more"]) == (["0-0", "1-0"], False)
    assert client.get("/v1/topics/t/messages?limit=1").get_json()["more"] is True
    lines = client.get("/v1/topics/t/messages", headers={"Accept": wire.NDJSON}).data.splitlines()
    assert [json.loads(line)["value"] for line in lines] == [1, 2]


def test_reading_an_unknown_topic_is_a_problem_in_every_form(client, problem_of):
    for accept in ("*/*", wire.NDJSON):
        problem_of(client.get("/v1/topics/none/messages", headers={"Accept": accept}), 404, "topic_not_found")


def test_a_head_of_an_unknown_topic_is_not_found_in_every_form(client):
    for accept in ("*/*", wire.NDJSON):
        assert client.head("/v1/topics/none/messages", headers={"Accept": accept}).status_code == 404


def test_a_tail_beyond_the_limit_of_waiting_calls_is_refused(broker, metrics, problem_of):
    broker.logs["t"] = [[]]
    client = create_app(broker, BrokerConfig(parked_receives_max=1), metrics, Auth()).test_client()
    first = client.get(URL, headers={"Accept": "text/event-stream"})
    problem_of(client.get(URL, headers={"Accept": "text/event-stream"}), 429, "backpressure")
    first.close()
    assert client.get(URL, headers={"Accept": "text/event-stream"}).status_code == 200, "its place is free again"


def test_waiting_calls_are_bounded(broker, metrics, problem_of):
    broker.logs["t"] = [[]]
    client = create_app(broker, BrokerConfig(parked_receives_max=1), metrics, Auth()).test_client()
    answer = client.get(URL, headers={"Accept": "text/event-stream"})
    stream = iter(answer.response)
    next(stream)
    assert metrics.waiting() == 1
    refused = client.get(f"{URL}?wait_ms=1")
    problem_of(refused, 429, "backpressure")
    assert refused.headers["Retry-After"] == "1"
    assert client.get(f"{URL}?wait_ms=0").status_code == 200
    answer.close()
    stream.close()
    assert client.get(f"{URL}?wait_ms=1").status_code == 200
