"""HTTP as an old program uses it: urllib, and a list of servers of which one may be down."""

from __future__ import annotations

import http.client
import itertools
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

TIMEOUT_S = 5
PAUSE_S = 0.05
GIVE_UP_S = 120


def numbered(name: str, count: int) -> Iterator[str]:
    """The messages of a sender. It pauses half way until it reads a line from standard input, and before the last one
    until standard input is closed: the test acts during the sending."""
    for number in range(count):
        if number == count // 2:
            sys.stdin.readline()
        if number == count - 1:
            sys.stdin.read()
        yield f"{name}-{number}"


class Anywhere:
    """Asks one server, and the next one when that server is down or cannot answer now."""

    def __init__(self, urls: str, **headers: str) -> None:
        self._urls = itertools.cycle(urls.split(","))
        self._url = next(self._urls)
        self._headers = headers

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of the answer. Repeat until there is one; a refusal (4xx) is an answer."""
        deadline = time.monotonic() + GIVE_UP_S
        while True:
            try:
                return self.once(method, path, body)
            except urllib.error.HTTPError as error:
                if error.code < 500 and error.code != 429:
                    return error.code, None
            except (OSError, http.client.HTTPException):
                pass  # refused, silent, or cut off, possibly during an answer
            except ValueError as fault:
                raise SystemExit(f"{method} {path} was answered by something that is no JSON: {fault}") from fault
            if time.monotonic() > deadline:
                raise SystemExit(f"no server has answered {method} {path} for {GIVE_UP_S} s")
            self._url = next(self._urls)
            time.sleep(PAUSE_S)

    def once(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, self._headers, method=method)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            said = answer.read()
            return answer.status, json.loads(said) if said else None
