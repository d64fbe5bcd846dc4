"""The `where` of a redrive, and of calls about scheduled messages: conditions on messages that must all hold.

    {"value.order.total": {"gt": 100}, "reason": {"contains": "timeout"}}
     `-- field            `-- operator, operand

No SQL, no expressions, no regular expressions: the caller gives parameters, and every operator takes time in proportion
to what it reads. Conditions, depths and operands are bounded, so only the number of messages can take long, and the
caller bounds that. A message's value is parsed once, and only if a condition reads it.

Values of different types never match: text and a number, a number and null, `true` and 1. That holds for `ne` too.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from portalmq.errors import InvalidRequest

CONDITIONS_MAX = 32
FIELD_LENGTH_MAX = 500
PATH_DEPTH_MAX = 16
OPERAND_LENGTH_MAX = 1_000

OPERATORS = ("eq", "ne", "lt", "lte", "gt", "gte", "contains", "exists")
FIELDS = "value, value.<path>, headers.<name>, key, reason, delivery_count"

# A field that the message does not have.
MISSING = object()

_ORDERED: dict[str, Callable[[Any, Any], bool]] = {
    "lt": operator.lt,
    "lte": operator.le,
    "gt": operator.gt,
    "gte": operator.ge,
}


class Candidate(NamedTuple):
    """A message as conditions see it. `is_json` is true if its content type says so. One that is no dead letter has an
    empty reason, and no deliveries."""

    value: bytes
    is_json: bool
    headers: Mapping[str, str]
    key: bytes | None
    reason: str
    delivery_count: int


class _Condition(NamedTuple):
    """One condition. `path` are the steps into the value; `source` is the field's first word."""

    source: str
    path: tuple[str, ...]
    operator: str
    operand: Any


class Predicate:
    """A conjunction of conditions."""

    def __init__(self, conditions: tuple[_Condition, ...]) -> None:
        self._conditions = conditions
        self._reads_value = any(condition.source == "value" for condition in conditions)

    def matches(self, candidate: Candidate) -> bool:
        value = _parsed(candidate) if self._reads_value else MISSING
        return all(_holds(condition, _found(condition, candidate, value)) for condition in self._conditions)


def parse(where: object) -> Predicate:
    """Return the predicate of `where`. Raise InvalidRequest with the reason if it is malformed."""
    if not isinstance(where, dict):
        raise InvalidRequest('where must be an object of conditions, such as {"reason": {"contains": "timeout"}}')
    if not where:
        raise InvalidRequest("where has no condition: leave it out to mean all")
    conditions: list[_Condition] = []
    for field, tests in where.items():
        source, path = _field(field)
        if not isinstance(tests, dict) or not tests:
            raise InvalidRequest(
                f'where: {_shown(field)} needs an operator with its operand, such as {{"eq": 1}}; there are'
                f" {', '.join(OPERATORS)}"
            )
        conditions += [_condition(field, source, path, name, operand) for name, operand in tests.items()]
        if len(conditions) > CONDITIONS_MAX:
            raise InvalidRequest(f"where has more than {CONDITIONS_MAX} conditions")
    return Predicate(tuple(conditions))


def _field(field: object) -> tuple[str, tuple[str, ...]]:
    if not isinstance(field, str) or not field or len(field) > FIELD_LENGTH_MAX:
        raise InvalidRequest(f"where: a field is named by 1 to {FIELD_LENGTH_MAX} characters; there are {FIELDS}")
    if field in {"key", "reason", "delivery_count", "value"}:
        return field, ()
    source, _, rest = field.partition(".")
    if source == "headers" and rest:
        return source, (rest.lower(),)  # a header's name may have dots in it, and is kept in lower case
    if source == "value" and rest:
        path = tuple(rest.split("."))
        if len(path) > PATH_DEPTH_MAX:
            raise InvalidRequest(f"where: {_shown(field)} goes {len(path)} steps deep, the limit is {PATH_DEPTH_MAX}")
        if not all(path):
            raise InvalidRequest(f"where: {_shown(field)} has an empty step: write value.a.b")
        return source, path
    raise InvalidRequest(f"where: there is no field {_shown(field)}; there are {FIELDS}")


def _condition(field: str, source: str, path: tuple[str, ...], name: object, operand: object) -> _Condition:
    where = f"where: {_shown(field)}"
    if name not in OPERATORS or not isinstance(name, str):
        raise InvalidRequest(f"{where}: there is no operator {_shown(name)}; there are {', '.join(OPERATORS)}")
    if name == "exists":
        if not isinstance(operand, bool):
            raise InvalidRequest(f"{where}: exists takes true or false")
    elif operand is not None and not isinstance(operand, bool | int | float | str):
        raise InvalidRequest(f"{where}: {name} takes a number, text, true, false or null, and no list or object")
    elif name in _ORDERED and (isinstance(operand, bool) or not isinstance(operand, int | float | str)):
        raise InvalidRequest(f"{where}: {name} takes a number or text")
    if isinstance(operand, str) and len(operand) > OPERAND_LENGTH_MAX:
        raise InvalidRequest(f"{where}: the operand has {len(operand)} characters, the limit is {OPERAND_LENGTH_MAX}")
    return _Condition(source, path, name, operand)


def _shown(name: object) -> str:
    return repr(name)[:100]


# --- matching a message ----------------------------------------------------------------------------------------------


def _parsed(candidate: Candidate) -> Any:
    """Return the value as JSON, else as text; MISSING for bytes that are not text."""
    if candidate.is_json:
        try:
            return msgspec.json.decode(candidate.value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # its content type is wrong
    try:
        return candidate.value.decode("utf-8")
    except UnicodeDecodeError:
        return MISSING


def _found(condition: _Condition, candidate: Candidate, value: Any) -> Any:
    match condition.source:
        case "value":
            return _inside(value, condition.path)
        case "headers":
            return candidate.headers.get(condition.path[0], MISSING)
        case "key":
            return _text(candidate.key)
        case "reason":
            return candidate.reason
        case _:
            return candidate.delivery_count


def _inside(value: Any, path: tuple[str, ...]) -> Any:
    for step in path:
        if isinstance(value, dict):
            value = value.get(step, MISSING)
        elif isinstance(value, list) and step.isascii() and step.isdigit() and len(step) < 10:
            value = value[int(step)] if int(step) < len(value) else MISSING
        else:
            return MISSING
    return value


def _text(key: bytes | None) -> Any:
    if key is None:
        return MISSING
    try:
        return key.decode("utf-8")
    except UnicodeDecodeError:
        return MISSING


def _holds(condition: _Condition, found: Any) -> bool:
    name, operand = condition.operator, condition.operand
    if name == "exists":
        return (found is not MISSING) is operand
    if found is MISSING:
        return False
    if name == "contains":
        if isinstance(found, str):
            return isinstance(operand, str) and operand in found
        return isinstance(found, list) and any(_alike(each, operand) and each == operand for each in found)
    if not _alike(found, operand):
        return False
    if name == "eq":
        return bool(found == operand)
    if name == "ne":
        return bool(found != operand)
    return _ORDERED[name](found, operand)


def _alike(found: Any, operand: Any) -> bool:
    """Return whether both are of one type: number, text, boolean or null."""
    return _kind(found) == _kind(operand) != "other"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):  # before numbers: in Python it is one
        return "bool"
    if isinstance(value, int | float):
        return "number"
    return "text" if isinstance(value, str) else "other"
