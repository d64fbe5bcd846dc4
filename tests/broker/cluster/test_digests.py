"""Comparisons read one part at a time from a broker."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from portalmq.broker.cluster import digests
from portalmq.broker.cluster.digests import Digests
from portalmq.broker.cluster.rpc.brokers import DigestRequest
from portalmq.errors import Unavailable


def test_a_request_does_not_wait_for_ever_for_those_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "TURN_WAIT_S", 0.01)
    topics = SimpleNamespace(local=lambda topic_id, number: SimpleNamespace())
    here = Digests(1, topics, SimpleNamespace())  # type: ignore[arg-type]
    with here._turn, pytest.raises(Unavailable, match="broker 1 is reading other replicas"):
        here.answer(DigestRequest("topic-id-1", 0, 0, 10, False, False))
