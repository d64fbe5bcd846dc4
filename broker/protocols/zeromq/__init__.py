"""MiniQ over ZeroMQ: three ports with REQ/REP in JSON, in front of a cluster.

    5557 commands    {"type", "payload": {"queue", ...}}    CREATE_QUEUE, QUEUE_SIZE, DELETE_MSG, PRODUCE_MSG, CONSUME
    5555 producers   {"queue", "message"}                   {"status": "ok", "id", ...} once it is stored
    5556 consumers   {"queue"}                              {"status": "ok", "id", "message", ...}, null when empty

    protocol   decodes and encodes frames; pure        dispatcher  requests by queue, and the worker threads
    server     the sockets                             cluster     the brokers' HTTP API, as this server uses it
    command    `portalmq zeromq`                       service     MiniQService, the client for programs
    curve      encryption                              flood       protection against endless messages

The server keeps no state: queues, messages and leases are the brokers'. It may be killed, restarted, or run several
times in front of one cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portalmq.broker.protocols.zeromq.service import MiniQMessage, MiniQService

__all__ = ["MiniQMessage", "MiniQService"]


def __getattr__(name: str) -> Any:
    """Load pyzmq on first use: the help of the command line works without it."""
    if name not in __all__:
        raise AttributeError(f"module 'portalmq.zeromq' has no attribute {name!r}")
    from portalmq.broker.protocols.zeromq import service

    return getattr(service, name)
