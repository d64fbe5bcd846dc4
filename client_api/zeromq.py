"""MiniQ's service under its public name, `portalmq.zeromq`. The code is in broker/protocols/zeromq."""

from __future__ import annotations

from portalmq.broker.protocols.zeromq.service import MiniQMessage, MiniQService

__all__ = ["MiniQMessage", "MiniQService"]
