"""The alarm: set, brought forward, put off, rung."""

from __future__ import annotations

import ctypes
import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from portalmq.producers.alarm import Alarm, PlainAlarm, new_alarm

needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it needs Linux")


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
        self._thread = threading.Thread(target=self._run, daemon=True)
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
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    def is_plain(change: Callable[[pytest.MonkeyPatch], object]) -> bool:
        with monkeypatch.context() as patch:
            change(patch)
            return isinstance(new_alarm(), PlainAlarm)

    greenlets = SimpleNamespace(is_module_patched=lambda name: name == "threading")
    assert is_plain(lambda patch: patch.setattr(sys, "platform", "darwin"))
    assert is_plain(lambda patch: patch.setattr(sys, "maxsize", 2**31 - 1))
    assert is_plain(lambda patch: patch.setattr(ctypes, "PyDLL", lambda name: object()))
    assert is_plain(lambda patch: patch.setitem(sys.modules, "ctypes", None))
    assert is_plain(lambda patch: patch.delattr(os, "eventfd", raising=False))
    assert is_plain(lambda patch: patch.setitem(sys.modules, "gevent.monkey", greenlets))
    gc.collect()
    assert not unraisable, "none fails when it is collected"


@needs_linux
def test_one_whose_descriptors_were_closed_raises_and_can_be_closed() -> None:
    alarm = Alarm()
    for each in (alarm._timer, alarm._event):
        os.close(each)
    for use in (lambda: alarm.set(1.0), alarm.ring, alarm.wait):
        with pytest.raises(OSError):
            use()
    alarm.close()


@needs_linux
def test_one_that_is_not_closed_is_closed_when_it_is_collected() -> None:
    alarm = Alarm()
    descriptors = alarm._timer, alarm._event
    del alarm
    for each in descriptors:
        with pytest.raises(OSError):
            os.fstat(each)
