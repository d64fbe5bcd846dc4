"""A program written by a reader of WonderQ's text alone.

    python wonderq.py URLS publish NAME COUNT
    python wonderq.py URLS consume CID LIMIT [CRASH_AFTER]

The text: "consumer retrieves messages from the queue depending on the limit", "sets consumerId ensuring message is
processed by only one consumer at any given time", "after processing messages get deleted", "if message is not processed
within a defined time, message is unlocked". A publisher prints the messages with an id,
`sent <message> <partition> <begun at> <answered at>`; a consumer prints
`got <id> <message> <asked at> <shown at>` and `deleted <id> <true or false> <at>`.
"""

from __future__ import annotations

import os
import sys
import time

from anywhere import Anywhere, numbered


def publish(servers: Anywhere, name: str, count: int) -> None:
    for message in numbered(name, count):
        began_at = time.monotonic()
        status, told = servers.call("POST", "/v1/publish", {"message": message})
        assert status == 200, status
        assert isinstance(told["id"], int)
        print("sent", message, told["id"] >> 40, began_at, time.monotonic(), flush=True)


def consume(servers: Anywhere, cid: int, limit: int, crash_after: int) -> None:
    taken = 0
    while True:
        asked_at = time.monotonic()
        status, told = servers.call("GET", f"/v1/consumer?cid={cid}&limit={limit}")
        assert status == 200, status
        shown_at = time.monotonic()
        for each in told["messages"]:
            print("got", each["id"], each["message"], asked_at, shown_at, flush=True)
        for each in told["messages"]:
            taken += 1
            if taken == crash_after:
                os._exit(9)
            status, deleted = servers.call("DELETE", f"/v1/consumer?cid={cid}&id={each['id']}")
            assert status == 200, status
            print("deleted", each["id"], str(deleted).lower(), time.monotonic(), flush=True)
        if not told["messages"]:
            time.sleep(0.02)


if __name__ == "__main__":
    urls, role, *rest = sys.argv[1:]
    if role == "publish":
        publish(Anywhere(urls), rest[0], int(rest[1]))
    else:
        consume(Anywhere(urls), int(rest[0]), int(rest[1]), int(rest[2]) if rest[2:] else 0)
