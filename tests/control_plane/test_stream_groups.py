"""The state of stream groups in the control plane: rosters by compare-and-set, checkpoints, and their removal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from portalmq.control_plane.catalog import Catalog
from portalmq.control_plane.plane import Conflict
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import GroupState
from portalmq.control_plane.stream_groups import (
    PLAIN_BYTES_MAX,
    CheckpointState,
    MemberState,
    RosterState,
    StreamGroups,
    decode,
    encode,
    membership_path,
)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Standalone]:
    standalone = Standalone(tmp_path)
    standalone.start()
    yield standalone
    standalone.close()


@pytest.fixture
def group(plane: Standalone) -> GroupState:
    return Catalog(plane).put_group("g", {"mode": "stream"})[0]


def roster(generation: int, members: int = 1, partitions: int = 4) -> RosterState:
    return RosterState(
        generation,
        (1, 7),
        tuple(MemberState(f"member-{number:032x}", ("t",), 10_000, 2) for number in range(members)),
        {"t": "id"},
        {"t": tuple((number, number % members, 2, -1) for number in range(partitions))},
    )


def test_a_roster_is_written_by_compare_and_set(plane: Standalone, group: GroupState) -> None:
    store = StreamGroups(plane)
    assert store.roster(group.group_id) is None
    version = store.set_roster("g", group.group_id, roster(1), -1)
    with pytest.raises(Conflict):
        store.set_roster("g", group.group_id, roster(1), -1)
    later = store.set_roster("g", group.group_id, roster(2), version)
    with pytest.raises(Conflict):
        store.set_roster("g", group.group_id, roster(3), version)
    held = store.roster(group.group_id, sure=True)
    assert held is not None
    assert (held.value, held.version) == (roster(2), later)


def test_a_large_roster_fits_a_node_and_a_small_one_is_plain_json() -> None:
    large = roster(5, members=1_000, partitions=1_000)
    assert len(encode(large)) < 64 * 1024
    assert decode(encode(large)) == large
    assert encode(roster(1))[:1] == b"{"
    assert len(encode(roster(1))) < PLAIN_BYTES_MAX


def test_nothing_is_written_for_a_group_that_is_gone(plane: Standalone, group: GroupState) -> None:
    store, catalog = StreamGroups(plane), Catalog(plane)
    catalog.delete_group("g")
    checkpoint = CheckpointState("t", 1, {0: (1, 2, 1)})
    store.save_checkpoint("g", group.group_id, "id", checkpoint)
    with pytest.raises(Conflict):
        store.set_roster("g", group.group_id, roster(1), -1)
    assert plane.children("/streams") == []


def test_nothing_is_written_for_an_older_group_of_the_name(plane: Standalone, group: GroupState) -> None:
    store, catalog = StreamGroups(plane), Catalog(plane)
    catalog.delete_group("g")
    catalog.put_group("g", {"mode": "stream"})
    with pytest.raises(Conflict):
        store.set_roster("g", group.group_id, roster(1), -1)
    store.save_checkpoint("g", group.group_id, "id", CheckpointState("t", 1, {0: (1, 2, 1)}))
    assert plane.children("/streams") == []


def test_a_deleted_group_leaves_no_node(plane: Standalone, group: GroupState) -> None:
    store = StreamGroups(plane)
    store.set_roster("g", group.group_id, roster(1), -1)
    for number in range(150):
        store.save_checkpoint("g", group.group_id, f"topic-{number}", CheckpointState("t", number, {0: (1, 2, 1)}))
    store.save_checkpoint("g", group.group_id, "topic-7", CheckpointState("t", 99, {0: (2, 2, 0)}))
    assert store.checkpoints(group.group_id)["topic-7"] == CheckpointState("t", 99, {0: (2, 2, 0)})
    Catalog(plane).delete_group("g")
    assert plane.get(membership_path(group.group_id)) is None
    assert plane.children("/streams") == []
