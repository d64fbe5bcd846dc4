"""The Lock: tokens, renewals, losses; a broker that forgets, hangs up and grants the lock to others."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from support.lock_broker import PATH, LockBroker
from support.scripted_broker import Call, Reply, ScriptedBroker, hang_up, hold, lose_answer, refuse

from portalmq import Fenced, InvalidRequest, Lock, LockHeld, Unavailable
from portalmq.errors import ERRORS_BY_CODE

WITHIN_S = 20.0


class HandClock:
    """The holder's clock. It advances only by hand, so that a slow machine loses no lock."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def broker() -> Iterator[LockBroker]:
    with LockBroker() as broker:
        yield broker


@pytest.fixture
def make(broker: LockBroker) -> Iterator[Callable[..., Lock]]:
    made: list[Lock] = []

    def lock(**more: object) -> Lock:
        made.append(Lock("l", broker.url, **more))  # type: ignore[arg-type]
        return made[-1]

    yield lock
    for each in made:
        each.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WITHIN_S
    while not condition():
        assert time.monotonic() < deadline, "that did not come"
        time.sleep(0.005)


class TestHolding:
    def test_the_body_gets_the_token_and_the_lock_is_released_after_it(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        lock = make()
        with lock as fencing_token:
            assert fencing_token == 1
            assert (lock.held, lock.lost, lock.check()) == (True, False, 1)
        assert broker.holder is None
        assert (lock.held, lock.lost, lock.fencing_token) == (False, False, 1)
        with lock as fencing_token:
            assert fencing_token == 2

    def test_an_exception_in_the_body_returns_the_message_too(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        with pytest.raises(KeyError), make():
            raise KeyError("body")
        assert broker.holder is None

    def test_each_acquisition_has_an_owner_of_its_own_unless_one_is_given(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        lock, owners = make(), set()
        for _ in range(2):
            with lock:
                owners.add(broker.holder)
        assert len(owners) == 2
        with make(owner="me"):
            assert broker.holder == "me"

    def test_a_lock_is_renewed_only_while_it_is_held(self, broker: LockBroker, make: Callable[..., Lock]) -> None:
        lock = make(ttl_s=0.6, clock=HandClock())
        with lock:
            until(lambda: broker.count("PUT") >= 4)
            assert lock.held
        assert broker.count("DELETE") == 1
        assert lock._acquisition is not None
        lock._acquisition._thread.join(WITHIN_S)
        assert not lock._acquisition._thread.is_alive(), "its renewal thread must end"

    def test_a_broker_that_fails_for_less_than_the_ttl_costs_nothing(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        broker.script("PUT", PATH, [hang_up, lose_answer, refuse(503, "unavailable"), hang_up])
        with make(ttl_s=2, clock=HandClock()) as token:
            until(lambda: broker.count("PUT") >= 6)
        assert token == 1
        assert broker.holder is None

    def test_a_paused_broker_costs_a_part_of_the_ttl_and_not_the_lock(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        """A renewal without an answer is retried at another broker while there is time."""
        never = threading.Event()
        broker.script("PUT", PATH, [hold(never)])
        try:
            with make(ttl_s=1.5, clock=HandClock()) as fencing_token:
                until(lambda: broker.count("PUT") >= 4)
                assert fencing_token == 1
        finally:
            never.set()
        assert broker.token == 1

    def test_a_second_acquire_and_a_release_without_an_acquire_are_errors(self, make: Callable[..., Lock]) -> None:
        lock = make()
        for call in (lock.release, lock.renew, lock.check, lock.wait_lost):
            with pytest.raises(RuntimeError, match="acquire it first"):
                call()
        lock.acquire()
        with pytest.raises(RuntimeError, match="held by this object"):
            lock.acquire()

    def test_a_garbage_collected_lock_is_not_renewed(self, broker: LockBroker) -> None:
        lock = Lock("l", broker.url, ttl_s=0.6)
        lock.acquire()
        acquisition = lock._acquisition
        assert acquisition is not None
        del lock
        gc.collect()
        acquisition._thread.join(WITHIN_S)
        assert not acquisition._thread.is_alive()

    def test_release_in_the_body_is_fine(self, broker: LockBroker, make: Callable[..., Lock]) -> None:
        lock = make()
        with lock:
            lock.release()
        assert broker.count("DELETE") == 1

    @pytest.mark.parametrize(
        "options", [{"ttl_s": 0.4}, {"ttl_s": 90_000}, {"owner": ""}, {"owner": "x" * 191}, {"ttl_s": float("nan")}]
    )
    def test_limits_are_checked_at_once(self, broker: LockBroker, options: dict[str, object]) -> None:
        with pytest.raises(ValueError, match="must"):
            Lock("l", broker.url, **options)  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            Lock("no name", broker.url)


class TestWaiting:
    def test_without_time_to_wait_acquire_makes_one_request(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        broker.pass_on()
        with pytest.raises(LockHeld):
            make().acquire(timeout_s=0)
        assert broker.count("POST") == 1

    def test_a_wait_ends_in_time(self, broker: LockBroker, make: Callable[..., Lock]) -> None:
        broker.pass_on()
        with pytest.raises(LockHeld), make(acquire_timeout_s=0.2):
            pass
        asked = broker.calls_of("POST", PATH)[-1].json()
        assert "keep_place_ms" not in asked  # no later request needs the place

    def test_a_waiter_gets_the_lock_when_the_holder_releases_it(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        broker.pass_on()
        lock = make()
        threading.Timer(0.1, broker.pass_on, [None]).start()
        assert lock.acquire() == 2

    def test_a_long_wait_polls_as_the_same_owner_and_keeps_its_position(
        self, broker: LockBroker, make: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.lock.POLL_WAIT_S", 0.05)
        broker.pass_on()
        lock = make()
        waiting = threading.Thread(target=lock.acquire)
        waiting.start()
        until(lambda: broker.count("POST") >= 3)
        broker.pass_on(None)
        waiting.join(WITHIN_S)
        asked = [call.json() for call in broker.calls_of("POST", PATH)]
        assert len({each["owner"] for each in asked}) == 1
        assert {each["keep_place_ms"] for each in asked} == {2_000}
        assert lock.held

    def test_a_request_with_a_lost_answer_is_repeated_and_gets_the_same_token(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        broker.script("POST", PATH, [lose_answer, refuse(503, "unavailable")])
        assert make().acquire(timeout_s=0) == 1
        assert broker.count("POST") == 3

    def test_unreachable_brokers_are_reported_after_a_delay(
        self, broker: LockBroker, make: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.lock.REACH_TIMEOUT_S", 0.2)
        broker.script("POST", PATH, [hang_up] * 100)
        with pytest.raises(Unavailable):
            make().acquire()

    def test_an_invalid_request_is_not_repeated(self, broker: LockBroker, make: Callable[..., Lock]) -> None:
        broker.script("POST", PATH, [refuse(403, "forbidden")])
        with pytest.raises(ERRORS_BY_CODE["forbidden"]):
            make().acquire()

    def test_a_lock_granted_after_its_ttl_is_requested_again(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        clock = HandClock()
        lock = make(clock=clock)

        def late(broker: ScriptedBroker, call: Call) -> Reply:
            clock.now += 11
            return broker.work(call)

        broker.script("POST", PATH, [late])
        lock.acquire()
        assert lock.held
        assert broker.count("POST") == 2


class TestLosing:
    def test_a_holder_that_was_paused_longer_than_the_ttl_knows_without_a_request(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        clock, told = HandClock(), []
        lock = make(clock=clock, on_lost=told.append)
        with pytest.raises(Fenced, match="10 s"), lock:  # noqa: PT012 - the end of the body raises the loss
            clock.now += 10
            assert (lock.held, lock.lost) == (False, True)
            with pytest.raises(Fenced):
                lock.check()
        assert len(told) == 1
        assert broker.count("DELETE") == 0
        assert lock.lost

    def test_a_holder_with_an_old_token_is_fenced(self, broker: LockBroker, make: Callable[..., Lock]) -> None:
        told: list[Fenced] = []
        lock = make(ttl_s=0.6, on_lost=told.append)
        with pytest.raises(Fenced), lock:  # noqa: PT012 - the end of the body raises the loss
            broker.pass_on()
            assert lock.wait_lost(WITHIN_S)
            assert lock.lost
            with pytest.raises(Fenced):
                lock.renew()
        assert len(told) == 1
        assert broker.holder == "another"

    def test_the_error_of_the_body_counts_more_than_the_loss(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        clock = HandClock()
        with pytest.raises(KeyError), make(clock=clock):  # noqa: PT012
            clock.now += 10
            raise KeyError("body")

    def test_a_broker_that_is_away_for_the_whole_ttl_costs_the_lock(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        lock = make(ttl_s=0.6)
        lock.acquire()
        broker.script("PUT", PATH, [hang_up] * 1000)
        assert lock.wait_lost(WITHIN_S)
        with pytest.raises(Fenced):
            lock.release()

    def test_after_a_loss_it_can_be_acquired_again_under_a_greater_token(
        self, broker: LockBroker, make: Callable[..., Lock]
    ) -> None:
        clock = HandClock()
        lock = make(clock=clock)
        lock.acquire()
        clock.now += 10
        broker.pass_on(None)
        assert lock.acquire() == 2
        assert (lock.held, lock.lost) == (True, False)

    def test_a_release_whose_answer_was_lost_is_no_loss(self, broker: LockBroker, make: Callable[..., Lock]) -> None:
        def lose_and_pass_on(scripted: ScriptedBroker, call: Call) -> Reply:
            scripted.work(call)
            broker.pass_on()
            return hang_up(scripted, call)

        broker.script("DELETE", PATH, [lose_and_pass_on])
        with make():
            pass
        assert broker.holder == "another"

    def test_a_failed_release_is_a_warning_after_with_and_an_error_otherwise(
        self, broker: LockBroker, make: Callable[..., Lock], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("portalmq.lock.RELEASE_TIMEOUT_S", 0.1)
        broker.script("DELETE", PATH, [hang_up] * 1000)
        with make(owner="me"):
            pass
        lock = make(owner="me")
        lock.acquire()
        with pytest.raises(Unavailable):
            lock.release()
        assert not lock.held
