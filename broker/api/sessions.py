"""Sign-in of browsers: a cookie stands for a token, as pages can send no `Authorization` with a stream of events.

    <when it ends, Unix s>.<HMAC-SHA256 of that, under the digest of the token>

It holds nothing secret, every broker with the same tokens accepts it, and it ends with its token: no broker remembers
who signed in. A browser sends it by itself, so a request that changes something needs more: the `Origin` of this
broker. The cookie is `HttpOnly` and `SameSite=Strict`; the latter alone does not tell two ports of one host apart.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable
from typing import Literal

COOKIE = "portalmq-session"
SESSION_S = 12 * 3600

# What the holder of a token may do.
Access = Literal["all", "read"]


class Sessions:
    """Makes and checks the values of cookies. `digests`: those of the tokens, each with what it allows."""

    def __init__(self, digests: Iterable[tuple[bytes, Access]], clock: Callable[[], float] = time.time) -> None:
        self._digests = tuple(digests)
        self._clock = clock

    def begin(self, token: bytes) -> str | None:
        """Return the value of a cookie for the token; None for an unknown one."""
        digest, found = hashlib.sha256(token).digest(), None
        for known, _ in self._digests:
            if hmac.compare_digest(digest, known):
                found = known
        if found is None:
            return None
        ends = str(int(self._clock()) + SESSION_S)
        return f"{ends}.{_signature(found, ends)}"

    def access(self, cookies: str) -> Access | None:
        """Return what the session in a `Cookie` header allows; None without a valid one."""
        for cookie in cookies.split(";"):
            name, _, value = cookie.strip().partition("=")
            if name == COOKIE and (access := self._access(value)) is not None:
                return access
        return None

    def _access(self, value: str) -> Access | None:
        ends, _, signature = value.partition(".")
        if not (ends.isascii() and ends.isdigit()) or len(ends) > 12 or int(ends) < self._clock():
            return None
        shown, found = signature.encode("latin-1", "replace"), None
        for digest, access in self._digests:
            if hmac.compare_digest(shown, _signature(digest, ends).encode("ascii")):
                found = access
        return found


def set_cookie(value: str, *, secure: bool) -> str:
    """Return the `Set-Cookie` header of a session; with an empty value it ends the session."""
    age = SESSION_S if value else 0
    return f"{COOKIE}={value}; Path=/; Max-Age={age}; HttpOnly; SameSite=Strict" + ("; Secure" if secure else "")


def _signature(digest: bytes, ends: str) -> str:
    return hmac.new(digest, b"portalmq session until " + ends.encode("ascii"), hashlib.sha256).hexdigest()
