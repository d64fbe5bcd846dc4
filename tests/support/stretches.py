"""Stretches of the event loop: how long its thread works without polling its sockets, while no other request is served.

    with Stretches() as stretches:
        ...
    stretches.longest          processor time in ms, with the stack that was seen in it

A stretch is measured in the processor time of the thread, so pauses of the process do not count; nor do garbage
collections, whose cost depends on the whole test run. A second thread samples the stack: a stretch shorter than its
interval has none.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from types import TracebackType
from typing import NamedTuple

import gevent
from gevent import monkey

LOOK_EVERY_S = 0.002
STACK_LINES = 6

_Thread = monkey.get_original("threading", "Thread")
_Event = monkey.get_original("threading", "Event")
_get_ident = monkey.get_original("_thread", "get_ident")


class Stretch(NamedTuple):
    ms: float
    stack: str = ""


class Stretches:
    """The stretches of the thread that enters, from the entry to the exit. Enter it once."""

    def __init__(self, stack_at_ms: float = 5.0) -> None:
        self.longest = Stretch(0.0)
        self.count = 0
        self._stack_at_ms = stack_at_ms
        self._seen: tuple[int, str] = (-1, "")
        self._ended = _Event()

    def __enter__(self) -> Stretches:
        self._watched = _get_ident()
        self._check = gevent.get_hub().loop.check(ref=False)
        self._check.start(self._end_stretch)
        self._watcher = _Thread(target=self._watch, daemon=True)
        self._watcher.start()
        gc.callbacks.append(self._collect)
        self._collects_from = 0.0
        self._began = time.thread_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_stretch()
        gc.callbacks.remove(self._collect)
        self._check.stop()
        self._check.close()
        self._ended.set()
        self._watcher.join()

    def _end_stretch(self) -> None:
        """The loop has just polled its sockets."""
        ms = (time.thread_time() - self._began) * 1_000
        if ms > self.longest.ms:
            number, stack = self._seen
            self.longest = Stretch(ms, stack if number == self.count else "")
        self.count += 1
        self._began = time.thread_time()

    def _collect(self, phase: str, info: dict[str, int]) -> None:
        if _get_ident() != self._watched:
            return
        if phase == "start":
            self._collects_from = time.thread_time()
        else:
            self._began += time.thread_time() - self._collects_from

    def _watch(self) -> None:
        number, since = -1, 0.0
        while not self._ended.wait(LOOK_EVERY_S):
            now = time.monotonic()
            if self.count != number:
                number, since = self.count, now
            elif (now - since) * 1_000 >= self._stack_at_ms and self._seen[0] != number:
                frame = sys._current_frames().get(self._watched)
                if frame is not None:
                    self._seen = (number, "".join(traceback.format_stack(frame)[-STACK_LINES:]))
