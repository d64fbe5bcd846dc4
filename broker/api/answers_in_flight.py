"""A limit on the bytes of all answers with messages that are being built or not sent yet.

Each page has a limit of its own, and may be six times as large as JSON. Without a common limit, a client with many
connections that reads slowly would make the broker hold all of its pages. So a page is built only while there is room
for it, and occupies its room until its last byte is sent or its connection is closed. Refusing a page loses nothing: it
changes no state.

A receive leases the messages that it returns, so it is limited before that: it gets a share of the remaining room,
divided by the receives being built, and is refused when no room is left. Its size is known when its answer is built.
"""

from __future__ import annotations

from collections.abc import Iterable

from flask import Response

from portalmq.broker.api.http_request import HttpRequest
from portalmq.broker.partition.answer_size import sizes_of
from portalmq.broker.storage.batch import Record
from portalmq.errors import Backpressure

# Smaller answers are always allowed.
SMALL_BYTES = 4 * 1024


class AnswersInFlight:
    """Invariant: 0 <= bytes. At most bytes_max plus the growth of one page as JSON, small pages and a single larger
    page excepted."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        # Receives that lease messages, and whose answers are not built yet.
        self.making = 0

    def check(self) -> None:
        """Raise Backpressure when no room is left to lease messages, or to read them for a stream."""
        if self.bytes >= self.bytes_max:
            raise self._refusal()

    def _refusal(self) -> Backpressure:
        return Backpressure(
            f"answers with {self.bytes} bytes are not sent yet, the limit is {self.bytes_max}"
            " (answer_bytes_in_flight_max): repeat in a moment, or ask for less at a time",
            retry_after_s=1,
        )

    def hold(self, request: HttpRequest, records: Iterable[Record]) -> None:
        """Take room for a page of these messages until `release`. Raises Backpressure."""
        self.hold_bytes(request, sizes_of(records))

    def hold_bytes(self, request: HttpRequest, size: int) -> None:
        """Take room for a page of this size. Raises Backpressure."""
        if size > SMALL_BYTES and self.bytes and self.bytes + size > self.bytes_max:
            raise self._refusal()
        self._add(request, size)

    def note(self, request: HttpRequest, size: int) -> None:
        """Take room for a finished answer until `release`, without a limit."""
        if size > SMALL_BYTES:
            self._add(request, size)

    def _add(self, request: HttpRequest, size: int) -> None:
        request.answer_bytes_held += size
        self.bytes += size

    def send(self, request: HttpRequest, response: Response) -> None:
        """Adjust the room to the size of the finished page, until the connection is done with it."""
        if not request.answer_bytes_held:
            return
        size = response.calculate_content_length() or 0
        self.bytes += size - request.answer_bytes_held
        request.answer_bytes_held = size
        response.call_on_close(lambda: self.release(request))

    def release(self, request: HttpRequest) -> None:
        self.bytes -= request.answer_bytes_held
        request.answer_bytes_held = 0


class Portion:
    """The share of the room for one receive. Invariant: counted in `making` from `begin` to `end`."""

    __slots__ = ("_answers", "_is_counted")

    def __init__(self, answers: AnswersInFlight) -> None:
        self._answers = answers
        self._is_counted = False

    def begin(self) -> int:
        """Return how many bytes of messages may be taken now, at least 1. Raises Backpressure."""
        answers = self._answers
        answers.check()
        if not self._is_counted:
            self._is_counted = True
            answers.making += 1
        return max(1, (answers.bytes_max - answers.bytes) // answers.making)

    def end(self) -> None:
        """Return the share: nothing was leased, or the answer is built. May be repeated."""
        if self._is_counted:
            self._is_counted = False
            self._answers.making -= 1
