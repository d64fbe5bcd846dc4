"""What the mirror ignores: each guard on its own, with the late or foreign node that only it keeps out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Thread

import msgspec
import pytest

from portalmq import wire
from portalmq.control_plane import state
from portalmq.control_plane.catalog import Catalog, Versioned
from portalmq.control_plane.mirror import Mirror, SetBack
from portalmq.control_plane.plane import Create, Node, PlaneUnavailable, Set
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.state import BrokerState

BROKER = BrokerState("http://localhost:5001", 3, "store-1")


class Late(Standalone):
    """Answers some reads with `says`, as a server that lags behind does."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.says: dict[str, Node | None] = {}

    def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        return [self.says.get(path, node) for path, node in zip(paths, super().get_many(paths), strict=True)]

    def write(self, path: str, data: bytes) -> None:
        held = self.get(path)
        self.commit(*([Set(path, data, held.version)] if held else [Create(path, data)]))


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Late]:
    made = Late(tmp_path)
    made.start()
    yield made
    made.close()


@pytest.fixture
def catalog(plane: Late) -> Catalog:
    return Catalog(plane)


@pytest.fixture
def mirror(plane: Late) -> Mirror:
    made = Mirror(plane)
    made.refresh()
    return made


def create(catalog: Catalog, partitions: int = 1) -> state.TopicState:
    return catalog.create_topic("t", wire.CreateTopic(partitions=partitions), brokers={1: BROKER})[0]


def test_a_control_plane_that_was_set_back_is_reported_by_each_refresh(catalog: Catalog, mirror: Mirror) -> None:
    topic = create(catalog)
    mirror.note(None)
    mirror.refresh()
    known = mirror.partitions[topic.topic_id, 0]
    mirror.partitions[topic.topic_id, 0] = Versioned(known.value, known.version + 9)
    mirror.note(None)
    with pytest.raises(SetBack):
        mirror.refresh()
    del mirror.partitions[topic.topic_id, 0]
    mirror.note(None)
    with pytest.raises(SetBack):
        mirror.refresh()


def test_a_partition_that_has_not_changed_is_neither_noted_nor_reported(catalog: Catalog, mirror: Mirror) -> None:
    topic = create(catalog)
    mirror.note(None)
    mirror.refresh()
    noted: list[None] = []
    mirror.on_noted = lambda: noted.append(None)
    assert mirror.reread(topic.topic_id, 0) is mirror.partitions[topic.topic_id, 0]
    assert noted == []
    mirror.note(state.partition_path(topic.topic_id, 0))
    assert not mirror.refresh()


def test_a_read_that_was_ended_halfway_is_no_answer_for_those_that_shared_it(catalog: Catalog, mirror: Mirror) -> None:
    topic = create(catalog)
    reading, errors = mirror._next_reading, []

    def reread() -> None:
        try:
            mirror.reread(topic.topic_id, 0)
        except PlaneUnavailable as error:
            errors.append(error)

    with mirror._one_reading:
        thread = Thread(target=reread)
        thread.start()
        while not reading.paths:
            pass
        mirror._next_reading = type(reading)()  # whoever began this one is gone
    thread.join()
    assert len(errors) == 1


def test_a_foreign_node_beside_the_partitions_is_no_partition(catalog: Catalog, mirror: Mirror) -> None:
    topic = create(catalog)
    mirror.note(state.topic_path("t"))
    mirror.note(f"{state.PARTITIONS}/{topic.topic_id}/note")
    mirror.refresh()
    assert list(mirror.partitions) == [(topic.topic_id, 0)]


def test_a_partition_beyond_the_known_number_waits_for_its_topic(plane: Late, catalog: Catalog, mirror: Mirror) -> None:
    topic = create(catalog)
    mirror.note(None)
    mirror.refresh()
    first = plane.get(state.partition_path(topic.topic_id, 0))
    assert first is not None
    plane.write(state.partition_path(topic.topic_id, 1), first.data)
    mirror.note(state.partition_path(topic.topic_id, 1))
    assert not mirror.refresh()
    assert list(mirror.partitions) == [(topic.topic_id, 0)]


def test_a_late_read_does_not_set_the_controllers_version_back(plane: Late, catalog: Catalog, mirror: Mirror) -> None:
    catalog.elect_controller(1, 1)
    late = plane.get(state.CONTROLLER)
    assert late is not None
    plane.write(state.CONTROLLER, late.data.replace(b'"epoch":1', b'"epoch":7'))
    mirror.note(state.CONTROLLER)
    mirror.refresh()
    before = mirror.controller
    assert before is not None
    assert before.version == late.version + 1
    plane.says[state.CONTROLLER] = late
    mirror.note(state.CONTROLLER)
    assert not mirror.refresh()
    assert mirror.controller == before


def test_of_a_topic_that_was_created_again_nothing_old_remains(plane: Late, catalog: Catalog, mirror: Mirror) -> None:
    before = create(catalog, partitions=2)
    mirror.note(None)
    mirror.refresh()
    catalog.delete_topic("t", now_ms=0)
    after = create(catalog)
    for path in (state.topic_path("t"), state.tombstone_path(before.topic_id)):
        mirror.note(path)
    mirror.refresh()
    assert mirror.topic_by_id(before.topic_id) is None
    assert mirror.topic_by_id(after.topic_id) == after
    assert list(mirror.partitions) == [(after.topic_id, 0)]


def test_an_entry_that_becomes_unreadable_stays_as_it_was_known(plane: Late, catalog: Catalog, mirror: Mirror) -> None:
    catalog.register_broker(1, BROKER)
    mirror.note(state.broker_path(1))
    mirror.refresh()
    plane.write(state.broker_path(1), b"by hand")
    mirror.note(state.broker_path(1))
    assert not mirror.refresh()
    assert mirror.brokers == {1: BROKER}


@pytest.mark.parametrize(("change", "counts"), [
    ({"incarnation": 4}, True), ({"draining": True}, True), ({"incarnation": 2, "draining": True}, False),
])  # fmt: skip
def test_a_brokers_entry_changes_within_its_life_and_with_a_later_one(
    plane: Late, catalog: Catalog, mirror: Mirror, change: dict[str, int], counts: bool
) -> None:
    catalog.register_broker(1, BROKER)
    mirror.note(state.broker_path(1))
    mirror.refresh()
    after = msgspec.structs.replace(BROKER, **change)
    plane.write(state.broker_path(1), state.encode(after))
    mirror.note(state.broker_path(1))
    assert mirror.refresh().brokers is counts
    assert mirror.brokers == {1: after if counts else BROKER}


def test_a_groups_settings_change_with_its_version(plane: Late, catalog: Catalog, mirror: Mirror) -> None:
    catalog.put_group("g", {})
    late = plane.get(state.group_path("g"))
    assert late is not None
    mirror.note(state.group_path("g"))
    mirror.refresh()
    before = mirror.groups["g"]
    catalog.put_group("g", {"max_deliveries": 3})
    mirror.note(state.group_path("g"))
    assert mirror.refresh().groups == {"g"}
    assert mirror.groups["g"] != before
    plane.says[state.group_path("g")] = late
    mirror.note(state.group_path("g"))
    assert mirror.refresh().groups == set()
    assert mirror.groups["g"] != before
