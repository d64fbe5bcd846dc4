"""The lease of a message in hand ends at its own time, independent of the messages that wait behind it."""

from __future__ import annotations

import threading
import time

import msgspec
import pytest
from support.blocking_leases import Leases
from support.cluster import wait_until

from portalmq import LeaseLost, StaleReceipt, wire
from portalmq.consumers.lease import ACK_DELAY_S_MAX
from portalmq.transport.request import Request

VISIBILITY_S = 30.0


class Broker:
    """A transport for Leases that records requests."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.fail: StaleReceipt | None = None

    def call(self, request: Request, timeout_s: float | None = None) -> None:
        self.sent.append((request.path.rpartition("/")[2], msgspec.json.decode(request.body)["receipts"]))
        if self.fail is not None:
            raise self.fail


def held_at(now: list[float], broker: Broker, max_handling_s: float) -> Leases:
    """Return leases of three messages, without a keeper thread."""
    held = Leases(broker, "g", VISIBILITY_S, lambda: now[0], max_handling_s)
    held._keeper = threading.current_thread()
    held._calls.group_leases = True
    held.hold([wire.PackMessageOut(0, offset, b"", 0, receipt=f"r{offset}") for offset in range(3)])
    return held


def test_a_lease_that_expires_in_hand_while_waiting_ones_are_extended_is_checked() -> None:
    now, broker = [0.0], Broker()
    held = held_at(now, broker, max_handling_s=0.0)
    held.take()
    now[0] = 16.0
    held._keep_waiting(now[0])
    assert broker.sent == [("extend", ["r1", "r2"])]
    now[0] = 31.0  # the waiting messages are leased until 46
    broker.fail = StaleReceipt("stale")
    with pytest.raises(LeaseLost):
        held.finish_handed()
    assert broker.sent[-1] == ("extend", ["r0"])
    assert held.take_acks("a") == []


def test_a_lease_that_the_keeper_has_renewed_is_not_checked() -> None:
    now, broker = [0.0], Broker()
    held = held_at(now, broker, max_handling_s=100.0)
    held.take()
    now[0] = 16.0
    held._keep_waiting(now[0])
    now[0] = 31.0
    held.finish_handed()
    assert (len(broker.sent), held.take_acks("a")) == (1, ["r0"])


def test_messages_that_come_one_by_one_do_not_wake_the_keeper_each_time() -> None:
    held = Leases(Broker(), "g", 30.0, lambda: 0.0)
    woken: list[float] = []

    def handle(number: int) -> None:
        held.begin_receive()
        held.take_acks("a")
        held.arrived(wire.PackReceived([]))
        held.hold([wire.PackMessageOut(0, 0, b"", 0, receipt=f"r{number}")])
        held.take()
        held.finish_handed()

    handle(0)
    wait_until(lambda: held._wakes_at == ACK_DELAY_S_MAX, "the keeper looks again by itself")
    notify = held._changed.notify_all
    held._changed.notify_all = lambda: (woken.append(time.monotonic()), notify())[1]  # type: ignore[method-assign]
    began = time.monotonic()
    for number in range(1, 500):
        handle(number)
    assert len(woken) <= 1 + (time.monotonic() - began) / ACK_DELAY_S_MAX, "only after a pause of this test"
    held.release()
