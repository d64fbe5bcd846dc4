"""A lock that programs on many machines share. One holds it, under a fencing token that rises with each holder.

    acquire --> held --(renewed every third of the ttl)--> release
                  `--> lost: fenced by the brokers, or not renewed in time by this clock

No lock over a network can stop a program that has lost it: the process may be paused between the check and the write.
So a program passes the fencing token along with each write under the lock, and the storage refuses a token lower than
the highest that it has seen. docs/LOCKS.md shows this with a row of SQLite.

Here the ttl counts from before a request was sent, on a clock that continues while the machine is suspended. At the
brokers it counts from the receipt of the request. So the holder always learns first that the lock is lost.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections.abc import Callable

from portalmq import wire
from portalmq.errors import Fenced, LockHeld, LockNotFound, PortalMQError
from portalmq.network.forking import reset_in_children
from portalmq.network.tls import TlsFiles
from portalmq.system import steady_s
from portalmq.transport.answers import decode_answer
from portalmq.transport.request import WAIT_S_MIN, Request, json_request, with_query
from portalmq.transport.retries import Backoff, may_repeat
from portalmq.transport.transport import Bootstrap, Transport

_log = logging.getLogger("portalmq.lock")

# A waiting client asks again after this time, so that a paused broker does not hold it for long.
POLL_WAIT_S = 10.0
KEEP_PLACE_MS = 2_000
# How long failures are retried if the caller gives no shorter time.
REACH_TIMEOUT_S = 10.0
RELEASE_TIMEOUT_S = 10.0
RENEWALS_PER_TTL = 3
OWNER_CHARACTERS_MAX = 190


class Lock:
    """A client that acquires the lock `name`. acquire, renew and release are for one thread at a time.

        with Lock("nightly", "http://localhost:5000", ttl_s=10) as fencing_token:
            write_report(fencing_token)

    A background thread renews the lock while it is held. A holder that is paused, disconnected or killed for longer
    than `ttl_s` loses it: `lost` becomes true, `on_lost` is called, and `check`, `renew`, `release` and the end of
    `with` raise Fenced. `owner` names the holder to others; by default it is unique for each acquisition.

    The child of a fork does not hold the parent's lock. An `owner` that was given gets the child's process id appended.
    """

    def __init__(
        self,
        name: str,
        bootstrap: Bootstrap = None,
        *,
        ttl_s: float = 10.0,
        owner: str | None = None,
        acquire_timeout_s: float | None = None,
        on_lost: Callable[[Fenced], object] | None = None,
        token: str | None = None,
        clock: Callable[[], float] = steady_s,
        tls_ca: str | None = None,
        tls_client_cert: str | None = None,
        tls_client_key: str | None = None,
        allow_advertised: bool | None = None,
    ) -> None:
        """`acquire_timeout_s`: how long `with` waits for the lock; None waits for ever. `on_lost` is called once, from
        the renewing thread. `token` is the access token of the broker, not a fencing token. `clock` is for tests.
        `tls_…` and `allow_advertised` are those of Producer."""
        least, most = wire.LOCK_TTL_MS_MIN / 1000, wire.LOCK_TTL_MS_MAX // 1000
        if not least <= ttl_s <= most:
            raise ValueError(f"ttl_s must be {least:g} to {most}")
        if owner is not None and not 1 <= len(owner) <= OWNER_CHARACTERS_MAX:
            raise ValueError(f"owner must have 1 to {OWNER_CHARACTERS_MAX} characters")
        self.name = wire.check_name(name, "lock")
        self.ttl_s = ttl_s
        self._owner = owner
        self._acquire_timeout_s = acquire_timeout_s
        self._on_lost = on_lost
        self._clock = clock
        self._transport = Transport(
            bootstrap,
            token=token,
            tls=TlsFiles(tls_ca, tls_client_cert, tls_client_key),
            allow_advertised=allow_advertised,
        )
        self._acquisition: _Acquisition | None = None
        self._finalizer: weakref.finalize[[], Lock] | None = None
        reset_in_children(self)

    def __repr__(self) -> str:
        state = f"held under {self.fencing_token}" if self.held else "lost" if self.lost else "not held"
        return f"<Lock {self.name!r} at {', '.join(self._transport.urls)}: {state}>"

    def _reset_in_child(self) -> None:
        """Forget the lock in the child of a fork: the parent renews and releases it. A child that acquires it needs
        another owner, or the brokers would take it for the parent."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._acquisition = self._finalizer = None
        if self._owner is not None:
            suffix = f":{os.getpid()}"
            self._owner = self._owner[: OWNER_CHARACTERS_MAX - len(suffix)] + suffix

    # --- holding -----------------------------------------------------------------------------------------------------

    def acquire(self, timeout_s: float | None = None) -> int:
        """Wait for the lock, in order of arrival, and return the fencing token.

        Raises LockHeld after `timeout_s` (None waits for ever, 0 asks once), and the error of brokers that cannot
        answer.
        """
        if self.held:
            raise RuntimeError(f"lock {self.name!r} is held by this object already: release it first")
        self._drop()
        owner = self._owner or _new_owner()
        began = time.monotonic()
        deadline = None if timeout_s is None else began + max(0.0, timeout_s)
        failing_since: float | None = None
        backoff = Backoff()
        while True:
            now = time.monotonic()
            wait_s = POLL_WAIT_S if deadline is None else min(POLL_WAIT_S, max(0.0, deadline - now))
            asked_at = self._clock()
            try:
                grant = self._request(owner, wait_s, is_last=deadline is not None and now + wait_s >= deadline)
            except LockHeld:
                if deadline is not None and time.monotonic() >= deadline:
                    raise
                failing_since, backoff = None, Backoff()
                continue
            except PortalMQError as error:
                now = time.monotonic()
                failing_since = now if failing_since is None else failing_since
                give_up_at = failing_since + REACH_TIMEOUT_S if deadline is None else deadline
                if timeout_s == 0 and not self._transport.reachability.is_refused:
                    give_up_at = began + REACH_TIMEOUT_S  # a broker is there, and cannot answer now
                pause_s = backoff.next_s(error.retry_after_s)
                if not may_repeat(error, repeatable=True) or now + pause_s >= give_up_at:
                    raise
                self._transport.pause(pause_s)
                continue
            acquisition = _Acquisition(self, owner, grant.fencing_token, asked_at)
            if not acquisition.is_over():
                acquisition.start()
                self._acquisition = acquisition
                self._finalizer = weakref.finalize(self, acquisition.stop)
                return grant.fencing_token

    def _request(self, owner: str, wait_s: float, *, is_last: bool) -> wire.LockGrant:
        body = wire.LockRequest(
            owner, round(self.ttl_s * 1000), round(wait_s * 1000), 0 if is_last else KEEP_PLACE_MS
        )  # fmt: skip
        request = json_request("POST", wire.lock_path(self.name), body, wait_s=max(wait_s, WAIT_S_MIN))
        deadline = time.monotonic() + wait_s + REACH_TIMEOUT_S
        return decode_answer(self._transport.attempt(request, deadline), wire.LockGrant)

    def renew(self) -> None:
        """Renew now. The background thread does this by itself. Raises Fenced if the lock is lost."""
        acquisition = self._held_acquisition()
        acquisition.check()
        acquisition.renew()

    def release(self) -> None:
        """Release the lock. Raises Fenced if it was lost before, and the error of brokers that cannot answer: then the
        lock is free once its ttl is over."""
        acquisition = self._held_acquisition()
        try:
            acquisition.check()
        finally:
            self._drop()
        acquisition.give_back()

    # --- looking -----------------------------------------------------------------------------------------------------

    @property
    def fencing_token(self) -> int | None:
        """The token of the latest acquisition, to pass along with each write; None before the first."""
        return None if self._acquisition is None else self._acquisition.token

    @property
    def owner(self) -> str | None:
        """The owner of the latest acquisition."""
        return self._owner if self._acquisition is None else self._acquisition.owner

    @property
    def held(self) -> bool:
        """True while this process may assume that it holds the lock. The answer may be outdated when it is read."""
        return self._acquisition is not None and not self._acquisition.stopped and not self._acquisition.is_over()

    @property
    def lost(self) -> bool:
        """True if the lock was lost since its latest acquisition, without a release."""
        return self._acquisition is not None and self._acquisition.is_lost()

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Wait until the lock is lost or released; return True if it is lost."""
        acquisition = self._held_acquisition()
        acquisition.ended.wait(timeout_s)
        return self.lost

    def check(self) -> int:
        """Return the fencing token. Raises Fenced if the lock is lost."""
        acquisition = self._held_acquisition()
        acquisition.check()
        return acquisition.token

    def _held_acquisition(self) -> _Acquisition:
        if self._acquisition is None or self._acquisition.stopped:
            raise RuntimeError(f"lock {self.name!r} is not held: acquire it first")
        return self._acquisition

    # --- the end -----------------------------------------------------------------------------------------------------

    def _drop(self) -> None:
        if self._finalizer is not None:
            self._finalizer()

    def close(self) -> None:
        """Stop renewing without releasing the lock (see release), and close the connections."""
        self._drop()
        self._transport.close()

    def __enter__(self) -> int:
        return self.acquire(self._acquire_timeout_s)

    def __exit__(self, kind: object, fault: BaseException | None, traceback: object) -> None:
        """Release. Raises Fenced if the lock was lost, unless the body raised an error itself."""
        if self._acquisition is None or self._acquisition.stopped:
            return  # the body released it
        try:
            self.release()
        except Fenced:
            if fault is None:
                raise
        except PortalMQError as error:
            _log.warning("lock %r could not be released, and expires by itself: %s", self.name, error)


class _Acquisition:
    """One acquisition, from its token to its loss or release. The renewing thread refers to this and not to the Lock,
    so that an abandoned Lock can be garbage collected and is not renewed for ever."""

    def __init__(self, lock: Lock, owner: str, token: int, asked_at: float) -> None:
        self.owner = owner
        self.token = token
        self.stopped = False
        self.ended = threading.Event()  # lost, or stopped
        self._name = lock.name
        self._ttl_s = lock.ttl_s
        self._clock = lock._clock
        self._transport = lock._transport
        self._on_lost = lock._on_lost
        self._guard = threading.Lock()
        self._until = asked_at + lock.ttl_s
        self._loss: str | None = None
        self._thread = threading.Thread(target=self._renew_until_ended, name="portalmq-lock", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing."""
        self.stopped = True
        self.ended.set()

    def is_over(self) -> bool:
        return self._loss is not None or self._clock() >= self._until

    def is_lost(self) -> bool:
        return self._loss is not None or (not self.stopped and self.is_over())

    def check(self) -> None:
        if self.is_over():
            self._lose_by_time()
        if self._loss is not None:
            raise Fenced(self._loss)

    def renew(self) -> None:
        """Renew. Raises Fenced, and then the lock is lost; or the error of brokers that cannot answer."""
        asked_at = self._clock()
        body = wire.LockRenewal(self.owner, self.token, round(self._ttl_s * 1000))
        request = json_request("PUT", wire.lock_path(self._name), body)
        # A paused broker must not use up the time in which another one would answer.
        limit_s = max(0.1, min(self._until - asked_at, self._ttl_s / RENEWALS_PER_TTL))
        try:
            self._transport.attempt(request, time.monotonic() + limit_s)
        except (Fenced, LockNotFound) as error:
            self._lose(error.detail)
            self.check()
        with self._guard:
            if self._loss is None and self._clock() < self._until:
                self._until = max(self._until, asked_at + self._ttl_s)
        self.check()

    def give_back(self) -> None:
        query = {"owner": self.owner, "fencing_token": self.token}
        request = Request("DELETE", with_query(wire.lock_path(self._name), query), repeatable=True)
        try:
            self._transport.call(request, timeout_s=RELEASE_TIMEOUT_S)
        except (Fenced, LockNotFound):
            # By our own clock the lock was still ours, so only this release can have freed it. The answer of its first
            # try was lost, and the repeat arrived after the next holder's acquisition.
            _log.debug("lock %r was released by a request whose answer was lost", self._name)

    def _renew_until_ended(self) -> None:
        backoff = Backoff()
        pause_s = self._ttl_s / RENEWALS_PER_TTL
        while not self.ended.wait(min(pause_s, max(0.0, self._until - self._clock()))):
            if self.is_over():
                self._lose_by_time()
                return
            try:
                self.renew()
                pause_s, backoff = self._ttl_s / RENEWALS_PER_TTL, Backoff()
            except Fenced:
                return
            except PortalMQError as error:
                pause_s = min(backoff.next_s(error.retry_after_s), self._ttl_s / RENEWALS_PER_TTL)
                _log.info("lock %r will be renewed again in %.2f s: %s", self._name, pause_s, error)

    def _lose_by_time(self) -> None:
        self._lose(f"lock {self._name!r} was not renewed within its {self._ttl_s:g} s; another may hold it now")

    def _lose(self, why: str) -> None:
        with self._guard:
            if self._loss is not None or self.stopped:
                return
            self._loss = why
        _log.warning("lock %r is lost: %s", self._name, why)
        self.ended.set()
        if self._on_lost is not None:
            try:
                self._on_lost(Fenced(why))
            except Exception:  # noqa: BLE001 - an error of the caller must not end this thread
                _log.exception("on_lost of lock %r failed", self._name)


def _new_owner() -> str:
    return f"{socket.gethostname()[:100]}:{os.getpid()}:{uuid.uuid4().hex}"
