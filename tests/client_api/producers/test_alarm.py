"""The alarm: set, brought forward, put off, rung."""

from __future__ import annotations

import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from portalmq.producers.alarm import Alarm, PlainAlarm, new_alarm


@pytest.fixture(params=[Alarm, PlainAlarm])
def alarm(request: pytest.FixtureRequest) -> Iterator[Alarm | PlainAlarm]:
    if request.param is Alarm and not sys.platform.startswith("linux"):
        pytest.skip("it needs Linux")
    made = request.param()
    yield made
    made.close()


class Waiter:
    """A thread that waits for an alarm until the time that counts has come, as a sender does."""

    def __init__(self, alarm: Alarm | PlainAlarm) -> None:
        self.rang_at = math.inf
        self._alarm = alarm
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while self._alarm.at > time.monotonic():
            self._alarm.wait()
        self.rang_at = time.monotonic()

    def join(self) -> float:
        self._thread.join(20)
        return self.rang_at


def test_it_rings_at_its_time_and_not_before(alarm: Alarm | PlainAlarm) -> None:
    at = time.monotonic() + 0.05
    alarm.set(at)
    assert at <= Waiter(alarm).join() < math.inf


@pytest.mark.parametrize("first_s", [0.02, 1000, math.inf])
def test_it_is_set_anew_while_a_thread_waits(alarm: Alarm | PlainAlarm, first_s: float) -> None:
    alarm.set(time.monotonic() + first_s)
    waiter = Waiter(alarm)
    at = time.monotonic() + 0.05
    alarm.set(at)
    assert waiter.join() < math.inf


def test_it_rings_at_once_whatever_it_is_set_to(alarm: Alarm | PlainAlarm) -> None:
    alarm.set(time.monotonic() + 1000)
    waiter = Waiter(alarm)
    alarm.ring()
    assert waiter.join() < math.inf


def test_a_time_that_has_passed_rings_at_once(alarm: Alarm | PlainAlarm) -> None:
    alarm.set(time.monotonic() - 1)
    assert Waiter(alarm).join() < math.inf


def test_it_can_be_closed_twice(alarm: Alarm | PlainAlarm) -> None:
    alarm.close()
    alarm.close()


def test_without_a_timer_of_the_kernel_the_plain_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ctypes, "PyDLL", lambda name: object())
        assert isinstance(new_alarm(), PlainAlarm)
    with monkeypatch.context() as patch:
        patch.delattr(os, "eventfd", raising=False)
        assert isinstance(new_alarm(), PlainAlarm)
