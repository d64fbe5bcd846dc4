from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from flask.testing import FlaskClient
from support.declared import _declared  # noqa: F401 - a fixture of all tests here
from support.domain import Fixture, running
from support.protocols import client_of


@pytest.fixture
def fixture(tmp_path: Path) -> Iterator[Fixture]:
    with running(tmp_path) as started:
        yield started


@pytest.fixture
def client(fixture: Fixture) -> FlaskClient:
    return client_of(fixture)
