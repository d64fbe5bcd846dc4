"""One kombu connection's clients of the cluster, and what its channels share.

The child of a fork (Celery's prefork pool) has none of the parent's threads, leases or messages: those stay the
parent's, and closing in the child returns nothing. Publishing works there, as by another process.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Any

from portalmq.admin import Admin
from portalmq.consumers.lease_calls import LeaseCalls
from portalmq.errors import GroupNotFound
from portalmq.kombu.bindings import TRANSIENT_S, Bindings
from portalmq.kombu.inbox import Inbox
from portalmq.kombu.leases import GroupLeases, Keeper
from portalmq.kombu.names import MAX_DELIVERIES, Names, TransportOptions
from portalmq.kombu.readers import Receives
from portalmq.network.either import finish
from portalmq.network.forking import reset_in_children
from portalmq.network.tls import File, TlsFiles
from portalmq.producer import Producer
from portalmq.transport.transport import Transport

PUBLISH_TIMEOUT_S = 30.0
CALL_TIMEOUT_S = 30.0
# An exchange's topic is read as it grows. Groups that have not read a message keep it.
EXCHANGE_CONFIG = {"retention_ms": 3600 * 1000, "segment_bytes": 16 * 1024 * 1024}


class ClusterSession:
    """Thread-safe. `urls` are the brokers to begin with."""

    def __init__(self, urls: Sequence[str], token: str | None, tls: TlsFiles, options: TransportOptions) -> None:
        self._urls, self._token, self._tls = list(urls), token, tls
        self.options = options
        self.names = Names(options.topic_prefix)
        self.calls = self.new_transport()
        self.admin = Admin(
            self._urls,
            token=token,
            timeout_s=CALL_TIMEOUT_S,
            tls_ca=_text(tls.ca),
            tls_client_cert=_text(tls.cert),
            tls_client_key=_text(tls.key),
        )
        self.producer = Producer(
            linger_ms=0, delivery_timeout_s=PUBLISH_TIMEOUT_S, transport=self.new_transport(PUBLISH_TIMEOUT_S)
        )
        self._begin()
        reset_in_children(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._ready_groups: set[str] = set()
        self._ready_exchanges: set[str] = set()
        self.inbox = Inbox()
        self.bindings = Bindings(self.admin, self.producer, self.names.bindings_topic)
        self._keeper = Keeper(self.bindings.renew, TRANSIENT_S / 8)

    def _reset_in_child(self) -> None:
        self._begin()

    def new_transport(self, timeout_s: float = CALL_TIMEOUT_S) -> Transport:
        return Transport(self._urls, token=self._token, timeout_s=timeout_s, tls=self._tls)

    # --- leases ------------------------------------------------------------------------------------------------------

    def new_leases(self, group: str) -> GroupLeases:
        leases = GroupLeases(self.calls, group, self.options.visibility_timeout_s, self._keeper.wake)
        self._keeper.add(leases)
        return leases

    def end_leases(self, leases: GroupLeases) -> None:
        self._keeper.remove(leases)
        leases.close()

    def keep_bindings(self) -> None:
        """Have transient bindings renewed."""
        self._keeper.start()

    # --- groups and exchanges ----------------------------------------------------------------------------------------

    def prepare_group(self, group: str, **settings: Any) -> None:
        """Create the group if it is missing. An existing one keeps its settings, but for a `max_deliveries` option."""
        with self._lock:
            if group in self._ready_groups:
                return
        wanted = self.options.max_deliveries
        try:
            known = self.admin.group(group).config.max_deliveries
        except GroupNotFound:
            self.admin.create_group(group, max_deliveries=wanted or MAX_DELIVERIES, **settings)
        else:
            if wanted is not None and wanted != known:
                self.admin.create_group(group, max_deliveries=wanted)
        with self._lock:
            self._ready_groups.add(group)

    def prepare_exchange(self, exchange: str) -> str:
        """Create the topic of an exchange if it is missing, and return its name."""
        topic = self.names.exchange_topic(exchange)
        with self._lock:
            if topic in self._ready_exchanges:
                return topic
        self.admin.create_topic(topic, config=EXCHANGE_CONFIG)
        with self._lock:
            self._ready_exchanges.add(topic)
        return topic

    def join_exchange(self, queue: str, exchange: str) -> None:
        """Have the queue's group begin at the end of the exchange's topic: its first receive fixes that."""
        topic, group = self.prepare_exchange(exchange), self.names.exchange_group(queue, exchange)
        self.prepare_group(group, start="latest")
        received = Receives(self.calls, group, [topic], self.options.visibility_timeout_s, None).receive(1, 0.0)
        receipts = [message.receipt for message in received.messages if message.receipt is not None]
        calls = LeaseCalls(self.calls, group, self.options.visibility_timeout_s)
        finish(calls.give_back_unseen(receipts, "only looking"))

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        self._keeper.close()
        self.producer.close(timeout=PUBLISH_TIMEOUT_S)
        self.calls.close()
        self.admin.close()
        self.inbox.close()


def _text(file: File | None) -> str | None:
    return None if file is None else os.fspath(file)
