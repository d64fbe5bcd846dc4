"""The dead letters that `where` matches: every operator, every field, and the errors of malformed predicates."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portalmq.broker.core.queue import predicate
from portalmq.broker.core.queue.predicate import Candidate, parse
from portalmq.errors import InvalidRequest


def letter(value: object = None, **more: Any) -> Candidate:
    """A dead letter with this JSON value."""
    fields: dict[str, Any] = {"headers": {}, "key": None, "reason": "", "delivery_count": 5, "is_json": True, **more}
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return Candidate(
        raw, fields["is_json"], fields["headers"], fields["key"], fields["reason"], fields["delivery_count"]
    )


def matches(where: object, candidate: Candidate) -> bool:
    return parse(where).matches(candidate)


ORDER = letter(
    {"sensor": 1, "total": 99.5, "tags": ["urgent", "eu"], "items": [{"sku": "a"}], "note": None, "paid": True},
    headers={"x.trace-id": "abc"},
    key=b"order-7",
    reason="gave up after a timeout",
    delivery_count=5,
)


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ({"value.sensor": {"eq": 1}}, True),
        ({"value.sensor": {"eq": 1.0}}, True),
        ({"value.sensor": {"eq": 2}}, False),
        ({"value.sensor": {"ne": 2}}, True),
        ({"value.sensor": {"gt": 0, "lt": 2}}, True),
        ({"value.sensor": {"gt": 1}}, False),
        ({"value.total": {"gte": 99.5, "lte": 99.5}}, True),
        ({"value.items.0.sku": {"eq": "a"}}, True),
        ({"value.items.1.sku": {"exists": False}}, True),
        ({"value.tags": {"contains": "eu"}}, True),
        ({"value.tags": {"contains": "e"}}, False),
        ({"value.note": {"eq": None}}, True),
        ({"value.note": {"exists": True}}, True),
        ({"value.paid": {"eq": True}}, True),
        ({"value.missing": {"exists": False}}, True),
        ({"value.missing": {"ne": 1}}, False),
        ({"headers.X.Trace-Id": {"eq": "abc"}}, True),
        ({"headers.none": {"exists": True}}, False),
        ({"key": {"contains": "order"}}, True),
        ({"key": {"gte": "order-5"}}, True),
        ({"reason": {"contains": "timeout"}}, True),
        ({"delivery_count": {"gte": 5}}, True),
        ({"value.sensor": {"eq": 1}, "reason": {"contains": "nothing"}}, False),
    ],
)
def test_conditions(where: object, holds: bool) -> None:
    assert matches(where, ORDER) is holds


@pytest.mark.parametrize("name", ["eq", "ne", "lt", "lte", "gt", "gte"])
def test_values_of_different_kinds_never_match(name: str) -> None:
    values: list[Any] = [1, "1", True, None, [1], {"a": 1}]
    operands: list[Any] = [1, "1"] if name not in {"eq", "ne"} else [1, "1", True, None]
    for value in values:
        for operand in operands:
            if type(value) is not type(operand):
                assert not matches({"value": {name: operand}}, letter(value)), (value, name, operand)


def test_a_text_value_is_compared_as_text() -> None:
    plain = letter(b"boom: timeout", is_json=False)
    assert matches({"value": {"contains": "timeout"}}, plain)
    assert not matches({"value.a": {"exists": True}}, plain)


@pytest.mark.parametrize("raw", [b"{broken", b"\xff\xfe", b"[" * 100_000, b""])
def test_a_value_that_is_no_json_has_no_fields(raw: bytes) -> None:
    assert not matches({"value.a": {"exists": True}}, letter(raw))
    assert matches({"value.a": {"exists": False}}, letter(raw))


def test_a_key_that_is_no_text_and_one_that_is_missing_match_nothing() -> None:
    for key in (None, b"\xff"):
        assert not matches({"key": {"contains": ""}}, letter(1, key=key))


@pytest.mark.parametrize(
    ("where", "fault"),
    [
        ([], "object"),
        ("value.a = 1", "object"),
        ({}, "leave it out"),
        ({"nonsense": {"eq": 1}}, "no field 'nonsense'"),
        ({"headers": {"eq": 1}}, "no field 'headers'"),
        ({"headers.": {"eq": 1}}, "no field"),
        ({"value..a": {"eq": 1}}, "empty step"),
        ({"value.": {"eq": 1}}, "no field"),
        ({"": {"eq": 1}}, "1 to 500"),
        ({"x" * 501: {"eq": 1}}, "1 to 500"),
        ({"value." + ".".join("a" * 17): {"eq": 1}}, "17 steps deep"),
        ({"reason": "timeout"}, "needs an operator"),
        ({"reason": {}}, "needs an operator"),
        ({"reason": {"like": "%"}}, "no operator 'like'"),
        ({"reason": {"regex": "(a+)+$"}}, "no operator 'regex'"),
        ({"reason": {"eq": ["a"]}}, "no list"),
        ({"reason": {"eq": {"a": 1}}}, "no list"),
        ({"reason": {"lt": True}}, "number or text"),
        ({"reason": {"gt": None}}, "number or text"),
        ({"reason": {"exists": 1}}, "true or false"),
        ({"reason": {"contains": "x" * 1_001}}, "limit is 1000"),
        ({f"value.a{n}": {"eq": n} for n in range(33)}, "more than 32"),
    ],
)
def test_a_malformed_predicate_is_named(where: object, fault: str) -> None:
    with pytest.raises(InvalidRequest, match=fault):
        parse(where)


def test_the_value_is_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []
    real = predicate._parsed

    def counted(candidate: Candidate) -> Any:
        parsed.append(candidate.value)
        return real(candidate)

    monkeypatch.setattr(predicate, "_parsed", counted)
    assert matches({f"value.a{n}": {"exists": False} for n in range(20)}, letter({}))
    assert not matches({"reason": {"eq": "x"}}, letter({}))
    assert parsed == [b"{}"]


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
wheres = st.dictionaries(
    st.sampled_from(["value", "value.a", "value.a.0", "headers.a", "key", "reason", "delivery_count"]) | st.text(),
    st.dictionaries(st.sampled_from(predicate.OPERATORS) | st.text(), values) | values,
)


@given(wheres | values, values, st.text(), st.binary())
def test_any_predicate_is_refused_clearly_or_answered(where: object, value: object, reason: str, key: bytes) -> None:
    candidate = letter(value, reason=reason, key=key, headers={"a": reason})
    refused = ""
    try:
        assert parse(where).matches(candidate) in {True, False}
    except InvalidRequest as error:
        refused = str(error)
    assert not refused or refused.startswith("where")


@given(st.integers() | st.floats(allow_nan=False, allow_infinity=False), st.integers(-(2**53), 2**53))
def test_numbers_compare_as_numbers(value: float, operand: int) -> None:
    decoded = json.loads(json.dumps(value))
    for name, compare in {"eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "gte": operator.ge}.items():
        assert matches({"value": {name: operand}}, letter(value)) is compare(decoded, operand)
