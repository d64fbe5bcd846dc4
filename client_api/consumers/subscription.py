"""What a consumer subscribes to, and how."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

from portalmq import wire
from portalmq.stream_wire import SESSION_TIMEOUT_MS_MAX

Delivery = Literal["at_least_once", "at_most_once", "exactly_once"]
Mode = Literal["queue", "stream"]

VISIBILITY_TIMEOUT_S = 30.0
HANDLING_S = 300.0


@dataclass(frozen=True, slots=True)
class Subscription:
    """The arguments of a consumer that its parts share. `settings` are given to the group before it is used."""

    group: str
    topics: tuple[str, ...]
    settings: dict[str, object]
    delivery: Delivery
    manual_ack: bool
    max_messages: int
    visibility_timeout_s: float
    member_id: str | None
    session_timeout_s: float
    prefetch: bool = True
    mode: Mode = "queue"
    max_handling_s: float = 0.0

    def shown(self, kind: str, urls: list[str], *, is_closed: bool) -> str:
        """Return the repr of its consumer."""
        topics, state = ", ".join(self.topics), ": closed" if is_closed else ""
        return f"<{kind} of {topics} in {self.mode} group {self.group!r} at {', '.join(urls)}{state}>"

    def at_most(self, max_messages: int | None) -> int:
        """Return the most messages of one poll. Raises ValueError."""
        if max_messages is not None and not 1 <= max_messages <= wire.RECEIVE_MESSAGES_MAX:
            raise ValueError(f"max_messages must be 1 to {wire.RECEIVE_MESSAGES_MAX}")
        return max_messages or self.max_messages


def subscription_of(
    topics: tuple[str, ...],
    *,
    group: str,
    mode: Mode,
    delivery: Delivery,
    max_messages: int,
    visibility_timeout_s: float,
    start: str | datetime,
    manual_ack: bool,
    prefetch: bool,
    member_id: str | None,
    session_timeout_s: float,
    max_handling_s: float | None,
) -> Subscription:
    """Return the arguments of a consumer, checked. Raises ValueError."""
    if not topics:
        raise ValueError("name at least one topic")
    if mode not in ("queue", "stream"):
        raise ValueError(f"mode={mode!r}: use 'queue' or 'stream'")
    if delivery not in ("at_least_once", "at_most_once", "exactly_once"):
        raise ValueError(f"delivery={delivery!r}: use 'at_least_once', 'at_most_once' or 'exactly_once'")
    if not 0.5 <= session_timeout_s <= SESSION_TIMEOUT_MS_MAX / 1000:
        raise ValueError(f"session_timeout_s must be 0.5 to {SESSION_TIMEOUT_MS_MAX // 1000}")
    if member_id is not None and mode != "stream":
        raise ValueError("member_id is for mode='stream': in a queue group all consumers are alike")
    if not 1 <= max_messages <= wire.RECEIVE_MESSAGES_MAX:
        raise ValueError(f"max_messages must be 1 to {wire.RECEIVE_MESSAGES_MAX}")
    if max_handling_s is None:
        max_handling_s = HANDLING_S if visibility_timeout_s == VISIBILITY_TIMEOUT_S else 0
    if not 0 <= max_handling_s < math.inf:
        raise ValueError("max_handling_s must be a number of seconds, or 0")
    if not 1 <= visibility_timeout_s * 1000 <= wire.VISIBILITY_TIMEOUT_MS_MAX:
        raise ValueError(f"visibility_timeout_s must be 0.001 to {wire.VISIBILITY_TIMEOUT_MS_MAX // 1000}")
    names = tuple(wire.check_name(topic, "topic") for topic in topics)
    return Subscription(
        group=wire.check_name(group, "group"),
        topics=names,
        settings=_settings_of(start),
        delivery=delivery,
        manual_ack=manual_ack,
        prefetch=prefetch,
        max_messages=max_messages,
        visibility_timeout_s=visibility_timeout_s,
        member_id=None if member_id is None else wire.check_name(member_id, "member"),
        session_timeout_s=session_timeout_s,
        mode=mode,
        max_handling_s=0.0 if manual_ack else max_handling_s,
    )


def only_for_streams(what: str) -> ValueError:
    return ValueError(f"{what} is for mode='stream'")


def _settings_of(start: str | datetime) -> dict[str, object]:
    """Return the settings of a group that begins there."""
    if start not in ("earliest", "latest") and not isinstance(start, datetime):
        raise ValueError(f"start={start!r}: use 'earliest', 'latest' or a datetime")
    if start == "earliest":
        return {}
    return {"start": start if isinstance(start, str) else {"at": unix_ms(start)}}


def unix_ms(moment: datetime) -> int:
    """Return a time for brokers. Raises ValueError if it names no time zone."""
    if moment.tzinfo is None:
        raise ValueError(f"{moment!r} names no time zone: write datetime.now(timezone.utc), for instance")
    return round(moment.timestamp() * 1000)


def only_for_queues(what: str) -> ValueError:
    return ValueError(
        f"{what} is for mode='queue': a stream group has no leases, it continues from its committed offsets"
    )


def seek_position(to: Any) -> str | dict[str, int]:
    """Return the position of a seek in its wire form: of "earliest" or "latest", an offset, or a time."""
    if isinstance(to, datetime):
        return {"at": unix_ms(to)}
    return {"offset": to} if isinstance(to, int) else str(to)
