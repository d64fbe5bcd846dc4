"""The report's directory: one complete report, the last one, and no other files."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from portalmq.spark.report import output

ROUNDS = 40


def make(making: Path, what: str) -> None:
    (making / output.PARQUET).mkdir()
    for path in (making / output.PARQUET / "part", making / output.PAGE, making / output.JSON):
        path.write_text(what)


def compare_positions(out: Path) -> set[str]:
    """Return the contents of the report's parts, which are equal in a complete report."""
    assert {path.name for path in out.iterdir()} == {output.PARQUET, output.PAGE, output.JSON}
    assert [path.name for path in (out / output.PARQUET).iterdir()] == ["part"]
    return {path.read_text() for path in (out / output.PARQUET / "part", out / output.PAGE, out / output.JSON)}


def test_two_concurrent_reports_are_independent_and_the_last_one_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with output.workspace(out) as first:
        make(first, "first")
        with output.workspace(out) as second:
            make(second, "second")
            output.publish(second, out)
        assert (first / output.PAGE).read_text() == "first", "the other report has removed it"
        output.publish(first, out)
    assert compare_positions(out) == {"first"}


def test_of_many_reports_that_end_at_once_one_remains_complete(tmp_path: Path) -> None:
    out, together = tmp_path / "out", Barrier(3)

    def report(what: str) -> None:
        with output.workspace(out) as making:
            make(making, what)
            together.wait(30)
            output.publish(making, out)

    with ThreadPoolExecutor(3) as pool:
        for number in range(ROUNDS):
            names = [f"{number}-{which}" for which in "abc"]
            list(pool.map(report, names))
            (found,) = compare_positions(out)
            assert found in names


def test_the_rest_of_a_killed_report_is_removed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    program = (
        "import os, sys\nfrom pathlib import Path\nfrom portalmq.spark.report import output\n"
        "with output.workspace(Path(sys.argv[1])) as making:\n"
        "    (making / 'report.json').write_text('half')\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(out)], check=False, timeout=60)
    assert [path.name.startswith(".making-") for path in out.iterdir()] == [True]
    with output.workspace(out) as making:
        assert list(out.iterdir()) == [Path(making)]
        make(making, "whole")
        output.publish(making, out)
    assert compare_positions(out) == {"whole"}


def test_a_report_that_ends_while_the_next_begins_causes_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes its own work directory, and needs no lock for that."""
    out = tmp_path / "out"
    locked = output._locked

    def gone_meanwhile(directory: Path) -> int | None:
        if directory.name.startswith(".making-ended"):
            directory.rmdir()
        return locked(directory)

    (out / ".making-ended").mkdir(parents=True)
    monkeypatch.setattr(output, "_locked", gone_meanwhile)
    with output.workspace(out) as making:
        assert list(out.iterdir()) == [making]


def test_a_lock_that_is_not_acquired_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "TURN_WITHIN_S", 0.05)
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with (
        pytest.raises(output.OutputUnusable, match="another report is being put into") as told,
        output.workspace(tmp_path),
    ):
        pass
    assert told.value.exit_code == 73
    os.close(other)
    with output.workspace(tmp_path):
        pass


def test_without_locks_a_report_is_written_and_other_reports_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", none)
    out = tmp_path / "out"
    with output.workspace(out) as first, output.workspace(out) as second:
        assert first.is_dir()
        make(second, "second")
        output.publish(second, out)
    assert compare_positions(out) == {"second"}
