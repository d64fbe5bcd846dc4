"""A group's messages at another broker: receives there, and an interest there while consumers wait here.

    waiters here --park--> RemoteGroup ==interest, a long poll==> a waiter at the leader
    one is woken <-------- RemoteGroup <========= ready =========
        `--take: receive there, without waiting

One interest serves all waiters of a group, and leases nothing: the woken waiter receives then, and only if its client
is still connected. So a client that has disconnected gets no lease, and each message wakes one consumer.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import gevent
from gevent.event import Event

from portalmq.broker.cluster.rpc import BrokerCall, PeerCaller
from portalmq.broker.cluster.rpc.queues import INTEREST, RECEIVE, REPLAY, Interest, Receive, ReceiveResult
from portalmq.broker.partition.long_poll import LeasedMessage, ReceiveOptions, Waiter
from portalmq.control_plane.state import GroupState
from portalmq.errors import PortalMQError

INTEREST_WAIT_MS = 20_000
# An interest outlives its last waiter by this much: a consumer whose wait has ended usually asks again at once.
LINGER_S = 0.2
PAUSE_FIRST_S = 0.05
PAUSE_MAX_S = 1.0
# The pause after an empty receive: another consumer was faster, or the messages are not available.
EMPTY_PAUSE_S = 0.02

# Makes a call that is abandoned when its broker does not answer and leads no longer.
Ask = Callable[[Callable[[], ReceiveResult]], ReceiveResult]


@dataclass(eq=False, repr=False)
class RemoteGroup:
    """A `long_poll.Source`: the partitions of some topics that one other broker leads, for one group.

    Invariant: a greenlet runs while a waiter is parked here, and LINGER_S longer.
    """

    is_remote = True

    _peers: PeerCaller
    broker_id: int
    _group: GroupState
    _topics: tuple[str, ...]
    _on_unbegun: Callable[[], None]
    _ask: Ask

    def __post_init__(self) -> None:
        self._waiters: dict[Waiter, None] = {}
        self._ready = False
        self._was_empty = False
        self._taken = Event()
        self._watch: gevent.Greenlet | None = None

    @property
    def is_idle(self) -> bool:
        return self._watch is None

    # --- messages ----------------------------------------------------------------------------------------------------

    def leadership(self) -> Callable[[], bool]:
        return lambda: True  # that broker has checked its answer

    def replay(self, attempt_id: str) -> list[LeasedMessage] | None:
        received = self._call(REPLAY, ReceiveOptions(1, 1, "", attempt_id))
        return received.messages if received.known else None

    def has_messages(self) -> bool:
        return self._ready

    def take(self, options: ReceiveOptions) -> list[LeasedMessage]:
        self._ready = False
        self._was_empty = True  # if it refuses too, it is asked again after a pause
        try:
            received = self._call(RECEIVE, options)
        finally:
            self._taken.set()
        self._was_empty = not received.messages
        if received.unbegun:
            self._on_unbegun()
        return received.messages

    def _call(self, call: BrokerCall[Receive, ReceiveResult], options: ReceiveOptions) -> ReceiveResult:
        request = Receive(
            self._group.name,
            self._group.group_id,
            list(self._topics),
            options.max_messages,
            options.visibility_timeout_ms,
            options.consumer,
            options.attempt_id,
            options.max_bytes,
            options.patient,
            options.is_move,
        )
        return self._ask(lambda: call.ask(self._peers, self.broker_id, request))

    # --- waiters -----------------------------------------------------------------------------------------------------

    def park(self, waiter: Waiter) -> None:
        self._waiters[waiter] = None
        if self._watch is None or self._watch.dead:
            self._ready = False
            self._watch = gevent.spawn(self._run)

    def leave(self, waiter: Waiter) -> None:
        self._waiters.pop(waiter, None)
        if not self._waiters:
            self._taken.set()
            gevent.spawn_later(LINGER_S, self._end_if_idle)

    def notify(self) -> None:
        if self._ready and self._waiters:
            first = next(iter(self._waiters))
            if not first.woken:
                first.wake()

    def _end_if_idle(self) -> None:
        if not self._waiters and self._watch is not None:
            self._watch.kill(block=False)
            self._watch = None

    def _run(self) -> None:
        pause_s = PAUSE_FIRST_S
        request = Interest(self._group.name, self._group.group_id, list(self._topics), INTEREST_WAIT_MS)
        while True:
            try:
                answer = INTEREST.ask(self._peers, self.broker_id, request)
            except PortalMQError:  # the mirror will show another leader, or this one returns
                gevent.sleep(pause_s * (0.5 + 0.5 * random.random()))
                pause_s = min(2 * pause_s, PAUSE_MAX_S)
                continue
            pause_s = PAUSE_FIRST_S
            if answer.ready:
                self._taken.clear()
                self._ready = True
                self.notify()
                while self._ready:  # until a waiter has received, or none is left
                    self._taken.wait()
                    self._taken.clear()
                if self._was_empty:
                    gevent.sleep(EMPTY_PAUSE_S)
