"""Request bodies are counted while they stream. A body that is too large, cut short, compressed or broken changes
nothing."""

from __future__ import annotations

import io

import gevent
import pytest

from portalmq.broker.api.app import create_app
from portalmq.broker.api.body import BodiesInFlight, FramingError, leaves_bytes_unread, read_body
from portalmq.broker.api.http_request import REQUEST, HttpRequest
from portalmq.broker.server.auth import Auth
from portalmq.broker.server.config import BrokerConfig
from portalmq.errors import Backpressure, InvalidRequest, MessageTooLarge, UnsupportedMediaType


class Stream(io.BytesIO):
    """A request body that may fail after its last byte."""

    fault: Exception | None = None

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        if self.fault is not None:
            raise self.fault
        return data


def posted(body: bytes, length: int | None = None, path: str = "/", **headers: str) -> HttpRequest:
    """A request whose body is on its way."""
    return HttpRequest("POST", path, "", headers, length, length is None, source=Stream(body))


def test_a_body_of_known_length_is_read_whole():
    assert read_body(posted(b"12345", 5), 5) == b"12345"


def test_a_timer_watches_a_body_that_has_not_arrived(monkeypatch):
    def started(seconds, _exception):
        raise LookupError(seconds)

    monkeypatch.setattr(gevent, "Timeout", started)
    assert read_body(HttpRequest("POST", "/", "", {}, 5, received=b"12345"), 50) == b"12345"
    for length in (5, None):
        with pytest.raises(LookupError):
            read_body(posted(b"12345", length), 50)


def test_a_chunked_body_is_counted():
    assert read_body(posted(b"12345"), 5) == b"12345"
    with pytest.raises(MessageTooLarge):
        read_body(posted(b"123456"), 5)


def test_a_body_that_announces_too_much_is_not_read_at_all():
    request = posted(b"123456", 6)
    with pytest.raises(MessageTooLarge):
        read_body(request, 5)
    assert request.source.tell() == 0
    assert leaves_bytes_unread(request)


def test_a_body_that_is_cut_short_is_refused():
    request = posted(b"123", 5)
    with pytest.raises(InvalidRequest, match="3 of 5"):
        read_body(request, 5)
    assert leaves_bytes_unread(request)


@pytest.mark.parametrize("fault", [FramingError("a size"), ConnectionResetError(), TimeoutError()])
def test_a_body_whose_framing_breaks_is_refused(fault):
    request = posted(b"123")
    request.source.fault = fault
    with pytest.raises(InvalidRequest, match="nothing was applied"):
        read_body(request, 5)


def test_a_fault_of_the_broker_is_not_reported_as_a_client_error():
    request = posted(b"123")
    request.source.fault = KeyError("ours")
    with pytest.raises(KeyError):
        read_body(request, 5)


@pytest.mark.parametrize("encoding", ["gzip", "br", "identity, gzip", "zstd"])
def test_a_compressed_body_is_not_supported(encoding):
    with pytest.raises(UnsupportedMediaType):
        read_body(posted(b"x", 1, **{"content-encoding": encoding}), 5)
    assert read_body(posted(b"x", 1, **{"content-encoding": "identity"}), 5) == b"x"


def test_a_request_without_length_or_chunks_has_no_body():
    assert read_body(HttpRequest("GET", "/", "", {}, source=Stream(b"the next request")), 50) == b""


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/topics/t/messages", 413), ("/v1/nothing", 404), ("/livez", 405), ("/v1/topics/..", 405)]
)
def test_a_connection_with_unread_bytes_is_closed_after_the_answer(client, broker, path, status):
    request = posted(b"x" * 100_001, 100_001, path)
    assert client.post(path, environ_overrides={REQUEST: request}).status_code == status
    assert request.must_close
    assert broker.logs == {}


def test_a_connection_whose_body_was_read_stays_open(client):
    request = posted(b"hello", 5, "/v1/topics/t/messages")
    assert client.post("/v1/topics/t/messages", environ_overrides={REQUEST: request}).status_code == 200
    assert not request.must_close


def test_a_compressed_batch_is_answered_415(client, problem_of):
    answer = client.post("/v1/topics/t/messages", data=b"x", headers={"Content-Encoding": "gzip"})
    problem_of(answer, 415, "unsupported_media_type")


def test_the_limit_itself_is_allowed(client):
    assert client.post("/v1/topics/t/messages", data=b"x" * 100_000).status_code == 200


def test_bodies_are_accepted_while_there_is_room_for_all_of_them():
    in_flight, first, second = BodiesInFlight(100_000), posted(b"x" * 60_000, 60_000), posted(b"y" * 60_000, 60_000)
    assert read_body(first, 1 << 20, in_flight=in_flight) == b"x" * 60_000
    with pytest.raises(Backpressure, match="100000"):
        read_body(second, 1 << 20, in_flight=in_flight)
    assert leaves_bytes_unread(second)
    assert second.source.tell() == 0
    in_flight.release(second)
    assert in_flight.bytes == 60_000
    in_flight.release(first)
    in_flight.release(first)
    assert in_flight.bytes == 0
    assert len(read_body(second, 1 << 20, in_flight=in_flight)) == 60_000


def test_a_body_without_a_length_takes_room_as_it_arrives():
    in_flight, others = BodiesInFlight(100_000), posted(b"x" * 50_000, 50_000)
    read_body(others, 1 << 20, in_flight=in_flight)
    refused = posted(b"y" * 60_000)
    with pytest.raises(Backpressure):
        read_body(refused, 1 << 20, in_flight=in_flight)
    assert refused.source.tell() <= 50_000
    in_flight.release(refused)
    assert read_body(posted(b"short"), 1 << 20, in_flight=in_flight) == b"short"
    assert in_flight.bytes == 50_005
    assert len(read_body(posted(b"z" * 30_000), 1 << 20, in_flight=in_flight)) == 30_000


def test_a_small_body_and_a_single_large_one_are_always_accepted():
    in_flight, large = BodiesInFlight(65_536), posted(b"x" * 90_000, 90_000)
    assert len(read_body(large, 1 << 20, in_flight=in_flight)) == 90_000
    assert read_body(posted(b"small", 5), 1 << 20, in_flight=in_flight) == b"small"


def test_room_for_a_body_is_released_with_any_answer(broker, metrics):
    config = BrokerConfig(body_bytes_max=100_000, body_bytes_in_flight_max=70_000)
    client = create_app(broker, config, metrics, Auth()).test_client()
    for _ in range(3):
        assert client.post("/v1/topics/t/messages", data=b"x" * 60_000).status_code == 200
        assert client.post("/v1/groups/g/ack", data=b"[" * 60_000).status_code == 400
        assert client.put("/v1/topics/t", data=b"[" * 60_000).status_code == 400
        assert client.post("/v1/topics/t/messages", data=b"x" * 100_001).status_code == 413
        assert client.post("/v1/nothing", data=b"x" * 60_000).status_code == 404


def test_a_body_that_arrives_too_slowly_is_refused():
    """Each pause is short, so no timeout of the socket ends it."""

    class Drops:
        def read(self, size: int) -> bytes:
            while True:
                gevent.sleep(0.001)

    with pytest.raises(InvalidRequest, match="in time"):
        read_body(HttpRequest("POST", "/", "", {}, 10, source=Drops()), 100, pause_s=0.05)
