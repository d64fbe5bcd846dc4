"""Leases that a channel holds: renewed while they are held, and nothing is said of those that are lost."""

from __future__ import annotations

import json
import math

import pytest

from portalmq.errors import PortalMQError, StaleReceipt, Unavailable
from portalmq.kombu.leases import ACK_DELAY_S_MAX, GroupLeases
from portalmq.transport.request import Request

VISIBILITY_S = 30.0


class Transport:
    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.errors: list[PortalMQError] = []

    def call(self, request: Request, timeout_s: float | None = None) -> None:
        self.calls.append((request.path.rsplit("/", 1)[1], json.loads(request.body)["receipts"]))
        if self.errors:
            raise self.errors.pop(0)


class Held:
    def __init__(self) -> None:
        self.now = 100.0
        self.transport = Transport()
        self.woken: list[float] = []
        self.leases = GroupLeases(
            self.transport,  # type: ignore[arg-type]
            "g",
            VISIBILITY_S,
            self.woken.append,
            lambda: self.now,
        )
        self.leases.hold(["a", "b"], self.now)


@pytest.fixture
def held() -> Held:
    return Held()


def test_leases_are_renewed_as_long_as_they_are_held(held: Held) -> None:
    for _ in range(20):  # far longer than the visibility timeout
        held.now = held.leases.due_at()
        held.leases.keep()
        assert held.leases.is_held("a")
    assert held.transport.calls == [("extend", ["a", "b"])] * 20
    assert held.now == pytest.approx(100 + 20 * VISIBILITY_S / 3)


def test_nothing_held_is_nothing_to_do(held: Held) -> None:
    held.leases.ack("a")
    held.leases.ack("b")
    held.leases.flush()
    assert held.leases.due_at() == math.inf


def test_an_ack_that_no_receive_takes_along_is_sent_soon(held: Held) -> None:
    held.leases.ack("a")
    assert held.woken[-1] == held.now + ACK_DELAY_S_MAX
    held.now += ACK_DELAY_S_MAX
    held.leases.keep()
    assert held.transport.calls == [("ack", ["a"])]


def test_a_lease_that_another_has_is_not_delivered(held: Held) -> None:
    held.transport.errors = [StaleReceipt("x", results=[{"receipt": "a", "status": "stale_receipt"}])]
    held.now = held.leases.due_at()
    held.leases.keep()
    assert not held.leases.is_held("a") or not held.leases.is_held("b")


def test_a_lease_that_ran_out_is_not_delivered(held: Held) -> None:
    held.now += VISIBILITY_S
    assert not held.leases.is_held("a")


def test_a_renewal_that_failed_is_tried_again_before_the_lease_ends(held: Held) -> None:
    held.transport.errors = [Unavailable("no leader"), Unavailable("no leader")]
    end = held.now + VISIBILITY_S
    for _ in range(3):
        held.now = held.leases.due_at()
        held.leases.keep()
    assert held.now < end
    held.now = end + 1
    assert held.leases.is_held("a")


def test_closing_acks_and_gives_back(held: Held) -> None:
    held.leases.ack("a")
    held.leases.close()
    assert held.transport.calls == [("ack", ["a"]), ("nack", ["b"])]
