"""A session with ZooKeeper: its state, its change notifications, and one request at a time or many.

The package's docstring has the theory.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from kazoo.exceptions import (
    AuthFailedError,
    ConnectionLoss,
    NoAuthError,
    NoNodeError,
    SessionExpiredError,
    SessionMovedError,
    ThrottledOpError,
    UnimplementedError,
    ZookeeperError,
)
from kazoo.protocol.states import Callback, KazooState, KeeperState

from portalmq.control_plane.plane import ChangeCallback, PlaneRefused, PlaneState, PlaneUnavailable, clock_s
from portalmq.control_plane.zookeeper.connection import Access, AddWatch, NotSentError, SessionRequest, make_client

log = logging.getLogger(__name__)

# kazoo wakes its connection routine by a byte for each request, and a pair of sockets holds 277 of them: beyond that
# all callers would wait for room in it, whatever their deadlines. Twice this many may be on their way: single requests,
# and those of one `_each`.
REQUESTS_AT_ONCE_MAX = 100
NOTES_MAX = 1_000
RETRY_PAUSE_S = 0.02
WATCH_PAUSE_S = 0.5


class UnansweredError(Exception):
    """The request was sent, and no answer came in time."""


# A read that meets one of these is repeated. The last three mean that a commit was not applied: they are refusals.
_REPEATABLE = (ConnectionLoss, SessionExpiredError, SessionMovedError, ThrottledOpError, NotSentError)


class ZooKeeperSession:
    """The session of one client, from `start` to `close`. `_prepare` runs when it is connected."""

    def __init__(self, access: Access, chroot: str) -> None:
        self._access = access
        self._servers = access.servers
        self._chroot = chroot
        self._callbacks: list[ChangeCallback] = []
        self._lock = threading.Lock()
        self._requests = threading.BoundedSemaphore(REQUESTS_AT_ONCE_MAX)
        self._each_at_a_time = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self._client: Any = None
        self.state = PlaneState.LOST
        self.session_id = 0
        self.session_timeout_s = self._access.session_timeout_s
        self.last_answered = 0.0
        self._refused = ""
        self._connections = 0
        self._noted: set[str | None] = set()
        self.set_back = False

    def watch(self, callback: ChangeCallback) -> None:
        self._callbacks.append(callback)

    # --- from start to close ---

    def start(self) -> None:
        assert self._client is None, "started twice"
        client = make_client(self._access, self)
        client.add_listener(self._on_state)
        # Set at each change of the connection: connected, refused, or closed.
        self._state_changed = client.handler.event_object()
        self._watching = client.handler.event_object()
        self._client = client
        try:
            deadline = clock_s() + 2 * self._access.session_timeout_s
            client.start_async()
            self._await_connection(deadline)
            self._prepare()
            self._watching.wait(max(0.0, deadline - clock_s()))
            if not self._watching.is_set():
                self._await_connection(clock_s())
                raise PlaneUnavailable(f"ZooKeeper at {self._servers} sets no watch; is it older than 3.6?")
        except BaseException:
            self.close()
            raise

    def _prepare(self) -> None:
        """Make the session ready for its user, while `start` waits."""

    def close(self) -> None:
        client = self._client
        if client is None:
            return
        self._client = None
        try:
            client.stop()
            client.close()
        finally:
            self._forget()
            self._state_changed.set()

    def _on_state(self, state: str) -> None:
        """Follow kazoo's state. Runs on the connection routine: no call to ZooKeeper may wait here."""
        client = self._client
        if client is None:
            return  # closing
        if state == KazooState.CONNECTED:
            same = self.session_id == client._session_id
            self.session_id = client._session_id
            self._connections += 1
            self.state = PlaneState.CONNECTED
            log.info("ZooKeeper session %s %s", self._session_name(), "goes on" if same else "begins")
            client.handler.spawn(self._set_watch, self._connections)
            self._state_changed.set()
        elif state == KazooState.SUSPENDED:
            self.state = PlaneState.SUSPENDED
            self._state_changed.clear()
            log.warning("no connection to ZooKeeper at %s; session %s waits", self._servers, self._session_name())
            self._note(None)
        else:
            refused = client.client_state == KeeperState.AUTH_FAILED
            log.error("ZooKeeper session %s %s", self._session_name(), "is refused" if refused else "is lost")
            self.state = PlaneState.LOST
            self.session_id = 0
            self._state_changed.clear()
            if refused:
                self._refuse("does not take the credentials: start again with those that its nodes were made with")
            self._note(None)

    def _refuse(self, why: str) -> None:
        self._refused = f"ZooKeeper at {self._servers} {why}"
        self._state_changed.set()

    def _session_name(self) -> str:
        return f"{self.session_id & (2**64 - 1):#x}"

    def on_granted(self, timeout_s: float, began: float) -> None:
        self.session_timeout_s = timeout_s
        self.on_answered(began)

    def on_answered(self, began: float) -> None:
        self.last_answered = max(self.last_answered, began)

    def on_set_back(self) -> None:
        self.set_back = True

    def _await_connection(self, deadline: float) -> int:
        """Return the session once connected. Raises PlaneUnavailable after `deadline`, PlaneRefused."""
        while True:
            if self._client is None:
                raise PlaneUnavailable(f"the session with ZooKeeper at {self._servers} is closed")
            if self._refused:
                raise PlaneRefused(self._refused)
            if self.state is PlaneState.CONNECTED:
                return self.session_id
            remaining = deadline - clock_s()
            if remaining <= 0:
                raise PlaneUnavailable(f"ZooKeeper at {self._servers} does not answer")
            self._state_changed.wait(remaining)

    # --- change notifications ---

    def _set_watch(self, connection: int) -> None:
        """Watch the whole tree while this connection lasts, then report that anything may have changed."""
        # Each connection sets its own watch. A request given up unsent (a paused process) does not mean that the
        # connection is gone, so only its state ends the attempts, or close(): until kazoo has ended, the state stays.
        while self._client is not None and self.state is PlaneState.CONNECTED and self._connections == connection:
            try:
                self._ask(AddWatch(self._chroot or "/"), self._deadline())
            except UnimplementedError:
                self._refuse("is older than 3.6, which this needs: run a newer one")
                return
            except (NotSentError, UnansweredError, ZookeeperError) as fault:
                log.info("no watch on ZooKeeper yet: %r", fault)
                self._pause(WATCH_PAUSE_S)
            else:
                self._watching.set()
                self._note(None)
                return

    def _note(self, path: str | None) -> None:
        """Record a change for the watchers. No callback may run here."""
        client = self._client
        if client is None:
            return
        with self._lock:
            first = not self._noted
            if len(self._noted) < NOTES_MAX:
                self._noted.add(path)
            else:
                self._noted = {None}
        if first:
            client.handler.dispatch_callback(Callback("watch", self._call_watchers, ()))

    def on_changed(self, path: str) -> None:
        if path.startswith(f"{self._chroot}/") and path != "/":
            self._note(path[len(self._chroot) :])

    def _call_watchers(self) -> None:
        with self._lock:
            noted, self._noted = self._noted, set()
        for path in noted:
            for callback in self._callbacks:
                try:
                    callback(path)
                except Exception:
                    log.exception("a watcher of the control plane failed")

    # --- requests ---

    def _read(self, make: Callable[[], Any]) -> Any:
        """Return the answer to a request that may be repeated. ZookeeperErrors about the node itself pass through."""
        deadline = self._deadline()
        while True:
            self._await_connection(deadline)
            try:
                return self._ask(make(), deadline)
            except _REPEATABLE:
                if clock_s() >= deadline:  # the connection came back too late to send a request
                    raise PlaneUnavailable(f"ZooKeeper at {self._servers} does not answer") from None
                self._pause(RETRY_PAUSE_S)
            except UnansweredError:
                raise PlaneUnavailable(f"ZooKeeper at {self._servers} does not answer") from None
            except (NoAuthError, AuthFailedError) as fault:
                self._raise_refused(fault)
                raise

    def _ask(self, inner: Any, deadline: float, *, session_id: int = 0) -> Any:
        """Return the answer. Raises kazoo's errors, NotSentError for one never sent, UnansweredError if it is late."""
        if not self._requests.acquire(timeout=max(0.0, deadline - clock_s())):
            raise NotSentError
        try:
            if clock_s() >= deadline:  # those before it were not answered in time either
                raise NotSentError
            return self._answer_to(inner, deadline, session_id)
        finally:
            self._requests.release()

    def _answer_to(self, inner: Any, deadline: float, session_id: int) -> Any:
        client = self._client
        if client is None:
            raise NotSentError
        request = SessionRequest(inner, session_id)
        result = client.handler.async_result()
        client._call(request, result)
        result.wait(max(0.0, deadline - clock_s()))
        fault = result.exception if result.ready() else UnansweredError()
        if fault is None:
            return result.value
        if isinstance(fault, (UnansweredError, ConnectionLoss, SessionExpiredError)) and request.claim():
            raise NotSentError
        raise fault

    def _each(self, paths: Sequence[str], make: Callable[[str], Any]) -> list[tuple[str, Any]]:
        """Return the answer for each node that exists. Many requests are in flight at a time."""
        answers = []
        if not self._each_at_a_time.acquire(timeout=self.session_timeout_s):
            raise PlaneUnavailable(f"ZooKeeper at {self._servers} has not answered other requests yet")
        try:
            for start in range(0, len(paths), REQUESTS_AT_ONCE_MAX):
                some = paths[start : start + REQUESTS_AT_ONCE_MAX]
                answers += self._each_of(some, make)
        finally:
            self._each_at_a_time.release()
        return answers

    def _each_of(self, paths: Sequence[str], make: Callable[[str], Any]) -> list[tuple[str, Any]]:
        client = self._client
        if client is None:
            raise PlaneUnavailable(f"the session with ZooKeeper at {self._servers} is closed")
        self._await_connection(self._deadline())
        results = [client.handler.async_result() for _ in paths]
        for path, result in zip(paths, results, strict=True):
            client._call(SessionRequest(make(path), 0), result)
        deadline = self._deadline()
        answers = []
        for path, result in zip(paths, results, strict=True):
            result.wait(max(0.0, deadline - clock_s()))
            fault = result.exception if result.ready() else UnansweredError()
            if fault is None:
                answers.append((path, result.value))
            elif not isinstance(fault, NoNodeError):  # a node that was deleted is left out
                if isinstance(fault, ZookeeperError):
                    self._raise_refused(fault)
                raise PlaneUnavailable(f"{path}: ZooKeeper answers {fault!r}")
        return answers

    def _raise_refused(self, fault: ZookeeperError) -> None:
        if isinstance(fault, (NoAuthError, AuthFailedError)):
            raise PlaneRefused(self._refused or f"ZooKeeper at {self._servers} keeps {self._chroot or '/'} for others")

    def _deadline(self) -> float:
        return clock_s() + self.session_timeout_s

    def _pause(self, seconds: float) -> None:
        client = self._client
        if client is not None:
            client.handler.sleep_func(seconds)
