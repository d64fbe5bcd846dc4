"""Access control: clients on this machine, or clients with a token. Only digests of the tokens are kept."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path

from portalmq.errors import Unauthorized


class TokenAccess:
    """Checks the token of a request. Without configured tokens every request is allowed."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(token) for token in tokens)

    @property
    def needed(self) -> bool:
        return bool(self._digests)

    def check(self, token: str | None) -> None:
        """Raise Unauthorized for a wrong token. Compares with every known token, in constant time."""
        if not self._digests:
            return
        if token is None:
            raise Unauthorized('a request is a JSON object that carries the member "token"')
        digest, allowed = _digest(token), False
        for known in self._digests:
            allowed |= hmac.compare_digest(digest, known)
        if not allowed:
            raise Unauthorized("the token is unknown")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def access_from(file: Path | None, host: str, *, insecure: bool) -> TokenAccess:
    """Return the access check for the options. Raises ValueError when the file cannot be read or holds no token, and
    when ports reachable from the network would be open to everyone."""
    tokens: list[str] = []
    if file is not None:
        try:
            lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
        except (OSError, UnicodeDecodeError) as fault:
            raise ValueError(f"the token file {file} cannot be read: {fault}") from None
        tokens = [line for line in lines if line and not line.startswith("#")]
        if not tokens:
            raise ValueError(f"the token file {file} holds no token: write one a line")
    if not tokens and not insecure and not is_loopback(host):
        raise ValueError(
            f"without a token MiniQ listens on this machine only, and {host} is reachable from others: give "
            "--require-token FILE, or --insecure if everyone who reaches it may do everything"
        )
    return TokenAccess(tokens)


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
