"""What a process that forks must not share with its child: sockets, threads, locks, and who it is to the brokers.

    parent  Producer, Consumer, Lock, ... --- goes on as if nothing had happened
              | fork
    child   the same objects, each begun anew: nothing buffered, leased or held, another name to the brokers

The child has none of the parent's threads, and somebody may have held any lock at the moment of the fork. So each
object makes its locks and its state anew in the child, before anything else runs there.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ResetInChild(Protocol):
    def _reset_in_child(self) -> None:
        """In the child of a fork: leave all that is the parent's to it. Waits for nobody, and asks no broker."""


_all: weakref.WeakSet[ResetInChild] = weakref.WeakSet()


def reset_in_children(thing: ResetInChild) -> None:
    """Have `thing._begin_anew()` called in each child that this process forks, as long as `thing` lives."""
    _all.add(thing)


def _reset_all() -> None:
    for thing in list(_all):
        thing._reset_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
