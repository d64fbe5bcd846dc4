"""A program written by a reader of the text of MiniQ over HTTP alone.

    python miniq_http.py URLS SECRET post NAME COUNT
    python miniq_http.py URLS SECRET get [CRASH_AFTER]

The text: "make a POST request to /message with your message in the request body and the Authorization header set to the
secret"; "users hit the /confirm endpoint once a message has been consumed so that it can be removed from the queue". A
poster prints accepted messages, `sent <message> <partition> <begun at> <answered at>`; a reader prints
`got <key> <message> <asked at> <shown at>` and, once it is confirmed, `confirmed <key> <message> <at>`.
"""

from __future__ import annotations

import os
import sys
import time

from anywhere import Anywhere, numbered


def post(servers: Anywhere, name: str, count: int) -> None:
    for message in numbered(name, count):
        began_at = time.monotonic()
        status, _ = servers.call("POST", "/message", {"Message": message})
        assert status == 200, status
        print("sent", message, 0, began_at, time.monotonic(), flush=True)


def get(servers: Anywhere, crash_after: int) -> None:
    taken = 0
    while True:
        asked_at = time.monotonic()
        status, shown = servers.call("GET", "/message")
        if status == 404:
            time.sleep(0.02)
            continue
        assert status == 200, status
        print("got", shown["key"], shown["message"], asked_at, time.monotonic(), flush=True)
        taken += 1
        if taken == crash_after:
            os._exit(9)
        status, _ = servers.call("POST", "/confirm", {"Key": shown["key"]})
        assert status == 200, status
        print("confirmed", shown["key"], shown["message"], time.monotonic(), flush=True)


if __name__ == "__main__":
    urls, secret, role, *rest = sys.argv[1:]
    servers = Anywhere(urls, Authorization=secret)
    if role == "post":
        post(servers, rest[0], int(rest[1]))
    else:
        get(servers, int(rest[0]) if rest else 0)
