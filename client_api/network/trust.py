"""To whom a client shows its token.

A token is shown to the brokers that the user has named. Over https a certificate tells who else is one. Over http
anybody could be behind an address that a broker advertises. The brokers' own word is believed, since one that was named
is enough to find the others, and ZooKeeper, which they have it from, is closed where tokens are asked for. Who does not
want that says `allow_advertised=False`: then a token goes only to hosts that were named, which forward the rest.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Iterable

from portalmq.network.connection import Address

_log = logging.getLogger("portalmq.client")

_warned: set[str] = set()
WARNED_MAX = 100


def advertised_allowed(given: bool | None) -> bool:
    if given is not None:
        return given
    return os.environ.get("PORTALMQ_ALLOW_ADVERTISED", "").lower() not in {"0", "false", "no"}


def is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def may_receive_token(address: Address, named: Iterable[Address]) -> bool:
    """Whether a broker at `address` may be shown a token, when these were named by the user."""
    if address.scheme == "https":
        return True
    hosts = {each.host for each in named}
    return address.host in hosts or (is_this_machine(address.host) and any(map(is_this_machine, hosts)))


def warn_of_plain_text(named: Iterable[Address]) -> None:
    """A token that goes to another machine in plain text can be read on the way."""
    for address in named:
        if address.scheme == "http" and not is_this_machine(address.host):
            _warn_once(
                address.host, f"the token goes to {address.url} in plain text, which others may read: use https://"
            )


def warn_of_unknown_host(address: Address) -> None:
    _warn_once(
        f"advertised {address.host}",
        f"the brokers advertise {address.url}, whose host is not among those that were named: it is not shown the"
        " token, and what it leads is asked of the others. Name it too, or use https://",
    )


def _warn_once(about: str, sentence: str) -> None:
    if about not in _warned and len(_warned) < WARNED_MAX:
        _warned.add(about)
        _log.warning("%s", sentence)
