"""One thread at a time holds the lock, and waiting for it does not switch greenlets."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from portalmq.broker.storage.fair_lock import FairLock


def test_only_one_thread_holds_the_lock():
    turn, counts = FairLock(), [0]

    def add():
        for _ in range(2_000):
            with turn:
                found = counts[0]
                counts[0] = found + 1

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(add) for _ in range(4)]:
            done.result()
    assert counts == [8_000]


def test_the_lock_is_released_after_an_error():
    turn = FairLock()
    for _ in range(2):
        try:
            with turn:
                raise KeyError
        except KeyError:
            pass


def test_waiting_for_the_lock_runs_no_other_greenlet():
    code = """
from gevent import monkey
monkey.patch_all()
import gevent, gevent.threadpool, time
from portalmq.broker.storage.fair_lock import FairLock
native_sleep = monkey.get_original("time", "sleep")
turn, ran = FairLock(), []
held = gevent.threadpool.ThreadPool(1)

def hold():
    with turn:
        ran.append("held")
        native_sleep(0.2)

held.spawn(hold)
while not ran:
    native_sleep(0.001)
gevent.spawn(ran.append, "another greenlet")
with turn:
    print(ran)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "['held']\n"


def test_a_thread_that_reacquires_the_lock_lets_others_in():
    turn, stop = FairLock(), []

    def hog():
        while not stop:
            with turn:
                sum(range(1_000))

    with ThreadPoolExecutor(1) as pool:
        hogging = pool.submit(hog)
        for _ in range(50):
            with turn:
                pass
        stop.append(True)
        hogging.result()
