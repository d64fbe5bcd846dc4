"""Reset of sockets, threads, locks and identities in the child of a fork.

    parent  Producer, Consumer, Lock, ... --- continues as before
              | fork
    child   the same objects, each reset: nothing buffered, leased or held, another identity to the brokers

The child has none of the parent's threads, and any lock may have been held at the moment of the fork. So each object
creates its locks and its state afresh in the child, before other code runs there.
"""

from __future__ import annotations

import logging
import os
import weakref
from typing import Protocol

_log = logging.getLogger("portalmq.client")


class ResetInChild(Protocol):
    def _reset_in_child(self) -> None:
        """Leave the parent's resources to the parent. Must neither wait nor call a broker."""


_all: weakref.WeakSet[ResetInChild] = weakref.WeakSet()


def reset_in_children(thing: ResetInChild) -> None:
    """Have `thing._reset_in_child()` called in each child that this process forks, as long as `thing` lives."""
    _all.add(thing)


def _reset_all() -> None:
    for thing in list(_all):
        try:
            thing._reset_in_child()
        except Exception:  # noqa: BLE001 - the others are reset all the same
            _log.exception("a %s could not be reset in a child process", type(thing).__name__)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_all)
