"""The segments in which a broker sends an answer."""

from __future__ import annotations

import re

import pytest
from gunicorn.config import Config
from gunicorn.http import wsgi
from gunicorn.http.parser import RequestParser

from portalmq.broker.server import responses
from portalmq.broker.server.responses import JOIN_BYTES_MAX, JoinedResponse

DATE = re.compile(rb"Date: \w{3}, \d\d \w{3} \d{4} \d\d:\d\d:\d\d GMT\r\n")


class Sent:
    """A socket that records each piece sent."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def sendall(self, data: bytes) -> None:
        self.pieces.append(data)


def sent(kind, parts, length=None, method="POST", version="1.1", status="200 OK"):
    """Return the pieces in which an answer of these parts is sent."""
    request = next(
        RequestParser(Config(), [f"{method} / HTTP/{version}\r\nHost: x\r\n\r\n".encode()], ("192.0.2.1", 1))
    )
    socket = Sent()
    response = kind(request, socket, Config())
    headers = [("Content-Type", "text/plain")]
    response.start_response(status, headers if length is None else [*headers, ("Content-Length", str(length))])
    for part in parts:
        response.write(part)
    response.close()
    return [DATE.sub(b"", piece) for piece in socket.pieces]


def test_a_small_answer_is_sent_in_one_piece():
    (piece,) = sent(JoinedResponse, [b"body"], 4)
    assert piece.startswith(b"HTTP/1.1 200 OK\r\n")
    assert piece.endswith(b"\r\n\r\nbody")


def test_a_large_body_is_sent_by_itself():
    assert len(sent(JoinedResponse, [bytes(JOIN_BYTES_MAX + 1)], JOIN_BYTES_MAX + 1)) == 2


@pytest.mark.parametrize(
    "how",
    [
        {"parts": [b"body"], "length": 4},
        {"parts": [b"body"], "length": 4, "version": "1.0"},
        {"parts": [b"bo", b"dy"], "length": 4},
        {"parts": [b"body and more"], "length": 4},
        {"parts": [b"bo"], "length": 4},
        {"parts": [b""], "length": 0},
        {"parts": [], "length": 0},
        {"parts": [b"bo", b"", b"dy"]},
        {"parts": [b"body"], "version": "1.0"},
        {"parts": [], "length": 4, "method": "HEAD"},
        {"parts": [b"body"], "length": 4, "method": "HEAD"},
        {"parts": [b"body"], "status": "204 No Content"},
    ],
)
def test_the_sent_bytes_are_those_of_gunicorn(how):
    assert b"".join(sent(JoinedResponse, **how)) == b"".join(sent(wsgi.Response, **how))


def test_the_date_is_gunicorns():
    assert responses._date_of(1_700_000_000) == wsgi.util.http_date(1_700_000_000.9)


def test_gunicorn_uses_joined_responses(monkeypatch):
    monkeypatch.setattr(wsgi, "Response", wsgi.Response)
    responses.join_responses()
    request = next(RequestParser(Config(), [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"], ("192.0.2.1", 1)))
    response, _ = wsgi.create(request, Sent(), ("192.0.2.1", 1), ("192.0.2.2", 2), Config())
    assert isinstance(response, JoinedResponse)
