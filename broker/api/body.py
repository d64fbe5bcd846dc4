"""Reading of request bodies: whole or not at all, within limits on each body and on all of them together.

Flask's MAX_CONTENT_LENGTH does not help: with a chunked body it stops at the limit and silently returns what it has
read. So the stream is read directly. After a body that is too large, cut short, or not read at all (a 404), the
connection is closed: its remaining bytes must not be parsed as the next request.
"""

from __future__ import annotations

import gevent

from portalmq.broker.api.http_request import BodySource, HttpRequest
from portalmq.errors import Backpressure, InvalidRequest, MessageTooLarge, UnsupportedMediaType

# The time limit of a body is the longest allowed pause, plus its size at this rate.
BYTES_PER_S_MIN = 64 * 1024
# Smaller bodies are always accepted: acks and receives continue while large bodies are refused.
SMALL_BYTES = 4 * 1024


class FramingError(Exception):
    """The rest of a body cannot be read: it is cut short, or its framing is broken."""


class BodiesInFlight:
    """A limit on the bytes of all request bodies that are being read or processed.

    Invariant: 0 <= bytes. At most bytes_max, small bodies and a single larger body excepted.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0

    def hold(self, request: HttpRequest, size: int) -> None:
        """Take room for a body until `release`. Raises Backpressure."""
        held = request.body_bytes_held
        if size > SMALL_BYTES and self.bytes > held and self.bytes - held + size > self.bytes_max:
            raise Backpressure(
                f"requests with {self.bytes} bytes are under way, the limit is {self.bytes_max}"
                " (body_bytes_in_flight_max): repeat in a moment, or send less at a time",
                retry_after_s=1,
            )
        request.body_bytes_held = size
        self.bytes += size - held

    def hold_also(self, request: HttpRequest, size: int) -> None:
        """Take room for what the body decompresses to, too. Raises Backpressure."""
        self.hold(request, request.body_bytes_held + size)

    def release(self, request: HttpRequest) -> None:
        """Release the room of an answered request."""
        self.bytes -= request.body_bytes_held
        request.body_bytes_held = 0


def read_body(
    request: HttpRequest, bytes_max: int, *, pause_s: float = 30.0, in_flight: BodiesInFlight | None = None
) -> bytes:
    """Return the body of a request, at most `bytes_max` bytes, with room taken in `in_flight`.

    Raises MessageTooLarge, InvalidRequest when it is cut short, too slow, or its framing is broken,
    UnsupportedMediaType when it is compressed, and Backpressure. The connection is closed after each of these.
    """
    coding = request.headers.get("content-encoding")
    if coding is not None and coding.strip().lower() not in {"", "identity"}:
        raise UnsupportedMediaType(f"Content-Encoding {coding[:40]!r} is not supported: send the body as it is")
    length = request.length
    if length is None and not request.is_chunked:
        request.body_was_read = True
        return b""
    if length is not None:
        if length > bytes_max:
            raise _too_large(bytes_max)
        if in_flight is not None:
            in_flight.hold(request, length)
    body = request.received
    if body is None:
        body = _awaited(request, bytes_max, pause_s, in_flight)
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        if length is not None and len(body) < length:
            raise InvalidRequest(f"the body ended after {len(body)} of {length} bytes; nothing was applied")
    request.body_was_read = True
    if length is None and in_flight is not None:
        in_flight.hold(request, len(body))
    return body


def _awaited(request: HttpRequest, bytes_max: int, pause_s: float, in_flight: BodiesInFlight | None) -> bytes:
    """Return a body that did not come with its head, or its beginning."""
    source, length = request.source, request.length
    assert source is not None, "a request that has a body has its bytes, or their source"
    try:
        with gevent.Timeout(pause_s + (bytes_max if length is None else length) / BYTES_PER_S_MIN, TimeoutError):
            if length is None:
                return _in_steps(request, source, bytes_max + 1, in_flight)
            return source.read(length)
    except TimeoutError:
        raise InvalidRequest("the body did not arrive in time; nothing was applied") from None
    except FramingError as fault:
        raise InvalidRequest(f"the body's framing is broken: {fault}; nothing was applied") from None
    except OSError as fault:
        raise InvalidRequest(f"the body was cut short: {type(fault).__name__}; nothing was applied") from None


def _in_steps(request: HttpRequest, source: BodySource, at_most: int, in_flight: BodiesInFlight | None) -> bytes:
    """Read a body without a length: `at_most` bytes, or fewer when it ends. Room is taken in steps, since the size is
    unknown and a small body should not reserve the maximum."""
    parts: list[bytes] = []
    step, size = min(SMALL_BYTES, at_most), 0
    while True:
        if in_flight is not None:
            in_flight.hold(request, size + step)
        part = source.read(step)
        parts.append(part)
        size += len(part)
        if len(part) < step or size >= at_most:
            return parts[0] if len(parts) == 1 else b"".join(parts)
        step = min(size, at_most - size)


def leaves_bytes_unread(request: HttpRequest) -> bool:
    """Return whether the request has a body that was not read to its end."""
    return not request.body_was_read and bool(request.is_chunked or request.length)


def _too_large(bytes_max: int) -> MessageTooLarge:
    return MessageTooLarge(f"the body is larger than {bytes_max} bytes: send smaller messages, or fewer at a time")
