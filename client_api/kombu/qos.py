"""The messages that a channel has delivered and that are not acked, and its free places (prefetch)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from portalmq.kombu.leases import GroupLeases

RESTORED = "the worker had not begun it"


class Held(NamedTuple):
    """How a delivered message is settled: by its lease, or, in a transient queue, by delivering it again here."""

    queue: str
    leases: GroupLeases | None
    receipt: str
    again: Callable[[], None]


class QoS:
    """Thread-safe: acks may come from any thread."""

    restore_at_shutdown = True

    def __init__(self, changed: threading.Condition, prefetch_count: int = 0) -> None:
        self._changed = changed
        self.prefetch_count = prefetch_count or 0
        self._delivered: dict[Any, tuple[Any, Held]] = {}

    def __len__(self) -> int:
        return len(self._delivered)

    def can_consume(self) -> bool:
        return not self.prefetch_count or len(self._delivered) < self.prefetch_count

    def can_consume_max_estimate(self) -> int | None:
        return max(self.prefetch_count - len(self._delivered), 0) if self.prefetch_count else None

    def append(self, message: Any, delivery_tag: Any, held: Held) -> None:
        self._delivered[delivery_tag] = message, held

    def get(self, delivery_tag: Any) -> Any:
        return self._delivered[delivery_tag][0]

    def _pop(self, delivery_tag: Any) -> Held | None:
        with self._changed:
            _, held = self._delivered.pop(delivery_tag, (None, None))
            if held is not None:
                self._changed.notify_all()
            return held

    def ack(self, delivery_tag: Any) -> None:
        """Ack a message; one that was settled before, or that is a parent process's, is ignored."""
        # The ack is pending before the place is free, so that the receive that fills the place carries it.
        with self._changed:
            _, held = self._delivered.pop(delivery_tag, (None, None))
            if held is not None and held.leases is not None:
                held.leases.ack(held.receipt)
            self._changed.notify_all()

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:
        """Drop a message, or return it as one that was delivered: its task has seen it, and is told so next time."""
        if not requeue:
            self.ack(delivery_tag)
        elif (held := self._pop(delivery_tag)) is not None:
            if held.leases is None:
                held.again()
            else:
                held.leases.requeue(held.receipt)

    def restore_unacked(self) -> list[Any]:
        """Return all messages to their queues, in a call for each group."""
        with self._changed:
            left = [held for _, held in self._delivered.values()]
            self._delivered.clear()
            self._changed.notify_all()
        self._restore(left)
        return []

    def _restore(self, messages: list[Held]) -> None:
        by_group: dict[int, list[Held]] = {}
        for held in messages:
            by_group.setdefault(id(held.leases), []).append(held)
        for group in by_group.values():
            if (leases := group[0].leases) is not None:
                leases.give_back([held.receipt for held in group], RESTORED)
            else:
                for held in group:
                    held.again()

    def restore_unacked_once(self, stderr: object = None) -> None:
        if self.restore_at_shutdown:
            self.restore_unacked()

    def restore_visible(self, *args: object, **kwargs: object) -> None:
        """Nothing: leases end by themselves."""
