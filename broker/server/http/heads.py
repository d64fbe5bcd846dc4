"""The heads of requests, parsed strictly: what two servers could read differently is refused.

A proxy in front of the broker must find the same requests in the bytes of a connection as the broker does; otherwise a
request can be smuggled in the body of another. So lines end with CRLF, a length is given once, with digits or in
chunks, names are tokens without spaces, lines are not folded, and no header that says how to read the rest is
repeated (RFC 9112, section 11.2).

Written by hand, since httptools was not faster with the same checks around it, and accepted a bare LF. Lines are the
same from request to request of a client, and often the whole head is, so short ones are parsed once.
"""

from __future__ import annotations

import re
from functools import lru_cache
from urllib.parse import unquote_to_bytes

from portalmq.errors import PortalMQError

# A message's own headers may have 8 KiB, its key 4 KiB, and each line 8 KiB.
HEAD_BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 8190
FIELDS_MAX = 100
# The cache has at most so many lines, each at most so long.
LINES_KEPT = 1024
LINE_KEPT_BYTES = 160
# The same of whole heads.
HEADS_KEPT = 256
HEAD_KEPT_BYTES = 640

_TOKEN = r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
# Of the target: the characters of a URI without a fragment. Methods are in capitals.
_match_request = re.compile(r"([A-Z][A-Z-]{2,19}) ([!\"$-~]+) HTTP/1\.([0-9])").fullmatch
# Possessive, since a field of many blanks would be read in each way that divides them.
_match_field = re.compile(rf"({_TOKEN}):[ \t]*+([^\x00-\x08\x0a-\x1f\x7f]*+)").fullmatch
_match_host = re.compile(r"(?:[\w.~!$&'()*+;=%-]*|\[[0-9A-Fa-f:.]+(?:%[\w.~-]+)?\])(?::[0-9]*)?", re.ASCII).fullmatch
_match_absolute = re.compile(r"https?://([^/?]+)(.*)", re.IGNORECASE).fullmatch

# Fields that may be given once: two of them leave it open what the request is.
_ONCE = frozenset({"host", "content-length", "content-type", "transfer-encoding", "expect"})
_KNOWN_CODINGS = frozenset({"chunked", "compress", "deflate", "gzip", "identity", "x-compress", "x-gzip"})
# Fields that change the meaning of a request may not come after its body (RFC 9110, section 6.5.1).
_NOT_IN_TRAILERS = _ONCE | {"authorization", "connection", "te", "trailer"}


class RefusedHead(PortalMQError):
    """A request that is not understood. It is answered, and the connection is closed: where the next request begins is
    unknown."""

    code, status, title = "invalid_request", 400, "The request is not valid HTTP"


class LineTooLong(RefusedHead):
    code, status, title = "uri_too_long", 414, "The request line is too long"


class HeadTooLarge(RefusedHead):
    code, status, title = "headers_too_large", 431, "The header fields are too many or too large"


class UnsupportedCoding(RefusedHead):
    code, status, title = "unsupported_media_type", 415, "The transfer coding is not supported"


class ExpectationFailed(RefusedHead):
    code, status, title = "expectation_failed", 417, "The expectation is not supported"


class RequestHead:
    """The head of a request, or of several that are alike: never change it. `path` and `headers` are as in HttpRequest;
    `minor` is that of HTTP/1.x, at most 1."""

    __slots__ = (
        *("method", "target", "path", "query", "minor", "headers"),
        *("expects_continue", "is_chunked", "keeps_alive", "length"),
    )

    def __init__(self, line: tuple[str, str, str, str, int], headers: dict[str, str]) -> None:
        self.method, self.target, self.path, self.query, self.minor = line
        self.headers = headers
        self.length: int | None = None
        self.is_chunked = self.expects_continue = False
        self.keeps_alive = self.minor > 0


def parse_head(raw: bytes) -> RequestHead:
    """Parse a head without the empty line at its end. Raises RefusedHead."""
    return _kept_head(raw) if len(raw) <= HEAD_KEPT_BYTES else _kept_head.__wrapped__(raw)


@lru_cache(HEADS_KEPT)
def _kept_head(raw: bytes) -> RequestHead:
    lines = raw.decode("latin-1").split("\r\n")
    if not lines[0] and len(lines) > 1:
        del lines[0]  # one empty line before a request is ignored (RFC 9112, section 2.2)
    if len(lines) > FIELDS_MAX + 1:
        raise HeadTooLarge
    first = lines[0]
    line = _request_line(first) if len(first) <= LINE_KEPT_BYTES else _request_line.__wrapped__(first)
    head = RequestHead(line, parse_fields(lines[1:]))
    headers = head.headers
    if line[4] and "host" not in headers:
        raise RefusedHead("Host is missing")
    if not line[1].startswith("/"):
        _check_other_target(head)
    if "transfer-encoding" in headers:
        _check_chunked(head)
    elif "content-length" in headers:
        head.length = _length(headers["content-length"])
    if "connection" in headers:
        options = {option.strip(" \t").lower() for option in headers["connection"].split(",")}
        head.keeps_alive = "close" not in options and (head.minor > 0 or "keep-alive" in options)
    if "expect" in headers:
        if headers["expect"].lower() != "100-continue":
            raise ExpectationFailed
        head.expects_continue = head.minor > 0
    return head


@lru_cache(LINES_KEPT)
def _request_line(line: str) -> tuple[str, str, str, str, int]:
    """Return the method, the target, its path and query, and the minor version."""
    if len(line) > LINE_BYTES_MAX:
        raise LineTooLong
    found = _match_request(line)
    if found is None:
        raise RefusedHead("the request line is not that of HTTP/1.1")
    method, target, minor = found.groups()
    path, _, query = target.partition("?")
    if "%" in path:
        path = unquote_to_bytes(path).decode("latin-1")
    return method, target, path, query, min(int(minor), 1)


def parse_fields(lines: list[str]) -> dict[str, str]:
    """Return the values of header or trailer fields by their names in lower case; those of a repeated one are joined.
    Raises RefusedHead."""
    fields: dict[str, str] = {}
    for line in lines:
        name, value = _field(line) if len(line) <= LINE_KEPT_BYTES else _field.__wrapped__(line)
        if name in fields:
            if name in _ONCE:
                raise RefusedHead(f"{name} is repeated")
            value = f"{fields[name]},{value}"
        fields[name] = value
    fields.pop("", None)
    return fields


@lru_cache(LINES_KEPT)
def _field(line: str) -> tuple[str, str]:
    """Return the name and the value. The name is empty when it has an underscore: to WSGI it would be the same as
    another one with a hyphen, which a proxy in front may set itself."""
    if len(line) > LINE_BYTES_MAX:
        raise HeadTooLarge
    found = _match_field(line)
    if found is None:
        raise RefusedHead("a header field is not valid")
    name = found[1].lower()
    value = found[2].rstrip(" \t")
    if name == "host" and _match_host(value) is None:
        raise RefusedHead("Host is not valid")
    return ("", "") if "_" in name else (name, value)


def check_trailers(lines: list[str]) -> None:
    """Check the fields after a body; they are not used. Raises RefusedHead."""
    if not _NOT_IN_TRAILERS.isdisjoint(parse_fields(lines)):
        raise RefusedHead("a field of the trailers belongs into the head")


def _check_other_target(head: RequestHead) -> None:
    """Accept `*` of OPTIONS, and a whole URL with the host that Host names (RFC 9112, section 3.2)."""
    if head.method == "OPTIONS" and head.target == "*":
        return
    found = _match_absolute(head.target)
    if found is None or found[1].lower() != head.headers.get("host", found[1]).lower():
        raise RefusedHead("the request target is not a path, nor a URL with the host that Host names")
    head.headers.setdefault("host", found[1])  # HTTP/1.0
    if _match_host(found[1]) is None:
        raise RefusedHead("the host of the request target is not valid")
    _, _, head.path, head.query, _ = _request_line(f"GET /{found[2].removeprefix('/')} HTTP/1.1")


def _check_chunked(head: RequestHead) -> None:
    """Accept chunks as the only coding, without a length (RFC 9112, sections 6.1 and 6.3)."""
    if head.minor == 0 or "content-length" in head.headers:
        raise RefusedHead("Transfer-Encoding is not allowed here")
    codings = [coding.strip(" \t").lower() for coding in head.headers["transfer-encoding"].split(",")]
    if codings != ["chunked"]:
        if _KNOWN_CODINGS.issuperset(codings) and (codings[-1] != "chunked" or codings.count("chunked") > 1):
            raise RefusedHead("Transfer-Encoding does not end with one `chunked`")
        raise UnsupportedCoding
    head.is_chunked = True


def _length(text: str) -> int:
    if not (text.isascii() and text.isdigit()) or len(text) > 19:
        raise RefusedHead("Content-Length is not a number")
    return int(text)
