"""Pages of messages that are being made or are not sent yet: bounded together, as bodies of requests are.

Each page is bounded by itself, and may be six times as large when it is JSON. A client that asks by many connections,
and reads slowly or not at all, would have the broker hold all of its pages. So a page is made only while there is room
for it, and has its room until its last byte is sent or its connection is closed. To refuse it takes nothing from
anybody: a page changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from flask import Response

from portalmq.broker.answers import sizes_of
from portalmq.broker.storage.batch import Record
from portalmq.errors import Backpressure

# So little is shown whatever others ask for.
SMALL_BYTES = 4 * 1024
_HELD = "portalmq.answer_bytes_held"


class AnswersInFlight:
    """Invariant: 0 <= bytes. It is at most bytes_max and what one page grows by as JSON, but for small pages, and for
    one that is larger by itself."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0

    def hold(self, environ: dict[str, Any], records: Iterable[Record]) -> None:
        """Take room for a page of these messages until `release`. Raises Backpressure."""
        size = sizes_of(records)
        if size > SMALL_BYTES and self.bytes and self.bytes + size > self.bytes_max:
            raise Backpressure(
                f"answers with {self.bytes} bytes are not sent yet, the limit is {self.bytes_max}"
                " (answer_bytes_in_flight_max): repeat in a moment, or ask for less at a time",
                retry_after_s=1,
            )
        environ[_HELD] = environ.get(_HELD, 0) + size
        self.bytes += size

    def send(self, environ: dict[str, Any], response: Response) -> None:
        """The page is made: from now on it takes what it has become, until its connection is done with it."""
        if _HELD not in environ:
            return
        size = response.calculate_content_length() or 0
        self.bytes += size - environ[_HELD]
        environ[_HELD] = size
        response.call_on_close(lambda: self.release(environ))

    def release(self, environ: dict[str, Any]) -> None:
        self.bytes -= environ.pop(_HELD, 0)
