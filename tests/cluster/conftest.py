"""One cluster for each test process, with all brokers running before each test; a new topic for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from support.cluster import Cluster

_numbers = itertools.count(1)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.cluster)


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: Cluster) -> Cluster:
    shared_cluster.heal()
    return shared_cluster


@pytest.fixture
def topic() -> str:
    return f"topic-{next(_numbers)}"
