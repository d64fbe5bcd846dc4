"""Delivery time, expiry and priority of a message, from the options of its producer.

    delay_ms | deliver_at_ms   -> deliver_at_ms    by the clock of the broker that takes the request
    ttl_ms                     -> expires_at_ms    counted from the time at which the message can be delivered

A time in the past means immediate delivery, and is stored as sent. A delay of 0 is no delay, so it costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from portalmq import wire
from portalmq.broker.api.query import instant_ms, whole_number
from portalmq.broker.messages.produce import expiry
from portalmq.errors import InvalidRequest

# A later time is nearly always a wrong unit: microseconds for milliseconds.
HORIZON_YEARS = 10
HORIZON_MS = HORIZON_YEARS * 366 * wire.DAY_MS


@dataclass(frozen=True, slots=True)
class Options:
    """The options of one message. `as_sent`: the options as the client sent them, empty without any."""

    deliver_at_ms: int | None
    expires_at_ms: int | None
    priority: int
    as_sent: tuple[int | str | None, ...]


_PLAIN = Options(None, None, 0, ())


def moments(
    delay_ms: int | None, deliver_at_ms: int | None, ttl_ms: int | None, now_ms: int, where: str
) -> tuple[int | None, int | None]:
    """Return (deliver_at_ms, expires_at_ms) of a message accepted at `now_ms`.

    Raises InvalidRequest, with `where` as the message's name, for a delay and a time together, and for a time too far
    ahead.
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
    """Return the priority; 0 when it is missing or null. Raises InvalidRequest."""
    if priority is None:
        return 0
    if not 0 <= priority <= wire.PRIORITY_MAX:
        raise InvalidRequest(f"the priority of {where} is {priority}, but must be 0 to {wire.PRIORITY_MAX}")
    return priority


def of_headers(headers: Mapping[str, str], now_ms: int) -> Options:
    """Return the options of a single message, from the headers of its request. Raises InvalidRequest."""
    delay = headers.get("portalmq-delay-ms")
    deliver_at = headers.get("portalmq-deliver-at")
    ttl = headers.get("portalmq-ttl-ms")
    priority = headers.get("portalmq-priority")
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
    """Parse PortalMQ-Deliver-At: Unix milliseconds, or an RFC 3339 time."""
    text = text.strip()
    if text.lstrip("-").isdigit():
        return whole_number(text, wire.HEADER_DELIVER_AT)
    return max(0, instant_ms(text, wire.HEADER_DELIVER_AT))
