"""A control plane in which one call fails: a test chooses it by its number."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from portalmq.control_plane.plane import ControlPlane, Node, Op, OutcomeUnknown, PlaneRefused, PlaneUnavailable

T = TypeVar("T")


class FailingPlane:
    """`fails` is the number of the failing call; with `for_good` all later calls fail too. `fault` is the kind:

    away      nothing was applied, no server answers
    refused   nothing was applied, and never will be
    lost      a commit was applied, and its answer is lost; other calls are away
    unsent    a commit was not applied, and its outcome is unknown; other calls are away
    """

    def __init__(self, plane: ControlPlane, fails: int, fault: str = "away", *, for_good: bool = False) -> None:
        self.calls: list[str] = []
        self._plane = plane
        self._fails = fails
        self._fault = fault
        self._for_good = for_good

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plane, name)

    @property
    def has_failed(self) -> bool:
        return len(self.calls) > self._fails

    def start(self) -> None:
        self._call("start", self._plane.start)

    def get(self, path: str) -> Node | None:
        return self._call("get", lambda: self._plane.get(path))

    def children(self, path: str) -> list[str]:
        return self._call("children", lambda: self._plane.children(path))

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        return self._call("get_many", lambda: self._plane.get_many(paths))

    def get_children(self, path: str) -> list[Node]:
        return self._call("get_children", lambda: self._plane.get_children(path))

    def sync(self) -> None:
        self._call("sync", self._plane.sync)

    def commit(self, *ops: Op) -> list[int]:
        return self._call("commit", lambda: self._plane.commit(*ops))

    def _call(self, name: str, call: Callable[[], T]) -> T:
        number = len(self.calls)
        self.calls.append(name)
        if number < self._fails or (number > self._fails and not self._for_good):
            return call()
        if self._fault == "refused":
            raise PlaneRefused("the nodes are kept for others")
        if name != "commit" or self._fault == "away":
            raise PlaneUnavailable("no server answers")
        if self._fault == "lost":
            call()
        raise OutcomeUnknown("the answer was lost")
