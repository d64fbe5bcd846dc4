"""Leases whose coroutines are run to their end at once, for tests that call them one by one."""

from __future__ import annotations

import inspect
from typing import Any

from portalmq.consumers.lease import Leases as SharedLeases
from portalmq.network.either import finish


class Leases:
    def __init__(self, *arguments: Any) -> None:
        self.__dict__["shared"] = SharedLeases(*arguments)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.shared, name)
        if inspect.iscoroutinefunction(found):
            return lambda *arguments: finish(found(*arguments))
        return found

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.shared, name, value)
