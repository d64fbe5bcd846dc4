"""The sender threads of a producer: started on demand, and woken when there is work, or when some is due."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from portalmq.producers.alarm import new_alarm

# A broker that hangs blocks at most as many as it has partitions; the others continue.
SENDERS_MAX = 8
JOIN_TIMEOUT_S = 1.0


class SenderThreads:
    """Of the idle ones, one keeps the time, by an alarm; the others rest. The producer's `lock` is held by the caller
    of each method but `end`."""

    def __init__(self, lock: threading.Lock, run: Callable[[], None]) -> None:
        self.threads: list[threading.Thread] = []
        self.keeps_time = False
        self.resting = 0
        self.alarm = new_alarm()
        self._lock = lock
        self._run = run
        self._work = threading.Condition(lock)

    def wake(self, at: float = 0.0) -> None:
        """Have an idle one look for work at this time of time.monotonic(), or start one."""
        if self.keeps_time:
            if at < self.alarm.at:
                if at:
                    self.alarm.set(at)
                else:
                    self.alarm.ring()
        elif self.resting:
            self._work.notify()
        elif len(self.threads) < SENDERS_MAX:
            thread = threading.Thread(target=self._run, name="portalmq-sender", daemon=True)
            self.threads.append(thread)
            thread.start()

    def wake_all(self) -> None:
        """Have all idle ones look for work."""
        self._work.notify_all()
        if self.keeps_time:
            self.wake()

    def unset(self, at: float) -> None:
        """Forget the work that is due at this time, if that is the next."""
        if self.alarm.at == at:
            self.alarm.set(math.inf)

    def rest(self, due: float) -> None:
        """Have the calling sender wait for work, of which the next is `due`."""
        if self.keeps_time:
            self.resting += 1
            try:
                self._work.wait()
            finally:
                self.resting -= 1
            return
        self.keeps_time = True
        self.alarm.set(due)
        self._lock.release()
        try:
            self.alarm.wait()
        finally:
            self._lock.acquire()
            self.keeps_time = False

    def end(self) -> bool:
        """Wait a moment for all to end. Return whether they have."""
        for thread in self.threads:
            thread.join(timeout=JOIN_TIMEOUT_S)
        return not any(thread.is_alive() for thread in self.threads)
