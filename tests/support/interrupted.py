"""A control plane whose commits compete with others or lose requests and answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from portalmq.control_plane.plane import Node, Op, OutcomeUnknown
from portalmq.control_plane.standalone import Standalone


class Interrupted(Standalone):
    """A plane whose next commits can meet another client's commit first, or lose their requests or answers. `session`
    is the session of the caller. Until the next sync, reads return `lagging`, as from a server that lags behind."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.meanwhile: list[Callable[[], object]] = []
        self.lose_answers = 0
        self.lose_requests = 0
        self.commits = 0
        self.session = 1
        self.lagging: dict[str, Node | None] = {}
        self.syncs = 0

    def get(self, path: str) -> Node | None:
        return self.lagging[path] if path in self.lagging else super().get(path)

    def sync(self) -> None:
        self.syncs += 1
        super().sync()
        self.lagging.clear()

    @property
    def session_id(self) -> int:
        return self.session

    def commit(self, *ops: Op) -> list[int]:
        self.commits += 1
        if self.meanwhile:
            self.meanwhile.pop(0)()
        if self.lose_requests:
            self.lose_requests -= 1
            raise OutcomeUnknown("the request was lost")
        versions = super().commit(*ops)
        if self.lose_answers:
            self.lose_answers -= 1
            raise OutcomeUnknown("the answer was lost")
        return versions
