"""Answers with messages that are being made or are not sent yet: bounded together, as bodies of requests are.

Each page is bounded by itself, and may be six times as large when it is JSON. A client that asks by many connections,
and reads slowly or not at all, would have the broker hold all of its pages. So a page is made only while there is room
for it, and has its room until its last byte is sent or its connection is closed. To refuse it takes nothing from
anybody: a page changes nothing.

A receive leases what it answers, so it is cut before that: it gets a portion of the room that is left, shared with
those that are being made, and is refused when none is left. Its size is known when the answer is made.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from flask import Response

from portalmq.broker.partition.answer_size import sizes_of
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
        # Receives that have taken messages, or are about to, and whose answers are not made yet.
        self.making = 0

    def check(self) -> None:
        """Raises Backpressure when no room is left for messages to be leased, or read by a stream."""
        if self.bytes >= self.bytes_max:
            raise self._refusal()

    def _refusal(self) -> Backpressure:
        return Backpressure(
            f"answers with {self.bytes} bytes are not sent yet, the limit is {self.bytes_max}"
            " (answer_bytes_in_flight_max): repeat in a moment, or ask for less at a time",
            retry_after_s=1,
        )

    def hold(self, environ: dict[str, Any], records: Iterable[Record]) -> None:
        """Take room for a page of these messages until `release`. Raises Backpressure."""
        self.hold_bytes(environ, sizes_of(records))

    def hold_bytes(self, environ: dict[str, Any], size: int) -> None:
        """The same by its size."""
        if size > SMALL_BYTES and self.bytes and self.bytes + size > self.bytes_max:
            raise self._refusal()
        self._add(environ, size)

    def note(self, environ: dict[str, Any], size: int) -> None:
        """Take room for an answer that is made, until `release`."""
        if size > SMALL_BYTES:
            self._add(environ, size)

    def _add(self, environ: dict[str, Any], size: int) -> None:
        environ[_HELD] = environ.get(_HELD, 0) + size
        self.bytes += size

    def sent(self, environ: dict[str, Any], body: bytes) -> Iterable[bytes]:
        """The answer for the server to send: what it holds is released when its connection is done with it."""
        return _Unsent(self, environ, body) if _HELD in environ else [body]

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


class Portion:
    """The room that one receive may fill with messages. Invariant: counted in `making` from `begin` to `end`."""

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
        """Nothing was taken, or the answer is made. May be repeated."""
        if self._is_counted:
            self._is_counted = False
            self._answers.making -= 1


class _Unsent:
    """The body of an answer, and what the server calls when it has sent it or given it up (PEP 3333)."""

    def __init__(self, answers: AnswersInFlight, environ: dict[str, Any], body: bytes) -> None:
        self._answers = answers
        self._environ = environ
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self._body

    def close(self) -> None:
        self._answers.release(self._environ)
