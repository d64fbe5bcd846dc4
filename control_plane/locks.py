"""Locks in the control plane: the holder of each, its fencing token, and the queue of waiting clients.

    /locks/<name>   LockState: the holder, its token, the queue; changed only by compare-and-set of its version
    /lock_floor     LockFloor: every token up to this one has been issued

A holder has a lock for its ttl, and no two clocks are compared. Each renewal raises `beat`, so a *mark* (token, beat,
held or not) identifies one lease. An observer records, on its own clock, when it first saw a mark; a mark that it has
seen unchanged for the ttl was not renewed for at least that long. The holder counts from before its request, so it
learns of the end first. A broker that was away starts to count again, which can only lengthen a lease. The next holder
takes the lock by compare-and-set against the state that was judged: a renewal in between wins.

The queue is in the node, so clients are served in order of arrival whichever broker they wait at. Nothing hands a free
lock to a client: the broker where the first client in the queue waits takes it, and only for a client that is still
connected. Tickets of brokers that are gone are skipped at once, tickets of a silent one after PATIENCE_MS each.
(Rejected: an ephemeral node for each waiter, the recipe of ZooKeeper's documentation. It ties the lock to the session
of a broker, which is not its client's life, and hands it to clients that are gone.)

Tokens only rise: a new holder gets the last token plus one. To remove an unused lock raises the floor to its token in
the same commit; a lock that is created starts above the floor. A node that is created again starts at version 0, so its
version does not tell it from the one that was judged: each commit checks that the floor has not moved since before that
read. (Floors rarely rise; the version last seen is cached.) An adoption, which finds no tokens on any disk, raises the
floor to the time in milliseconds.

Everything above `LockTable` is pure. The theory of fencing: Kleppmann, "How to do distributed locking" (2016).
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

import msgspec

from portalmq import wire
from portalmq.control_plane import state
from portalmq.control_plane.plane import COMMIT_OPS_MAX, Check, Conflict, Create, Delete, Set, parent_of
from portalmq.control_plane.tree import Tree, Versioned
from portalmq.errors import Backpressure, Fenced, LockNotFound

log = logging.getLogger(__name__)

LOCKS = "/locks"
LOCK_FLOOR = "/lock_floor"

# A ticket takes about 30 bytes: a full queue and its holder stay well below the size limit of a node.
QUEUE_MAX = 1_000
REMOVE_AT_ONCE_MAX = COMMIT_OPS_MAX - 1
# How long the broker of a client further ahead may take to notice that the lock is free.
PATIENCE_MS = 1_000

Mark = tuple[int, int, bool]


class LockTicket(msgspec.Struct, frozen=True, array_like=True):
    """A client's position in the queue: its owner (see `digest_of`), and the broker and incarnation where it waits."""

    owner_digest: str
    broker_id: int
    incarnation: int


class LockState(msgspec.Struct, frozen=True):
    """A lock. `token` is the holder's, or the last holder's while the lock is free (`owner` is None).

    Invariants: `token` never falls, and rises with each holder; no owner is in the queue twice.
    """

    token: int
    owner: str | None
    ttl_ms: int
    beat: int = 0
    queue: tuple[LockTicket, ...] = ()

    @property
    def mark(self) -> Mark:
        return (self.token, self.beat, self.owner is not None)

    def ticket_of(self, owner_digest: str) -> LockTicket | None:
        return next((ticket for ticket in self.queue if ticket.owner_digest == owner_digest), None)


class LockFloor(msgspec.Struct, frozen=True):
    token: int


def lock_path(name: str) -> str:
    return f"{LOCKS}/{name}"


def name_of(path: str) -> str | None:
    """Return the lock of this node; None for another node."""
    return path.rpartition("/")[2] if parent_of(path) == LOCKS else None


def digest_of(owner: str) -> str:
    """Return a short digest of an owner's name: a thousand of them fit into a node."""
    return hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


# --- decisions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LockOutcome:
    """The state of a lock after a client requests it, and whether the client holds it now."""

    state: LockState
    granted: bool


def remaining_ms(lock: LockState, age_ms: int) -> int:
    """Return how much longer the holder has the lock at most, `age_ms` after its mark was first seen; 0 when free."""
    return 0 if lock.owner is None else max(0, lock.ttl_ms - age_ms)


def until_turn_ms(lock: LockState, owner_digest: str, age_ms: int, live: Mapping[int, int]) -> int:
    """Return the time until this client may take the lock if nothing changes, at the latest; 0 means now.

    `live` has the incarnation of each registered broker. A client without a ticket comes last.
    """
    ahead = []
    for ticket in lock.queue:
        if ticket.owner_digest == owner_digest:
            break
        ahead.append(ticket)
    answering = {ticket.broker_id for ticket in ahead if live.get(ticket.broker_id) == ticket.incarnation}
    free_for_ms = age_ms if lock.owner is None else age_ms - lock.ttl_ms
    return max(0, PATIENCE_MS * len(answering) - free_for_ms)


def requested(
    lock: LockState, owner: str, ttl_ms: int, age_ms: int, live: Mapping[int, int], ticket: LockTicket | None
) -> LockOutcome:
    """Return the lock after `owner` requests it. With a `ticket` the owner queues when it cannot have the lock now; the
    ticket replaces the owner's earlier one, at whichever broker that waited. A holder that asks again (its answer was
    lost) keeps its token. Its ttl never falls: a late copy of an earlier request must not shorten what a later one got.

    Raises Backpressure when the queue is full.
    """
    owner_digest = digest_of(owner)
    if lock.owner == owner and remaining_ms(lock, age_ms) > 0:
        return LockOutcome(
            msgspec.structs.replace(lock, ttl_ms=max(lock.ttl_ms, ttl_ms), beat=lock.beat + 1), granted=True
        )
    if until_turn_ms(lock, owner_digest, age_ms, live) == 0:
        return LockOutcome(LockState(lock.token + 1, owner, ttl_ms, 0, _behind(lock, owner_digest)), granted=True)
    if ticket is None:
        return LockOutcome(lock, granted=False)
    if lock.ticket_of(owner_digest) is None:
        if len(lock.queue) >= QUEUE_MAX:
            raise Backpressure(f"{QUEUE_MAX} wait for this lock already: ask again later", retry_after_s=1)
        queue = (*lock.queue, ticket)
    else:
        queue = tuple(ticket if held.owner_digest == owner_digest else held for held in lock.queue)
    return LockOutcome(msgspec.structs.replace(lock, queue=queue), granted=False)


def _behind(lock: LockState, owner_digest: str) -> tuple[LockTicket, ...]:
    """Return the queue behind a client's ticket. Those ahead of it did not take their turn: they are gone."""
    for index, ticket in enumerate(lock.queue):
        if ticket.owner_digest == owner_digest:
            return lock.queue[index + 1 :]
    return ()


def renewed(lock: LockState, owner: str, token: int, ttl_ms: int | None) -> LockState:
    """Return the renewed lock. Its ttl never falls, as in `requested`. Raises Fenced for an owner that no longer holds
    it."""
    _check_holder(lock, owner, token)
    return msgspec.structs.replace(lock, ttl_ms=max(lock.ttl_ms, ttl_ms or 0), beat=lock.beat + 1)


def released(lock: LockState, owner: str, token: int) -> LockState:
    """Return the released lock; a repeat changes nothing. Raises Fenced for an owner that no longer holds it."""
    if lock.owner is None and lock.token == token:
        return lock
    _check_holder(lock, owner, token)
    return msgspec.structs.replace(lock, owner=None)


def _check_holder(lock: LockState, owner: str, token: int) -> None:
    if lock.owner == owner and lock.token == token:
        return
    if lock.owner is None:
        raise _fenced(f"nobody holds the lock any more; its last fencing token was {lock.token}", token, lock.token)
    if lock.token == token:
        raise Fenced(f"fencing token {token} was given to another owner", newest_token=lock.token)
    raise _fenced(f"the lock has passed on: its fencing token is {lock.token} now, not {token}", token, lock.token)


def _fenced(detail: str, token: int, newest: int) -> Fenced:
    """Return the refusal of a token. For one that was issued it is unknown: an earlier copy of the request may have
    come while its holder had the lock, and have released it."""
    return Fenced(detail, outcome="unknown" if token <= newest else "not_applied", newest_token=newest)


# --- the tree --------------------------------------------------------------------------------------------------------

VersionedLock = Versioned[LockState]
# Called with each state that is read or written. Returns how long ago, in milliseconds, its mark was first seen.
Observe = Callable[[str, VersionedLock | None], int]


class LockTable(Tree):
    """Locks, each changed by compare-and-set. A read settles an unknown outcome: each change is recognised as done (the
    client holds the lock or has its ticket), or is harmless to repeat."""

    # The last version read of the floor. A stale one only makes a commit conflict, after which it is read again.
    _floor_seen: int | None = None

    def read(self, name: str) -> VersionedLock | None:
        return self._read(lock_path(wire.check_name(name, "lock")), LockState)

    def names(self) -> list[str]:
        return self.plane.children(LOCKS)

    def read_many(self, names: list[str]) -> dict[str, VersionedLock | None]:
        """Return the locks that can be read, None for a missing one."""
        found: dict[str, VersionedLock | None] = {}
        for name, node in zip(names, self.plane.get_many([lock_path(name) for name in names]), strict=True):
            try:
                found[name] = Versioned(state.decode(node.data, LockState), node.version) if node else None
            except msgspec.DecodeError as fault:
                log.critical("lock %r in the control plane cannot be read, and is skipped: %s", name, fault)
        return found

    def ask(
        self,
        name: str,
        owner: str,
        ttl_ms: int,
        observe: Observe,
        live: Mapping[int, int],
        *,
        ticket: LockTicket | None = None,
        may_create: bool = True,
    ) -> LockOutcome:
        """Commit the result of `requested`. Without `may_create` a missing lock raises Backpressure."""

        def attempt() -> LockOutcome:
            floor_version = self._floor_version()
            held = self.read(name)
            age_ms = observe(name, held)
            if held is None:
                if not may_create:
                    raise Backpressure(
                        "there are as many locks as the cluster keeps: use fewer names", retry_after_s=10
                    )
                floor = self._floor()
                made = LockState(floor.value.token + 1, owner, ttl_ms)
                self.plane.commit(Check(LOCK_FLOOR, floor.version), Create(lock_path(name), state.encode(made)))
                observe(name, Versioned(made, 0))
                return LockOutcome(made, granted=True)
            outcome = requested(held.value, owner, ttl_ms, age_ms, live, ticket)
            self._set(name, held, outcome.state, observe, floor_version)
            return outcome

        return self._retry_conflicts(f"lock {name!r}", attempt)

    def renew(self, name: str, owner: str, token: int, ttl_ms: int | None, observe: Observe) -> LockState:
        """Renew the lease. Raises Fenced, LockNotFound."""
        return self._change(name, token, lambda lock: renewed(lock, owner, token, ttl_ms), observe)

    def release(self, name: str, owner: str, token: int, observe: Observe) -> LockState:
        """Free the lock. Raises Fenced, LockNotFound."""
        return self._change(name, token, lambda lock: released(lock, owner, token), observe)

    def _change(self, name: str, token: int, change: Callable[[LockState], LockState], observe: Observe) -> LockState:
        path = lock_path(wire.check_name(name, "lock"))

        def attempt() -> LockState:
            floor_version = self._floor_version()
            held = self._read(path, LockState)
            observe(name, held)
            if held is None:
                newest = self._floor().value.token
                if token <= newest:
                    raise Fenced(f"nobody holds the lock {name!r} any more", outcome="unknown", newest_token=newest)
                raise LockNotFound(f"there is no lock {name!r}")
            after = change(held.value)
            self._set(name, held, after, observe, floor_version)
            return after

        return self._retry_conflicts(f"lock {name!r}", attempt)

    def free(self, name: str, mark: Mark, observe: Observe) -> None:
        """Free a lock whose ttl is over by its observer's clock, so that every waiting client can take it."""

        def attempt() -> None:
            floor_version = self._floor_version()
            held = self.read(name)
            observe(name, held)
            if held is not None and held.value.mark == mark and held.value.owner is not None:
                self._set(name, held, msgspec.structs.replace(held.value, owner=None), observe, floor_version)

        self._retry_conflicts(f"lock {name!r}", attempt)

    def leave(self, name: str, tickets: AbstractSet[LockTicket], observe: Observe) -> None:
        """Remove these tickets from the queue, those that are still in it."""

        def attempt() -> None:
            floor_version = self._floor_version()
            held = self.read(name)
            observe(name, held)
            if held is not None and not tickets.isdisjoint(held.value.queue):
                queue = tuple(each for each in held.value.queue if each not in tickets)
                self._set(name, held, msgspec.structs.replace(held.value, queue=queue), observe, floor_version)

        self._retry_conflicts(f"lock {name!r}", attempt)

    def remove(self, name: str, mark: Mark) -> bool:
        """Remove a lock that is free and has an empty queue; False when that is no longer so."""
        return bool(self.remove_all({name: mark}))

    def remove_all(self, marks: Mapping[str, Mark]) -> list[str]:
        """Remove locks, at most REMOVE_AT_ONCE_MAX, that are free and have an empty queue. Return those removed.

        It uses one commit, since each rise of the floor makes other commits conflict.
        """
        assert len(marks) <= REMOVE_AT_ONCE_MAX

        def attempt() -> list[str]:
            floor = self._floor()
            unused = {
                name: held
                for name, held in self.read_many(list(marks)).items()
                if held is not None and held.value.mark == marks[name] and not held.value.queue
            }
            if unused:
                newest = LockFloor(max(floor.value.token, *(held.value.token for held in unused.values())))
                self._floor_seen = None
                self.plane.commit(
                    *(Delete(lock_path(name), held.version) for name, held in unused.items()),
                    Set(LOCK_FLOOR, state.encode(newest), floor.version),
                )
            return list(unused)

        return self._retry_conflicts("unused locks", attempt)

    def reserve_tokens(self, upto: int) -> None:
        """Never issue a token up to this one again. A lock with a lower one keeps its owner, and that
        owner's token is stale."""

        def reserve() -> None:
            floor = self._floor()
            if floor.value.token < upto:
                self._floor_seen = None
                self.plane.commit(Set(LOCK_FLOOR, state.encode(LockFloor(upto)), floor.version))

        def raise_lock() -> None:
            if (held := self.read_many([name]).get(name)) is not None and held.value.token < upto:
                raised = msgspec.structs.replace(held.value, token=upto)
                self.plane.commit(Set(lock_path(name), state.encode(raised), held.version))

        self._retry_conflicts("the floor of tokens", reserve)
        for name in self.names():
            self._retry_conflicts(f"lock {name!r}", raise_lock)

    def _set(self, name: str, held: VersionedLock, after: LockState, observe: Observe, floor_version: int) -> None:
        """Commit the new state. `floor_version` was read before `held` was."""
        if after == held.value:
            return
        try:
            versions = self.plane.commit(
                Check(LOCK_FLOOR, floor_version), Set(lock_path(name), state.encode(after), held.version)
            )
        except Conflict:
            self._floor_seen = None
            raise
        observe(name, Versioned(after, versions[-1]))

    def _floor_version(self) -> int:
        if self._floor_seen is None:
            self._floor_seen = self._floor().version
        return self._floor_seen

    def _floor(self) -> Versioned[LockFloor]:
        held = self._read(LOCK_FLOOR, LockFloor)
        if held is not None:
            return held
        self.plane.commit(Create(LOCK_FLOOR, state.encode(LockFloor(0))))
        return Versioned(LockFloor(0), 0)
