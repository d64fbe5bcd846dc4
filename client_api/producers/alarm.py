"""An alarm that is set and cleared without waking the thread that waits for it.

The kernel keeps the time (a timerfd). So a message that is sent, and awaited before its linger is over, costs no thread
switch. Without timerfds (outside 64-bit Linux), and under gevent, whose threads must not wait in the kernel, each
setting wakes the waiting thread, which keeps the time itself.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import sys
import threading
import time

_NONBLOCK = os.O_NONBLOCK | os.O_CLOEXEC
_ABSOLUTE = 1


class Alarm:
    """For one waiting thread. All others hold a lock of theirs while they set or clear it.

    Each use raises OSError after another part of the program has closed its descriptors.
    """

    _timer = _event = -1

    def __init__(self) -> None:
        """Raises OSError, AttributeError or ImportError if it cannot be used here."""
        if not sys.platform.startswith("linux") or sys.maxsize < 2**32:
            raise OSError("the layout of its settings is not known here")
        if _threads_are_greenlets():
            raise OSError("a thread that waits for it would stop all others")
        import ctypes  # here, as not every Python has it

        self.at = math.inf
        # The `struct itimerspec` of 64-bit Linux: seconds and nanoseconds of the repetition (none), and of the time.
        self._setting = (ctypes.c_long * 4)()
        self._address = ctypes.addressof(self._setting)
        library = ctypes.PyDLL(None)  # it keeps the GIL: releasing it takes longer than the call
        self._settime = library.timerfd_settime
        self._settime.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._timer = library.timerfd_create(time.CLOCK_MONOTONIC, _NONBLOCK)
        if self._timer < 0:
            raise OSError("no timer could be created")
        self._poll = select.poll()
        for each in (self._event, self._timer):
            self._poll.register(each, select.POLLIN)

    def set(self, at: float) -> None:
        """Have it ring at this time of time.monotonic(), in place of the one set before."""
        self.at = at
        if at == math.inf:
            self._set(0, 0)
        else:
            seconds = int(at)
            self._set(seconds, int((at - seconds) * 1e9) or 1)

    def ring(self) -> None:
        """Have it ring now."""
        self.at = -math.inf
        os.eventfd_write(self._event, 1)

    def _set(self, seconds: int, nanoseconds: int) -> None:
        self._setting[2], self._setting[3] = seconds, nanoseconds
        if self._settime(self._timer, _ABSOLUTE, self._address, None) < 0:
            raise OSError("its timer is closed")

    def wait(self) -> None:
        """Wait until it rings; now and then it seems to."""
        for descriptor, _ in self._poll.poll():
            with contextlib.suppress(BlockingIOError):  # it was set anew
                os.read(descriptor, 8)

    def close(self) -> None:
        """Close it. Nobody may wait for it, now or later."""
        descriptors = self._timer, self._event
        self._timer = self._event = -1
        for each in descriptors:
            if each >= 0:
                with contextlib.suppress(OSError):
                    os.close(each)

    def __del__(self) -> None:
        if self._event >= 0:
            self.close()


class PlainAlarm:
    """The same without the kernel's help."""

    def __init__(self) -> None:
        self.at = math.inf
        self._changed = threading.Condition()

    def set(self, at: float) -> None:
        with self._changed:
            self.at = at
            self._changed.notify()

    def ring(self) -> None:
        self.set(-math.inf)

    def wait(self) -> None:
        with self._changed:
            while (left_s := self.at - time.monotonic()) > 0:
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))

    def close(self) -> None:
        """Nothing is held."""


def new_alarm() -> Alarm | PlainAlarm:
    try:
        return Alarm()
    except (OSError, AttributeError, ImportError):
        return PlainAlarm()


def _threads_are_greenlets() -> bool:
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and any(map(monkey.is_module_patched, ("threading", "select")))
