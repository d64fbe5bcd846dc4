"""A broker accepts no more connections than the limit of open files allows, and logs that."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest

from portalmq.broker.server import composition as server
from portalmq.broker.server.composition import DESCRIPTORS_BESIDE, within_limit
from portalmq.broker.server.config import BrokerConfig
from portalmq.system import OPEN_FILES_MAX

CONFIG = BrokerConfig(worker_connections=10_000, parked_receives_max=5_000)
ENOUGH = CONFIG.worker_connections + DESCRIPTORS_BESIDE


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The soft and the hard limit of open files."""
    held = [256, ENOUGH]
    monkeypatch.setattr(resource, "getrlimit", lambda which: tuple(held))
    monkeypatch.setattr(resource, "setrlimit", lambda which, pair: held.__setitem__(slice(None), pair))
    monkeypatch.setattr(server, "descriptor_limit", lambda: held[0])
    return held


def test_where_there_is_room_all_connections_are_taken_and_the_soft_limit_is_the_hard_one(
    limits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    assert within_limit(CONFIG) == CONFIG
    assert limits == [ENOUGH, ENOUGH]
    assert caplog.messages == []


def test_connections_take_a_third_of_too_low_a_limit_and_a_warning_names_it(
    limits: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    limits[1] = ENOUGH - 1
    third = (ENOUGH - 1) // 3
    assert within_limit(CONFIG) == replace(CONFIG, worker_connections=third, parked_receives_max=third // 2)
    (said,) = caplog.messages
    for told in (str(ENOUGH - 1), "10000", str(ENOUGH), str(third), "ulimit -n"):
        assert told in said


def test_settings_below_the_cap_stay_and_a_tiny_limit_leaves_ten(limits: list[int]) -> None:
    limits[1] = 900
    small = BrokerConfig(worker_connections=200, parked_receives_max=50)
    assert within_limit(small) == small, "the limit leaves room for 300"
    limits[:] = [12, 12]
    assert within_limit(small) == replace(small, worker_connections=10, parked_receives_max=5)


def test_a_system_that_allows_no_unlimited_number_raises_it_as_far_as_it_can(
    limits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_endless(which: int, pair: tuple[int, int]) -> None:
        if pair[0] == resource.RLIM_INFINITY:
            raise ValueError("not allowed to raise maximum limit")
        limits[:] = pair

    limits[1] = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "setrlimit", refuse_endless)
    assert within_limit(CONFIG).worker_connections == OPEN_FILES_MAX // 3
    assert limits == [OPEN_FILES_MAX, resource.RLIM_INFINITY]


def test_a_limit_that_cannot_be_raised_is_obeyed(limits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(which: int, pair: tuple[int, int]) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert within_limit(CONFIG).worker_connections == 256 // 3
