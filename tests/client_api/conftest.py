from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripted broker runs in the process of its client: where the machine stands still, both do, and it is the
    client's time that runs out. A test that is about this limit sets its own."""
    monkeypatch.setattr("portalmq.cli.session.REACH_TIMEOUT_S", 20.0)
