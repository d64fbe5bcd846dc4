"""PortalMQ for Python: send, receive and administer over HTTP.

    from portalmq import Producer, Consumer, Admin

Names are loaded at their first use, so that `import portalmq` and the command line start quickly.
"""

from __future__ import annotations

from importlib import import_module, metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portalmq.admin import Admin
    from portalmq.aio import AsyncConsumer, AsyncProducer
    from portalmq.consumer import Consumer
    from portalmq.errors import (
        Backpressure,
        Fenced,
        Forbidden,
        GroupModeMismatch,
        GroupNotFound,
        IdempotencyKeyReused,
        IllegalGeneration,
        InvalidRequest,
        KeyOrder,
        LeaseLost,
        LockHeld,
        LockNotFound,
        MessageNotFound,
        MessageTooLarge,
        MethodNotAllowed,
        NotEnoughReplicas,
        NotFound,
        NotLeader,
        OffsetMoved,
        OffsetOutOfRange,
        OutOfOrderSequence,
        PartitionNotFound,
        PortalMQError,
        RequestInProgress,
        StaleReceipt,
        StorageFull,
        TopicExists,
        TopicNotFound,
        Unauthorized,
        Unavailable,
        UnsupportedMediaType,
    )
    from portalmq.lock import Lock
    from portalmq.message import Message, RecordMetadata
    from portalmq.producer import Producer
    from portalmq.seeds import PortalClient, PortalConsumer, PortalProducer, publishMessage, subscribeMessage

__all__ = [
    "Admin",
    "AsyncConsumer",
    "AsyncProducer",
    "Backpressure",
    "Consumer",
    "Fenced",
    "Forbidden",
    "GroupModeMismatch",
    "GroupNotFound",
    "IdempotencyKeyReused",
    "IllegalGeneration",
    "InvalidRequest",
    "KeyOrder",
    "LeaseLost",
    "Lock",
    "LockHeld",
    "LockNotFound",
    "Message",
    "MessageNotFound",
    "MessageTooLarge",
    "MethodNotAllowed",
    "NotEnoughReplicas",
    "NotFound",
    "NotLeader",
    "OffsetMoved",
    "OffsetOutOfRange",
    "OutOfOrderSequence",
    "PartitionNotFound",
    "PortalClient",
    "PortalConsumer",
    "PortalMQError",
    "PortalProducer",
    "Producer",
    "RecordMetadata",
    "RequestInProgress",
    "StaleReceipt",
    "StorageFull",
    "TopicExists",
    "TopicNotFound",
    "Unauthorized",
    "Unavailable",
    "UnsupportedMediaType",
    "publishMessage",
    "subscribeMessage",
]

_HOMES = {
    "Admin": "portalmq.admin",
    "AsyncConsumer": "portalmq.aio",
    "AsyncProducer": "portalmq.aio",
    "Consumer": "portalmq.consumer",
    "Lock": "portalmq.lock",
    "Message": "portalmq.message",
    "PortalClient": "portalmq.seeds",
    "PortalConsumer": "portalmq.seeds",
    "PortalProducer": "portalmq.seeds",
    "Producer": "portalmq.producer",
    "RecordMetadata": "portalmq.message",
    "publishMessage": "portalmq.seeds",
    "subscribeMessage": "portalmq.seeds",
}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = metadata.version("portalmq")
    elif name in __all__:
        value = getattr(import_module(_HOMES.get(name, "portalmq.errors")), name)
    else:
        raise AttributeError(f"module 'portalmq' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
