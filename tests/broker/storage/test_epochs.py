"""The highest leader epoch of each replica, in one file of the broker."""

import shutil

import apsw
import pytest
from support.failing_disk import KINDS, unsynced_disk
from support.log_files import IDENTITY

from portalmq.broker.core.fold import PartitionFold
from portalmq.broker.storage.epochs import EpochFile
from portalmq.broker.storage.errors import Shortage, StorageFault
from portalmq.broker.storage.state import StateFile

FIRST, SECOND = ("a", 0), ("a", 1)


def read_again(directory):
    epochs = EpochFile(directory)
    try:
        return [epochs.highest(key) for key in (FIRST, SECOND)]
    finally:
        epochs.close()


def test_epochs_outlive_their_process_and_never_fall(tmp_path):
    epochs = EpochFile(tmp_path)
    assert epochs.highest(FIRST) == -1
    assert not epochs.path.exists(), "a broker without replicas needs no file"
    epochs.save({FIRST: 7, SECOND: 1})
    epochs.save({FIRST: 5, SECOND: 2})
    assert [epochs.highest(key) for key in (FIRST, SECOND)] == [7, 2]
    epochs.close()
    assert read_again(tmp_path) == [7, 2]
    epochs.save({SECOND: 3})  # a closed file is opened again
    epochs.close()
    assert read_again(tmp_path) == [7, 3]


def test_the_epochs_of_a_deleted_topic_are_forgotten(tmp_path):
    epochs = EpochFile(tmp_path)
    epochs.forget("a")
    epochs.save({FIRST: 7, SECOND: 1, ("b", 0): 4})
    epochs.forget("a")
    assert [epochs.highest(key) for key in (FIRST, SECOND, ("b", 0))] == [-1, -1, 4]
    epochs.close()
    assert read_again(tmp_path) == [-1, -1]


def test_a_damaged_file_is_replaced_by_one_with_what_can_be_read_of_it(tmp_path, caplog):
    epochs = EpochFile(tmp_path)
    epochs.save({(f"topic-{number:04d}", 0): number for number in range(2_000)})
    epochs.close()
    content = bytearray(epochs.path.read_bytes())
    content[-8_192:] = bytes(8_192)
    epochs.path.write_bytes(content)
    again = EpochFile(tmp_path)
    known = [again.highest((f"topic-{number:04d}", 0)) for number in range(2_000)]
    kept = known.index(-1)
    assert known[:kept] == list(range(kept))
    assert kept > 100
    assert "is damaged" in caplog.text
    again.save({FIRST: 9})
    again.close()
    assert read_again(tmp_path) == [9, -1]


@pytest.mark.parametrize(("at", "bit"), [(18, 2), (20, 128), (55, 1), (4101, 1)], ids=str)
def test_a_file_that_can_be_read_and_not_written_is_replaced(tmp_path, at, bit):
    epochs = EpochFile(tmp_path)
    epochs.save({FIRST: 7, SECOND: 1, ("b", 0): 4})
    epochs.close()
    content = bytearray(epochs.path.read_bytes())
    content[at] ^= bit
    epochs.path.write_bytes(content)
    after = EpochFile(tmp_path)
    after.save({FIRST: 8})
    after.forget("b")
    after.close()
    assert read_again(tmp_path)[0] == 8


def test_a_file_that_is_none_is_replaced(tmp_path):
    EpochFile(tmp_path).path.write_bytes(b"something else" * 1_000)
    assert read_again(tmp_path) == [-1, -1]
    EpochFile(tmp_path).save({FIRST: 9})
    assert read_again(tmp_path) == [9, -1]


def test_the_higher_of_the_broker_s_epoch_and_the_state_file_s_counts(tmp_path):
    """Versions before wrote it to the state file alone, and one that is put back finds the last saved one there."""
    before = StateFile(tmp_path / "0", identity=IDENTITY)
    before.save_highest_epoch(7)
    before.close()
    epochs = EpochFile(tmp_path)
    state = StateFile(tmp_path / "0", identity=IDENTITY, epochs=epochs)
    assert state.highest_epoch() == 7
    state.save_highest_epoch(9)
    assert state.highest_epoch() == 9
    state.close()
    assert StateFile(tmp_path / "0", identity=IDENTITY).highest_epoch() == 7
    state = StateFile(tmp_path / "0", identity=IDENTITY, epochs=epochs)
    state.save(PartitionFold(applied=3), 3)
    assert not state.repair()
    state.close()
    assert StateFile(tmp_path / "0", identity=IDENTITY).highest_epoch() == 9


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("damaged", [False, True])
def test_a_save_that_fails_at_any_step_is_done_or_not(tmp_path, monkeypatch, kind, damaged):
    before = tmp_path / "before"
    epochs = EpochFile(before)
    epochs.save({FIRST: 5, SECOND: 5})
    epochs.close()
    if damaged:
        connection = apsw.Connection(str(epochs.path))
        connection.execute("INSERT INTO epochs VALUES ('z', 'none', 0)")
        connection.close()
    with unsynced_disk(monkeypatch) as disk:
        for at in range(1, 1_000):
            directory = tmp_path / str(at)
            shutil.copytree(before, directory)
            failed = None
            with disk.failing(at, kind):
                try:
                    EpochFile(directory).save({FIRST: 7, SECOND: 7})
                except (Shortage, StorageFault) as error:
                    failed = error
            expected = [[7, 7]] if failed is None else [[5, 5], [7, 7]]
            assert read_again(directory) in expected, (at, failed)
            if disk.steps < at:
                assert failed is None
                return
    raise AssertionError("the save never completed")
