"""Conditions on messages (core/queue/predicate.py), drawn at random and compared with a reference that shares no code.

Of a malformed condition it is known beforehand that it is refused.
"""

from __future__ import annotations

import contextlib
import json
from random import Random
from typing import Any

from portalmq.broker.core.queue.predicate import (
    CONDITIONS_MAX,
    FIELD_LENGTH_MAX,
    OPERAND_LENGTH_MAX,
    OPERATORS,
    PATH_DEPTH_MAX,
    Candidate,
    parse,
)
from portalmq.errors import InvalidRequest

ABSENT = object()
LEAVES = (None, True, False, 0, 1, 1.5, -2, "", "a", "b", "ab", "1")
STEPS = ("a", "b", "0", "1", "x", "99999999999")
TEXTS = ("", "a", "ab", "timeout")
REFUSED: tuple[Any, ...] = (
    None,
    [],
    {},
    {"key": 1},
    {"key": {}},
    {"": {"eq": 1}},
    {1: {"eq": 1}},
    {"k" * (FIELD_LENGTH_MAX + 1): {"eq": 1}},
    {"offset": {"eq": 1}},
    {"headers": {"eq": "a"}},
    {"headers.": {"eq": "a"}},
    {"value.": {"eq": 1}},
    {"value.a..b": {"eq": 1}},
    {".".join(["value", *["a"] * (PATH_DEPTH_MAX + 1)]): {"eq": 1}},
    {"key": {"like": "a"}},
    {"key": {2: "a"}},
    {"key": {"exists": 1}},
    {"key": {"eq": ["a"]}},
    {"key": {"gt": None}},
    {"key": {"lte": True}},
    {"key": {"eq": "a" * (OPERAND_LENGTH_MAX + 1)}},
    {f"value.{number}": {"exists": True} for number in range(CONDITIONS_MAX + 1)},
)


def check(random: Random) -> str | None:
    """Return what is wrong with the conditions of a run, None if nothing is."""
    where = random.choice(REFUSED)
    try:
        parse(where)
    except InvalidRequest:
        pass
    else:
        return f"{str(where)[:100]} is accepted"
    candidate = Candidate(
        _encoded(random, _value(random, 2)),
        random.random() < 0.7,
        {"h.i": random.choice(TEXTS)},
        random.choice((None, b"a", b"ab", b"\xff")),
        random.choice(TEXTS),
        random.randint(0, 3),
    )
    for _ in range(8):
        where = dict(_condition(random) for _ in range(random.randint(1, 2)))
        found, expected = parse(where).matches(candidate), _matches(where, candidate)
        if found != expected:
            return f"{candidate} matches {where}: {found}"
    return None


def _value(random: Random, depth: int) -> Any:
    kind = random.randrange(4) if depth else 0
    if kind == 1:
        return [_value(random, depth - 1) for _ in range(random.randrange(3))]
    if kind > 1:
        return {random.choice(STEPS): _value(random, depth - 1) for _ in range(random.randrange(4))}
    return random.choice(LEAVES)


def _encoded(random: Random, value: Any) -> bytes:
    text = json.dumps(value).encode()
    return random.choice((text, text, text, text[:-1], b"\xff", b"ab"))


def _condition(random: Random) -> tuple[str, dict[str, Any]]:
    path = ".".join(random.choice(STEPS) for _ in range(random.randint(1, 3)))
    fields = ("value", f"value.{path}", f"value.{path}", "key", "reason", "delivery_count", "headers.H.i", "headers.x")
    name = random.choice(OPERATORS)
    operands = (True, False) if name == "exists" else LEAVES
    if name in ("lt", "lte", "gt", "gte"):
        operands = tuple(each for each in LEAVES if each is not None and not isinstance(each, bool))
    return random.choice(fields), {name: random.choice(operands)}


# --- the reference ---------------------------------------------------------------------------------------------------


def _matches(where: dict[str, dict[str, Any]], candidate: Candidate) -> bool:
    return all(_holds(_field(field, candidate), *test) for field, tests in where.items() for test in tests.items())


def _field(field: str, candidate: Candidate) -> Any:
    first, _, rest = field.partition(".")
    if first == "headers":
        return {name.lower(): text for name, text in candidate.headers.items()}.get(rest.lower(), ABSENT)
    if first == "key":
        return ABSENT if candidate.key is None else _decoded(candidate.key)
    if first != "value":
        return getattr(candidate, field)
    found = _decoded(candidate.value)
    if candidate.is_json:
        with contextlib.suppress(ValueError):
            found = json.loads(candidate.value)
    for step in rest.split(".") if rest else ():
        try:
            found = found[int(step) if isinstance(found, list) else step] if isinstance(found, list | dict) else ABSENT
        except (KeyError, IndexError, ValueError):
            found = ABSENT
    return found


def _decoded(data: bytes) -> Any:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return ABSENT


def _type(value: Any) -> type:
    return float if type(value) is int else type(value)


def _holds(found: Any, name: str, operand: Any) -> bool:
    if name == "exists":
        return (found is not ABSENT) == operand
    if name == "contains" and isinstance(found, str):
        return isinstance(operand, str) and operand in found
    if name == "contains":
        return isinstance(found, list) and any(_type(each) is _type(operand) and each == operand for each in found)
    if _type(found) is not _type(operand):
        return False
    order = 0 if found == operand else -1 if found < operand else 1
    return {"eq": order == 0, "ne": order != 0, "lt": order < 0, "lte": order <= 0, "gt": order > 0,
            "gte": order >= 0}[name]  # fmt: skip
