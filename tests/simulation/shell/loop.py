"""The event loop of a run: gevent's interface on simulated time.

Each callback and timer belongs to one process: the one that ran when it was made. So a process can be paused (what is
its own waits) and killed (nothing of it ever runs again: no `finally`, as after SIGKILL). Ready callbacks run in their
order, as in gevent; the differences between runs come from drawn times: of the network, the disk and the timers.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from random import Random
from typing import Any
from zlib import crc32

import greenlet
from gevent import get_hub
from gevent.hub import Hub, Waiter, set_hub

START_S = 1_700_000_000
# How long a callback takes, at most: so waiting loops end, and no two events are simultaneous for long.
STEP_NS = 20_000
# How late a timer is, at most.
TIMER_LATE_NS = 300_000
STEPS_MAX = 3_000_000


class Stuck(AssertionError):
    """The run does not come to an end."""


class Process:
    """What can be paused and killed. `number` is that of its machine; `wall_ms` is how far its time of day is wrong."""

    def __init__(self, name: str, number: int | None = None) -> None:
        self.name = name
        self.number = number
        self.dead = False
        self.paused = False
        self.wall_ms = 0
        self.work_ns = (20_000, 400_000)  # the shortest and longest time that a native thread takes
        self.held: list[Any] = []

    def __repr__(self) -> str:
        return self.name


class Callback:
    """gevent's handle of a scheduled call."""

    __slots__ = ("args", "callback", "process")

    def __init__(self, process: Process, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.process = process
        self.callback: Callable[..., Any] | None = callback
        self.args: tuple[Any, ...] | None = args

    def stop(self) -> None:
        self.callback = None
        self.args = None

    close = stop

    def __bool__(self) -> bool:
        return self.args is not None

    @property
    def pending(self) -> bool:
        return self.callback is not None

    def run(self, loop: SimLoop) -> None:
        callback, args = self.callback, self.args
        self.callback = None
        if callback is not None and args is not None:
            try:
                callback(*args)
            except BaseException:  # noqa: BLE001 - gevent's contract
                loop.handle_error(self, *sys.exc_info())
            finally:
                self.args = None


class Timer:
    """gevent's timer watcher."""

    __slots__ = ("_number", "_seconds", "args", "callback", "loop", "process", "ref", "repeat")

    def __init__(self, loop: SimLoop, after: float, repeat: float, ref: bool) -> None:
        self.loop = loop
        self.ref = ref
        self.repeat = repeat
        self._seconds = after
        self._number = -1
        self.callback: Callable[..., Any] | None = None
        self.args: tuple[Any, ...] | None = None
        self.process = loop.current

    def start(self, callback: Callable[..., Any], *args: Any, **more: Any) -> None:
        loop = self.loop
        self.callback, self.args, self.process = callback, args, loop.current
        loop.number += 1
        self._number = loop.number
        late_ns = int(loop.random.random() * TIMER_LATE_NS)
        heappush(loop.timers, (loop.now_ns + max(0, int(self._seconds * 1e9)) + late_ns, self._number, self))

    def again(self, callback: Callable[..., Any], *args: Any, **more: Any) -> None:
        self.start(callback, *args)

    def stop(self) -> None:
        self._number = -1
        self.callback = self.args = None

    close = stop

    @property
    def active(self) -> bool:
        return self.callback is not None

    pending = active

    def __enter__(self) -> Timer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def is_due(self, number: int) -> bool:
        return self._number == number and self.callback is not None

    def run(self, loop: SimLoop) -> None:
        callback, args = self.callback, self.args
        if callback is None or args is None:
            return
        self.stop()
        try:
            callback(*args)
        except BaseException:  # noqa: BLE001 - gevent's contract
            loop.handle_error(self, *sys.exc_info())


class SimLoop:
    """What gevent's hub needs of a loop, and no more."""

    default = True
    approx_timer_resolution = 0.0001
    MAXPRI = 2
    MINPRI = -2

    def __init__(self, random: Random) -> None:
        self.random = random
        self.now_ns = START_S * 1_000_000_000
        self.world = Process("world")
        self.current = self.world
        self.ready: deque[Callback] = deque()
        self.timers: list[tuple[int, int, Timer]] = []
        self.number = 0
        self.steps = 0
        self.fingerprint = 0
        self.is_over = False
        self.error_handler: Any = None
        self.main: Any = None
        self.on_error: Callable[[Process, Any, BaseException], None] = lambda process, context, error: None

    # --- gevent's interface ------------------------------------------------------------------------------------------

    pendingcnt = 0

    @property
    def _callbacks(self) -> deque[Callback]:
        return self.ready

    def run_callback(self, callback: Callable[..., Any], *args: Any) -> Callback:
        scheduled = Callback(self.current, callback, args)
        self.ready.append(scheduled)
        return scheduled

    run_callback_threadsafe = run_callback

    def timer(self, after: float, repeat: float = 0.0, ref: bool = True, priority: int | None = None) -> Timer:
        return Timer(self, after, repeat, ref)

    def now(self) -> float:
        return self.now_ns / 1e9

    def update_now(self) -> None: ...

    update = update_now

    def handle_error(self, context: Any, kind: Any, value: Any, trace: Any) -> None:
        self.on_error(self.current, context, value)

    def destroy(self) -> None: ...

    # --- the run -----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run until `is_over`, then go back to the greenlet that waits in `SimHub.simulate`."""
        ready, timers = self.ready, self.timers
        while True:
            while not self.is_over:
                self.steps += 1
                if self.steps > STEPS_MAX:
                    raise Stuck(f"{STEPS_MAX} steps are not enough")
                if ready:
                    self._run(ready.popleft())
                    continue
                if not timers:
                    break
                due_ns, number, timer = heappop(timers)
                if timer.is_due(number):
                    self.now_ns = max(self.now_ns, due_ns)
                    self._run(timer)
            self.main.switch()

    def _run(self, scheduled: Callback | Timer) -> None:
        process = scheduled.process
        if process.dead or process.paused:
            process.held.append(scheduled)  # of a dead one, so that its greenlets are never collected
            return
        self.now_ns += int(self.random.random() * STEP_NS)
        self.current = process
        self.fingerprint = crc32(self.now_ns.to_bytes(8), self.fingerprint)
        scheduled.run(self)
        self.current = self.world

    def resume(self, process: Process) -> None:
        process.paused = False
        held, process.held = process.held, []
        for scheduled in held:
            if isinstance(scheduled, Callback):
                self.ready.append(scheduled)
            else:
                self.number += 1
                scheduled._number = self.number
                heappush(self.timers, (self.now_ns, self.number, scheduled))

    # --- for the world -----------------------------------------------------------------------------------------------

    def after(self, seconds: float, process: Process, callback: Callable[..., Any], *args: Any) -> Timer:
        """Call as part of `process`."""
        before, self.current = self.current, process
        try:
            timer = Timer(self, seconds, 0.0, True)
            timer.start(callback, *args)
        finally:
            self.current = before
        return timer

    def spawn(self, process: Process, work: Callable[..., Any], *args: Any) -> Any:
        """Spawn a greenlet of `process`."""
        import gevent

        before, self.current = self.current, process
        try:
            return gevent.spawn(work, *args)
        finally:
            self.current = before

    def wait(self, seconds: float) -> None:
        """Let simulated time pass for the calling greenlet."""
        waiter: Waiter[None] = Waiter()
        self.timer(seconds).start(waiter.switch, None)
        waiter.get()

    def simulate(self) -> None:
        """Run the loop until it is over. Called once, by the main greenlet."""
        self.main = greenlet.getcurrent()
        get_hub().switch()


class SimHub(Hub):
    """A hub that reports what greenlets raise to the run."""

    def handle_error(self, context: Any, type: Any, value: Any, tb: Any) -> None:
        if not isinstance(value, greenlet.GreenletExit):
            self.loop.on_error(self.loop.current, context, value)

    def start_periodic_monitoring_thread(self) -> None: ...


def install(random: Random) -> SimLoop:
    """Make a new loop that of this thread."""
    loop = SimLoop(random)
    set_hub(SimHub(loop=loop))
    return loop


class SimThreads:
    """NativeThreads whose work is done at a later moment, at once."""

    def __init__(self, threads_max: int) -> None:
        self._free = threads_max
        self._queue: deque[tuple[Any, ...]] = deque()

    def apply(self, work: Callable[..., Any], arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        hub = get_hub()
        waiter: Waiter[Any] = Waiter(hub)
        self._queue.append((work, arguments, named or {}, waiter, hub.loop))
        self._next()
        has_result, result = waiter.get()
        if has_result:
            return result
        raise result

    def _next(self) -> None:
        while self._free and self._queue:
            self._free -= 1
            job = self._queue.popleft()
            loop = job[-1]
            least, most = loop.current.work_ns
            loop.timer((least + loop.random.random() * (most - least)) / 1e9).start(self._work, *job)

    def _work(self, work: Any, arguments: Any, named: Any, waiter: Waiter[Any], loop: SimLoop) -> None:
        try:
            result = (True, work(*arguments, **named))
        except Exception as fault:  # noqa: BLE001 - it is raised in the greenlet that waits
            result = (False, fault)
        self._free += 1
        loop.timer(loop.random.random() * 50e-6).start(waiter.switch, result)
        self._next()
