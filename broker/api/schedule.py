"""When a message may be delivered, until when, and how urgently: what the sender's words come to.

    delay_ms | deliver_at_ms   -> deliver_at_ms    by the clock of the broker that takes the request
    ttl_ms                     -> expires_at_ms    counted from the moment at which the message can be delivered

A moment in the past means at once, and is kept as it was sent. A delay of nothing is no delay, so that a message with
one costs what a plain message costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from portalmq import wire
from portalmq.broker.api.query import instant_ms, whole_number
from portalmq.broker.messages.produce import expiry
from portalmq.errors import InvalidRequest

# Further ahead than this is a mistake in the unit, nearly always: seconds for milliseconds, or microseconds.
HORIZON_YEARS = 10
HORIZON_MS = HORIZON_YEARS * 366 * wire.DAY_MS


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one message, and `as_sent`, the words they came in; empty when none was given."""

    deliver_at_ms: int | None
    expires_at_ms: int | None
    priority: int
    as_sent: tuple[int | str | None, ...]


_PLAIN = Options(None, None, 0, ())


def moments(
    delay_ms: int | None, deliver_at_ms: int | None, ttl_ms: int | None, now_ms: int, where: str
) -> tuple[int | None, int | None]:
    """(deliver_at_ms, expires_at_ms) of a message that is taken at `now_ms`; `where` names it in errors.

    Raises InvalidRequest for a delay and a moment together, and for what lies too far ahead.
    """
    if delay_ms is not None:
        if deliver_at_ms is not None:
            raise InvalidRequest(f"{where} has both a delay and a moment of delivery: give delay_ms or deliver_at_ms")
        deliver_at_ms = now_ms + delay_ms if delay_ms else None
    if deliver_at_ms is not None and deliver_at_ms - now_ms > HORIZON_MS:
        raise InvalidRequest(
            f"{where} is to be delivered at {deliver_at_ms}, but at most {HORIZON_YEARS} years ahead are taken:"
            " delay_ms and deliver_at_ms count milliseconds, deliver_at_ms since 1970"
        )
    return deliver_at_ms, None if ttl_ms is None else expiry(ttl_ms, deliver_at_ms, now_ms)


def checked_priority(priority: int | None, where: str) -> int:
    """The priority, 0 where none is given: null is none, as it is for every other option."""
    if priority is None:
        return 0
    if not 0 <= priority <= wire.PRIORITY_MAX:
        raise InvalidRequest(f"the priority of {where} is {priority}, but must be 0 to {wire.PRIORITY_MAX}")
    return priority


def of_headers(environ: dict[str, Any], now_ms: int) -> Options:
    """The options of a message that is the body of its request. Raises InvalidRequest."""
    delay = environ.get("HTTP_PORTALMQ_DELAY_MS")
    deliver_at = environ.get("HTTP_PORTALMQ_DELIVER_AT")
    ttl = environ.get("HTTP_PORTALMQ_TTL_MS")
    priority = environ.get("HTTP_PORTALMQ_PRIORITY")
    if delay is None and deliver_at is None and ttl is None and priority is None:
        return _PLAIN
    delay_ms = None if delay is None else whole_number(delay, wire.HEADER_DELAY_MS)
    deliver_at_ms = None if deliver_at is None else _moment_ms(deliver_at)
    ttl_ms = None if ttl is None else whole_number(ttl, wire.HEADER_TTL_MS, least=1)
    number = 0 if priority is None else whole_number(priority, wire.HEADER_PRIORITY)
    return Options(
        *moments(delay_ms, deliver_at_ms, ttl_ms, now_ms, "the request"),
        checked_priority(number, "the request"),
        (delay_ms, deliver_at_ms, ttl_ms, number),
    )


def _moment_ms(text: str) -> int:
    """PortalMQ-Deliver-At: Unix milliseconds, or a time as RFC 3339 writes it."""
    text = text.strip()
    if text.lstrip("-").isdigit():
        return whole_number(text, wire.HEADER_DELIVER_AT)
    return max(0, instant_ms(text, wire.HEADER_DELIVER_AT))
