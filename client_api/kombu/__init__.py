"""Celery and kombu on PortalMQ.

Importing this module registers the URL schemes `portalmq` and `portalmqs` with kombu:

    import portalmq.kombu
    app = Celery("shop", broker="portalmq://localhost:5000")

`broker_transport = "portalmq.kombu:Transport"` works without the import. docs/CELERY.md says what a queue, an exchange
and a transport option become.

    publish --> channel --> bindings (which queues) --> Producer --> one topic a queue, one topic an exchange
    readers (a thread a queue) --receive, with acks--> inbox --pipe--> kombu's event loop --> callbacks
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

try:
    from kombu.transport import TRANSPORT_ALIASES
except ImportError as error:
    raise ImportError("portalmq.kombu needs kombu: pip install 'portalmq[celery]'") from error

from portalmq.kombu.transport import TlsTransport as TlsTransport
from portalmq.kombu.transport import Transport as Transport

TRANSPORT_ALIASES["portalmq"] = "portalmq.kombu.transport:Transport"
TRANSPORT_ALIASES["portalmqs"] = "portalmq.kombu.transport:TlsTransport"


def __getattr__(name: str) -> Any:
    """`Scheduler` needs Celery, the transport only kombu."""
    if name == "Scheduler":
        return import_module("portalmq.kombu.scheduler").Scheduler
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
