"""Storage on disks that lose power or fail: a sample of `make crashes`."""

import pytest
from simulation.storage.bugs import killer_of
from simulation.storage.crashes import crash
from simulation.storage.failures import SMALL_DISK, failures
from simulation.storage.recorder import KINDS
from simulation.storage.subjects import CONTROL, PARTITION

SUBJECTS = pytest.mark.parametrize("subject", [PARTITION, CONTROL], ids=lambda subject: subject.name)


@pytest.fixture
def root(tmp_path):
    return tmp_path.resolve()


@SUBJECTS
def test_every_crash_image_holds_what_was_acknowledged_and_nothing_else(root, subject):
    outcomes = list(crash(subject, root, seed=7, each=3, share=0.008 if subject is PARTITION else 1.0))
    assert [failure for _, failure in outcomes if failure] == []
    assert {name for name, _ in outcomes} == set(subject.stages)
    assert len(outcomes) >= 50


@pytest.mark.parametrize("kind", [*KINDS, SMALL_DISK])
def test_whatever_call_fails_nothing_acknowledged_is_lost_and_the_process_goes_on(root, kind):
    every = 30 if kind == SMALL_DISK else 240
    outcomes = [*failures(PARTITION, root, every=every, kinds=[kind]), *failures(CONTROL, root, every=3, kinds=[kind])]
    assert [failure for _, failure in outcomes if failure] == []
    assert len(outcomes) >= 10


QUICKLY_FOUND = [
    "an append is acknowledged before its fsync",
    "a segment is renamed before its fsync",
    "an open claims what is not synced",
    "a commit of the control plane is answered before its fsync",
]


@pytest.mark.parametrize("name", QUICKLY_FOUND)
def test_a_planted_bug_is_found(root, name):
    assert killer_of(name, root)


@pytest.mark.parametrize("stage", ["close", pytest.param("truncate what is sealed", marks=pytest.mark.prove)])
def test_a_write_ahead_log_that_a_close_removed_after_a_failed_fsync_stays_away(root, stage):
    outcomes = list(failures(PARTITION, root, kinds=["lost sync"], only=[stage]))
    assert [failure for _, failure in outcomes if failure] == []
