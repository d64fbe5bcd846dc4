"""The OPTIONS of the backend, and the clients that they describe."""

from __future__ import annotations

import threading
from typing import Annotated, Any

import msgspec

from portalmq.admin import Admin
from portalmq.consumer import Consumer
from portalmq.producer import Producer

Seconds = Annotated[float, msgspec.Meta(gt=0)]
# The lease of a message is renewed while its task runs, up to this time.
TASK_S_MAX = 7 * 24 * 3600.0
# No queue may have this name: its topic has the results.
RESULTS_QUEUE = "results"


class BackendOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`enqueue_timeout_s`: how long enqueue waits for a broker. `max_attempts`: how often a task may fail,
    `retry_delay_s`: the time before the next attempt. `result_ttl_s`: how long a result can be read, 0: no results."""

    bootstrap: str | tuple[str, ...] | None = None
    token: str | None = None
    tls_ca: str | None = None
    tls_client_cert: str | None = None
    tls_client_key: str | None = None
    allow_advertised: bool | None = None
    topic_prefix: str = "django."
    group: str = "django"
    enqueue_timeout_s: Seconds = 30.0
    max_attempts: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 1
    retry_delay_s: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    result_ttl_s: Annotated[float, msgspec.Meta(ge=0)] = 24 * 3600.0
    result_partitions: Annotated[int, msgspec.Meta(ge=1, le=1_000)] = 8
    visibility_timeout_s: Annotated[float, msgspec.Meta(ge=1)] = 30.0

    @classmethod
    def read(cls, options: dict[str, Any]) -> BackendOptions:
        """Raises msgspec.ValidationError, which says what is wrong, for an unknown name or a wrong type."""
        return msgspec.convert(options, cls)

    def topic(self, queue: str) -> str:
        return self.topic_prefix + queue

    @property
    def results_topic(self) -> str:
        return self.topic(RESULTS_QUEUE)

    def _connection(self) -> dict[str, Any]:
        names = ("token", "tls_ca", "tls_client_cert", "tls_client_key", "allow_advertised")
        bootstrap = list(self.bootstrap) if isinstance(self.bootstrap, tuple) else self.bootstrap
        return {"bootstrap": bootstrap, **{name: getattr(self, name) for name in names}}

    def admin(self) -> Admin:
        """Raises ValueError for a bootstrap that names no broker."""
        return Admin(**self._connection())

    def consumer(self, topics: list[str]) -> Consumer:
        """Return a consumer that has one message at a time: of those that wait, the one with the highest priority."""
        return Consumer(
            *topics,
            group=self.group,
            max_messages=1,
            prefetch=False,
            visibility_timeout_s=self.visibility_timeout_s,
            max_handling_s=TASK_S_MAX,
            **self._connection(),
        )

    def producer(self) -> Producer:
        """Return the producer of this process for these options: Django makes a backend for each thread."""
        with _lock:
            producer = _producers.get(self)
            if producer is None:
                timeout_s = self.enqueue_timeout_s
                producer = Producer(delivery_timeout_s=timeout_s, max_block_s=timeout_s, **self._connection())
                _producers[self] = producer
            return producer

    def shared_admin(self) -> Admin:
        with _lock:
            admin = _admins.get(self)
            if admin is None:
                admin = _admins[self] = self.admin()
            return admin


_lock = threading.Lock()
_producers: dict[BackendOptions, Producer] = {}
_admins: dict[BackendOptions, Admin] = {}
