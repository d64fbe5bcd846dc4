"""The contract of control planes, run over each implementation. `make_plane` has one line for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.zookeeper import fresh_chroot, until

from portalmq.control_plane.plane import (
    COMMIT_BYTES_MAX,
    COMMIT_OPS_MAX,
    DATA_BYTES_MAX,
    Check,
    ControlPlane,
    Create,
    Delete,
    Node,
    NodeExists,
    NodeMissing,
    NodeNotEmpty,
    PlaneState,
    PlaneUnavailable,
    Set,
    VersionMismatch,
    clock_s,
)
from portalmq.control_plane.standalone import Standalone
from portalmq.control_plane.zookeeper import ZooKeeper

PLANES = ["standalone", pytest.param("zookeeper", marks=pytest.mark.cluster)]


@pytest.fixture(params=PLANES)
def make_plane(request: pytest.FixtureRequest) -> Callable[[Path], ControlPlane]:
    """Create a plane that is not started. Of two in one directory, the second sees the first one's commits."""
    if request.param == "standalone":
        return Standalone
    server, chroot = request.getfixturevalue("zookeeper_server"), fresh_chroot()
    return lambda directory: ZooKeeper(f"{server.hosts}{chroot}/{directory.name}")


@pytest.fixture
def plane(make_plane: Callable[[Path], ControlPlane], tmp_path: Path) -> Iterator[ControlPlane]:
    made = make_plane(tmp_path / "control")
    made.start()
    yield made
    made.close()


class TestReading:
    def test_a_missing_node_is_none_and_has_no_children(self, plane: ControlPlane) -> None:
        assert plane.get("/nowhere") is None
        assert plane.children("/nowhere") == []

    def test_children_are_sorted_names_one_level_down(self, plane: ControlPlane) -> None:
        plane.commit(Create("/t/b"), Create("/t/a"), Create("/t/a/deeper"), Create("/tt"))
        assert plane.children("/t") == ["a", "b"]

    def test_a_started_plane_is_connected_and_answers(self, plane: ControlPlane) -> None:
        before = clock_s()
        plane.sync()
        assert plane.state is PlaneState.CONNECTED
        assert before <= plane.last_answered <= clock_s()
        assert 0 < plane.session_timeout_s < 60

    def test_many_nodes_are_answered_in_the_order_asked(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a", b"1"), Create("/b", b"2", ephemeral=True))
        assert plane.get_many([]) == []
        assert plane.get_many(["/b", "/gone", "/a", "/gone/too", "/b"]) == [
            plane.get("/b"),
            None,
            plane.get("/a"),
            None,
            plane.get("/b"),
        ]

    def test_the_nodes_below_a_path_come_sorted_and_whole(self, plane: ControlPlane) -> None:
        assert plane.get_children("/nowhere") == []
        names = [str(number) for number in range(450)]
        for start in range(0, 450, 90):
            plane.commit(*(Create(f"/n/{name}", name.encode()) for name in names[start : start + 90]))
        plane.commit(Create("/n/7/deeper"))
        found = plane.get_children("/n")
        assert found == [Node(f"/n/{name}", name.encode(), 0) for name in sorted(names)]

    @pytest.mark.parametrize(
        "path", ["", "a", "/", "/a/", "//a", "/a//b", "/a/./b", "/a/..", "/a\x00", "/a\n", "/" + "a" * 1_000]
    )
    def test_a_path_that_some_plane_could_not_hold_is_refused(self, plane: ControlPlane, path: str) -> None:
        for read in (plane.get, plane.children, plane.get_children):
            with pytest.raises(ValueError, match="not a path"):
                read(path)
        with pytest.raises(ValueError, match="not a path"):
            plane.get_many(["/a", path])
        with pytest.raises(ValueError, match="not a path"):
            plane.commit(Create(path))


class TestVersions:
    def test_a_node_begins_at_version_0_and_each_set_adds_1(self, plane: ControlPlane) -> None:
        assert plane.commit(Create("/a", b"0")) == [0]
        assert plane.commit(Set("/a", b"1", 0)) == [1]
        assert plane.commit(Set("/a", b"2", 1)) == [2]
        assert plane.get("/a") == Node("/a", b"2", 2)

    def test_a_set_with_an_old_or_a_future_version_is_refused(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a", b"0"))
        plane.commit(Set("/a", b"1", 0))
        for version in (0, 2):
            with pytest.raises(VersionMismatch):
                plane.commit(Set("/a", b"x", version))
        assert plane.get("/a") == Node("/a", b"1", 1)

    def test_a_set_of_the_same_bytes_raises_the_version_too(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a", b"0"))
        assert plane.commit(Set("/a", b"0", 0)) == [1]

    def test_a_node_made_again_begins_at_version_0(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a", b"0"))
        plane.commit(Set("/a", b"1", 0))
        plane.commit(Delete("/a", 1), Create("/a", b"new"))
        assert plane.get("/a") == Node("/a", b"new", 0)

    def test_there_is_no_wildcard_version(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a"))
        for op in (Set("/a", b"", -1), Delete("/a", -1), Check("/a", -1)):
            with pytest.raises(ValueError, match="no wildcard"):
                plane.commit(op)


class TestCommits:
    def test_the_answer_has_one_version_for_each_operation(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a"), Create("/b"))
        assert plane.commit(Check("/a", 0), Set("/a", b"1", 0), Create("/c"), Delete("/b", 0)) == [0, 1, 0, -1]

    def test_later_operations_see_the_earlier_ones(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a"), Set("/a", b"1", 0), Check("/a", 1), Create("/a/b"), Delete("/a/b", 0))
        assert plane.get("/a") == Node("/a", b"1", 1)
        assert plane.children("/a") == []

    @pytest.mark.parametrize(
        ("last", "error"),
        [
            (Create("/held"), NodeExists),
            (Set("/held", b"", 7), VersionMismatch),
            (Check("/held", 7), VersionMismatch),
            (Delete("/held", 7), VersionMismatch),
            (Set("/gone", b"", 0), NodeMissing),
            (Check("/gone", 0), NodeMissing),
            (Delete("/gone", 0), NodeMissing),
            (Delete("/parent", 0), NodeNotEmpty),
        ],
    )
    def test_when_one_operation_does_not_fit_nothing_is_applied(
        self, plane: ControlPlane, last: Create | Set | Check | Delete, error: type[Exception]
    ) -> None:
        plane.commit(Create("/held", b"old"), Create("/parent"), Create("/parent/child"))
        with pytest.raises(error):
            plane.commit(
                Set("/held", b"new", 0), Create("/fresh"), Delete("/parent/child", 0), Create("/parent/x"), last
            )
        assert plane.get("/held") == Node("/held", b"old", 0)
        assert plane.get("/fresh") is None
        assert plane.children("/parent") == ["child"]

    def test_an_empty_commit_succeeds(self, plane: ControlPlane) -> None:
        assert plane.commit() == []

    def test_parents_are_made_empty_and_lasting(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a/b/c", b"x"))
        assert plane.get("/a") == Node("/a", b"", 0)
        assert plane.get("/a/b") == Node("/a/b", b"", 0)

    def test_children_can_be_deleted_with_their_parent_in_one_commit(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a/b"), Create("/a/c"))
        plane.commit(Delete("/a/b", 0), Delete("/a/c", 0), Delete("/a", 0))
        assert plane.get("/a") is None

    def test_a_refusal_names_the_path_of_the_operation_that_did_not_fit(self, plane: ControlPlane) -> None:
        plane.commit(Create("/held"))
        with pytest.raises(NodeExists) as caught:
            plane.commit(Create("/a"), Check("/a", 0), Create("/held"), Create("/b"))
        assert caught.value.path == "/held"
        with pytest.raises(VersionMismatch) as wrong:
            plane.commit(Check("/held", 0), Set("/held", b"", 5), Delete("/gone", 0))
        assert wrong.value.path == "/held"

    def test_a_hundred_nodes_get_their_parents_in_one_commit(self, plane: ControlPlane) -> None:
        made = plane.commit(*(Create(f"/a/{number % 10}/b/{number}") for number in range(COMMIT_OPS_MAX)))
        assert made == [0] * COMMIT_OPS_MAX
        assert plane.children("/a") == sorted(map(str, range(10)))
        assert plane.get("/a/3/b/93") == Node("/a/3/b/93", b"", 0)

    def test_a_parent_made_in_the_commit_is_the_one_that_counts(self, plane: ControlPlane) -> None:
        assert plane.commit(Create("/a/b", b"mine"), Create("/a/b/c/d"), Set("/a/b", b"yours", 0)) == [0, 0, 1]
        assert plane.get("/a/b") == Node("/a/b", b"yours", 1)

    def test_nothing_is_made_below_a_node_that_the_commit_deletes(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a"))
        with pytest.raises(ValueError, match="below"):
            plane.commit(Delete("/a", 0), Create("/a/b"))
        plane.commit(Delete("/a", 0), Create("/a"), Create("/a/b"))
        assert plane.children("/a") == ["b"]

    def test_the_limits_hold_before_anything_is_applied(self, plane: ControlPlane) -> None:
        plane.commit(Create("/full", b"x" * DATA_BYTES_MAX))
        with pytest.raises(ValueError, match="at most"):
            plane.commit(Create("/a"), Create("/b", b"x" * (DATA_BYTES_MAX + 1)))
        with pytest.raises(ValueError, match="at most"):
            plane.commit(*(Create(f"/n/{number}") for number in range(COMMIT_OPS_MAX + 1)))
        whole = COMMIT_BYTES_MAX // DATA_BYTES_MAX
        with pytest.raises(ValueError, match="at most"):
            plane.commit(*(Create(f"/n/{number}", b"x" * DATA_BYTES_MAX) for number in range(whole + 1)))
        plane.commit(*(Create(f"/n/{number}", b"x" * DATA_BYTES_MAX) for number in range(whole)))
        assert plane.get("/a") is None
        assert len(plane.children("/n")) == whole


class TestEphemerals:
    def test_an_ephemeral_node_goes_with_its_session(
        self, make_plane: Callable[[Path], ControlPlane], tmp_path: Path
    ) -> None:
        first = make_plane(tmp_path)
        first.start()
        first.commit(Create("/ids/1", b"me", ephemeral=True), Create("/lasting", b"x"))
        assert first.get("/ids/1") == Node("/ids/1", b"me", 0, ephemeral=True, owner=first.session_id)
        first.commit(Set("/ids/1", b"still me", 0))
        assert first.get("/ids/1") == Node("/ids/1", b"still me", 1, ephemeral=True, owner=first.session_id)
        first.close()
        second = make_plane(tmp_path)
        second.start()
        assert second.children("/ids") == []
        assert second.get("/lasting") == Node("/lasting", b"x", 0)
        second.close()

    def test_a_lasting_node_that_was_ephemeral_before_stays(
        self, make_plane: Callable[[Path], ControlPlane], tmp_path: Path
    ) -> None:
        first = make_plane(tmp_path)
        first.start()
        first.commit(Create("/a", b"1", ephemeral=True), Create("/b", b"1"))
        first.commit(Delete("/a", 0), Create("/a", b"2"), Delete("/b", 0), Create("/b", b"2", ephemeral=True))
        first.close()
        second = make_plane(tmp_path)
        second.start()
        assert second.get("/a") == Node("/a", b"2", 0)
        assert second.get("/b") is None
        second.close()

    def test_an_ephemeral_node_has_no_children(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a", ephemeral=True))
        with pytest.raises(ValueError, match="no children"):
            plane.commit(Create("/a/b"))


class TestSessions:
    def test_committed_nodes_exist_in_the_next_session(
        self, make_plane: Callable[[Path], ControlPlane], tmp_path: Path
    ) -> None:
        first = make_plane(tmp_path)
        first.start()
        first.commit(Create("/a", b"0"), Create("/b"))
        first.commit(Set("/a", b"1", 0), Delete("/b", 0))
        first.close()
        second = make_plane(tmp_path)
        second.start()
        assert second.get("/a") == Node("/a", b"1", 1)
        assert second.get("/b") is None
        second.close()

    def test_a_closed_plane_is_lost_and_refuses(self, plane: ControlPlane) -> None:
        assert plane.session_id != 0
        plane.close()
        plane.close()
        assert plane.state is PlaneState.LOST
        assert plane.session_id == 0
        for call in (
            lambda: plane.get("/a"),
            lambda: plane.children("/a"),
            lambda: plane.get_many(["/a"]),
            lambda: plane.get_children("/a"),
            lambda: plane.commit(Create("/a")),
            plane.sync,
        ):
            with pytest.raises(PlaneUnavailable):
                call()


class TestTheDoorbell:
    def test_each_bell_rings_with_the_path_of_what_changed(self, plane: ControlPlane) -> None:
        before: set[str | None] = set()
        plane.watch(before.add)
        plane.commit(Create("/a"), Create("/b"), Create("/quiet"))
        until(lambda: {"/a", "/b", "/quiet"} <= before)
        one: set[str | None] = set()
        two: list[str | None] = []
        plane.watch(one.add)
        plane.watch(two.append)
        plane.commit(Set("/a", b"1", 0), Delete("/b", 0), Create("/c/d", ephemeral=True))
        until(lambda: {"/a", "/b", "/c/d"} <= one and {"/a", "/b", "/c/d"} <= set(two))
        assert "/quiet" not in one

    def test_a_refused_commit_rings_no_bell(self, plane: ControlPlane) -> None:
        rung: list[str | None] = []
        plane.commit(Create("/held"))
        plane.watch(rung.append)
        with pytest.raises(NodeExists):
            plane.commit(Create("/a"), Create("/held"))
        plane.commit(Create("/last"))
        until(lambda: "/last" in rung)
        assert "/a" not in rung

    def test_a_node_that_is_deleted_and_made_again_rings(self, plane: ControlPlane) -> None:
        plane.commit(Create("/a", b"same"))
        rung: list[str | None] = []
        plane.watch(rung.append)
        plane.commit(Delete("/a", 0), Create("/a", b"same"))
        until(lambda: "/a" in rung)
