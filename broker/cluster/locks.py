"""Locks as a broker serves them: it watches all of them, and holds the requests that wait here.

    change -> note --> keeper: reads what changed, and when it saw it first (an Observation)
                         |--> wakes the first of the waiters here when it is that owner's turn
                         `--> frees locks that were not renewed for their ttl, removes locks unused for long

control_plane/locks.py decides, and says why no clock is compared with another. Any broker serves any lock: there is no
leader, and nothing is forwarded. What is known here may be old. So every action is a compare-and-set, and no request is
refused before a sync.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice

import gevent
from gevent.event import Event
from gevent.lock import Semaphore

from portalmq import wire
from portalmq.broker.partition.clock import Clock
from portalmq.broker.partition.long_poll import Peer
from portalmq.broker.partition.yielding import TimeSlice, in_short_turns
from portalmq.control_plane.locks import (
    REMOVE_AT_ONCE_MAX,
    LockOutcome,
    LockState,
    LockTable,
    LockTicket,
    Mark,
    VersionedLock,
    digest_of,
    name_of,
    remaining_ms,
    until_turn_ms,
)
from portalmq.control_plane.plane import ControlPlane
from portalmq.control_plane.state import BrokerState
from portalmq.errors import LockHeld, LockNotFound, PortalMQError, Unavailable

log = logging.getLogger(__name__)

LOCKS_MAX = 10_000
NOTES_MAX = 2_000
# How many locks one read covers when many have changed.
LOCKS_A_READ = 500
# How long a lock without a holder is kept, in case it is used again.
KEEP_UNUSED_MS = 60_000
SWEEP_EVERY_S = 10.0
AGAIN_S = 1.0
GATE_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Observation:
    """A lock as it was last read, and when, on this broker's clock, its mark was first seen."""

    state: LockState
    version: int
    since_ms: int

    @property
    def order(self) -> tuple[int, int]:
        """Rises with each change: a lock that is created again has a greater token, and version 0 again."""
        return (self.state.token, self.version)


@dataclass(slots=True, eq=False)
class LockWaiter:
    """A request that waits here. `joined`: its ticket is in the queue. `away`: its wait is over, and its ticket is kept
    for a moment. `displaced`: the same owner waits elsewhere now."""

    place: LockTicket
    event: Event = field(default_factory=Event)
    joined: bool = False
    away: bool = False
    gone: bool = False
    displaced: bool = False

    def leave(self) -> None:
        self.gone = True
        self.event.set()

    def displace(self) -> None:
        self.displaced = True
        self.event.set()


@dataclass(eq=False, repr=False)
class Locks:
    """`brokers` are the registered ones, by id; `me` is this broker's id and incarnation."""

    _plane: ControlPlane
    _brokers: Callable[[], Mapping[int, BrokerState]]
    _me: tuple[int, int]
    _clock: Clock

    def __post_init__(self) -> None:
        self._table = LockTable(self._plane)
        self._observations: dict[str, Observation] = {}
        self._waiters: dict[str, dict[str, LockWaiter]] = {}
        # When, on the clock, a lock with waiters is checked again if nothing changes.
        self._due: dict[str, int] = {}
        # Tickets that are about to be given up, while a greenlet does so.
        self._leaving: dict[str, set[LockTicket]] = {}
        self._noted: set[str | None] = {None}
        self._wakeup = Event()
        self._gates: dict[str, tuple[Semaphore, int]] = {}
        self._sweep_at_ms = 0
        self._closed = False
        self._greenlet: gevent.Greenlet | None = None

    # --- life --------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._plane.watch(self.note)
        self._wakeup.set()
        self._greenlet = gevent.spawn(self._run)

    def drain(self) -> None:
        """End every wait. The client goes to another broker, where the same owner finds its place in the queue."""
        self._closed = True
        for waiters in self._waiters.values():
            for waiter in waiters.values():
                waiter.event.set()

    def close(self) -> None:
        self.drain()
        if self._greenlet is not None:
            self._greenlet.kill()

    def note(self, path: str | None) -> None:
        """Note a change in the control plane for the keeper."""
        name = None if path is None else name_of(path)
        if path is not None and name is None:
            return
        if name is None or len(self._noted) >= NOTES_MAX:
            self._noted = {None}
        elif None not in self._noted:
            self._noted.add(name)
        self._wakeup.set()

    def brokers_changed(self) -> None:
        """Check all waits again: tickets of brokers that are gone no longer count."""
        for name in self._waiters:
            self._due[name] = 0
        self._wakeup.set()

    # --- calls -------------------------------------------------------------------------------------------------------

    def acquire(self, name: str, request: wire.LockRequest, peer: Peer | None) -> wire.LockGrant:
        """Return the lock as soon as it is this owner's turn. Raises LockHeld when that is not within `wait_ms`;
        Unavailable, Backpressure."""
        self._check_open()
        if peer is not None and peer.gone():
            # This broker may have been paused: the client went elsewhere, and must not get a second lock here.
            raise Unavailable("the client has gone")
        if request.wait_ms > 0:
            return self._wait(name, request, peer)
        asked = self._ask(name, request, None)
        if not asked.granted:
            # What was read may be older than what another broker has just done.
            self._plane.sync()
            asked = self._ask(name, request, None)
        if not asked.granted:
            raise self._held(name, asked.state)
        return _grant(asked.state)

    def renew(self, name: str, request: wire.LockRenewal) -> wire.LockGrant:
        """Renew the lock: its ttl begins again. Raises Fenced, LockNotFound."""
        return _grant(self._table.renew(name, request.owner, request.fencing_token, request.ttl_ms, self._observe))

    def release(self, name: str, request: wire.LockRelease) -> None:
        """Release the lock. Raises Fenced, LockNotFound."""
        self._table.release(name, request.owner, request.fencing_token, self._observe)

    def describe(self, name: str) -> wire.LockDescription:
        """Describe the lock, after a sync. Raises LockNotFound."""
        self._plane.sync()
        held = self._table.read(name)
        self._observe(name, held)
        if held is None:
            raise LockNotFound(f"there is no lock {name!r}")
        return self._described(name, self._observations[name])

    def list_all(self) -> list[wire.LockDescription]:
        """Describe all locks as this broker last saw them."""
        names = in_short_turns(sorted(self._observations))
        return [self._described(name, seen) for name in names if (seen := self._observations.get(name)) is not None]

    def _described(self, name: str, seen: Observation) -> wire.LockDescription:
        left_ms = remaining_ms(seen.state, self._clock.now_ms() - seen.since_ms)
        lock = seen.state
        return wire.LockDescription(name, lock.owner, lock.token, lock.ttl_ms, left_ms, len(lock.queue))

    def _held(self, name: str, lock: LockState) -> LockHeld:
        seen = self._observations.get(name)
        left_ms = remaining_ms(seen.state, self._clock.now_ms() - seen.since_ms) if seen else 0
        return LockHeld(
            f"lock {name!r} is held by {lock.owner!r}" if lock.owner is not None else f"others wait for lock {name!r}",
            owner=lock.owner,
            expires_in_ms=left_ms,
            waiters=len(lock.queue),
        )

    def _check_open(self) -> None:
        if self._closed:
            raise Unavailable("this broker is shutting down", retry_after_s=0.5)

    # --- waiting -----------------------------------------------------------------------------------------------------

    def _ask(self, name: str, request: wire.LockRequest, place: LockTicket | None) -> LockOutcome:
        may_create = len(self._observations) < LOCKS_MAX
        with self._gate(name):
            return self._table.ask(
                name, request.owner, request.ttl_ms, self._observe, self._live(), ticket=place, may_create=may_create
            )

    def _wait(self, name: str, request: wire.LockRequest, peer: Peer | None) -> wire.LockGrant:
        waiter = LockWaiter(LockTicket(digest_of(request.owner), *self._me))
        self._register(name, waiter)
        unwatch = peer.watch(waiter.leave) if peer is not None else lambda: None
        deadline = time.monotonic() + request.wait_ms / 1_000
        keeps_place = False
        try:
            while True:
                if waiter.gone or (peer is not None and peer.gone()):
                    raise Unavailable("the client has gone")
                if waiter.displaced:
                    raise LockHeld(f"another request of {request.owner!r} waits for lock {name!r} now")
                if self._closed:
                    keeps_place = True  # it ends with this broker, unless the client asks elsewhere
                    self._check_open()
                waiter.event.clear()
                asked = self._ask(name, request, waiter.place)
                if asked.granted:
                    return _grant(asked.state)
                waiter.joined = True
                self._mark_due(name)
                left_s = deadline - time.monotonic()
                if left_s <= 0 or not (waiter.event.wait(left_s) or waiter.event.is_set()):
                    keeps_place = request.keep_place_ms > 0
                    raise self._held(name, asked.state)
        finally:
            unwatch()
            self._end_wait(name, waiter, request.keep_place_ms if keeps_place else 0)

    def _register(self, name: str, waiter: LockWaiter) -> None:
        here = self._waiters.setdefault(name, {})
        earlier = here.get(waiter.place.owner_digest)
        if earlier is not None:
            earlier.displace()
        here[waiter.place.owner_digest] = waiter

    def _end_wait(self, name: str, waiter: LockWaiter, keep_ms: int) -> None:
        """End a wait: give up its ticket, at once or after `keep_ms`, unless the owner waits again by then."""
        if self._waiters.get(name, {}).get(waiter.place.owner_digest) is not waiter:
            return
        if keep_ms and not self._closed:
            waiter.away = True
            gevent.spawn_later(keep_ms / 1_000, self._end_wait, name, waiter, 0)
            return
        self._forget(name, waiter)
        seen = self._observations.get(name)
        if not self._closed and (seen is None or waiter.place in seen.state.queue):
            self._leave(name, waiter.place)

    def _leave(self, name: str, place: LockTicket) -> None:
        """Give up a ticket, together with all others given up during the commit before: a thousand clients may leave
        at once, and a commit for each would delay all others."""
        leaving = self._leaving.get(name)
        if leaving is not None:
            leaving.add(place)
            return
        self._leaving[name] = {place}
        gevent.spawn(self._leave_all, name)

    def _leave_all(self, name: str) -> None:
        try:
            while leaving := self._leaving[name]:
                self._leaving[name] = set()
                here = self._waiters.get(name, {})
                # An owner that has come back keeps its place in the queue.
                gone = {place for place in leaving if place.owner_digest not in here}
                self._try(self._table.leave, name, gone, self._observe)
        finally:
            del self._leaving[name]

    def _forget(self, name: str, waiter: LockWaiter) -> None:
        here = self._waiters.get(name, {})
        if here.get(waiter.place.owner_digest) is waiter:
            del here[waiter.place.owner_digest]
        if not here:
            self._waiters.pop(name, None)
            self._due.pop(name, None)
        else:
            self._mark_due(name)

    @contextlib.contextmanager
    def _gate(self, name: str) -> Iterator[None]:
        """Let one request a time ask for a lock here: most of many at once would have to retry again and again."""
        gate, users = self._gates.get(name, (Semaphore(), 0))
        self._gates[name] = (gate, users + 1)
        try:
            if not gate.acquire(timeout=GATE_TIMEOUT_S):
                raise Unavailable(f"too many ask for lock {name!r} at once", retry_after_s=0.5)
            try:
                yield
            finally:
                gate.release()
        finally:
            gate, users = self._gates[name]
            if users == 1:
                del self._gates[name]
            else:
                self._gates[name] = (gate, users - 1)

    # --- observed states ---------------------------------------------------------------------------------------------

    def _live(self) -> dict[int, int]:
        live = {broker_id: broker.incarnation for broker_id, broker in self._brokers().items()}
        live[self._me[0]] = self._me[1]
        return live

    def _observe(self, name: str, held: VersionedLock | None) -> int:
        """Note a state that was read or written. Return for how many milliseconds its mark has been seen."""
        now_ms = self._clock.now_ms()
        known = self._observations.get(name)
        if held is None:
            self._observations.pop(name, None)
            return 0
        since_ms = known.since_ms if known is not None and known.state.mark == held.value.mark else now_ms
        fresh = Observation(held.value, held.version, since_ms)
        if known is None or fresh.order > known.order:
            self._observations[name] = fresh
            if name in self._waiters:
                self._mark_due(name)
        # An answer that was overtaken by a newer one is old: nothing follows from it.
        return now_ms - since_ms if known is None or fresh.order >= known.order else 0

    def _mark_due(self, name: str) -> None:
        self._due[name] = 0
        self._wakeup.set()

    # --- the keeper --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            now_ms = self._clock.now_ms()
            next_ms = min(self._due.values(), default=now_ms + round(SWEEP_EVERY_S * 1_000)) - now_ms
            self._wakeup.wait(max(0.0, min(next_ms / 1_000, SWEEP_EVERY_S)))
            self._wakeup.clear()
            try:
                self._read_noted()
                now_ms = self._clock.now_ms()
                for name in [name for name, due_ms in self._due.items() if due_ms <= now_ms]:
                    self._wake_due(name, now_ms)
                self._sweep()
            except PortalMQError as error:
                log.info("locks will be checked again: %s", error)
                gevent.sleep(AGAIN_S)
                self._wakeup.set()
            except Exception:  # a node that cannot be decoded, say: the other locks go on
                log.exception("the keeper of the locks failed, and continues")
                gevent.sleep(AGAIN_S)

    def _read_noted(self) -> None:
        noted, self._noted = self._noted, set()
        if not noted:
            return
        try:
            if None in noted:
                names = sorted({*self._table.names(), *self._observations})
            else:
                names = [name for name in noted if name is not None]
            turn = TimeSlice()
            for first in range(0, len(names), LOCKS_A_READ):
                turn.pause_if_over()
                # No other greenlet runs between the read and this loop, so what was read is not outdated here.
                for name, held in self._table.read_many(names[first : first + LOCKS_A_READ]).items():
                    self._observe(name, held)
        except PortalMQError:
            self._noted |= noted
            raise
        for name in names:
            if name in self._waiters:
                self._due[name] = 0

    def _wake_due(self, name: str, now_ms: int) -> None:
        """Wake the waiters here that have their turn or must ask again; note when to check next."""
        here = self._waiters.get(name)
        if here is None:
            self._due.pop(name, None)
            return
        seen = self._observations.get(name)
        if seen is None:
            self._wake_all(name)
            return
        age_ms, lock = now_ms - seen.since_ms, seen.state
        places = {place.owner_digest: place for place in lock.queue}
        for who, waiter in here.items():
            if waiter.joined and not waiter.away and places.get(who) != waiter.place:
                # Passed over while this broker was silent: it asks again. Or the same owner waits at another broker.
                waiter.displace() if who in places else waiter.event.set()
        waiting = (place.owner_digest for place in lock.queue)
        first = next((digest for digest in waiting if (w := here.get(digest)) and not w.away), None)
        wait_ms = None if first is None else until_turn_ms(lock, first, age_ms, self._live())
        left_ms = None if lock.owner is None else remaining_ms(lock, age_ms)
        due_in_ms = min((ms for ms in (wait_ms, left_ms) if ms), default=round(SWEEP_EVERY_S * 1_000))
        if first is not None and wait_ms == 0:
            here[first].event.set()
            due_in_ms = round(AGAIN_S * 1_000)
        elif left_ms == 0:
            gevent.spawn(self._try, self._table.free, name, lock.mark, self._observe)
            due_in_ms = round(AGAIN_S * 1_000)
        self._due[name] = now_ms + due_in_ms

    def _wake_all(self, name: str) -> None:
        """Wake all waiters of a missing lock: each asks for it again."""
        self._due.pop(name, None)
        for waiter in self._waiters.get(name, {}).values():
            if waiter.joined:
                waiter.event.set()

    def _sweep(self) -> None:
        """Remove unused locks, and tickets without a waiter on this broker. Unused locks are removed by the broker with
        the least id; correctness does not depend on which one it is."""
        now_ms = self._clock.now_ms()
        if now_ms < self._sweep_at_ms:
            return
        self._sweep_at_ms = now_ms + round(SWEEP_EVERY_S * 1_000)
        is_least = self._me[0] == min(self._live())
        unused: dict[str, Mark] = {}
        for name, seen in in_short_turns(list(self._observations.items())):
            lock, age_ms = seen.state, now_ms - seen.since_ms
            for place in lock.queue:
                is_ours = (place.broker_id, place.incarnation) == self._me
                if is_ours and place.owner_digest not in self._waiters.get(name, {}):
                    self._leave(name, place)
            over_for_ms = age_ms - (lock.ttl_ms if lock.owner is not None else 0)
            if is_least and not lock.queue and over_for_ms >= KEEP_UNUSED_MS:
                unused[name] = lock.mark
        for name in self._table.remove_all(dict(islice(unused.items(), REMOVE_AT_ONCE_MAX))):
            self._observations.pop(name, None)

    def _try(self, do: Callable[..., object], *arguments: object) -> None:
        """Do what will be tried again if it fails."""
        try:
            do(*arguments)
        except PortalMQError as error:
            log.info("maintenance of a lock will be tried again: %s", error)


def _grant(lock: LockState) -> wire.LockGrant:
    assert lock.owner is not None
    return wire.LockGrant(lock.owner, lock.token, lock.ttl_ms)
