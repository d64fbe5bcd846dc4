"""Query parameters, parsed strictly: a misspelt `before_ofset` that is ignored would purge a whole topic."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from urllib.parse import parse_qsl

from portalmq.errors import InvalidRequest
from portalmq.wire import INTEGER_MAX


class Query:
    """The parameters in the query of a URL. A parameter that is not in `known`, or given twice, raises
    InvalidRequest."""

    def __init__(self, query: str, *known: str) -> None:
        self._arguments: dict[str, str] = {}
        for name, value in parse_qsl(query, keep_blank_values=True) if query else ():
            if name not in known:
                allowed = ", ".join(known) or "none"
                raise InvalidRequest(f"there is no query parameter {name[:100]!r} here; known: {allowed}")
            if name in self._arguments:
                raise InvalidRequest(f"the query parameter {name!r} is given twice")
            self._arguments[name] = value

    def text(self, name: str) -> str | None:
        return self._arguments.get(name)

    def number(self, name: str, *, least: int = 0) -> int | None:
        """Return the parameter as a whole number of at least `least`, or None when it is missing."""
        text = self._arguments.get(name)
        return None if text is None else whole_number(text, f"the query parameter {name!r}", least=least)

    def choice(self, name: str, default: str, *words: str) -> Any:
        text = self._arguments.get(name, default)
        if text not in words:
            raise InvalidRequest(
                f"the query parameter {name!r} is {text[:100]!r}, but must be one of {', '.join(words)}"
            )
        return text

    def instant_ms(self, name: str) -> int | None:
        """Return the parameter, an RFC 3339 time, in Unix milliseconds, or None when it is missing."""
        text = self._arguments.get(name)
        return None if text is None else instant_ms(text, name)


def instant_ms(text: str, what: str) -> int:
    """Return an RFC 3339 time in Unix milliseconds. Raises InvalidRequest that names `what`."""
    stamp = text.upper()  # RFC 3339 allows T and Z in either case
    try:
        # a "+" that was not percent-encoded arrives as a space
        moment = datetime.fromisoformat(stamp.replace(" ", "+") if stamp.count(" ") == 1 and "T" in stamp else stamp)
    except ValueError:
        raise InvalidRequest(f"{what} is {text[:100]!r}, but must be a time as 2026-01-31T12:00:00Z") from None
    if moment.tzinfo is None:
        raise InvalidRequest(f"{what} is {text[:100]!r}, which names no zone: write 2026-01-31T12:00:00Z")
    return int(moment.timestamp() * 1000)


def whole_number(text: str, what: str, *, least: int = 0) -> int:
    """Return `text` as a whole number of at least `least`. Raises InvalidRequest that names `what`."""
    digits = text[1:] if text[:1] == "-" else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 20:
        raise InvalidRequest(f"{what} is {text[:100]!r}, but must be a whole number")
    number = int(text)
    if number < least:
        raise InvalidRequest(f"{what} is {number}, but must be at least {least}")
    if number > INTEGER_MAX:
        raise InvalidRequest(f"{what} is {number}, but must be at most {INTEGER_MAX}")
    return number
