"""Greenlets that are used again."""

import weakref

import gevent
from gevent.event import Event

from portalmq.broker.partition.greenlets import IDLE_MAX, KeptGreenlets


def test_work_starts_in_the_next_turn_and_uses_a_greenlet_again():
    greenlets, seen = KeptGreenlets(), []
    for _ in range(3):
        greenlets.run(lambda: seen.append(gevent.getcurrent()))
        before = len(seen)
        gevent.sleep(0)
        gevent.sleep(0)
        assert len(seen) == before + 1
    assert len(set(seen)) == 1


def test_work_is_cancelled_until_it_begins():
    greenlets, seen = KeptGreenlets(), []
    assert greenlets.run(lambda: seen.append("by a new greenlet")) is None
    gevent.sleep(0)
    gevent.sleep(0)
    start = greenlets.run(lambda: seen.append("cancelled"))
    assert start is not None
    assert greenlets.cancel(start)
    assert not greenlets.cancel(start)
    begun = greenlets.run(lambda: seen.append("begun"))
    gevent.sleep(0)
    assert begun is not None
    assert not greenlets.cancel(begun)
    assert seen == ["by a new greenlet", "begun"]
    assert len(greenlets._idle) == 1


def test_work_that_waits_does_not_delay_other_work():
    greenlets, goes_on, seen = KeptGreenlets(), Event(), []

    def patient(number):
        goes_on.wait()
        seen.append(number)

    for number in range(IDLE_MAX + 5):
        greenlets.run(lambda number=number: patient(number))
    greenlets.run(lambda: seen.append("quick"))
    gevent.sleep(0.001)
    assert seen == ["quick"]
    goes_on.set()
    gevent.sleep(0.001)
    assert seen[1:] == list(range(IDLE_MAX + 5))
    assert len(greenlets._idle) == IDLE_MAX


def test_an_error_ends_only_its_own_greenlet(capsys):
    greenlets, seen = KeptGreenlets(), []

    def fails():
        raise RuntimeError("planted")

    greenlets.run(fails)
    gevent.sleep(0.001)
    assert "planted" in capsys.readouterr().err
    greenlets.run(lambda: seen.append(1))
    gevent.sleep(0.001)
    assert seen == [1]


def test_closing_ends_the_greenlets_that_wait_and_those_that_work_when_they_are_done():
    greenlets, goes_on, seen = KeptGreenlets(), Event(), []

    def noted(do):
        seen.append(gevent.getcurrent())
        do()

    greenlets.run(lambda: noted(lambda: None))
    gevent.sleep(0.001)
    greenlets.run(lambda: noted(goes_on.wait))
    greenlets.run(lambda: noted(lambda: None))
    gevent.sleep(0.001)
    _, working, idle = seen
    greenlets.close()
    gevent.sleep(0.001)
    assert (idle.dead, working.dead) == (True, False)
    goes_on.set()
    working.join(timeout=10)
    assert working.dead


def test_a_greenlet_that_waits_keeps_nothing_of_its_work():
    greenlets = KeptGreenlets()

    class Kept:
        def __call__(self):
            """Do nothing."""

    work = Kept()
    gone = weakref.ref(work)
    greenlets.run(work)
    del work
    gevent.sleep(0.001)
    assert gone() is None
