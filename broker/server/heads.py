"""Reading of request heads: with one limit on the whole head, and searched once.

gunicorn limits the number of fields and the size of each, 800 KiB together, and searches all bytes again after each
read. Here the head is collected, only new bytes are searched, and it is parsed when it is complete.
"""

from __future__ import annotations

import re
from typing import Any

from gunicorn.http.errors import LimitRequestHeaders, NoMoreData
from gunicorn.http.message import Request

# A message's own headers may have 8 KiB, its key 4 KiB, and each line 8 KiB.
HEAD_BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 8190

_END = b"\r\n\r\n"
_bare_line_feed = re.compile(rb"(?<!\r)\n").search


class BoundedRequest(Request):  # type: ignore[misc]
    """A request with a head of at most HEAD_BYTES_MAX. `came_with_head`: bytes of the body received with the head."""

    came_with_head = 0

    def parse(self, unreader: Any) -> Any:
        self.max_buffer_headers = HEAD_BYTES_MAX
        rest = super().parse(unreader)
        self.came_with_head = len(rest)
        return rest

    def read_into(self, unreader: Any, buf: bytearray, stop: bool = False) -> None:
        """Read the next piece. The first one (`stop`) is the whole head, usually in one read."""
        piece = unreader.read()
        if stop and _END not in piece:
            piece = _gathered(piece, unreader)
        if not piece:
            raise StopIteration if stop else NoMoreData(bytes(buf))
        buf += piece

    def _peer_is_trusted_proxy(self) -> bool:
        """No proxy is trusted (see `composition.py`), so the address of a request is not checked."""
        return False


def _gathered(piece: bytes, unreader: Any) -> bytes:
    """Return the whole head that begins with this piece, and the bytes read with it. Stop early at bytes that cannot be
    a head; the parser refuses them."""
    head = bytearray()
    has_line = False
    while piece:
        looked = len(head)
        head += piece
        end = head.find(_END, max(0, looked - len(_END) + 1))
        if (end if end >= 0 else len(head)) > HEAD_BYTES_MAX:
            raise LimitRequestHeaders("the head is too large")
        if end >= 0 or _bare_line_feed(head, looked):
            break
        has_line = has_line or head.find(b"\r\n", max(0, looked - 1)) >= 0
        if not has_line and len(head) > LINE_BYTES_MAX + 2:
            break
        piece = unreader.read()
    return bytes(head)
