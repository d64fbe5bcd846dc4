from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.interrupted import Interrupted

from portalmq.control_plane.catalog import Catalog


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Interrupted]:
    made = Interrupted(tmp_path)
    made.start()
    yield made
    made.close()


@pytest.fixture
def catalog(plane: Interrupted) -> Catalog:
    return Catalog(plane)
