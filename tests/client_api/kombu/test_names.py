"""Names of topics and groups for queues, and the transport options."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from portalmq import wire
from portalmq.kombu.names import Names, TransportOptions, options_of

QUEUES = ["celery", "high-priority", "a.b_c", "celery@host", "with space", "", ".", "..", "__x", "q" * 400, "ü", "a/b"]


@pytest.mark.parametrize("prefix", ["", "shop."])
@pytest.mark.parametrize("queue", QUEUES)
def test_every_queue_and_exchange_has_valid_names(queue: str, prefix: str) -> None:
    names = Names(prefix)
    for name in (names.topic(queue), names.exchange_topic(queue), names.exchange_group(queue, "bus")):
        assert wire.check_name(name, "topic").startswith(prefix)
        assert not name.startswith("__")


def test_a_plain_name_is_kept() -> None:
    assert Names("").topic("celery") == "celery"
    assert Names("shop.").topic("celery") == "shop.celery"


def test_names_that_differ_stay_different() -> None:
    topics = {Names("").topic(name) for name in ["a b", "a/b", "a-b", "a@b", "q" * 400, "q" * 401]}
    assert len(topics) == 6


def test_options_have_defaults_and_ignore_those_of_others() -> None:
    assert options_of({"polling_interval": 3, "max_retries": 1}) == TransportOptions("", 30.0, 10.0, None)
    given = {"topic_prefix": "shop.", "visibility_timeout": 5, "wait_time_s": 2.5, "max_deliveries": 3}
    assert options_of(given) == TransportOptions("shop.", 5.0, 2.5, 3)


@pytest.mark.parametrize(
    "given",
    [
        {"visibility_timeout": 0},
        {"visibility_timeout": 50_000},
        {"visibility_timeout": "30"},
        {"visibility_timeout": float("nan")},
        {"visibility_timeout": True},
        {"wait_time_s": 0},
        {"wait_time_s": 60},
        {"max_deliveries": 0},
        {"max_deliveries": 2.5},
        {"topic_prefix": "no spaces"},
        {"topic_prefix": "x" * 61},
        {"topic_prefix": None},
    ],
)
def test_an_option_that_cannot_be_used_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(given))):
        options_of(given)


def test_the_client_alone_does_not_load_kombu() -> None:
    code = "import portalmq, sys; portalmq.Producer; portalmq.Consumer; sys.exit('kombu' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
