"""`portalmq up` and `down` without a running cluster."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from portalmq.broker.ops.up import down, up
from portalmq.broker.storage.disk import DataDirectory, holder_of


def test_down_names_a_broker_that_was_started_by_hand(tmp_path: Path) -> None:
    by_hand = DataDirectory.open(tmp_path / "broker-2")
    try:
        result = CliRunner().invoke(down, ["--data-dir", str(tmp_path)])
        assert result.exit_code == 70
        assert f"broker-2 (pid {holder_of(tmp_path / 'broker-2')})" in result.stderr
    finally:
        by_hand.close()
    assert CliRunner().invoke(down, ["--data-dir", str(tmp_path)]).exit_code == 0


def test_an_unlocked_directory_has_no_holder(tmp_path: Path) -> None:
    assert holder_of(tmp_path) is None
    DataDirectory.open(tmp_path / "broker-1").close()
    assert holder_of(tmp_path / "broker-1") is None


def test_an_unusable_directory_is_reported_in_a_sentence(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.touch()
    result = CliRunner().invoke(up, ["--detach", "--data-dir", str(taken / "below")])
    assert result.exit_code == 73
    assert "name another --data-dir" in result.stderr
    assert isinstance(result.exception, SystemExit)
