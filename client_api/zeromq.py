"""MiniQ's service under its public name, `portalmq.zeromq`. The code is in broker/protocols/zeromq."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from portalmq.broker.protocols.zeromq.service import MiniQMessage, MiniQService

__all__ = ["MiniQMessage", "MiniQService"]


def __getattr__(name: str) -> Any:
    """Load pyzmq with the first use of a name."""
    if name not in __all__:
        raise AttributeError(f"module 'portalmq.zeromq' has no attribute {name!r}")
    return getattr(import_module("portalmq.broker.protocols.zeromq.service"), name)
