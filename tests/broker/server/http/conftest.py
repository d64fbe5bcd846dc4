from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.http_server import Served


@pytest.fixture
def served() -> Iterator[Served]:
    started = Served()
    yield started
    started.close()
