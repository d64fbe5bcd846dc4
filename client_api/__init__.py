"""PortalMQ for Python: send, receive and administer over HTTP.

    from portalmq import Producer, Consumer, Admin

Names other than errors are loaded at their first use, so that `import portalmq` and the command line start quickly.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from portalmq.errors import Backpressure as Backpressure
from portalmq.errors import Fenced as Fenced
from portalmq.errors import Forbidden as Forbidden
from portalmq.errors import GroupModeMismatch as GroupModeMismatch
from portalmq.errors import GroupNotFound as GroupNotFound
from portalmq.errors import IdempotencyKeyReused as IdempotencyKeyReused
from portalmq.errors import IllegalGeneration as IllegalGeneration
from portalmq.errors import InvalidRequest as InvalidRequest
from portalmq.errors import KeyOrder as KeyOrder
from portalmq.errors import LeaseLost as LeaseLost
from portalmq.errors import LockHeld as LockHeld
from portalmq.errors import LockNotFound as LockNotFound
from portalmq.errors import MessageNotFound as MessageNotFound
from portalmq.errors import MessageTooLarge as MessageTooLarge
from portalmq.errors import MethodNotAllowed as MethodNotAllowed
from portalmq.errors import NotEnoughReplicas as NotEnoughReplicas
from portalmq.errors import NotFound as NotFound
from portalmq.errors import NotLeader as NotLeader
from portalmq.errors import OffsetMoved as OffsetMoved
from portalmq.errors import OffsetOutOfRange as OffsetOutOfRange
from portalmq.errors import OutOfOrderSequence as OutOfOrderSequence
from portalmq.errors import PartitionNotFound as PartitionNotFound
from portalmq.errors import PortalMQError as PortalMQError
from portalmq.errors import QueryLimit as QueryLimit
from portalmq.errors import RequestInProgress as RequestInProgress
from portalmq.errors import ScheduleNotFound as ScheduleNotFound
from portalmq.errors import StaleReceipt as StaleReceipt
from portalmq.errors import StorageFull as StorageFull
from portalmq.errors import TopicExists as TopicExists
from portalmq.errors import TopicNotFound as TopicNotFound
from portalmq.errors import Unauthorized as Unauthorized
from portalmq.errors import Unavailable as Unavailable
from portalmq.errors import UnsupportedMediaType as UnsupportedMediaType

if TYPE_CHECKING:
    from portalmq.admin import Admin as Admin
    from portalmq.aio import AsyncConsumer as AsyncConsumer
    from portalmq.aio import AsyncProducer as AsyncProducer
    from portalmq.consumer import Consumer as Consumer
    from portalmq.lock import Lock as Lock
    from portalmq.message import Message as Message
    from portalmq.message import RecordMetadata as RecordMetadata
    from portalmq.producer import Producer as Producer
    from portalmq.seeds import PortalClient as PortalClient
    from portalmq.seeds import PortalConsumer as PortalConsumer
    from portalmq.seeds import PortalProducer as PortalProducer
    from portalmq.seeds import publishMessage as publishMessage
    from portalmq.seeds import subscribeMessage as subscribeMessage
    from portalmq.worker.app import App as App
    from portalmq.worker.outcomes import Reject as Reject
    from portalmq.worker.outcomes import Retry as Retry

_HOMES = {
    "Admin": "portalmq.admin",
    "App": "portalmq.worker.app",
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
    "Reject": "portalmq.worker.outcomes",
    "Retry": "portalmq.worker.outcomes",
    "publishMessage": "portalmq.seeds",
    "subscribeMessage": "portalmq.seeds",
}

_NAMES = sorted([*_HOMES, *(name for name, value in globals().items() if hasattr(value, "retryable_by_default"))])

if not TYPE_CHECKING:  # type checkers read the imports above
    __all__ = _NAMES


def __getattr__(name: str) -> Any:
    if name == "__version__":
        # At its first use: it takes longer to load than all else that a client imports.
        value: Any = import_module("importlib.metadata").version("portalmq")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module 'portalmq' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*_NAMES, "__version__"]
