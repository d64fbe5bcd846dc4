"""The control plane's tree, read as typed states and changed by compare-and-set: the base of the catalog.

A change reads, decides and commits against the version that was read. After a conflict it decides again, at most
ATTEMPTS times. After an unknown outcome it reads the tree again (sync first) and assumes nothing: each change is either
recognised as done in that read, or harmless to repeat.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from portalmq.control_plane import state
from portalmq.control_plane.plane import Check, Conflict, ControlPlane, Create, OutcomeUnknown, PlaneUnavailable, Set
from portalmq.errors import PortalMQError, Unavailable

ATTEMPTS = 16

T = TypeVar("T")
StateT = TypeVar("StateT", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Versioned(Generic[T]):
    """The content of a node, and the version for a compare-and-set."""

    value: T
    version: int


class Tree:
    """Typed access to the nodes. `random_bytes` makes ids and keys; a simulation passes its own."""

    def __init__(self, plane: ControlPlane, *, random_bytes: Callable[[int], bytes] = os.urandom) -> None:
        self.plane = plane
        self._random_bytes = random_bytes
        self._confirming = threading.Lock()
        self._confirmations = 0
        self._unconfirmed = ""

    def confirm(self) -> None:
        """Sync. Concurrent callers share the next one, so any number of refusals costs one write at a time.

        Raises PlaneUnavailable.
        """
        seen = self._confirmations
        with self._confirming:
            if self._confirmations == seen:
                self._confirmations += 1
                self._unconfirmed = "the control plane was not asked to the end"
                try:
                    self.plane.sync()
                    self._unconfirmed = ""
                except Unavailable as fault:
                    self._unconfirmed = fault.detail
            if self._unconfirmed:
                raise PlaneUnavailable(self._unconfirmed)

    def _unique(self) -> str:
        return self._random_bytes(16).hex()

    def _made_once(self, path: str, make: Callable[[], bytes]) -> bytes:
        def load() -> bytes:
            held = self.plane.get(path)
            if held is None:
                self.plane.commit(Create(path, make()))
                held = self.plane.get(path)
            assert held is not None, path
            return held.data

        return self._retry_conflicts(path, load)

    def _read(self, path: str, kind: type[StateT]) -> Versioned[StateT] | None:
        held = self.plane.get(path)
        return Versioned(state.decode(held.data, kind), held.version) if held else None

    def _confirmed(self, path: str, kind: type[StateT]) -> Versioned[StateT] | None:
        """Read the node; None only after a sync, since a server that lags misses recent commits."""
        held = self._read(path, kind)
        if held is None:
            self.confirm()
            held = self._read(path, kind)
        return held

    def _check_newest(self, path: str, held: Versioned[Any]) -> None:
        """Raise a Conflict unless the node is as it was read: a server that lags may have answered, and a change that
        seems to be made already may have been undone since."""
        self.plane.commit(Check(path, held.version))

    def _write(self, path: str, value: msgspec.Struct, held: Versioned[Any] | None) -> None:
        """Write the node: over what was read of it as `held`, or anew."""
        data = state.encode(value)
        self.plane.commit(Set(path, data, held.version) if held else Create(path, data))

    def _all(self, parent: str, kind: type[StateT]) -> dict[str, StateT]:
        nodes = self.plane.get_children(parent)
        return {node.path.rpartition("/")[2]: state.decode(node.data, kind) for node in nodes}

    def _retry_conflicts(self, what: str, attempt: Callable[[], T]) -> T:
        """Run `attempt` (read, decide, commit) until it meets no conflict. A refusal that a stale read may have caused
        is decided once more after a sync."""
        unknown: OutcomeUnknown | None = None
        is_synced = False
        for _ in range(ATTEMPTS):
            try:
                if unknown:
                    self.plane.sync()
                    is_synced = True
                return attempt()
            except Conflict:
                continue
            except OutcomeUnknown as lost:
                unknown = lost
            except PlaneUnavailable:
                # This attempt applied nothing; an earlier one may have.
                raise unknown or PlaneUnavailable(f"{what}: the control plane does not answer") from None
            except PortalMQError as refusal:
                if is_synced or refusal.status >= 500:
                    if unknown:  # the refusal is of what the tree has now, perhaps by that attempt
                        refusal.outcome = "unknown"
                    raise
                self.confirm()
                is_synced = True
        raise unknown or Unavailable(f"{what}: others changed it {ATTEMPTS} times in between, try again")
