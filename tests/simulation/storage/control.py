"""The data directory of a broker of its own: its identity, and the journal of its control plane.

A commit that was answered is there, one that was refused or never made is not, none is there in part; the identity that
was returned once never changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from simulation.storage.recorder import Recorder

from portalmq.broker.storage.disk import DataDirectory
from portalmq.control_plane.plane import Create, Delete, Op, Set
from portalmq.control_plane.standalone import Standalone

DATA = Path("broker/data")
Tree = dict[str, tuple[bytes, int]]


@dataclass(frozen=True)
class Promised:
    """The trees that may be found, and the identity; "" while none was returned."""

    trees: tuple[Tree, ...] = ({},)
    store_uuid: str = ""


@dataclass
class Tables:
    """The tree that was answered last."""

    tree: Tree = field(default_factory=dict)
    store_uuid: str = ""
    number: int = 0


@dataclass
class Control:
    """A data directory and a control plane, open after `begin`. `acked` counts the commits that were answered."""

    disk: Recorder
    model: Tables
    allowed: Promised = field(init=False)
    data: DataDirectory | None = None
    plane: Standalone | None = None
    acked: int = 0

    def begin(self, allowed: Promised) -> None:
        self.note(allowed)
        self.close()
        self.data = DataDirectory.open(self.disk.root / DATA)
        found = self.data.identity.store_uuid
        assert self.allowed.store_uuid in ("", found), "the identity changed"
        self.note(replace(self.allowed, store_uuid=found))
        self.plane = Standalone(self.disk.root / DATA / "control")
        self.plane.start()
        tree = self.tree()
        assert tree in self.allowed.trees, f"found {sorted(tree)}, expected one of {self.allowed.trees}"
        self.model.tree, self.model.store_uuid = tree, found
        self.note(Promised((tree,), found))

    def close(self) -> None:
        for each in (self.plane, self.data):
            if each is not None:
                each.close()
        self.plane = self.data = None

    def note(self, allowed: Promised) -> None:
        self.allowed = allowed
        self.disk.note(allowed)

    def tree(self) -> Tree:
        assert self.plane is not None
        return {node.path: (node.data, node.version) for node in self.plane.get_children("/n")}

    def read(self) -> None:
        assert self.tree() in self.allowed.trees

    def restart(self) -> None:
        self.begin(self.allowed)

    def commit(self, *ops: Op) -> None:
        """Commit `ops`: answered on return."""
        assert self.plane is not None
        tree = dict(self.model.tree)
        for op in ops:
            match op:
                case Create(path, data):
                    tree[path] = (data, 0)
                case Set(path, data, version):
                    tree[path] = (data, version + 1)
                case Delete(path):
                    del tree[path]
        self.note(replace(self.allowed, trees=(*self.allowed.trees, tree)))
        self.plane.commit(*ops)
        self.model.tree = tree
        self.acked += 1
        self.note(replace(self.allowed, trees=(tree,)))

    def create(self, size: int = 40) -> None:
        self.model.number += 1
        self.commit(Create(f"/n/{self.model.number}", b"%d" % self.model.number * size))

    def change(self) -> None:
        """Change, create and delete nodes in one commit."""
        self.model.number += 1
        nodes = sorted(self.model.tree)
        first, last = nodes[0], nodes[-1]
        ops: list[Any] = [
            Set(last, b"changed" * 30, self.model.tree[last][1]),
            Create(f"/n/{self.model.number}", b"new"),
        ]
        if first != last:
            ops.append(Delete(first, self.model.tree[first][1]))
        self.commit(*ops)
