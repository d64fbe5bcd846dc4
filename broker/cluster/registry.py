"""Names that programs register, kept in the control plane for others to look up. No broker depends on them.

/registry/<kind>/<name>    empty nodes
"""

from __future__ import annotations

from portalmq.control_plane.plane import ControlPlane, Create, Delete, NodeExists, NodeMissing, VersionMismatch
from portalmq.errors import Backpressure

NAMES_MAX = 10_000


class Registry:
    def __init__(self, plane: ControlPlane) -> None:
        self._plane = plane

    def create(self, kind: str, name: str) -> bool:
        """Register a name; return whether it is new. Raises Backpressure when there are too many, and PlaneError."""
        names = self._plane.children(f"/registry/{kind}")
        if len(names) >= NAMES_MAX and name not in names:
            raise Backpressure(f"{NAMES_MAX} of the kind {kind!r} are registered: delete some first", retryable=False)
        try:
            self._plane.commit(Create(_path(kind, name)))
        except NodeExists:
            return False
        return True

    def delete(self, kind: str, name: str) -> bool:
        """Remove a name; return whether it was registered."""
        try:
            self._plane.commit(Delete(_path(kind, name), 0))
        except (NodeMissing, VersionMismatch):
            return False
        return True

    def has(self, kind: str, name: str) -> bool:
        self._plane.sync()
        return self._plane.get(_path(kind, name)) is not None


def _path(kind: str, name: str) -> str:
    return f"/registry/{kind}/{name}"
