"""MiniQ over ZeroMQ: three ports that speak REQ/REP in JSON, in front of a cluster.

    5557 commands    {"type", "payload": {"queue", ...}}    CREATE_QUEUE, QUEUE_SIZE, DELETE_MSG, PRODUCE_MSG, CONSUME
    5555 producers   {"queue", "message"}                   {"status": "ok", "id", ...} once it is stored
    5556 consumers   {"queue"}                              {"status": "ok", "id", "message", ...}, null when empty

    protocol   frames in, frames out: pure             desk     who asks what of which queue, and its workers
    access     who may ask                             cluster  the brokers, as this server uses them
    server     the sockets                             service  MiniQService, for programs that call
    command    `portalmq zeromq`

The server keeps nothing that matters: queues, messages and leases are the brokers'. It may be killed, started again, or
run several times over one cluster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portalmq.broker.protocols.zeromq.service import MiniQMessage, MiniQService

__all__ = ["MiniQMessage", "MiniQService"]


def __getattr__(name: str) -> Any:
    """pyzmq is loaded when it is needed: the command line shows its help without."""
    if name not in __all__:
        raise AttributeError(f"module 'portalmq.zeromq' has no attribute {name!r}")
    from portalmq.broker.protocols.zeromq import service

    return getattr(service, name)
