"""Calls by plain HTTP, which repeat nothing by themselves. For one thread."""

from __future__ import annotations

import http.client
import json
import random
from typing import Any
from urllib.parse import urlsplit

from chaos.history import OK, REFUSED, UNKNOWN

CONNECT_WITHIN_S = 2.0


class NotSent(Exception):
    """No broker has the request."""


class NoAnswer(Exception):
    """A broker may have the request."""


def outcome_of(status: int, got: dict[str, Any]) -> str:
    if status < 300:
        return OK
    return REFUSED if got.get("outcome") == "not_applied" else UNKNOWN


class Http:
    """`asked` is the number of the broker that was asked last."""

    def __init__(self, urls: list[str], chance: random.Random) -> None:
        self._urls = urls
        self._chance = chance
        self.asked = 0

    def call(
        self,
        method: str,
        path: str,
        body: bytes | dict[str, Any] | None = None,
        headers: dict[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> tuple[int, dict[str, Any]]:
        """Ask one broker, on a connection of its own. Raises NotSent and NoAnswer."""
        url = self._chance.choice(self._urls)
        address, self.asked = urlsplit(url), self._urls.index(url) + 1
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=CONNECT_WITHIN_S)
        try:
            connection.connect()
        except OSError as error:
            connection.close()
            raise NotSent(repr(error)) from None
        try:
            connection.sock.settimeout(timeout_s or self._chance.choice((2.0, 5.0, 15.0)))
            raw = json.dumps(body).encode() if isinstance(body, dict) else body
            connection.request(method, path, raw, headers or {"Content-Type": "application/json"})
            answer = connection.getresponse()
            content = answer.read()
            return answer.status, json.loads(content) if content else {}
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise NoAnswer(repr(error)) from None
        finally:
            connection.close()
