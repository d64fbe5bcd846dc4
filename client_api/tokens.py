"""The tokens that a server accepts: files of them, the check of one, and where none is needed."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from pathlib import Path


class Tokens:
    """The known tokens, of which only digests are kept. `needed`: there is at least one."""

    def __init__(self, tokens: Iterable[str] = ()) -> None:
        self._digests = tuple(_digest(token.encode("utf-8")) for token in tokens)
        self.needed = bool(self._digests)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """The SHA-256 of each token."""
        return self._digests

    def include(self, token: bytes) -> bool:
        """Return whether a token is known. It is compared with every one in constant time, so the duration reveals
        nothing about them."""
        digest, found = _digest(token), False
        for known in self._digests:
            found |= hmac.compare_digest(digest, known)
        return found


def _digest(token: bytes) -> bytes:
    return hashlib.sha256(token).digest()


def tokens_in(file: Path) -> list[str]:
    """Return the tokens of a file: one a line, beside comments after #. Raises ValueError when it has none."""
    try:
        lines = [line.strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as fault:
        raise ValueError(f"the token file {file} cannot be read: {fault}") from None
    tokens = [line for line in lines if line and not line.startswith("#")]
    if not tokens:
        raise ValueError(f"the token file {file} holds no token: write one a line")
    return tokens


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach `host`."""
    if host.lower() in {"localhost", "ip6-localhost"}:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
