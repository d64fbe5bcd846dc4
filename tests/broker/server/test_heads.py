"""Reading the head of a request in pieces of any size."""

from __future__ import annotations

import pytest
from gunicorn.config import Config
from gunicorn.http.errors import InvalidHeader, LimitRequestHeaders, LimitRequestLine, NoMoreData
from gunicorn.http.parser import RequestParser

from portalmq.broker.server import heads
from portalmq.broker.server.heads import HEAD_BYTES_MAX, BoundedRequest

LINE = b"GET /livez HTTP/1.1\r\n"


class Pieces:
    """A socket that returns one piece for each read and counts the reads."""

    def __init__(self, data: bytes, size: int) -> None:
        self.data, self.size, self.reads = data, size, 0

    def recv(self, _size: int) -> bytes:
        self.reads += 1
        piece, self.data = self.data[: self.size], self.data[self.size :]
        return piece


def parser_of(source: Pieces) -> RequestParser:
    parser = RequestParser(Config(), source, ("192.0.2.1", 1))
    parser.mesg_class = BoundedRequest
    return parser


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8192])
def test_a_head_in_pieces_is_the_head_as_a_whole(size):
    data = b"".join(b"POST /%d HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n%d!" % (n, n) for n in range(3))
    parser = parser_of(Pieces(data, size))
    for number in range(3):
        request = next(parser)
        assert (request.path, dict(request.headers)["HOST"]) == (f"/{number}", "x")
        assert request.body.read() == b"%d!" % number
    with pytest.raises(StopIteration):
        next(parser)


@pytest.mark.parametrize(("size", "came"), [(1, 0), (60, 3), (8192, 5)])
def test_bytes_of_the_body_received_with_the_head_are_counted(size, came):
    head = b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nA: "
    head += b"a" * (57 - len(head) - 4) + b"\r\n\r\n"
    request = next(parser_of(Pieces(head + b"12345", size)))
    assert (request.came_with_head, request.body.read()) == (came, b"12345")


def test_a_head_in_one_piece_is_read_once():
    source = Pieces(LINE + b"Host: x\r\n\r\n", 8192)
    parser = parser_of(source)
    put_back = []
    parser.unreader.unread = put_back.append
    assert next(parser).path == "/livez"
    assert (source.reads, put_back) == (1, [b""])


def test_no_header_makes_a_request_count_as_proxied():
    parser = parser_of(Pieces(LINE + b"X-Forwarded-Proto: https\r\n\r\n", 8192))
    parser.source_addr = ("127.0.0.1", 1)
    assert next(parser).scheme == "http"


@pytest.mark.parametrize("size", [200, 8192])
def test_a_head_that_never_ends_is_refused_before_it_is_large(size):
    source = Pieces(LINE + (b"A: " + b"b" * 8000 + b"\r\n") * 100, size)
    with pytest.raises(LimitRequestHeaders):
        next(parser_of(source))
    assert source.reads * size <= HEAD_BYTES_MAX + 2 * size


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"GET /" + b"x" * 20_000, LimitRequestLine),
        (LINE + b"A: b\n", InvalidHeader),
        (LINE + b"A: " + b"b" * 9_000 + b"\r\n\r\n", LimitRequestHeaders),
        (LINE + b"A: b\r\n" * 101 + b"\r\n", LimitRequestHeaders),
        (LINE + b"A: b\r\n", NoMoreData),
    ],
)
@pytest.mark.parametrize("size", [100, 8192])
def test_an_error_in_a_head_is_reported_as_soon_as_it_shows(data, error, size):
    source = Pieces(data, size)
    with pytest.raises(error):
        next(parser_of(source))


def test_each_byte_of_a_head_is_looked_at_a_few_times_whatever_its_pieces(monkeypatch):
    """A search of the whole head for each piece would make many small pieces expensive."""

    looked = []

    class Watched(bytearray):
        def find(self, what, start=0, end=None):
            looked.append((len(self) if end is None else min(end, len(self))) - start)
            return super().find(what, start, len(self) if end is None else end)

    monkeypatch.setattr(heads, "bytearray", Watched, raising=False)
    data = LINE + (b"A: " + b"b" * 500 + b"\r\n") * 60 + b"\r\n"
    request = next(parser_of(Pieces(data, 7)))
    assert len(request.headers) == 60
    assert sum(looked) < 50 * len(data)
