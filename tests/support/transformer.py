"""A program that reads messages, makes one output of each, and commits both at once. It runs until it is killed.

python transformer.py URLS TOPIC OUT GROUP MODE      URLS separated by commas
"""

from __future__ import annotations

import sys
from itertools import groupby

from portalmq import Consumer, Message, PortalMQError

BATCH = 100
LEASE_S = 4.0


def transformed(text: str) -> str:
    return f"<{text}>"


def transform(consumer: Consumer, messages: list[Message], out: str) -> None:
    """Commit the messages of each partition with their outputs."""
    ordered = sorted(messages, key=lambda message: (message.partition, message.offset))
    for _, own in groupby(ordered, key=lambda message: message.partition):
        batch = list(own)
        outputs = [{"topic": out, "value": transformed(each.text), "key": each.key} for each in batch]
        try:
            consumer.commit_with(batch, outputs)
        except (
            PortalMQError
        ) as error:  # another member owns them, or the outcome is unknown: unfinished ones are delivered again
            print(f"not committed: {error.code}: {error}", file=sys.stderr, flush=True)


def main(urls: str, topic: str, out: str, group: str, mode: str) -> None:
    with Consumer(
        topic,
        group=group,
        bootstrap=urls.split(","),
        mode=mode,  # type: ignore[arg-type]
        max_messages=BATCH,
        visibility_timeout_s=LEASE_S,
        session_timeout_s=LEASE_S,
        manual_ack=True,
    ) as consumer:
        while True:
            try:
                transform(consumer, consumer.poll(timeout_s=5), out)
            except PortalMQError as error:
                print(f"no messages: {error.code}: {error}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
