"""What a process takes of the memory, and what it may take."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from portalmq.broker.server.memory import limit_bytes, resident_bytes


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells it this way")
def test_what_a_process_takes_grows_with_what_it_holds():
    before = resident_bytes()
    held = b"\1" * 64_000_000
    assert before is not None
    assert resident_bytes() - before > 32_000_000
    assert len(held) == 64_000_000


def test_the_least_limit_counts(tmp_path: Path):
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    container, unlimited = tmp_path / "container", tmp_path / "unlimited"
    container.write_text("1000000\n")
    unlimited.write_text("max\n")
    assert limit_bytes((container, tmp_path / "missing")) == 1_000_000
    assert limit_bytes((unlimited,)) == machine
    assert limit_bytes(()) == machine


def test_a_system_that_does_not_tell_is_no_error(tmp_path: Path):
    assert resident_bytes(tmp_path / "missing") is None
    (tmp_path / "odd").write_text("x")
    assert resident_bytes(tmp_path / "odd") is None
