"""App: the handlers of a program, registered by a decorator, and where their broker is.

    app = App("http://localhost:5000")

    @app.handler("orders", group="billing", concurrency=8, max_deliveries=5, retry_backoff_s=(1, 10, 60), timeout_s=300)
    def bill(order: Order) -> None: ...

`portalmq worker module:app` runs it. The decorated function stays a plain function, so a test can call it.
"""

from __future__ import annotations

import inspect
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec

from portalmq import wire
from portalmq.admin import Admin
from portalmq.consumer import Consumer
from portalmq.errors import InvalidRequest
from portalmq.producer import Producer
from portalmq.transport.transport import Bootstrap
from portalmq.worker.decoding import arguments_of
from portalmq.worker.handler import CONCURRENCY, CONCURRENCY_MAX, Handler
from portalmq.worker.worker import Worker

GRACE_S = 30.0
VISIBILITY_TIMEOUT_S_MIN = 1.0

Function = TypeVar("Function", bound=Callable[..., Any])


class App:
    """The handlers of a program."""

    def __init__(self, bootstrap: Bootstrap = None, **connection: Any) -> None:
        """`bootstrap` is that of Producer, and so are the options in `connection`: `token`, `tls_ca`,
        `tls_client_cert`, `tls_client_key` and `allow_advertised`."""
        unknown = connection.keys() - {"token", "tls_ca", "tls_client_cert", "tls_client_key", "allow_advertised"}
        if unknown:
            raise TypeError(f"App takes no {', '.join(sorted(unknown))}")
        self._bootstrap = bootstrap
        self._connection = connection
        self._handlers: list[Handler] = []
        self._producer: Producer | None = None
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<App with {len(self._handlers)} handlers>"

    @property
    def handlers(self) -> tuple[Handler, ...]:
        """The registered handlers, in order."""
        return tuple(self._handlers)

    def handler(
        self,
        *topics: str,
        group: str = "default",
        concurrency: int | None = None,
        max_deliveries: int | None = None,
        retry_backoff_s: float | Sequence[float] | None = None,
        timeout_s: float | None = 300,
        visibility_timeout_s: float = 30,
        **settings: Any,
    ) -> Callable[[Function], Function]:
        """Register a function, `def` or `async def`, for the messages of `topics` in a queue group.

        Its first parameter is the message; annotated with another type, the payload decoded from JSON (a dataclass, a
        msgspec Struct, a pydantic model, …), or its `bytes` or `str`. A second parameter is the message. A payload that
        is not of the type becomes a dead letter at once.

        Returning acks the message. Raising nacks it, with the exception as the reason; Reject makes a dead letter of
        it, Retry sets the delay. `concurrency`: how many messages a process handles at a time (default: that of the
        worker, `-c`). After `timeout_s` a handler is interrupted, and its message nacked; None is never. A lease lasts
        `visibility_timeout_s`, and is extended while the handler runs: so long after a crash the message comes again.

        `max_deliveries`, `retry_backoff_s` and `settings` (those of docs/SETTINGS.md, such as `ordering="key"`,
        `max_in_flight=4` or `rate_per_s=10`) are given to the group when the worker starts; the others stay as they
        are. Raises TypeError or ValueError for what cannot be run.
        """
        if not topics or not all(isinstance(topic, str) for topic in topics):
            raise TypeError("name the topics: @app.handler('orders', group='billing')")
        if concurrency is not None and not 1 <= concurrency <= CONCURRENCY_MAX:
            raise ValueError(f"concurrency must be 1 to {CONCURRENCY_MAX}")
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            raise ValueError("timeout_s must be a positive number of seconds, or None")
        visibility_max_s = wire.VISIBILITY_TIMEOUT_MS_MAX / 1000
        if not VISIBILITY_TIMEOUT_S_MIN <= visibility_timeout_s <= visibility_max_s:
            raise ValueError(f"visibility_timeout_s must be {VISIBILITY_TIMEOUT_S_MIN:g} to {visibility_max_s:g}")
        if max_deliveries is not None:
            settings["max_deliveries"] = max_deliveries
        if retry_backoff_s is not None:
            waits = [retry_backoff_s] if isinstance(retry_backoff_s, (int, float)) else list(retry_backoff_s)
            settings["retry_backoff_ms"] = [round(each * 1000) for each in waits]
        names = tuple(dict.fromkeys(wire.check_name(topic, "topic") for topic in topics))
        checked = _checked(wire.check_name(group, "group"), settings)

        def register(function: Function) -> Function:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            handler = Handler(
                name,
                function,
                arguments_of(function),
                _is_async(function),
                names,
                group,
                concurrency,
                timeout_s,
                visibility_timeout_s,
                checked,
            )
            self._check_apart(handler)
            self._handlers.append(handler)
            return function

        return register

    def _check_apart(self, handler: Handler) -> None:
        """Raise ValueError where two handlers would compete for messages, or set their group differently."""
        for other in self._handlers:
            if other.group != handler.group:
                continue
            shared = sorted(set(other.topics) & set(handler.topics))
            if shared:
                raise ValueError(
                    f"handlers {other.name} and {handler.name} both handle topic {shared[0]!r} in group"
                    f" {handler.group!r}: each message goes to one of them. Give them different groups"
                )
            for setting in other.settings.keys() & handler.settings.keys():
                if other.settings[setting] != handler.settings[setting]:
                    raise ValueError(
                        f"handlers {other.name} and {handler.name} set {setting} of group {handler.group!r} differently"
                    )

    # --- clients -----------------------------------------------------------------------------------------------------

    @property
    def producer(self) -> Producer:
        """A producer for handlers and for the rest of the program. The worker closes it when it ends."""
        with self._lock:
            if self._producer is None:
                self._producer = Producer(self._bootstrap, **self._connection)
            return self._producer

    def close_producer(self) -> None:
        """Send what the producer holds, and close it."""
        with self._lock:
            producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()

    def admin(self) -> Admin:
        """Return a new administrator's client of the app's brokers."""
        return Admin(self._bootstrap, **self._connection)

    def consumer(self, handler: Handler) -> Consumer:
        """Return a new consumer of the handler's messages, which are acked by hand. It fetches no more than is asked
        for."""
        return Consumer(
            *handler.topics,
            group=handler.group,
            bootstrap=self._bootstrap,
            max_messages=1,
            visibility_timeout_s=handler.visibility_timeout_s,
            manual_ack=True,
            **self._connection,
        )

    # --- running -----------------------------------------------------------------------------------------------------

    @contextmanager
    def running(self, concurrency: int = CONCURRENCY, *, grace_s: float = GRACE_S) -> Iterator[Worker]:
        """Run the handlers on threads of this process within a `with` block: in a test, or beside other work."""
        worker = Worker(self, concurrency)
        worker.start()
        try:
            yield worker
        finally:
            worker.stop(grace_s)


def _checked(group: str, settings: dict[str, Any]) -> dict[str, object]:
    """Return the settings if a group can have them. Raises TypeError for unknown ones, ValueError for bad values."""
    unknown = settings.keys() - set(wire.GroupConfig.__struct_fields__)
    if unknown:
        raise TypeError(f"a group has no setting {', '.join(sorted(unknown))}: docs/SETTINGS.md lists them")
    if settings.get("mode", "queue") != "queue":
        raise ValueError("handlers take messages from queue groups: leave `mode` out")
    try:
        msgspec.convert(settings, wire.GroupConfig)
    except (msgspec.ValidationError, InvalidRequest) as wrong:
        raise ValueError(f"the settings of group {group!r}: {wrong}") from None
    return dict(settings)


def _is_async(function: Callable[..., Any]) -> bool:
    while isinstance(function, partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)
