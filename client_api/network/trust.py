"""The hosts that may receive a client's token.

A token is sent to the brokers that the user has named. Over https a certificate identifies the others. Over http any
host could be behind an advertised address. Advertised addresses are trusted by default: one named broker is enough to
find the others, and clusters with tokens protect ZooKeeper, the source of the addresses. With `allow_advertised=False`
a token goes only to named hosts, which forward the rest.
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
    """Return the argument, or the setting PORTALMQ_ALLOW_ADVERTISED if it is None."""
    if given is not None:
        return given
    return os.environ.get("PORTALMQ_ALLOW_ADVERTISED", "").lower() not in {"0", "false", "no"}


def is_this_machine(host: str) -> bool:
    """Return whether the host is a loopback address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def may_receive_token(address: Address, named: Iterable[Address]) -> bool:
    """Return whether a token may be sent to `address`, given the addresses that the user named."""
    if address.scheme == "https":
        return True
    hosts = {each.host for each in named}
    return address.host in hosts or (is_this_machine(address.host) and any(map(is_this_machine, hosts)))


def warn_of_plain_text(named: Iterable[Address]) -> None:
    """Warn once if a token goes to another machine in plain text."""
    for address in named:
        if address.scheme == "http" and not is_this_machine(address.host):
            _warn_once(
                address.host, f"the token goes to {address.url} in plain text, which others may read: use https://"
            )


def warn_of_unknown_host(address: Address) -> None:
    """Warn once that an advertised broker is not used, as its host was not named."""
    _warn_once(
        f"advertised {address.host}",
        f"the brokers advertise {address.url}, whose host is not among those that were named: it does not get the"
        " token, and the others forward to it. Name it too, or use https://",
    )


def _warn_once(about: str, sentence: str) -> None:
    if about not in _warned and len(_warned) < WARNED_MAX:
        _warned.add(about)
        _log.warning("%s", sentence)
