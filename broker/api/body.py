"""Reading of request bodies: whole or not at all, within limits on each body and on all of them together.

Flask's MAX_CONTENT_LENGTH does not help: with a chunked body it stops at the limit and silently returns what it has
read. So the WSGI stream is read directly. After a body that is too large, cut short, or not read at all (a 404), the
connection is closed: its remaining bytes must not be parsed as the next request.
"""

from __future__ import annotations

from typing import Any

import gevent

from portalmq.errors import Backpressure, InvalidRequest, MessageTooLarge, UnsupportedMediaType

# The time limit of a body is the longest allowed pause, plus its size at this rate.
BYTES_PER_S_MIN = 64 * 1024
# Smaller bodies are always accepted: acks and receives continue while large bodies are refused.
SMALL_BYTES = 4 * 1024

_READ = "portalmq.body_was_read"
_HELD = "portalmq.body_bytes_held"


class BodiesInFlight:
    """A limit on the bytes of all request bodies that are being read or processed.

    Invariant: 0 <= bytes. At most bytes_max, small bodies and a single larger body excepted.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0

    def hold(self, environ: dict[str, Any], size: int) -> None:
        """Take room for a body until `release`. Raises Backpressure."""
        held = environ.get(_HELD, 0)
        if size > SMALL_BYTES and self.bytes > held and self.bytes - held + size > self.bytes_max:
            raise Backpressure(
                f"requests with {self.bytes} bytes are under way, the limit is {self.bytes_max}"
                " (body_bytes_in_flight_max): repeat in a moment, or send less at a time",
                retry_after_s=1,
            )
        environ[_HELD] = size
        self.bytes += size - held

    def release(self, environ: dict[str, Any]) -> None:
        """Release the room of an answered request."""
        self.bytes -= environ.pop(_HELD, 0)


def read_body(
    environ: dict[str, Any], bytes_max: int, *, pause_s: float = 30.0, in_flight: BodiesInFlight | None = None
) -> bytes:
    """Return the body of a request, at most `bytes_max` bytes, with room taken in `in_flight`.

    Raises MessageTooLarge, InvalidRequest when it is cut short, too slow, or its framing is broken,
    UnsupportedMediaType when it is compressed or coded, and Backpressure. The connection is closed after each of these.
    """
    if "HTTP_CONTENT_ENCODING" in environ:
        _check_coding(environ, "Content-Encoding", "identity")
    if "HTTP_TRANSFER_ENCODING" in environ:
        _check_coding(environ, "Transfer-Encoding", "chunked")
    length = _content_length(environ)
    if length is not None and length > bytes_max:
        raise _too_large(bytes_max)
    if length is None and not environ.get("wsgi.input_terminated"):
        environ[_READ] = True  # neither a length nor a terminated stream: there is no body
        return b""
    try:
        source = environ["wsgi.input"]
        if length is not None and in_flight is not None:
            in_flight.hold(environ, length)
        if length is not None and length <= getattr(source, "came_with_head", 0):
            body: bytes = source.read(length)  # received with the head: no waiting
        else:
            with gevent.Timeout(pause_s + (bytes_max if length is None else length) / BYTES_PER_S_MIN, TimeoutError):
                body = _read(environ, bytes_max + 1, in_flight) if length is None else source.read(length)
    except TimeoutError:
        raise InvalidRequest("the body did not arrive in time; nothing was applied") from None
    except (OSError, ValueError, EOFError) as fault:
        raise InvalidRequest(f"the body was cut short: {type(fault).__name__}; nothing was applied") from None
    except Exception as fault:
        if not _is_framing_error(fault):
            raise
        raise InvalidRequest(f"the body's framing is broken: {type(fault).__name__}; nothing was applied") from None
    if len(body) > bytes_max:
        raise _too_large(bytes_max)
    if length is not None and len(body) < length:
        raise InvalidRequest(f"the body ended after {len(body)} of {length} bytes; nothing was applied")
    environ[_READ] = True
    if in_flight is not None and length is None:
        in_flight.hold(environ, len(body))
    return body


def _read(environ: dict[str, Any], at_most: int, in_flight: BodiesInFlight | None) -> bytes:
    """Read a body without a length: `at_most` bytes, or fewer when it ends. Room is taken in steps, since the size is
    unknown and a small body should not reserve the maximum."""
    parts: list[bytes] = []
    step, size = min(SMALL_BYTES, at_most), 0
    while True:
        if in_flight is not None:
            in_flight.hold(environ, size + step)
        part: bytes = environ["wsgi.input"].read(step)
        parts.append(part)
        size += len(part)
        if len(part) < step or size >= at_most:
            return parts[0] if len(parts) == 1 else b"".join(parts)
        # Double the step each time, without a small last one: the server would wait for a whole kilobyte.
        step = size if at_most - size > 2 * size else at_most - size


def _check_coding(environ: dict[str, Any], header: str, known: str) -> None:
    coding = environ["HTTP_" + header.upper().replace("-", "_")].strip().lower()
    if coding not in {"", known}:
        raise UnsupportedMediaType(f"{header} {coding[:40]!r} is not supported: send the body as it is")


def leaves_bytes_unread(environ: dict[str, Any]) -> bool:
    """Return whether the request has a body that was not read to its end."""
    if _READ in environ:
        return False
    return "HTTP_TRANSFER_ENCODING" in environ or environ.get("CONTENT_LENGTH", "") not in {"", "0"}


def close_after_answer(environ: dict[str, Any]) -> None:
    """Ask the server to close the connection after this request."""
    closer = getattr(environ.get("wsgi.input"), "close_connection", None)  # set by `process.pre_request`
    if closer is not None:
        closer()


def note_peer(environ: dict[str, Any]) -> None:
    """Tell the server that the connection is another broker's."""
    mark = getattr(environ.get("wsgi.input"), "is_of_a_peer", None)  # set by `process.pre_request`
    if mark is not None:
        mark()


def _content_length(environ: dict[str, Any]) -> int | None:
    text = environ.get("CONTENT_LENGTH", "")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise InvalidRequest("Content-Length is not a number")
    return int(text)


def _too_large(bytes_max: int) -> MessageTooLarge:
    return MessageTooLarge(f"the body is larger than {bytes_max} bytes: send smaller messages, or fewer at a time")


def _is_framing_error(fault: Exception) -> bool:
    """Return whether the error is of gunicorn's parser, by its module: this package does not import the server."""
    return type(fault).__module__.startswith("gunicorn.http")
