"""The JSON value of a message that carries a kombu message, and the delivery options that its headers ask for."""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import datetime
from typing import Any, NamedTuple

from kombu.utils.json import dumps, loads

from portalmq import wire


class SendOptions(NamedTuple):
    """Options of Producer.send."""

    deliver_at: float | None
    ttl_s: float | None
    priority: int


def encode(message: Mapping[str, Any], exchange: str, routing_key: str) -> bytes:
    """Return the value of a message. `exchange` and `routing_key` say where it was published. Properties that JSON
    cannot carry are left out, as AMQP leaves out those that it does not know. Raises TypeError for such a header."""
    info = {**message["properties"].get("delivery_info", {}), "exchange": exchange, "routing_key": routing_key}
    properties = {**message["properties"], "delivery_info": info}
    try:
        text: str = dumps({**message, "properties": properties})
    except TypeError:
        text = dumps({**message, "properties": {name: each for name, each in properties.items() if _is_json(each)}})
    return text.encode()


def _is_json(value: object) -> bool:
    try:
        dumps(value)
    except TypeError:
        return False
    return True


def decode(value: bytes, delivery_tag: int, *, redelivered: bool) -> dict[str, Any]:
    """Return the kombu message of a value; one that another program sent is its body. Raises nothing."""
    message = _parsed(value)
    properties = message["properties"]
    properties["delivery_tag"] = delivery_tag
    info = properties.setdefault("delivery_info", {})
    if redelivered:
        info["redelivered"] = True
    return message


def _parsed(value: bytes) -> dict[str, Any]:
    try:
        message = loads(value)
    except ValueError:
        message = None
    if isinstance(message, dict) and isinstance(message.get("properties"), dict) and "body" in message:
        return message
    kind, encoding = ("application/json", "utf-8") if message is not None else ("application/data", "binary")
    body: str | bytes = value.decode() if message is not None else value
    return {"body": body, "content-type": kind, "content-encoding": encoding, "headers": {}, "properties": {}}


def send_options(message: Mapping[str, Any], now: float | None = None) -> SendOptions:
    """Return the options for a kombu message.

    `deliver_at` is Celery's header `eta`. The broker holds the message until then, whatever the length, and a worker
    that gets it runs it at once. An eta without a time zone is left to the worker, which knows its own. The property
    `expiration` (ms, as in AMQP) counts from now, and PortalMQ's time to live from `deliver_at`.
    """
    now = time.time() if now is None else now
    properties = message["properties"]
    deliver_at = _moment((message.get("headers") or {}).get("eta"))
    if deliver_at is not None and deliver_at <= now:
        deliver_at = None
    ttl_s: float | None = None
    if (expiration := properties.get("expiration")) not in (None, ""):
        ttl_s = max(0.001, float(expiration) / 1000 - ((deliver_at or now) - now))
    try:
        priority = min(max(int(properties.get("priority") or 0), 0), wire.PRIORITY_MAX)
    except (TypeError, ValueError):
        priority = 0
    return SendOptions(deliver_at, ttl_s, priority)


def _moment(eta: object) -> float | None:
    if not isinstance(eta, str):
        return None
    try:
        moment = datetime.fromisoformat(eta)
    except ValueError:
        return None
    return None if moment.tzinfo is None else moment.timestamp()
