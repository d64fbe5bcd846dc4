"""A use of the state file that fails at any step leaves the old fold or the new one, and keeps the highest epoch."""

import shutil

import apsw
import pytest
from support.failing_disk import KINDS, unsynced_disk
from support.log_files import IDENTITY

from portalmq.broker.core.fold import GroupFold, PartitionFold, ProducerFold, SpanFold, encode_fold
from portalmq.broker.storage.errors import Shortage, StorageFault
from portalmq.broker.storage.state import STATE_NAME, StateFile

EPOCH = 7
OLD = PartitionFold(applied=40, epochs=[(7, 0)], groups=[GroupFold("workers", 0, 30, [])])
NEW = PartitionFold(
    applied=90,
    epochs=[(7, 0), (8, 50)],
    producers=[ProducerFold(3, 0, [(0, 10, 60, 1_000)])],
    groups=[GroupFold("workers", 0, 80, [SpanFold(50, 60, 1, 0, True, 1_000, 9_000)])],
)


def save(state):
    state.save(NEW, 85)


def save_durably(state):
    state.save(NEW, 85, durable=True)


def nothing(_directory):
    pass


def of_an_older_version(directory):
    meddle(directory, "UPDATE meta SET value = 1 WHERE key = 'schema_version'")


def that_does_not_add_up(directory):
    meddle(directory, "UPDATE meta SET value = 41 WHERE key = 'applied'")


def that_is_no_longer_one(directory):
    file = directory / STATE_NAME
    file.write_bytes(file.read_bytes()[:5_000])


def meddle(directory, sql):
    connection = apsw.Connection(str(directory / STATE_NAME))
    connection.execute(sql)
    connection.close()


# name -> (the change made to the file, the use, the folds that may be found afterwards, the epoch that it saves)
USES = {
    "load": (nothing, lambda state: state.load(), [OLD], EPOCH),
    "save": (nothing, save, [OLD, NEW], EPOCH),
    "save durably": (nothing, save_durably, [OLD, NEW], EPOCH),
    "forget": (nothing, lambda state: state.forget(), [OLD, None], EPOCH),
    "save an epoch": (nothing, lambda state: state.save_highest_epoch(9), [OLD], 9),
    "close": (nothing, lambda state: (save(state), state.close()), [OLD, NEW], EPOCH),
    "load an older version": (of_an_older_version, lambda state: state.load(), [None], EPOCH),
    "save an epoch over an older version": (of_an_older_version, lambda state: state.save_highest_epoch(9), [None], 9),
    "load what does not add up": (that_does_not_add_up, lambda state: state.load(), [None], EPOCH),
    "save over what does not add up": (that_does_not_add_up, save, [None, NEW], EPOCH),
    "save over what is damaged": (that_is_no_longer_one, save, [None, NEW], EPOCH),
    "save an epoch over what is damaged": (that_is_no_longer_one, lambda state: state.save_highest_epoch(9), [None], 9),
}


@pytest.fixture(scope="module")
def before(tmp_path_factory):
    directory = tmp_path_factory.mktemp("state") / "before"
    state = StateFile(directory, identity=IDENTITY)
    state.save_highest_epoch(EPOCH)
    state.save(OLD, 40)
    state.close()
    return directory


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", USES)
def test_a_use_that_fails_at_any_step_leaves_a_usable_state_file(tmp_path, monkeypatch, before, name, kind):
    meddling, use, folds, epoch = USES[name]
    with unsynced_disk(monkeypatch) as disk:
        for at in range(1, 1_000):
            directory = tmp_path / str(at)
            shutil.copytree(before, directory)
            meddling(directory)
            state = StateFile(directory, identity=IDENTITY)
            knows_epoch = True
            if meddling is that_is_no_longer_one:
                state._highest_epoch = EPOCH  # this process has read it before the file was damaged
            failed = None
            with disk.failing(at, kind):
                try:
                    use(state)
                except (Shortage, StorageFault) as error:
                    failed = error
            assert kind == "broken" or not isinstance(failed, StorageFault), (at, failed)
            if failed is None or isinstance(failed, Shortage):
                is_usable(state, folds, epoch if failed is None else EPOCH, knows_epoch)
            knows_epoch &= failed is None or meddling is not that_is_no_longer_one
            is_usable(StateFile(directory, identity=IDENTITY), folds, epoch if failed is None else EPOCH, knows_epoch)
            again = StateFile(directory, identity=IDENTITY)
            again.save_highest_epoch(EPOCH)
            again.save(NEW, 85)
            again.close()
            is_usable(StateFile(directory, identity=IDENTITY), [NEW], EPOCH, knows_epoch)
            shutil.rmtree(directory)
            if disk.steps < at:
                assert failed is None
                return
        raise AssertionError("the use never completed")


def is_usable(state, folds, epoch, knows_epoch):
    found = state.load()
    saved = None if found is None else encode_fold(found[0])
    assert saved in [None if fold is None else encode_fold(fold) for fold in folds]
    if knows_epoch:
        assert state.highest_epoch() >= epoch
    state.park()
