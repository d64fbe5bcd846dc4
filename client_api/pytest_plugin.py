"""pytest fixtures: `portalmq_broker`, a real broker for the session, and `portalmq_topic`, a new topic for each test.

pytest loads this module in every environment with PortalMQ installed, so it imports the rest when a fixture is used.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from portalmq.testing import DevBroker

NAME_MAX = 150


@pytest.fixture(scope="session")
def portalmq_broker() -> Iterator[DevBroker]:
    """A `portalmq dev` on a free port, for the whole session: `portalmq_broker.url`, `portalmq_broker.transport`."""
    from portalmq.testing import DevBroker

    with DevBroker() as broker:
        yield broker


@pytest.fixture
def portalmq_topic(portalmq_broker: DevBroker, request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of a new, empty topic with one partition on `portalmq_broker`. It is deleted after the test."""
    from portalmq.admin import Admin

    name = re.sub(r"[^A-Za-z0-9._-]+", "-", request.node.name)[:NAME_MAX]
    topic = f"{name}-{uuid.uuid4().hex[:12]}"
    with Admin(transport=portalmq_broker.transport) as admin:
        admin.create_topic(topic, partitions=1)
        yield topic
        admin.delete_topic(topic)
