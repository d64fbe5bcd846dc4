"""Pitfalls of ZooKeeper and kazoo: each test provokes one ("trap") on a real server.

A proxy (support.zookeeper.Wire) cuts, slows and corrupts the connection between the plane and its server. Sessions are
short where a test waits for their end, and otherwise as long as the server grants: a paused machine ends none.
"""

from __future__ import annotations

import contextlib
import operator
import os
import signal
import socket
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stopping import stop
from support.zookeeper import Wire, fresh_chroot, until

from portalmq.control_plane import state
from portalmq.control_plane.catalog import BrokerIdTaken, Catalog
from portalmq.control_plane.embedded import EmbeddedZooKeeper
from portalmq.control_plane.plane import (
    COMMIT_OPS_MAX,
    PATH_CHARACTERS_MAX,
    Check,
    Create,
    Delete,
    Node,
    NodeExists,
    Op,
    OutcomeUnknown,
    PlaneState,
    PlaneUnavailable,
    Set,
    VersionMismatch,
    clock_s,
)
from portalmq.control_plane.state import BrokerState
from portalmq.control_plane.zookeeper import ZooKeeper

pytestmark = pytest.mark.cluster

SESSION_S = 4.0
LONG_SESSION_S = 10.0
ME = BrokerState("http://me", 1, "my store")


@pytest.fixture
def chroot() -> str:
    return fresh_chroot()


@pytest.fixture
def wire(zookeeper_server: EmbeddedZooKeeper) -> Iterator[Wire]:
    with Wire(zookeeper_server.ports[0]) as made:
        yield made


@pytest.fixture
def opened() -> Iterator[Callable[[str], ZooKeeper]]:
    """Open planes that are closed at the end."""
    with contextlib.ExitStack() as closing:

        def open_plane(hosts: str, session_timeout_s: float = LONG_SESSION_S) -> ZooKeeper:
            plane = ZooKeeper(hosts, session_timeout_s=session_timeout_s)
            plane.start()
            closing.callback(plane.close)
            return plane

        yield open_plane


@pytest.fixture
def plane(opened: Callable[[str], ZooKeeper], wire: Wire, chroot: str) -> ZooKeeper:
    """The plane under test, behind the wire."""
    return opened(wire.hosts + chroot)


@pytest.fixture
def brief(opened: Callable[[str, float], ZooKeeper], wire: Wire, chroot: str) -> ZooKeeper:
    """Like `plane`, with a short session."""
    return opened(wire.hosts + chroot, SESSION_S)


@pytest.fixture
def other(opened: Callable[[str], ZooKeeper], zookeeper_server: EmbeddedZooKeeper, chroot: str) -> ZooKeeper:
    """Another broker's plane on the same tree, with a direct connection."""
    return opened(zookeeper_server.hosts + chroot)


def expire(plane: ZooKeeper, wire: Wire, other: ZooKeeper) -> None:
    """Cut the plane off until the server has ended its session. Another plane observes the end by an ephemeral node."""
    plane.commit(Create("/expires", ephemeral=True))
    other.sync()
    assert other.get("/expires") is not None
    wire.cut()
    until(lambda: other.get("/expires") is None, what="the server ends the session")


class Call:
    """A call in a thread of its own, and its outcome."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.answer: Any = None
        self.error: BaseException | None = None
        self._call = lambda: function(*arguments)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.answer = self._call()
        except BaseException as error:  # noqa: BLE001 - the test checks every error
            self.error = error

    def ended(self) -> bool:
        self._thread.join(timeout=20)
        assert not self._thread.is_alive(), "the call is not bounded"
        return True


class TestSessions:
    def test_trap_lost_is_reported_only_after_the_return_so_a_lease_counts_from_the_last_answer(
        self, brief: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        rung: list[str | None] = []
        states: list[PlaneState] = []
        brief.watch(rung.append)
        brief.watch(lambda _: states.append(brief.state))
        first = brief.session_id
        expire(brief, wire, other)
        assert brief.state is PlaneState.SUSPENDED, "no server could have reported the end"
        assert brief.session_id == first
        assert clock_s() - brief.last_answered > brief.session_timeout_s * 2 / 3, "a lease would have run out"
        answered = brief.last_answered
        wire.heal()
        until(lambda: brief.state is PlaneState.CONNECTED and brief.session_id not in (0, first))
        assert brief.last_answered > answered
        until(lambda: states and states[-1] is PlaneState.CONNECTED)
        assert None in rung

    def test_trap_a_heartbeat_is_an_answer_so_an_idle_lease_goes_on(
        self, opened: Callable[[str, float], ZooKeeper], zookeeper_server: EmbeddedZooKeeper, chroot: str
    ) -> None:
        """Without requests, only heartbeats can renew the lease. Of seven pauses most must be short enough; a paused
        machine may lengthen one."""
        plane = opened(zookeeper_server.hosts + chroot, 2.0)
        answers = [plane.last_answered]

        def are_enough() -> bool:
            if plane.last_answered != answers[-1]:
                answers.append(plane.last_answered)
            return len(answers) > 7

        until(are_enough, what="heartbeats move it")
        assert statistics.median(map(operator.sub, answers[1:], answers)) < plane.session_timeout_s * 2 / 3

    def test_trap_no_answer_moves_the_lease_before_it_came(self, brief: ZooKeeper, wire: Wire) -> None:
        brief.sync()
        wire.swallow_answers = True
        silent_from = clock_s()
        until(lambda: wire.answers_swallowed > 0, what="a heartbeat is answered into the void")
        until(lambda: brief.state is PlaneState.SUSPENDED)
        assert brief.last_answered <= silent_from

    @pytest.mark.parametrize(("asked", "granted"), [(60.0, 10.0), (0.9, 1.0), (3.0, 3.0)])
    def test_trap_the_timeout_that_counts_is_the_one_the_server_granted(
        self, zookeeper_server: EmbeddedZooKeeper, chroot: str, asked: float, granted: float
    ) -> None:
        plane = ZooKeeper(zookeeper_server.hosts + chroot, session_timeout_s=asked)

        def is_started() -> bool:
            """A plane with a short session waits for its first answer no longer than that."""
            with contextlib.suppress(PlaneUnavailable):
                plane.start()
                return True
            return False

        until(is_started)
        assert plane.session_timeout_s == granted
        plane.close()

    def test_trap_a_commit_waiting_for_a_connection_is_not_sent_in_the_next_session(
        self, brief: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        expire(brief, wire, other)
        waits, wait = threading.Event(), brief._await_connection

        def told(deadline: float) -> int:
            waits.set()
            return wait(deadline)

        brief._await_connection = told  # type: ignore[method-assign]
        call = Call(brief.commit, Create("/late"))
        assert waits.wait(20)
        wire.heal()
        assert call.ended()
        assert isinstance(call.error, PlaneUnavailable), call.error
        until(lambda: brief.state is PlaneState.CONNECTED)
        brief.sync()
        assert brief.get("/late") is None

    def test_trap_a_commit_queued_inside_kazoo_is_not_sent_in_the_next_session(
        self, brief: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        """The queue outlives the session: a request of a lost session must not run in the next one."""
        first = brief.session_id
        expire(brief, wire, other)
        call = Call(brief._commit_in, first, [Create("/late")], clock_s() + 20)
        until(lambda: len(brief._client._queue) > 0, what="kazoo holds the request")
        wire.heal()
        assert call.ended()
        assert isinstance(call.error, PlaneUnavailable), call.error
        until(lambda: brief.session_id not in (0, first))
        with pytest.raises(PlaneUnavailable):  # queued a moment later, during the start of the new session
            brief._commit_in(first, [Create("/later")], clock_s() + 10)
        brief.sync()
        assert brief.get_many(["/late", "/later"]) == [None, None]

    def test_trap_a_request_that_timed_out_is_not_sent_later(
        self, plane: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        wire.cut()
        until(lambda: plane.state is PlaneState.SUSPENDED)
        with pytest.raises(PlaneUnavailable):
            plane._commit_in(plane.session_id, [Create("/late")], clock_s() + 0.1)
        assert len(plane._client._queue) == 1, "this test needs a request that kazoo still holds"
        wire.heal()
        until(lambda: plane.state is PlaneState.CONNECTED)
        plane.sync()
        assert plane.get("/late") is None

    def test_trap_an_answer_that_cannot_be_read_does_not_end_the_connection_for_good(
        self, plane: ZooKeeper, wire: Wire
    ) -> None:
        session_id, connections = plane.session_id, plane._connections
        wire.inject(struct.pack("!i", 3) + b"???")
        until(lambda: plane._connections > connections)
        assert plane.commit(Create("/a")) == [0]
        assert plane.session_id == session_id


class TestOutcomes:
    def test_trap_a_commit_whose_answer_is_lost_is_unknown_and_may_be_there(
        self, plane: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        wire.swallow_answers = True
        call = Call(plane.commit, Create("/a", b"mine"))
        until(lambda: other.get("/a") is not None)
        wire.cut()
        wire.heal()
        assert call.ended()
        assert isinstance(call.error, OutcomeUnknown), call.error
        plane.sync()
        assert plane.get("/a") == Node("/a", b"mine", 0)

    def test_trap_a_commit_that_got_lost_on_its_way_is_unknown_and_may_not_be_there(
        self, plane: ZooKeeper, wire: Wire
    ) -> None:
        wire.swallow_requests = True
        call = Call(plane.commit, Create("/a"))
        until(lambda: plane._client._pending, what="it has left, and not only a heartbeat")
        until(lambda: wire.requests_swallowed > 0)
        wire.cut()
        wire.heal()
        assert call.ended()
        assert isinstance(call.error, OutcomeUnknown), call.error
        plane.sync()
        assert plane.get("/a") is None

    def test_trap_a_commit_is_not_repeated_by_itself(self, plane: ZooKeeper, wire: Wire, other: ZooKeeper) -> None:
        plane.commit(Create("/a"))
        wire.swallow_answers = True
        call = Call(plane.commit, Set("/a", b"1", 0))
        until(lambda: other.get("/a") == Node("/a", b"1", 1))
        wire.cut()
        wire.heal()
        assert call.ended()
        assert isinstance(call.error, OutcomeUnknown), "a repeat would have met its own version"

    def test_a_commit_that_cannot_be_sent_was_not_applied(self, brief: ZooKeeper, wire: Wire) -> None:
        wire.cut()
        until(lambda: brief.state is PlaneState.SUSPENDED)
        began = time.monotonic()
        with pytest.raises(PlaneUnavailable):
            brief.commit(Create("/a"))
        assert time.monotonic() - began < 2 * SESSION_S

    def test_a_read_that_is_interrupted_is_asked_again(self, plane: ZooKeeper, wire: Wire) -> None:
        plane.commit(Create("/a", b"1"))
        wire.swallow_answers = True
        call = Call(plane.get, "/a")
        until(lambda: wire.answers_swallowed > 0)
        wire.cut()
        wire.heal()
        assert call.ended()
        assert call.answer == Node("/a", b"1", 0), call.error

    def test_a_commit_is_waited_for_until_its_deadline_and_no_longer(self, plane: ZooKeeper, wire: Wire) -> None:
        """Even if the connection works and only this answer is missing: the connection still works after the wait."""
        plane.sync()
        wire.swallow_answers = True
        with pytest.raises(OutcomeUnknown):
            plane._commit_in(plane.session_id, [Create("/a")], clock_s() + 1.5)
        assert plane.state is PlaneState.CONNECTED

    def test_reads_end_in_about_a_session_when_no_server_answers(self, brief: ZooKeeper, wire: Wire) -> None:
        wire.cut()
        began = time.monotonic()
        calls = [Call(brief.sync), Call(brief.get, "/a"), Call(brief.children, "/a")]
        errors = [call.error for call in calls if call.ended()]
        assert time.monotonic() - began < 2 * SESSION_S
        assert [isinstance(error, PlaneUnavailable) for error in errors] == [True] * 3, errors

    def test_trap_a_refused_transaction_raises_and_names_the_operation(self, plane: ZooKeeper) -> None:
        plane.commit(Create("/epoch"), Create("/a", b"0"))
        plane.commit(Set("/epoch", b"newer", 0))
        with pytest.raises(VersionMismatch) as fenced:
            plane.commit(Check("/epoch", 0), Set("/a", b"from an older controller", 0))
        assert fenced.value.path == "/epoch"
        with pytest.raises(NodeExists) as exists:
            plane.commit(Set("/a", b"1", 0), Create("/a"), Delete("/gone", 0))
        assert exists.value.path == "/a"
        assert plane.get("/a") == Node("/a", b"0", 0)

    def test_trap_a_creation_whose_answer_was_lost_is_recognised_by_its_content(
        self, plane: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        """NodeExists after a lost answer may mean the plane's own node, or another's."""
        commit, outcomes = plane.commit, []

        def lose_the_first_answer(*ops: Op) -> list[int]:
            wire.swallow_answers = not outcomes
            outcomes.append("lost" if wire.swallow_answers else "answered")
            return commit(*ops)

        plane.commit = lose_the_first_answer  # type: ignore[method-assign]
        call = Call(Catalog(plane).cluster_id)
        until(lambda: other.get(state.CLUSTER_ID) is not None)
        wire.cut()
        wire.heal()
        assert call.ended()
        assert call.error is None
        assert outcomes == ["lost"], "the node read afterwards is its own, so it repeats nothing"
        assert call.answer == Catalog(other).cluster_id() == Catalog(plane).cluster_id()

    def test_trap_two_concurrent_creations_of_a_parent_both_succeed(self, plane: ZooKeeper, other: ZooKeeper) -> None:
        for number in range(20):
            calls = [Call(each.commit, Create(f"/p/{number}/q/{each.session_id}")) for each in (plane, other)]
            assert all(call.ended() and call.error is None for call in calls), [call.error for call in calls]
            other.sync()
            assert len(other.children(f"/p/{number}/q")) == 2


class TestEphemerals:
    def test_trap_an_equal_entry_of_an_earlier_session_is_replaced(
        self, opened: Callable[[str], ZooKeeper], brief: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        """A restart within the old session: the end of that session would remove the broker's entry."""
        Catalog(brief).register_broker(1, ME)
        brief.commit(Create("/old-session", ephemeral=True))
        old = brief.session_id
        wire.cut()  # as if the process were dead: no client closes the session
        Catalog(other).register_broker(1, ME)
        held = other.get(state.broker_path(1))
        assert held is not None
        assert held.owner == other.session_id != old
        until(lambda: other.get("/old-session") is None, what="the old session ends")
        assert Catalog(other).brokers() == {1: ME}

    def test_an_entry_of_the_current_session_is_left_alone(self, plane: ZooKeeper) -> None:
        catalog = Catalog(plane)
        catalog.register_broker(1, ME)
        catalog.register_broker(1, ME)
        found = plane.get(state.broker_path(1))
        assert found is not None
        assert (found.owner, found.version) == (plane.session_id, 0)

    def test_another_data_directory_cannot_take_the_id(self, plane: ZooKeeper, other: ZooKeeper) -> None:
        Catalog(other).register_broker(1, ME)
        with pytest.raises(BrokerIdTaken, match="http://me"):
            Catalog(plane).register_broker(1, BrokerState("http://second", 1, "another store"))

    def test_a_broker_is_registered_again_after_its_session_was_lost(
        self, brief: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        Catalog(brief).register_broker(1, ME)
        expire(brief, wire, other)
        assert Catalog(other).brokers() == {}
        first = brief.session_id
        wire.heal()
        until(lambda: brief.session_id not in (0, first))
        Catalog(brief).register_broker(1, ME)
        assert Catalog(other).brokers() == {1: ME}


class TestTheBell:
    def test_trap_watches_end_with_the_connection_and_are_set_again(
        self, plane: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        rung: list[str | None] = []
        plane.watch(rung.append)
        for round_number in range(3):
            wire.cut()
            until(lambda: plane.state is PlaneState.SUSPENDED)
            other.commit(Create(f"/missed-{round_number}"))
            until(lambda: None in rung)
            rung.clear()
            wire.heal()
            until(lambda: None in rung, what="anything may have changed meanwhile")
            other.commit(Create(f"/heard-{round_number}/deep"))
            until(lambda number=round_number: f"/heard-{number}/deep" in rung)  # type: ignore[misc]
            rung.clear()

    def test_trap_watches_end_with_the_session_and_are_set_again(
        self, brief: ZooKeeper, wire: Wire, other: ZooKeeper
    ) -> None:
        rung: list[str | None] = []
        brief.watch(rung.append)
        first = brief.session_id
        expire(brief, wire, other)
        wire.heal()
        until(lambda: brief.session_id not in (0, first))
        until(lambda: other.commit(Create(f"/n/{clock_s()}")) and any(path for path in rung if path))

    def test_trap_a_node_that_is_deleted_and_created_again_notifies(self, plane: ZooKeeper, other: ZooKeeper) -> None:
        plane.commit(Create("/ids/1", b"me"))
        rung: list[str | None] = []
        plane.watch(rung.append)
        other.commit(Delete("/ids/1", 0), Create("/ids/1", b"me"))
        until(lambda: "/ids/1" in rung)

    def test_trap_a_callback_that_blocks_or_fails_delays_neither_the_session_nor_other_callbacks(
        self, brief: ZooKeeper, other: ZooKeeper
    ) -> None:
        release = threading.Event()
        rung: list[str | None] = []

        def blocks(_: str | None) -> None:
            release.wait(20)

        def fails(_: str | None) -> None:
            raise RuntimeError("a bell that fails")

        for bell in (fails, rung.append, blocks):
            brief.watch(bell)
        session_id = brief.session_id
        other.commit(Create("/a"))
        until(lambda: "/a" in rung)
        deadline = clock_s() + 1.5 * SESSION_S
        while clock_s() < deadline:
            assert brief.get("/a") is not None
            other.commit(Set("/a", b"", brief.get("/a").version))  # type: ignore[union-attr]
            time.sleep(0.01)
        until(lambda: brief.state is PlaneState.CONNECTED)
        assert brief.session_id == session_id
        release.set()
        other.commit(Create("/b"))
        until(lambda: "/b" in rung or None in rung)

    def test_a_callback_that_calls_the_plane_does_not_block_it(self, plane: ZooKeeper, other: ZooKeeper) -> None:
        found: list[Node | None] = []
        plane.watch(lambda path: found.append(plane.get(path)) if path else None)
        other.commit(Create("/a"))
        until(lambda: Node("/a", b"", 0) in found)

    def test_changes_outside_the_chroot_cause_no_notification(
        self, opened: Callable[[str], ZooKeeper], plane: ZooKeeper, wire: Wire, chroot: str
    ) -> None:
        rung: list[str | None] = []
        plane.watch(rung.append)
        opened(f"{wire.hosts}{chroot}-neighbour").commit(Create("/theirs"))
        plane.commit(Create("/ours"))
        until(lambda: "/ours" in rung)
        assert set(rung) <= {"/ours", None}


class TestReaching:
    def test_trap_one_silent_server_does_not_use_up_the_session(
        self, zookeeper_server: EmbeddedZooKeeper, chroot: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("kazoo.protocol.connection.random.shuffle", lambda _: None)  # the silent one first
        with contextlib.ExitStack() as held:
            silent = held.enter_context(socket.socket())
            silent.bind(("127.0.0.1", 0))
            silent.listen(0)
            port = silent.getsockname()[1]
            for _ in range(4):  # fills its backlog: the kernel answers no further SYN
                full = held.enter_context(socket.socket())
                full.setblocking(False)
                full.connect_ex(("127.0.0.1", port))
            hosts = f"127.0.0.1:{port},{zookeeper_server.hosts}{chroot}"
            plane = ZooKeeper(hosts, session_timeout_s=LONG_SESSION_S)
            began = time.monotonic()
            plane.start()
            took = time.monotonic() - began
            plane.close()
        assert 1.5 < took < LONG_SESSION_S, "the silent server may take a quarter of the session, not all of it"

    def test_trap_a_server_that_takes_the_connection_and_says_nothing_does_not_use_up_the_session(
        self, plane: ZooKeeper, wire: Wire
    ) -> None:
        """A server that is starting may do so: it never answers requests that arrive too early."""
        session_id = plane.session_id
        wire.silent_next = 1
        wire.cut()
        wire.heal()
        until(lambda: wire.requests_swallowed > 0)
        until(lambda: plane.state is PlaneState.CONNECTED)
        assert plane.session_id == session_id

    def test_trap_greenlets_in_a_patched_process_and_threads_in_any_other(self, plane: ZooKeeper) -> None:
        """kazoo hangs with the wrong handler. test_zookeeper_gevent runs this in a patched process too."""
        patched = not hasattr(time.sleep, "__self__")  # the standard library's is a builtin
        assert plane._client.handler.name == f"sequential_{'gevent' if patched else 'threading'}_handler"

    def test_a_start_without_a_server_fails_in_time(self) -> None:
        with socket.socket() as held:
            held.bind(("127.0.0.1", 0))
            plane = ZooKeeper(f"127.0.0.1:{held.getsockname()[1]}/x", session_timeout_s=1.0)
            began = time.monotonic()
            with pytest.raises(PlaneUnavailable, match="does not answer"):
                plane.start()
            assert time.monotonic() - began < 10, "two seconds, and the machine's own delays"
        assert plane.state is PlaneState.LOST

    def test_a_plane_that_could_not_start_can_be_started_later(self, wire: Wire, chroot: str) -> None:
        wire.cut()
        plane = ZooKeeper(wire.hosts + chroot, session_timeout_s=1.0)
        with pytest.raises(PlaneUnavailable):
            plane.start()
        wire.heal()
        plane._asked_timeout_s = LONG_SESSION_S
        plane.start()
        assert plane.commit(Create("/a")) == [0]
        plane.close()

    @pytest.mark.parametrize("hosts", ["", "/chroot", "a:1,,b:2", "a:1/x//y", "a:1/x/"])
    def test_invalid_hosts_are_refused(self, hosts: str) -> None:
        with pytest.raises(ValueError, match="not"):
            ZooKeeper(hosts)

    def test_trap_the_chroot_is_there_before_its_first_use(
        self, zookeeper_server: EmbeddedZooKeeper, chroot: str
    ) -> None:
        hosts = f"{zookeeper_server.hosts}{chroot}/deep/er"
        planes = [ZooKeeper(hosts, session_timeout_s=LONG_SESSION_S) for _ in range(4)]
        starts = [Call(plane.start) for plane in planes]
        assert [start.error for start in starts if start.ended()] == [None] * 4
        planes[0].commit(Create("/a"))
        planes[1].sync()
        assert planes[1].get("/a") is not None
        for plane in planes:
            plane.close()

    def test_without_a_chroot_the_root_is_the_tree(self, zookeeper_server: EmbeddedZooKeeper, chroot: str) -> None:
        plane = ZooKeeper(zookeeper_server.hosts)
        plane.start()
        rung: list[str | None] = []
        plane.watch(rung.append)
        plane.commit(Create(f"{chroot}/a", b"1"))
        assert plane.get(f"{chroot}/a") == Node(f"{chroot}/a", b"1", 0)
        until(lambda: f"{chroot}/a" in rung)
        plane.close()

    def test_trap_limits_a_hundred_long_paths_fit_one_commit_and_five_thousand_children_one_answer(
        self, plane: ZooKeeper
    ) -> None:
        long = "x" * (PATH_CHARACTERS_MAX - 20)
        plane.commit(*(Create(f"/{long}/{number}", b"y" * 5_000) for number in range(COMMIT_OPS_MAX)))
        assert len(plane.get_children(f"/{long}")) == COMMIT_OPS_MAX
        for start in range(0, 5_000, COMMIT_OPS_MAX):
            plane.commit(*(Create(f"/n/{number}") for number in range(start, start + COMMIT_OPS_MAX)))
        assert len(plane.children("/n")) == 5_000
        assert len(plane.get_children("/n")) == 5_000

    def test_five_hundred_nodes_are_read_in_a_handful_of_requests(self, plane: ZooKeeper) -> None:
        for start in range(0, 500, COMMIT_OPS_MAX):
            plane.commit(*(Create(f"/n/{start + number}", b"x" * 300) for number in range(COMMIT_OPS_MAX)))
        before = plane._client._connection._xid
        assert len(plane.get_children("/n")) == 500
        assert plane._client._connection._xid - before == 4


class TestServersThatGo:
    def test_a_killed_server_comes_back_with_its_data_and_the_session_goes_on(self, tmp_path: Path) -> None:
        with EmbeddedZooKeeper(tmp_path) as server:
            plane = ZooKeeper(f"{server.hosts}/c", session_timeout_s=LONG_SESSION_S)
            plane.start()
            plane.commit(Create("/a", b"1"), Create("/e", ephemeral=True))
            session_id = plane.session_id
            server.kill()
            until(lambda: plane.state is PlaneState.SUSPENDED)
            server.start()
            until(lambda: plane.state is PlaneState.CONNECTED)
            assert plane.session_id == session_id, "the session did not reconnect before the server ended it"
            assert plane.get("/a") == Node("/a", b"1", 0)
            assert plane.get("/e") == Node("/e", b"", 0, ephemeral=True, owner=session_id)
            assert plane.commit(Set("/a", b"2", 0)) == [1]
            plane.close()

    def test_trap_after_a_long_outage_reconnects_are_quick_and_the_session_continues(self, tmp_path: Path) -> None:
        """A server does not count its own downtime towards the session's end; kazoo must reconnect soon enough.

        A server restarts the count when it reads its files: the session has to outlast the rest of its start."""
        with EmbeddedZooKeeper(tmp_path) as server:
            plane = ZooKeeper(f"{server.hosts}/c", session_timeout_s=6.0)
            plane.start()
            plane.commit(Create("/e", ephemeral=True))
            session_id = plane.session_id
            server.kill()
            time.sleep(7)
            assert plane.state is PlaneState.SUSPENDED
            server.start()
            until(lambda: plane.state is PlaneState.CONNECTED)
            assert plane.session_id == session_id
            assert plane.get("/e") is not None
            plane.close()

    def test_requests_to_a_server_that_hangs_are_bounded(self, tmp_path: Path) -> None:
        with EmbeddedZooKeeper(tmp_path) as server:
            plane = ZooKeeper(f"{server.hosts}/c", session_timeout_s=6.0)
            plane.start()
            plane.commit(Create("/a"))
            stop(server.pids[0])
            calls = [Call(plane.commit, Set("/a", b"1", 0)), Call(plane.get, "/a"), Call(plane.sync)]
            began = time.monotonic()
            errors = [call.error for call in calls if call.ended()]
            assert time.monotonic() - began < 2 * plane.session_timeout_s
            assert isinstance(errors[0], OutcomeUnknown), errors
            assert isinstance(errors[1], PlaneUnavailable), errors
            assert isinstance(errors[2], PlaneUnavailable), errors
            os.kill(server.pids[0], signal.SIGCONT)
            until(lambda: plane.state is PlaneState.CONNECTED)
            plane.close()

    def test_closing_ends_the_setting_of_a_watch_at_once(self, plane: ZooKeeper) -> None:
        """On greenlets, a retry without a pause would keep kazoo from ending."""
        client, plane._client = plane._client, None  # as in close() while kazoo ends
        try:
            assert Call(plane._set_watch, plane._connections).ended()
        finally:
            plane._client = client

    def test_closing_is_bounded_while_the_server_hangs(self, tmp_path: Path) -> None:
        with EmbeddedZooKeeper(tmp_path) as server:
            plane = ZooKeeper(f"{server.hosts}/c", session_timeout_s=SESSION_S)
            plane.start()
            stop(server.pids[0])
            assert Call(plane.close).ended()
            assert plane.state is PlaneState.LOST


class TestThreeServers:
    def test_trap_a_read_after_sync_is_not_stale_though_another_server_answers_it(self, tmp_path: Path) -> None:
        with EmbeddedZooKeeper(tmp_path, servers=3) as servers:
            hosts = servers.hosts.split(",")
            # The last server leads, or the one before.
            writer, *readers = [ZooKeeper(f"{host}/c", session_timeout_s=LONG_SESSION_S) for host in hosts]
            for plane in (writer, *readers):
                plane.start()
            writer.commit(Create("/a"))
            for version in range(200):
                writer.commit(Set("/a", str(version).encode(), version))
                for reader in readers:
                    reader.sync()
                    assert reader.get("/a") == Node("/a", str(version).encode(), version + 1)
            for plane in (writer, *readers):
                plane.close()

    def test_when_a_server_dies_the_session_moves_to_another(self, tmp_path: Path) -> None:
        with EmbeddedZooKeeper(tmp_path, servers=3) as servers:
            plane = ZooKeeper(f"{servers.hosts}/c", session_timeout_s=LONG_SESSION_S)
            plane.start()
            plane.commit(Create("/e", ephemeral=True))
            session_id = plane.session_id
            for number in range(3):
                servers.kill(number)
                until(lambda: _answers(plane), what=f"without server {number}")
                assert plane.session_id == session_id
                assert plane.get("/e") is not None
                servers.start()
            plane.close()


def _answers(plane: ZooKeeper) -> bool:
    try:
        plane.sync()
    except PlaneUnavailable:
        return False
    return True
