"""A client's request to append."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from simulation.content import Control, Mail

from portalmq.broker.core.replica.events import Stamp
from portalmq.errors import PortalMQError


@dataclass(slots=True, eq=False)
class Submission:
    """A produce request that arrived at this broker. Each arrival has a uid of its own. `fold`: a STATE record, which
    lets the log begin at `log_start`; `control`: a group's. `then` is called at this broker, `answer` at the client."""

    uid: int
    count: int
    stamp: Stamp | None = None
    acks: str = "all"
    answer: Callable[[int, PortalMQError | None], None] | None = None
    base: int = -1
    done: bool = False
    repeats: bool = False
    fold: tuple[Any, ...] | None = None
    is_state: bool = False
    log_start: int = 0
    mail: tuple[Mail, ...] = ()
    control: Control | None = None
    not_before_ms: int = 0
    delivers: bool = False
    then: Callable[[PortalMQError | None], None] | None = None

    @property
    def end(self) -> int:
        return self.base + self.count

    def __str__(self) -> str:
        return f"#{self.uid}" + (f" {self.control}" if self.control else "")
