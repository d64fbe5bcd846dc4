"""A control plane whose commits compete with others, come late, or lose requests and answers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from portalmq.control_plane.plane import Conflict, Node, Op, OutcomeUnknown
from portalmq.control_plane.standalone import Standalone


class Interrupted(Standalone):
    """A plane whose next commits can meet another client's commit first, or lose their requests or answers. `session`
    is the session of the caller. Until the next sync or commit, reads return `lagging`, as from a server that lags
    behind. The next commit of the node `late` has no answer, and is applied after `late_by` more calls."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.meanwhile: list[Callable[[], object]] = []
        self.lose_answers = 0
        self.lose_requests = 0
        self.commits = 0
        self.session = 1
        self.lagging: dict[str, Node | None] = {}
        self.syncs = 0
        self.late = ""
        self.late_by = 0
        self._on_its_way: tuple[Op, ...] = ()

    def _called(self) -> None:
        if self._on_its_way:
            self.late_by -= 1
            if self.late_by < 0:
                ops, self._on_its_way = self._on_its_way, ()
                with suppress(Conflict):
                    super().commit(*ops)

    def get_children(self, path: str) -> list[Node]:
        self._called()
        return super().get_children(path)

    def get(self, path: str) -> Node | None:
        self._called()
        return self.lagging[path] if path in self.lagging else super().get(path)

    def sync(self) -> None:
        self._called()
        self.syncs += 1
        super().sync()
        self.lagging.clear()

    @property
    def session_id(self) -> int:
        return self.session

    def commit(self, *ops: Op) -> list[int]:
        self.commits += 1
        self.lagging.clear()
        if self.meanwhile:
            self.meanwhile.pop(0)()
        self._called()
        if self.late in {op.path for op in ops}:
            self._on_its_way, self.late = ops, ""
            raise OutcomeUnknown("there was no answer in time")
        if self.lose_requests:
            self.lose_requests -= 1
            raise OutcomeUnknown("the request was lost")
        versions = super().commit(*ops)
        if self.lose_answers:
            self.lose_answers -= 1
            raise OutcomeUnknown("the answer was lost")
        return versions
