"""The head of a request: no larger than any that this broker understands, and read once.

gunicorn bounds the fields and each of them, which is 800 KiB together, and looks through all that it has again with
each piece that comes. So the head is gathered here, with a look at what is new alone, and parsed when it is whole.
"""

from __future__ import annotations

import re
from typing import Any

from gunicorn.http.errors import LimitRequestHeaders, NoMoreData
from gunicorn.http.message import Request

# A message's own headers may have 8 KiB, its key 4; and each line 8 KiB.
HEAD_BYTES_MAX = 64 * 1024
LINE_BYTES_MAX = 8190

_END = b"\r\n\r\n"
_bare_line_feed = re.compile(rb"(?<!\r)\n").search


class BoundedRequest(Request):  # type: ignore[misc]
    """A request whose head has HEAD_BYTES_MAX at the most. `came_with_head` are the bytes behind it that are here."""

    came_with_head = 0

    def parse(self, unreader: Any) -> Any:
        self.max_buffer_headers = HEAD_BYTES_MAX
        rest = super().parse(unreader)
        self.came_with_head = len(rest)
        return rest

    def read_into(self, unreader: Any, buf: bytearray, stop: bool = False) -> None:
        """Read the next piece. The first one (`stop`) is the whole head; mostly that is how it comes."""
        piece = unreader.read()
        if stop and _END not in piece:
            piece = _gathered(piece, unreader)
        if not piece:
            raise StopIteration if stop else NoMoreData(bytes(buf))
        buf += piece

    def _peer_is_trusted_proxy(self) -> bool:
        """None is, as the setting says (`composition.py`): that needs no look at each request's address."""
        return False


def _gathered(piece: bytes, unreader: Any) -> bytes:
    """The whole head that begins with this piece, and what came with it; or as much as shows that it is none, which the
    parser says."""
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
