"""What a consumer subscribes to, and how; Consumer has checked it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Delivery = Literal["at_least_once", "at_most_once", "exactly_once"]


@dataclass(frozen=True, slots=True)
class Subscription:
    """The arguments of a Consumer that its parts share. `settings` are given to the group before it is used."""

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
