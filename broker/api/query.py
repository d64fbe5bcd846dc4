"""Query parameters, decoded strictly: a misspelt `before_ofset` that is ignored would purge a whole topic.

The parameters of a route are the fields of a Struct, which the route names (`Route.query`) and its view gets. A field
is text, a whole number with bounds, `true` or `false`, one of a few words, or what a function makes of it (`read_by`).
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from functools import cache, partial
from typing import Annotated, Any, TypeVar
from urllib.parse import parse_qsl

import msgspec
from msgspec.inspect import BoolType, IntType, LiteralType, Metadata, NoneType, StrType, UnionType, type_info

from portalmq import wire
from portalmq.errors import InvalidRequest
from portalmq.wire import INTEGER_MAX

T = TypeVar("T")

# Returns the value of a parameter; its second argument names the parameter in errors.
Reader = Callable[[str, str], Any]


@cache
def decoder_of(kind: type[T]) -> Callable[[str], T]:
    """Return the decoder of queries with these parameters. It raises InvalidRequest for a parameter that is wrong,
    missing, given twice or, if the Struct forbids unknown fields, unknown."""
    info: Any = type_info(kind)
    readers = {field.encode_name: _reader_of(field.type) for field in info.fields}
    required = [field.encode_name for field in info.fields if field.required]

    def decode(query: str) -> T:
        arguments: dict[str, Any] = {}
        for name, text in parse_qsl(query, keep_blank_values=True) if query else ():
            read = readers.get(name)
            if name in arguments:
                raise InvalidRequest(f"the query parameter {name!r} is given twice")
            if read is not None:
                arguments[name] = read(text, f"the query parameter {name!r}")
            elif info.forbid_unknown_fields:
                allowed = ", ".join(readers) or "none"
                raise InvalidRequest(f"there is no query parameter {name[:100]!r} here; known: {allowed}")
        for name in required:
            if name not in arguments:
                raise InvalidRequest(f"the query parameter {name!r} is missing: ?{name}=…")
        return kind(**arguments)

    return decode


def read_by(read: Reader, **schema: Any) -> msgspec.Meta:
    """Return the annotation of a parameter that `read` decodes. `schema`: its JSON schema, besides the type."""
    return msgspec.Meta(extra={"read": read}, extra_json_schema=schema)


def _reader_of(kind: Any) -> Reader:
    match kind:
        case Metadata(extra={"read": read}):
            return read  # type: ignore[no-any-return]
        case Metadata(type=inner):
            return _reader_of(inner)
        case UnionType(types=types):  # with None, which the query cannot say
            (inner,) = (each for each in types if not isinstance(each, NoneType))
            return _reader_of(inner)
        case IntType(ge=least, le=most):
            return partial(whole_number, least=least or 0, most=most or INTEGER_MAX)
        case LiteralType(values=words):
            return partial(_choice, words={str(word): word for word in words})
        case BoolType():
            return partial(_choice, words={"true": True, "false": False})
        case StrType():
            return lambda text, what: text
    raise TypeError(f"no query parameter is a {kind}")


def _choice(text: str, what: str, *, words: dict[str, Any]) -> Any:
    if text not in words:
        raise InvalidRequest(f"{what} is {text[:100]!r}, but must be one of {', '.join(words)}")
    return words[text]


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


def place_of_id(message_id: str) -> tuple[int, int]:
    """Return the partition and the offset of a message's id."""
    number, _, offset = message_id.partition("-")
    return (
        whole_number(number, "the partition of a message's id (<partition>-<offset>)"),
        whole_number(offset, "the offset of a message's id (<partition>-<offset>)"),
    )


def whole_number(text: str, what: str, *, least: int = 0, most: int = INTEGER_MAX) -> int:
    """Return `text` as a whole number within these bounds. Raises InvalidRequest that names `what`."""
    digits = text[1:] if text[:1] == "-" else text
    if not (digits.isascii() and digits.isdigit()) or len(digits) > 20:
        raise InvalidRequest(f"{what} is {text[:100]!r}, but must be a whole number")
    number = int(text)
    if number < least:
        raise InvalidRequest(f"{what} is {number}, but must be at least {least}")
    if number > most:
        raise InvalidRequest(f"{what} is {number}, but must be at most {most}")
    return number


def _topic(text: str, what: str) -> str:
    return wire.check_name(text, "topic")


class Parameters(msgspec.Struct, forbid_unknown_fields=True):
    """Base of the parameters of a route that refuses unknown ones."""


TopicName = Annotated[str, read_by(_topic, pattern=wire.NAME_PATTERN)]
# An RFC 3339 time, as Unix milliseconds.
Instant = Annotated[int, read_by(instant_ms, type="string", format="date-time")]
