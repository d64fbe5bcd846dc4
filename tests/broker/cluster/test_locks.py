"""Locks, served by three brokers that share a control plane; each broker has a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import gevent
import pytest
from support.domain import FakePeer, HandClock
from support.interrupted import Interrupted

from portalmq import wire
from portalmq.broker.cluster import locks as room
from portalmq.broker.cluster.locks import KEEP_UNUSED_MS, SWEEP_EVERY_S, Locks
from portalmq.control_plane.locks import PATIENCE_MS, LockTable, lock_path
from portalmq.control_plane.plane import Set
from portalmq.control_plane.state import BrokerState
from portalmq.errors import Backpressure, Fenced, LockHeld, LockNotFound, PortalMQError, Unavailable

WITHIN_S = 60.0
TTL = 10_000
SWEEP_MS = round(SWEEP_EVERY_S * 1_000)


class Brokers:
    """The locks of three brokers. `registered` has the brokers that each of them sees."""

    def __init__(self, plane: Interrupted) -> None:
        self.plane = plane
        self.registered = {number: BrokerState(f"http://b{number}", 1, f"store-{number}") for number in (1, 2, 3)}
        self.clocks = {number: HandClock(number * 1_000_000) for number in (1, 2, 3)}
        self.locks = {
            number: Locks(plane, lambda: self.registered, (number, 1), clock)  # type: ignore[arg-type]
            for number, clock in self.clocks.items()
        }

    def ask(self, number: int, owner: str, **more: int) -> wire.LockGrant:
        try:
            return self.locks[number].acquire("l", wire.LockRequest(owner, **{"ttl_ms": TTL, **more}), None)
        finally:
            self.settle()

    def settle(self) -> None:
        """Wait until every broker has read all changes."""
        until(lambda: not any(locks._noted and not locks._closed for locks in self.locks.values()))

    def wait(self, number: int, owner: str, peer: FakePeer | None = None, **more: int) -> gevent.Greenlet:
        """Start a request that waits; return once it is in the queue."""
        before = self.waiters()
        request = wire.LockRequest(owner, **{"ttl_ms": TTL, "wait_ms": 60_000, **more})
        waiting = gevent.spawn(_told, self.locks[number].acquire, "l", request, peer)
        until(lambda: waiting.dead or self.waiters() > before)
        return waiting

    def waiters(self) -> int:
        held = self.locks[1]._table.read("l")
        return len(held.value.queue) if held else 0

    def advance(self, ms: int) -> None:
        """Advance all clocks, and let every broker notice."""
        for number, clock in self.clocks.items():
            clock.advance(ms)
            self.locks[number].brokers_changed()

    def release(self, number: int, owner: str, token: int) -> None:
        self.locks[number].release("l", wire.LockRelease(owner, token))


def _told(call: Callable[..., wire.LockGrant], *arguments: Any, **more: Any) -> wire.LockGrant | PortalMQError:
    try:
        return call(*arguments, **more)
    except PortalMQError as error:
        return error


def until(condition: Callable[[], object]) -> None:
    with gevent.Timeout(WITHIN_S, AssertionError("the condition was not met in time")):
        while not condition():
            gevent.sleep(0.002)


def outcome(waiting: gevent.Greenlet) -> wire.LockGrant | PortalMQError:
    return waiting.get(timeout=WITHIN_S)  # type: ignore[no-any-return]


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Interrupted]:
    made = Interrupted(tmp_path)
    made.start()
    yield made
    made.close()


@contextmanager
def started(plane: Interrupted) -> Iterator[Brokers]:
    made = Brokers(plane)
    for locks in made.locks.values():
        locks.start()
    made.settle()
    try:
        yield made
    finally:
        for locks in made.locks.values():
            locks.close()


@pytest.fixture
def brokers(plane: Interrupted) -> Iterator[Brokers]:
    with started(plane) as made:
        yield made


class TestHolding:
    def test_any_broker_grants_renews_and_releases_a_lock(self, brokers: Brokers) -> None:
        assert brokers.ask(1, "a") == wire.LockGrant("a", 1, TTL)
        assert brokers.locks[2].renew("l", wire.LockRenewal("a", 1)) == wire.LockGrant("a", 1, TTL)
        brokers.release(3, "a", 1)
        assert brokers.ask(2, "b").fencing_token == 2

    def test_a_refusal_names_the_holder_and_the_longest_wait(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        brokers.advance(4_000)
        with pytest.raises(LockHeld) as caught:
            brokers.ask(2, "b")
        assert caught.value.extra == {"owner": "a", "expires_in_ms": 6_000, "waiters": 0}
        assert caught.value.outcome == "not_applied"

    def test_a_retry_at_another_broker_gets_the_same_token(self, brokers: Brokers) -> None:
        assert [brokers.ask(number, "a").fencing_token for number in (1, 2, 3)] == [1, 1, 1]

    def test_a_former_holder_is_fenced_at_every_broker(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        brokers.advance(TTL)
        assert brokers.ask(2, "b").fencing_token == 2
        for locks in brokers.locks.values():
            with pytest.raises(Fenced):
                locks.renew("l", wire.LockRenewal("a", 1))
            with pytest.raises(Fenced):
                locks.release("l", wire.LockRelease("a", 1))
        assert brokers.ask(3, "b").fencing_token == 2

    def test_a_fenced_release_may_have_been_made_by_an_earlier_copy(self, brokers: Brokers) -> None:
        token = brokers.ask(1, "a").fencing_token
        brokers.release(1, "a", token)
        brokers.ask(2, "b")
        with pytest.raises(Fenced) as repeated:
            brokers.release(1, "a", token)
        assert repeated.value.outcome == "unknown"
        with pytest.raises(Fenced) as of_no_holder:
            brokers.release(1, "a", token + 7)
        assert of_no_holder.value.outcome == "not_applied"

    def test_a_fenced_release_of_a_removed_lock_may_have_been_made_by_an_earlier_copy(
        self, brokers: Brokers, plane: Interrupted
    ) -> None:
        token = brokers.ask(1, "a").fencing_token
        brokers.release(1, "a", token)
        table = LockTable(plane)
        held = table.read("l")
        assert held is not None
        assert table.remove("l", held.value.mark)
        with pytest.raises(Fenced) as repeated:
            brokers.release(1, "a", token)
        assert repeated.value.outcome == "unknown"

    def test_renewals_at_one_broker_keep_the_lock_at_all_brokers(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        for _ in range(5):
            brokers.advance(TTL - 1)
            brokers.locks[1].renew("l", wire.LockRenewal("a", 1))
            brokers.settle()
            for number in (2, 3):
                with pytest.raises(LockHeld):
                    brokers.ask(number, "b")

    def test_a_broker_counts_a_lease_from_its_first_sight_of_the_lock(
        self, brokers: Brokers, plane: Interrupted
    ) -> None:
        brokers.ask(1, "a")
        brokers.advance(TTL - 1)
        newcomer = Locks(plane, lambda: brokers.registered, (2, 2), brokers.clocks[2])  # type: ignore[arg-type]
        newcomer.start()
        try:
            until(newcomer.list_all)
            brokers.clocks[2].advance(TTL - 1)
            with pytest.raises(LockHeld):
                newcomer.acquire("l", wire.LockRequest("b", ttl_ms=TTL), None)
            brokers.clocks[2].advance(1)
            assert newcomer.acquire("l", wire.LockRequest("b", ttl_ms=TTL), None).fencing_token == 2
        finally:
            newcomer.close()

    def test_a_wall_clock_that_jumps_ends_no_lease(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        for clock in brokers.clocks.values():
            clock.day_ms += 10 * TTL
        with pytest.raises(LockHeld):
            brokers.ask(2, "b")


class TestWaiting:
    def test_waiters_at_all_brokers_get_the_lock_in_the_order_of_arrival(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        order = [(2, "b"), (1, "c"), (3, "d"), (2, "e"), (2, "f"), (1, "g")]
        waiting = {owner: brokers.wait(number, owner) for number, owner in order}
        holder, token = "a", 1
        for number, owner in order:
            brokers.release(1, holder, token)
            grant = outcome(waiting.pop(owner))
            assert grant == wire.LockGrant(owner, token + 1, TTL)
            assert not any(greenlet.dead for greenlet in waiting.values())
            holder, token = owner, token + 1
            assert brokers.locks[number].describe("l").owner == owner

    def test_the_next_waiter_gets_a_lock_that_was_not_renewed(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        waiting = brokers.wait(2, "b")
        brokers.advance(TTL - 1)
        gevent.sleep(0.02)
        assert not waiting.dead
        brokers.advance(1)
        assert outcome(waiting) == wire.LockGrant("b", 2, TTL)

    def test_waiters_of_a_dead_broker_are_skipped_at_once(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        brokers.wait(3, "dead")
        waiting = brokers.wait(2, "b")
        brokers.locks[3].close()  # its clients have gone with it; their places are still in the queue
        del brokers.registered[3]
        brokers.release(1, "a", 1)
        assert outcome(waiting) == wire.LockGrant("b", 2, TTL)

    def test_waiters_of_a_silent_broker_are_skipped_after_a_delay(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        brokers.wait(3, "paused")
        waiting = brokers.wait(2, "b")
        assert brokers.locks[3]._greenlet is not None
        brokers.locks[3]._greenlet.kill()
        brokers.release(1, "a", 1)
        gevent.sleep(0.02)
        assert not waiting.dead
        brokers.advance(PATIENCE_MS)
        assert outcome(waiting) == wire.LockGrant("b", 2, TTL)

    def test_a_skipped_waiter_goes_to_the_end_of_the_queue(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        late = brokers.wait(3, "late")
        plane, held = brokers.plane, brokers.locks[1]._table.read("l")
        assert held is not None
        plane.commit(Set(lock_path("l"), b'{"token":1,"owner":"a","ttl_ms":10000,"beat":0}', held.version))
        until(lambda: brokers.waiters() == 1)
        brokers.release(1, "a", 1)
        assert outcome(late) == wire.LockGrant("late", 2, TTL)

    def test_a_client_that_disconnects_loses_its_place(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        peer = FakePeer()
        gone = brokers.wait(2, "gone", peer)
        waiting = brokers.wait(2, "b")
        peer.leave()
        outcome(gone)
        until(lambda: brokers.waiters() == 1)
        brokers.release(1, "a", 1)
        assert outcome(waiting) == wire.LockGrant("b", 2, TTL)

    def test_places_of_many_disconnected_clients_are_removed_in_few_steps(
        self, brokers: Brokers, plane: Interrupted
    ) -> None:
        brokers.ask(1, "a")
        peers = [FakePeer() for _ in range(50)]
        for number, peer in enumerate(peers):
            brokers.wait(number % 2 + 1, f"w{number}", peer)
        last = brokers.wait(1, "last")
        before = plane.commits
        for peer in peers:
            peer.leave()
        until(lambda: brokers.waiters() == 1)
        assert plane.commits - before <= 10
        brokers.release(1, "a", 1)
        assert outcome(last) == wire.LockGrant("last", 2, TTL)

    def test_a_wait_that_times_out_names_the_holder_and_leaves_no_place(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        ended = outcome(brokers.wait(2, "b", wait_ms=30))
        assert isinstance(ended, LockHeld)
        assert ended.extra["owner"] == "a"
        until(lambda: brokers.waiters() == 0)

    def test_a_place_is_kept_for_a_moment_for_a_repeated_request(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        first = brokers.wait(2, "b", wait_ms=30, keep_place_ms=60_000)
        brokers.wait(1, "c")
        assert isinstance(outcome(first), LockHeld)
        again = gevent.spawn(_told, brokers.ask, 3, "b", wait_ms=60_000)  # at another broker
        until(lambda: "l" in brokers.locks[3]._waiters)
        brokers.release(1, "a", 1)
        assert outcome(again) == wire.LockGrant("b", 2, TTL)

    def test_a_place_without_a_repeated_request_is_removed(
        self, brokers: Brokers, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        later: list[tuple[Any, ...]] = []
        monkeypatch.setattr(room.gevent, "spawn_later", lambda *call: later.append(call))
        brokers.ask(1, "a")
        outcome(brokers.wait(2, "b", wait_ms=10, keep_place_ms=50))
        assert brokers.waiters() == 1
        ((after_s, *give_up),) = later
        assert after_s == 0.05
        gevent.spawn(*give_up)
        until(lambda: brokers.waiters() == 0)

    @pytest.mark.parametrize("at", [2, 3])
    def test_of_two_waiting_requests_of_one_owner_the_later_counts(self, brokers: Brokers, at: int) -> None:
        brokers.ask(1, "a")
        first = brokers.wait(2, "b")
        second = gevent.spawn(_told, brokers.ask, at, "b", wait_ms=60_000)
        assert isinstance(outcome(first), LockHeld)
        assert brokers.waiters() == 1
        brokers.release(1, "a", 1)
        assert outcome(second) == wire.LockGrant("b", 2, TTL)

    def test_a_broker_that_drains_sends_its_waiters_to_another_with_their_places(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        moved, behind = brokers.wait(2, "b"), brokers.wait(1, "c")
        brokers.locks[2].drain()
        ended = outcome(moved)
        assert isinstance(ended, Unavailable)
        assert (ended.retryable, ended.outcome) == (True, "not_applied")
        again = gevent.spawn(_told, brokers.ask, 3, "b", wait_ms=60_000)
        until(lambda: "l" in brokers.locks[3]._waiters)
        brokers.release(1, "a", 1)
        assert outcome(again) == wire.LockGrant("b", 2, TTL)
        assert not behind.dead
        with pytest.raises(Unavailable):
            brokers.ask(2, "x")

    def test_a_hundred_waiters_get_the_lock_one_after_the_other(self, brokers: Brokers) -> None:
        brokers.ask(1, "w-0")
        waiting = [brokers.wait(1 + number % 3, f"w-{number}") for number in range(1, 101)]
        for number, greenlet in enumerate(waiting, start=1):
            brokers.release(1 + number % 3, f"w-{number - 1}", number)
            assert outcome(greenlet) == wire.LockGrant(f"w-{number}", number + 1, TTL)

    def test_a_wait_ends_with_an_error_while_the_control_plane_is_unavailable(
        self, brokers: Brokers, plane: Interrupted
    ) -> None:
        brokers.ask(1, "a")
        plane.lose_requests = 100
        with pytest.raises(Unavailable) as caught:
            brokers.ask(2, "b", wait_ms=60_000)
        assert caught.value.outcome == "unknown"
        plane.lose_requests = 0
        assert "l" not in brokers.locks[2]._waiters


class TestMaintenance:
    def test_an_unused_lock_is_removed_and_tokens_keep_rising(self, brokers: Brokers) -> None:
        brokers.ask(2, "a")
        brokers.advance(TTL + KEEP_UNUSED_MS - 1)
        gevent.sleep(0.02)
        assert brokers.locks[3].describe("l").expires_in_ms == 0
        brokers.advance(SWEEP_MS)
        until(lambda: not any(locks.list_all() for locks in brokers.locks.values()))
        with pytest.raises(LockNotFound):
            brokers.locks[3].describe("l")
        with pytest.raises(Fenced):
            brokers.locks[3].renew("l", wire.LockRenewal("a", 1))
        assert brokers.ask(3, "b").fencing_token == 2

    def test_a_place_without_a_waiter_is_removed(self, brokers: Brokers) -> None:
        brokers.ask(1, "a")
        held = brokers.locks[1]._table.read("l")
        assert held is not None
        data = b'{"token":1,"owner":"a","ttl_ms":10000,"beat":0,"queue":[["0011223344556677",2,1]]}'
        brokers.plane.commit(Set(lock_path("l"), data, held.version))
        brokers.settle()
        brokers.advance(SWEEP_MS)
        until(lambda: brokers.waiters() == 0)

    def test_the_number_of_locks_is_limited(self, brokers: Brokers, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(room, "LOCKS_MAX", 2)
        for name in ("x", "y"):
            brokers.locks[1].acquire(name, wire.LockRequest("a"), None)
        with pytest.raises(Backpressure):
            brokers.locks[1].acquire("z", wire.LockRequest("a"), None)
        assert brokers.locks[1].acquire("x", wire.LockRequest("a"), None).fencing_token == 1

    def test_a_node_that_cannot_be_read_stops_no_other_lock(self, brokers: Brokers, plane: Interrupted) -> None:
        brokers.ask(1, "a")
        held = brokers.locks[1]._table.read("l")
        assert held is not None
        brokers.locks[1].acquire("bad", wire.LockRequest("a"), None)
        plane.commit(Set(lock_path("bad"), b"not a lock", 0))
        waiting = brokers.wait(2, "b")
        brokers.release(1, "a", 1)
        assert outcome(waiting) == wire.LockGrant("b", 2, TTL)
