"""A program written by a reader of Portal MQ's text alone.

    python portal_mq.py URLS produce TOPIC NAME COUNT
    python portal_mq.py URLS consume TOPIC NAME

The text: "producer keeps on retrying to send the message in case of network failure until it receives an
acknowledgement from broker"; "broker first sends the message with its sequence number, only when consumer receives the
message it tells the broker to consume". A producer prints the acknowledged messages; a consumer prints a
received message, `got <offset> <message>`, then consumes it and prints the result, `consumed <offset> <status>`.
"""

from __future__ import annotations

import sys
import time

from anywhere import Anywhere, numbered


def produce(servers: Anywhere, topic: str, name: str, count: int) -> None:
    assert servers.call("POST", "/producer/create", {"id": name})[0] == 200
    if servers.call("POST", "/topic/exists", {"name": topic})[0] != 200:
        assert servers.call("POST", "/topic/create", {"name": topic})[0] == 200
    for message in numbered(name, count):
        status, _ = servers.call("POST", "/publish", {"name": topic, "message": message, "id": name})
        assert status == 200, status
        print(message, flush=True)
    assert servers.call("POST", "/producer/delete", {"id": name})[0] in (200, 404)


def consume(servers: Anywhere, topic: str, name: str) -> None:
    assert servers.call("POST", "/consumer/create", {"id": name})[0] == 200
    while True:
        status, shown = servers.call("POST", "/read", {"name": topic, "id": name})
        if status != 200:
            time.sleep(0.02)  # "consumers automatically sleep when there is no message in the queue"
            continue
        print("got", shown["offset"], shown["message"], flush=True)
        status, _ = servers.call("POST", "/consume", {"name": topic, "offset": shown["offset"]})
        print("consumed", shown["offset"], status, flush=True)


if __name__ == "__main__":
    urls, role, *rest = sys.argv[1:]
    if role == "produce":
        produce(Anywhere(urls), rest[0], rest[1], int(rest[2]))
    else:
        consume(Anywhere(urls), *rest)
