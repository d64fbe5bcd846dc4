"""A program written by a reader of the design notes: publishMessage and subscribeMessage.

    PORTALMQ_URL=... python design_notes.py publish TOPIC NAME COUNT
    PORTALMQ_URL=... python design_notes.py subscribe TOPIC GROUP [CRASH_AFTER]

A publisher prints the published messages; a subscriber the processed ones.
"""

from __future__ import annotations

import os
import sys

from anywhere import numbered

from portalmq import publishMessage, subscribeMessage


def publish(topic: str, name: str, count: int) -> None:
    for message in numbered(name, count):
        publishMessage(topic, message)
        print(message, flush=True)


def subscribe(topic: str, group: str, crash_after: int) -> None:
    for taken, message in enumerate(subscribeMessage(topic, group=group, max_messages=10, visibility_timeout_s=3), 1):
        if taken == crash_after:
            os._exit(9)
        print(message.text, flush=True)


if __name__ == "__main__":
    role, topic, name, *rest = sys.argv[1:]
    if role == "publish":
        publish(topic, name, int(rest[0]))
    else:
        subscribe(topic, name, int(rest[0]) if rest else 0)
