"""One call of a client: what it asks for, where it belongs, and how long one try may take."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import urlencode

import msgspec

from portalmq import wire

# How long one try waits for its answer, beside the time that the broker itself may wait. A broker that is silent for
# longer may be paused: then another one leads, and a repeatable request goes there.
REQUEST_TIMEOUT_S = 15.0
READ_TIMEOUT_S = 8.0
TO_LEADER_TIMEOUT_S = 5.0
LONG_POLL_GRACE_S = 5.0
# The wait of a long poll that does not wait, so that a silent broker is given up as soon as with one that does.
WAIT_S_MIN = 0.001


class Request(msgspec.Struct, frozen=True):
    """One call. `leader_of` is the (topic, partition) that alone it concerns, `near` one whose leader forwards less
    than others; `wait_s` is how long the broker itself may wait before it answers (a long poll). `anywhere`: any broker
    answers at once, so one that does not is soon left for another. `may_be_slow`: one that does not answer in time is
    left by no other call, since it may wait for another broker."""

    method: str
    path: str
    body: bytes = b""
    headers: tuple[tuple[str, str], ...] = ()
    repeatable: bool = False
    leader_of: tuple[str, int] | None = None
    near: tuple[str, int] | None = None
    wait_s: float = 0.0
    # Mark the first try, for which the broker need not look for the result of an earlier one.
    marks_first_try: bool = False
    anywhere: bool = False
    may_be_slow: bool = False

    @property
    def topic(self) -> str | None:
        """The topic whose leaders should be known."""
        place = self.leader_of or self.near
        return None if place is None else place[0]

    @property
    def try_timeout_s(self) -> float:
        """The time limit of one try."""
        if self.wait_s:
            return self.wait_s + LONG_POLL_GRACE_S
        if self.repeatable and self.leader_of is not None:
            return TO_LEADER_TIMEOUT_S
        return READ_TIMEOUT_S if self.method == "GET" else REQUEST_TIMEOUT_S


def json_request(
    method: str,
    path: str,
    body: object,
    *,
    accept: str | None = None,
    repeatable: bool = True,
    leader_of: tuple[str, int] | None = None,
    near: tuple[str, int] | None = None,
    wait_s: float = 0.0,
    marks_first_try: bool = False,
    anywhere: bool = False,
    prefer: str | None = None,
) -> Request:
    """Return a request with a JSON body; `accept` is the media type of the answer, JSON by default; `prefer` is a
    preference (RFC 7240)."""
    headers = (("Content-Type", wire.JSON),) if accept is None else (("Content-Type", wire.JSON), ("Accept", accept))
    if prefer is not None:
        headers = (*headers, ("Prefer", prefer))
    content = msgspec.json.encode(body)
    return Request(method, path, content, headers, repeatable, leader_of, near, wait_s, marks_first_try, anywhere)


def with_query(path: str, query: Mapping[str, object] | None) -> str:
    given = {name: value for name, value in (query or {}).items() if value is not None}
    return f"{path}?{urlencode(given)}" if given else path
