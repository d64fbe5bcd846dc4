"""A `celery beat` in a process of its own: URL of the broker, prefix of its topics, interval of its one entry."""

from __future__ import annotations

import sys

from celery import Celery

import portalmq.kombu as registered

__all__ = ["registered"]


def main(broker: str, prefix: str, every_s: str) -> None:
    app = Celery("beats", broker=broker)
    app.conf.update(
        broker_transport_options={"topic_prefix": prefix},
        beat_schedule={"an entry": {"task": "note", "schedule": float(every_s), "args": (1,)}},
    )
    app.Beat(scheduler_cls="portalmq.kombu:Scheduler", loglevel="INFO", quiet=True).run()


if __name__ == "__main__":
    main(*sys.argv[1:])
