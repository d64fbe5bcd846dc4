"""Blocking work on native threads: results, errors, and greenlets that no longer wait."""

from __future__ import annotations

import threading

import gevent
import pytest

from portalmq.broker.partition.native import NativeThreads, attempt


def test_a_greenlet_gets_the_result_while_others_run() -> None:
    threads, go_on = NativeThreads(1), threading.Event()
    waiting = gevent.spawn(threads.apply, go_on.wait)
    gevent.sleep(0)
    assert not waiting.ready()
    go_on.set()
    assert waiting.get() is True


def test_an_error_is_raised_in_the_greenlet_that_waits() -> None:
    threads = NativeThreads(1)
    with pytest.raises(ValueError, match="invalid literal"):
        threads.apply(int, ("x",))
    assert isinstance(attempt(threads, int, "x"), ValueError)
    assert attempt(threads, int, "11", base=2) == 3


def test_work_beyond_the_number_of_threads_waits_its_turn() -> None:
    threads, go_on = NativeThreads(2), threading.Event()
    busy = [gevent.spawn(threads.apply, go_on.wait) for _ in range(2)]
    later = gevent.spawn(threads.apply, threading.get_ident)
    gevent.sleep(0)
    assert not later.ready()
    go_on.set()
    assert all(each.get() for each in busy)
    assert later.get() != threading.get_ident()


def test_work_of_a_killed_greenlet_ends_without_it() -> None:
    threads, go_on = NativeThreads(1), threading.Event()
    killed = gevent.spawn(threads.apply, go_on.wait)
    gevent.sleep(0)
    killed.kill()
    go_on.set()
    assert threads.apply(int, ("7",)) == 7


def test_many_greenlets_get_their_own_results() -> None:
    threads = NativeThreads(3)
    assert [each.get() for each in [gevent.spawn(threads.apply, int, (str(n),)) for n in range(500)]] == [*range(500)]
