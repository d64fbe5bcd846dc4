"""The programs of docs/WORKER.md run as they stand there."""

from __future__ import annotations

import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

from portalmq import Admin, Producer
from portalmq.testing import InMemoryBroker

pytestmark = pytest.mark.checkout
PAGE = Path(__file__).parents[3] / "docs" / "WORKER.md"
WITHIN_S = 30.0


def programs() -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)


def loaded(program: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    module = types.ModuleType("worker_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(program, str(PAGE), "exec"), module.__dict__)
    return module.__dict__


def test_the_first_program_bills_mails_and_rejects(monkeypatch: pytest.MonkeyPatch) -> None:
    with InMemoryBroker() as broker, Producer(broker.url) as producer, Admin(broker.url) as admin:
        program = programs()[0].replace("http://localhost:5000", broker.url).replace("Retry(2)", "Retry(0)")
        names = loaded(program, monkeypatch)
        said: list[str] = []
        names["print"] = lambda *words, **_: said.append(" ".join(map(str, words)))
        for order in ({"id": 1, "amount": 9.5}, {"id": 2, "amount": -1}, "no order"):
            producer.send("orders", order).result(WITHIN_S)
        with names["app"].running():
            deadline = time.monotonic() + WITHIN_S
            while "mailed {'order': 1}" not in said or admin.group("billing").dead != 2:
                assert time.monotonic() < deadline, said
                time.sleep(0.01)
        assert "billed 1 delivery 1" in said
        reasons = {dead.headers["portalmq-dead-reason"] for dead in admin.dead_letters("billing", "orders")}
        assert "order 2 has a negative amount" in reasons


def test_the_test_of_the_page_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded(programs()[1], monkeypatch)["test_orders_are_billed"]()
