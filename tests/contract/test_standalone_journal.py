"""The one-process control plane under crashes: acknowledged commits stay, torn ones disappear."""

from __future__ import annotations

import signal
import subprocess
import sys
from bisect import bisect_right
from pathlib import Path

import pytest

from portalmq.control_plane import standalone
from portalmq.control_plane.plane import Create, Delete, OutcomeUnknown, PlaneState, PlaneUnavailable, Set
from portalmq.control_plane.standalone import JournalDamaged, JournalInUse, Standalone


def opened(directory: Path) -> Standalone:
    plane = Standalone(directory)
    plane.start()
    return plane


def tree(plane: Standalone, path: str = "/n") -> dict[str, tuple[bytes, int]]:
    found = (plane.get(f"{path}/{name}") for name in plane.children(path))
    return {node.path: (node.data, node.version) for node in found if node}


def test_others_may_run_after_each_long_commit_and_find_it_done(tmp_path: Path) -> None:
    found = []
    plane = Standalone(tmp_path, give_way=lambda: found.append(len(plane.children("/n"))))
    plane.start()
    for start in range(0, 300, 100):
        plane.commit(*(Create(f"/n/{number}") for number in range(start, start + 100)))
    plane.commit(Set("/n/1", b"x", 0))
    plane.close()
    assert found == [100, 200, 300]


def test_others_may_run_while_many_children_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer omits deleted nodes."""
    monkeypatch.setattr(standalone, "_NODES_A_TURN", 3)
    doomed = ["/n/0", "/n/8"]
    plane = Standalone(tmp_path, give_way=lambda: doomed and plane.commit(Delete(doomed.pop(), 0)))
    plane.start()
    for number in range(9):
        plane.commit(Create(f"/n/{number}"))
    assert [node.path for node in plane.get_children("/n")] == [f"/n/{number}" for number in range(8)]
    plane.close()


def test_a_journal_cut_at_any_byte_holds_exactly_the_commits_that_are_whole(tmp_path: Path) -> None:
    plane = opened(tmp_path / "whole")
    journal = tmp_path / "whole" / "journal"
    ends, trees = [0], [tree(plane)]
    for number in range(5):
        for ops in (
            [Create(f"/n/{number}", b"x" * number), Create(f"/n/{number}-twin")],
            [Set(f"/n/{number}", b"changed", 0), Delete(f"/n/{number}-twin", 0)],
        ):
            plane.commit(*ops)
            ends.append(journal.stat().st_size)
            trees.append(tree(plane))
    whole = journal.read_bytes()
    plane.close()
    cut_directory = tmp_path / "cut"
    cut_directory.mkdir()
    for cut in range(len(whole) + 1):
        (cut_directory / "journal").write_bytes(whole[:cut])
        plane = opened(cut_directory)
        assert tree(plane) == trees[bisect_right(ends, cut) - 1]
        plane.commit(Create("/after/the-crash"))
        plane.close()
        plane = opened(cut_directory)
        assert tree(plane) == trees[bisect_right(ends, cut) - 1]
        assert plane.children("/after") == ["the-crash"]
        plane.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\0" * 40, b"PMQ1", b"PMQ1\0\0\0\4\0\0\0\0abcd", bytes(range(255, 191, -1))],
    ids=["zeros", "a torn header", "a wrong checksum", "noise"],
)
def test_garbage_after_the_last_commit_is_dropped(tmp_path: Path, garbage: bytes) -> None:
    plane = opened(tmp_path)
    plane.commit(Create("/n/a"))
    plane.close()
    with (tmp_path / "journal").open("ab") as journal:
        journal.write(garbage)
    plane = opened(tmp_path)
    plane.commit(Create("/n/b"))
    plane.close()
    plane = opened(tmp_path)
    assert list(tree(plane)) == ["/n/a", "/n/b"]
    plane.close()


def test_damage_before_whole_commits_refuses_the_start_and_changes_nothing(tmp_path: Path) -> None:
    plane = opened(tmp_path)
    for number in range(3):
        plane.commit(Create(f"/n/{number}", b"payload"))
    plane.close()
    journal = tmp_path / "journal"
    damaged = bytearray(journal.read_bytes())
    damaged[20] ^= 1
    journal.write_bytes(damaged)
    with pytest.raises(JournalDamaged, match="damaged at byte 0"):
        opened(tmp_path)
    assert journal.read_bytes() == damaged


def test_two_processes_cannot_share_a_journal(tmp_path: Path) -> None:
    plane = opened(tmp_path)
    with pytest.raises(JournalInUse, match="another process uses"):
        opened(tmp_path)
    plane.close()
    opened(tmp_path).close()


def test_the_journal_is_rewritten_before_it_outgrows_the_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_COMPACT_BYTES_MIN", 2_000)
    plane = opened(tmp_path)
    plane.commit(Create("/me", ephemeral=True), Create("/n/a", b"0"))
    sizes = set()
    for version in range(1_000):
        plane.commit(Set("/n/a", b"%d" % version, version))
        sizes.add((tmp_path / "journal").stat().st_size)
    assert max(sizes) < 4_000
    assert plane.get("/me") is not None
    plane.close()
    plane = opened(tmp_path)
    assert tree(plane) == {"/n/a": (b"999", 1_000)}
    assert plane.get("/me") is None
    plane.close()


def test_others_may_run_between_the_parts_of_a_rewrite_and_lose_no_commit(tmp_path: Path) -> None:
    plane = Standalone(tmp_path, give_way=lambda: others())
    plane.start()
    parts: list[int] = []

    def others() -> None:
        number = len(parts)
        parts.append(number)
        plane.commit(Set("/n/0", b"%d" % number, number), Create(f"/later/{number}"), Delete(f"/n/{9 - number}", 0))

    data = b"x" * (standalone.COMMIT_BYTES_MAX // 12)
    for number in range(30):  # more than one megabyte: the rewrite begins by itself, in the last of these commits
        if not parts:
            plane.commit(Create(f"/n/{number}", data if number else b""))
    assert len(parts) >= 2, "the rewrite was done in one part"
    assert (tmp_path / "journal").stat().st_size == plane._journal_bytes
    expected = tree(plane), tree(plane, "/later")
    assert [len(parts)] * 2 == [expected[0]["/n/0"][1], len(expected[1])]
    plane.close()
    plane = opened(tmp_path)
    assert (tree(plane), tree(plane, "/later")) == expected
    plane.close()


def test_a_close_during_a_rewrite_leaves_the_old_journal_in_use(tmp_path: Path) -> None:
    plane = Standalone(tmp_path, give_way=lambda: plane.close())
    plane.start()
    plane._compact_at_bytes = 0
    plane.commit(Create("/n/a", b"1"))
    assert not (tmp_path / "journal.new").exists()
    plane = opened(tmp_path)
    assert tree(plane) == {"/n/a": (b"1", 0)}
    plane.close()


def test_a_failed_rewrite_leaves_the_old_journal_in_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standalone, "_COMPACT_BYTES_MIN", 200)
    plane = opened(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as full:
        full.setattr(standalone.os, "rename", refuse)
        for number in range(20):
            plane.commit(Create(f"/n/{number}", b"x" * 20))
    plane.close()
    assert not (tmp_path / "journal.new").exists()
    plane = opened(tmp_path)
    assert len(tree(plane)) == 20
    plane.close()


def test_a_failed_fsync_leaves_the_outcome_unknown_and_refuses_more_commits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = opened(tmp_path)
    plane.commit(Create("/n/before"))
    states: list[PlaneState] = []
    plane.watch(lambda _path: states.append(plane.state))

    def fail(_: int) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as broken:
        broken.setattr(standalone.os, "fdatasync", fail)
        with pytest.raises(OutcomeUnknown) as caught:
            plane.commit(Create("/n/unknown"))
    assert (caught.value.outcome, caught.value.retryable) == ("unknown", True)
    assert states == [PlaneState.LOST], "the owner sees no loss"
    with pytest.raises(PlaneUnavailable):
        plane.commit(Create("/n/after"))
    plane.close()
    plane = opened(tmp_path)
    assert "/n/before" in tree(plane)
    assert "/n/after" not in tree(plane)
    plane.close()


def test_a_start_writes_all_records_again_before_it_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failed fsync the system shows what is not on disk, and a further fsync does not write it."""
    plane = opened(tmp_path)
    for number in range(3):
        plane.commit(Create(f"/n/{number}", b"payload"))
    plane.close()
    content = (tmp_path / "journal").read_bytes()
    done: list[object] = []
    write, sync = standalone.os.write, standalone.sync
    monkeypatch.setattr(standalone.os, "write", lambda file, data: (done.append(bytes(data)), write(file, data))[1])
    monkeypatch.setattr(standalone, "sync", lambda file: (done.append("sync"), sync(file))[1])
    plane = opened(tmp_path)
    assert done[:2] == [content, "sync"]
    assert (tmp_path / "journal").read_bytes() == content
    assert len(tree(plane)) == 3
    plane.close()


WRITER = """
import sys
from pathlib import Path
from portalmq.control_plane import standalone
from portalmq.control_plane.plane import Create, Delete, Set
standalone._COMPACT_BYTES_MIN = 3_000  # many rewrites, so that the kill falls into them too
plane = standalone.Standalone(Path(sys.argv[1]))
plane.start()
counter = plane.get("/n/counter")
version = counter.version if counter else plane.commit(Create("/n/counter", b"0"), Create("/n/mirror", b"0"))[0]
while True:
    data = b"%d" % (version + 1)
    plane.commit(Set("/n/counter", data, version), Set("/n/mirror", data, version))
    version += 1
    print(version, flush=True)
"""


def test_kill_9_in_a_loop_of_commits_loses_nothing_that_was_answered(tmp_path: Path) -> None:
    answered = 0
    for round_number in range(6):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True, bufsize=1
        )
        assert writer.stdout
        for _ in range(40 + 17 * round_number):
            answered = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split("\n")
        answered = max([answered, *(int(line) for line in rest[:-1])])
        writer.stdout.close()
        writer.wait()
        plane = opened(tmp_path)
        counter, mirror = plane.get("/n/counter"), plane.get("/n/mirror")
        plane.close()
        assert counter
        assert mirror
        assert (counter.data, counter.version) == (mirror.data, mirror.version), "half a commit"
        assert counter.version in {answered, answered + 1}
        assert counter.data == b"%d" % counter.version
