"""Crash images: each opens, is whole, holds what was promised and nothing else, and goes on."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from simulation.storage.image import WAYS, write_image
from simulation.storage.stages import Run, runs
from simulation.storage.subjects import Subject

Image = dict[str, tuple[bytes, int] | None]


def images(run: Run, chance: random.Random, each: int) -> Iterator[tuple[str, Image, Any]]:
    """Yield `each` images of a crash before each change, as (where and way, image, what may be found)."""
    disk, allowed = run.start.disk.copy(), run.start.allowed
    for at, op in enumerate(run.ops):
        if op.kind == "note":
            allowed = op.note
            continue
        for way in [chance.choice(WAYS) for _ in range(each)]:
            yield f"before change {at} ({op.kind}), {way}", disk.image(way, chance), allowed
        disk.apply(op)
    yield "at the end", disk.image("synced", chance), allowed


def digest(image: Image, allowed: Any) -> bytes:
    """Return a hash of an image with what may be found in it."""
    found = hashlib.blake2b(repr(allowed).encode(), digest_size=16)
    for path, content in sorted(image.items()):
        found.update(path.encode() + (b"" if content is None else hashlib.blake2b(content[0]).digest()))
    return found.digest()


def check_image(subject: Subject, image: Image, allowed: Any, root: Path, number: int) -> None:
    """Write an image, compare it, go on with it and open it again. Raise for anything wrong."""
    write_image(image, root)
    try:
        subject.check(root, allowed, number)
    finally:
        shutil.rmtree(root)


def crash(
    subject: Subject, root: Path, *, seed: int, each: int, share: float = 1.0, only: Collection[str] = ()
) -> Iterator[tuple[str, str | None]]:
    """Check `each` images before each change of all stages, or of some, or a share of them; equal ones once. Yield each
    one's stage and failure."""
    chance, known = random.Random(seed), set[bytes]()
    for name, run in runs(subject, root):
        if only and name not in only:
            continue
        for where, image, allowed in images(run, chance, each):
            if chance.random() >= share or (found := digest(image, allowed)) in known:
                continue
            known.add(found)
            try:
                check_image(subject, image, allowed, root / "image", len(known))
            except Exception as error:  # noqa: BLE001 - each is a finding
                yield name, f"{name}, {where}: {type(error).__name__}: {error}"
            else:
                yield name, None
