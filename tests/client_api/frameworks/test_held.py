"""Leases that a framework holds are renewed until they are dropped, and no longer than allowed."""

from __future__ import annotations

import threading

from portalmq import Message, StaleReceipt, Unavailable
from portalmq.held import HeldMessages

WITHIN_S = 60.0


def message(receipt: str) -> Message:
    return Message("t", 0, 0, None, b"", {}, "text/plain", 0, receipt=receipt)


class Extensions:
    """Notes each call, and raises what it was told to."""

    def __init__(self, *errors: Exception | None) -> None:
        self.errors = list(errors)
        self.calls: list[list[str | None]] = []
        self.called = threading.Condition()

    def __call__(self, messages: list[Message]) -> None:
        with self.called:
            self.calls.append([each.receipt for each in messages])
            self.called.notify_all()
            error = self.errors.pop(0) if self.errors else None
        if error is not None:
            raise error

    def wait(self, count: int) -> None:
        with self.called:
            assert self.called.wait_for(lambda: len(self.calls) >= count, WITHIN_S)


def test_all_that_is_held_is_renewed_in_one_call() -> None:
    extend = Extensions()
    held = HeldMessages(extend, 0.03)
    held.add([message("a"), message("b")])
    extend.wait(2)
    held.close()
    assert extend.calls[0] == ["a", "b"]


def test_what_is_dropped_is_renewed_no_more() -> None:
    extend = Extensions()
    held = HeldMessages(extend, 0.03)
    held.add([message("a"), message("b")])
    held.drop([message("a")])
    seen = len(extend.calls)
    extend.wait(seen + 2)
    held.close()
    assert extend.calls[-1] == ["b"]
    assert len(held) == 1


def test_a_lost_lease_is_dropped_and_the_others_are_kept() -> None:
    results = [{"receipt": "a", "status": "stale_receipt"}, {"receipt": "b", "status": "ok"}]
    extend = Extensions(StaleReceipt("lost", results=results))
    held = HeldMessages(extend, 0.03)
    held.add([message("a"), message("b")])
    extend.wait(2)
    held.close()
    assert extend.calls[1] == ["b"]


def test_a_broker_that_does_not_answer_is_asked_again() -> None:
    extend = Extensions(Unavailable("no answer"))
    held = HeldMessages(extend, 0.03)
    held.add([message("a")])
    extend.wait(2)
    held.close()
    assert extend.calls[:2] == [["a"], ["a"]]


def test_a_message_that_is_held_for_too_long_is_let_go() -> None:
    extend = Extensions()
    held = HeldMessages(extend, 0.03, max_handling_s=0)
    held.add([message("a")])
    later = HeldMessages(extend, 0.03)
    later.add([message("b")])
    extend.wait(3)
    held.close()
    later.close()
    assert {receipt for call in extend.calls for receipt in call} == {"b"}
