"""The sender threads of a producer: started on demand, and woken when there is work, or when some is due."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from portalmq.producers.alarm import Alarm, PlainAlarm, new_alarm

# A broker that hangs blocks at most as many as it has partitions; the others continue.
SENDERS_MAX = 8
JOIN_TIMEOUT_S = 1.0


class SenderThreads:
    """Of the idle ones, one keeps the time, by an alarm; the others rest. The producer's `lock` is held by the caller
    of each method but `end`."""

    def __init__(self, lock: threading.RLock, run: Callable[[], None]) -> None:
        self.threads: list[threading.Thread] = []
        self.keeps_time = False
        self.resting = 0
        # One with descriptors as soon as there is a thread to wait for it.
        self.alarm: Alarm | PlainAlarm = PlainAlarm()
        self._lock = lock
        self._run = run
        self._work = threading.Condition(lock)

    def wake(self, at: float = 0.0) -> None:
        """Have an idle one look for work at this time of time.monotonic(), or start one."""
        if self.keeps_time and (at >= self.alarm.at or self._set(at)):
            return
        if self.resting:
            self._work.notify()
        elif len(self.threads) < SENDERS_MAX:
            if not self.threads:
                self.alarm = new_alarm()
            thread = threading.Thread(target=self._run_thread, name="portalmq-sender", daemon=True)
            self.threads.append(thread)
            try:
                thread.start()
            except RuntimeError:  # there are too many
                self.threads.remove(thread)
                raise

    def _run_thread(self) -> None:
        try:
            self._run()
        finally:
            with self._lock:
                self.threads.remove(threading.current_thread())

    def _set(self, at: float) -> bool:
        """Set the alarm, to ring at once if `at` is 0. Return False if its descriptors were closed under it: then
        another is in its place, and a thread that waits for the old one may never return."""
        try:
            self.alarm.set(at) if at else self.alarm.ring()
        except OSError:
            self._replace(self.alarm)
            return False
        return True

    def _replace(self, alarm: Alarm | PlainAlarm) -> None:
        if alarm is self.alarm:
            self.alarm, self.keeps_time = PlainAlarm(), False

    def wake_all(self) -> None:
        """Have all idle ones look for work."""
        self._work.notify_all()
        if self.keeps_time:
            self.wake()

    def unset(self, at: float) -> None:
        """Forget the work that is due at this time, if that is the next."""
        if self.alarm.at == at:
            self._set(math.inf)

    def rest(self, due: float) -> None:
        """Have the calling sender wait for work, of which the next is `due`."""
        if self.keeps_time:
            self.resting += 1
            try:
                self._work.wait()
            finally:
                self.resting -= 1
            return
        if not self._set(due):
            return
        self.keeps_time, alarm = True, self.alarm
        self._lock.release()
        try:
            alarm.wait()
        except OSError:
            with self._lock:
                self._replace(alarm)
        finally:
            self._lock.acquire()
            if alarm is self.alarm:
                self.keeps_time = False

    def end(self) -> bool:
        """Wait a moment for all to end. Return whether they have."""
        threads = list(self.threads)
        for thread in threads:
            thread.join(timeout=JOIN_TIMEOUT_S)
        return not any(thread.is_alive() for thread in threads)
