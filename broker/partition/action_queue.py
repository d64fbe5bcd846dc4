"""Actions of a partition's core that are not done yet, performed in order.

One of them waits for the disk (RememberEpoch: a replica acts in no epoch that it could forget). Until that is durable
the rest stays queued, and nothing is appended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import gevent
from gevent.event import Event
from gevent.lock import BoundedSemaphore

from portalmq.broker.core.replica.events import Action, Append, RememberEpoch
from portalmq.broker.partition.host import Replica
from portalmq.broker.partition.native import NativeThreads, attempt
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.errors import Shortage

log = logging.getLogger(__name__)

REMEMBER_AGAIN_S = 1.0

Key = tuple[str, int]


class _Seen:
    """EpochFile of replicas that are written together."""

    def __init__(self) -> None:
        self.epochs: dict[Key, int] = {}
        self.written = Event()
        self.failed: Exception | None = None


class EpochWriter:
    """Writes the epochs of all replicas of a broker: those that wait while the disk is busy go into the next
    transaction."""

    def __init__(self, pool: NativeThreads, epochs: EpochFile) -> None:
        self._pool = pool
        self._epochs = epochs
        self._seen = _Seen()
        self._turn = BoundedSemaphore()

    def save(self, key: Key, leader_epoch: int) -> Exception | None:
        """Return once it is durable; or why it is not."""
        seen = self._seen
        is_first = not seen.epochs
        seen.epochs[key] = max(leader_epoch, seen.epochs.get(key, -1))
        if is_first:
            with self._turn:
                self._seen = _Seen()
                seen.failed = attempt(self._pool, self._epochs.save, seen.epochs)
            seen.written.set()
        else:
            seen.written.wait()
        return seen.failed


class ActionQueue:
    """`act` performs one action. Events that it passes to the core may add actions to the queue. `remembering` is the
    epoch that is on its way to the disk; `on_remembered` is called when it is durable."""

    def __init__(
        self,
        partition: Replica,
        epochs: EpochWriter,
        act: Callable[[Action], None],
        on_remembered: Callable[[], None],
    ) -> None:
        self._partition = partition
        self._epochs = epochs
        self._act = act
        self._on_remembered = on_remembered
        # A list: it is short, and an empty deque would take 0.7 KB of each idle replica.
        self._actions: list[Action] = []
        self.performing = False
        self.remembering: RememberEpoch | None = None

    def add(self, actions: list[Action]) -> None:
        self._actions += actions
        if not self.performing:
            self._perform()

    def drop_appends(self) -> None:
        """Drop appends whose predecessors in the log are gone."""
        self._actions = [action for action in self._actions if not isinstance(action, Append)]

    def _perform(self) -> None:
        self.performing = True
        try:
            while self._actions:
                action = self._actions.pop(0)
                if isinstance(action, RememberEpoch):
                    self.remembering = action
                    gevent.spawn(self._remember, action)
                    return
                self._act(action)
        finally:
            self.performing = self.remembering is not None

    def _remember(self, action: RememberEpoch) -> None:
        """Make the epoch durable, then perform what waits for that. A shortage delays it. A replica that is closed
        before does nothing more: it could forget the epoch."""
        partition = self._partition
        key = (partition.topic_id, partition.number)
        while not partition.closed:
            failed = self._epochs.save(key, action.leader_epoch)
            if failed is None:
                self.remembering = None
                self._perform()
                self._on_remembered()
                return
            if not isinstance(failed, Shortage):
                partition.host.storage_failed(failed)
                return
            log.warning("%s cannot remember its leader epoch %d yet: %s", partition, action.leader_epoch, failed)
            gevent.sleep(REMEMBER_AGAIN_S)
