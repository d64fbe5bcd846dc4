"""A power cut while a damaged file with epochs is replaced: none that was saved is lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest
from simulation.storage.image import WAYS, Disk, write_image
from simulation.storage.recorder import Recorder, recorded
from support.log_files import IDENTITY

from portalmq.broker.core.fold import PartitionFold
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.state import StateFile

EPOCH = 7


def replace_epochs(disk: Recorder) -> None:
    epochs = EpochFile(disk.root)
    epochs.save({IDENTITY.key: 1})
    reader = apsw.Connection(str(epochs.path))  # until its end the write-ahead log alone has what is saved later
    reader.execute("BEGIN; SELECT * FROM epochs").fetchall()
    epochs.save({IDENTITY.key: EPOCH})
    damage(disk, epochs._connection, "INSERT INTO epochs VALUES ('z', 'none', 0)")
    assert EpochFile(disk.root).highest(IDENTITY.key) == EPOCH


def replace_state(disk: Recorder) -> None:
    state = StateFile(disk.root, identity=IDENTITY)
    state.save_highest_epoch(EPOCH)
    damage(disk, state._connection, "UPDATE meta SET value = 'x' WHERE key = 'schema_version'")
    StateFile(disk.root, identity=IDENTITY).save(PartitionFold(applied=3), 3)


def damage(disk: Recorder, connection: apsw.Connection | None, statement: str) -> None:
    """Put something that nobody can use into the write-ahead log, which stays as after a kill."""
    assert connection is not None
    connection.execute(statement)
    disk.note("saved")


@pytest.mark.parametrize("replace", [replace_epochs, replace_state])
def test_a_power_cut_while_a_damaged_file_is_replaced_loses_no_epoch(
    tmp_path: Path, replace: Callable[[Recorder], None]
) -> None:
    root, image = tmp_path.resolve() / "disk", tmp_path / "image"
    root.mkdir()
    with recorded(root) as recorder:
        replace(recorder)
    saved = next(at for at, op in enumerate(recorder.ops) if op.kind == "note")
    chance, disk = random.Random(5), Disk()
    for at, op in enumerate(recorder.ops):
        if op.kind != "note":
            disk.apply(op)
        for way in WAYS * 2 if at >= saved else ():
            write_image(disk.image(way, chance), image)
            assert highest(image) == EPOCH, f"after change {at} ({op.kind} {op.path}), {way}"
            shutil.rmtree(image)


def highest(directory: Path) -> int:
    epochs, state = EpochFile(directory), StateFile(directory, identity=IDENTITY)
    try:
        return max(epochs.highest(IDENTITY.key), state.highest_epoch())
    finally:
        epochs.close()
        state.close()
