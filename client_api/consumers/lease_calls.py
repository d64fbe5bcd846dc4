"""The calls to a queue group that settle or extend leases."""

from __future__ import annotations

import logging
from typing import Literal

from portalmq import wire
from portalmq.errors import PortalMQError
from portalmq.transport.request import json_request
from portalmq.transport.transport import Transport

_log = logging.getLogger("portalmq.consumer")

LOOK_TIMEOUT_S = 1.0

Verb = Literal["ack", "nack", "extend"]


class LeaseCalls:
    """Calls with receipts. `timeout_s` bounds those that name no time."""

    def __init__(self, transport: Transport, group: str, visibility_timeout_s: float) -> None:
        self._transport = transport
        self._group = group
        self._visibility_timeout_ms = round(visibility_timeout_s * 1000)
        # Whether the group leases messages at all (None: not known). With at_most_once they are acked at delivery.
        self.group_leases: bool | None = None
        self.timeout_s: float | None = None

    def settle(
        self, verb: Verb, receipts: list[str], options: dict[str, object], timeout_s: float | None = None
    ) -> None:
        request = json_request("POST", wire.group_path(self._group, verb), {"receipts": receipts, **options})
        self._transport.call(request, timeout_s=self.timeout_s or timeout_s)

    def extend(self, receipts: list[str], timeout_s: float | None = None) -> None:
        self.settle("extend", receipts, {"visibility_timeout_ms": self._visibility_timeout_ms}, timeout_s)

    def give_back_unseen(self, receipts: list[str], reason: str) -> None:
        """Return messages that were never handed out: this does not count as a delivery."""
        self.give_back(receipts, {"reason": reason, "delay_ms": 0, "unseen": True})

    def give_back(self, receipts: list[str], options: dict[str, object]) -> None:
        """Return messages. After a failure their leases expire."""
        if not receipts:
            return
        try:
            self.settle("nack", receipts, options)
        except PortalMQError as error:
            _log.debug("could not return %d messages: %s", len(receipts), error)

    def group_has_leases(self) -> bool | None:
        """Return whether the group leases messages; None if no broker can answer now."""
        if self.group_leases is None:
            try:
                group = self._transport.get(
                    wire.group_path(self._group), wire.GroupDescription, timeout_s=LOOK_TIMEOUT_S
                )
            except PortalMQError:
                return None
            self.group_leases = group.config.delivery != "at_most_once"
        return self.group_leases
