from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the client's time limits: the scripted broker runs in the client's process, and a paused machine stops
    both. A test about such a limit sets its own."""
    monkeypatch.setattr("portalmq.cli.session.REACH_TIMEOUT_S", 20.0)
