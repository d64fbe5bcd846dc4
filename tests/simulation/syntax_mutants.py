"""Mutants made from the syntax tree: one for each guard that drops an event, and a few for each comparison of epochs,
versions, generations, leases and watermarks.

    if C: return / continue / break / raise     C is never true; of "A or B", A never is, or B
    return A and B  (of a function -> bool)     A is always true, or B; of "A or B" never
    [... if A and B]                            the same
    a < b, of the words above                   removed, and <=; of == also >= and <=; of pairs, a component left out

A mutant is one function's code, so it is planted into a running process, without importing anything again. What it
leaves out is still evaluated: `if not tracker.fetched(...)` has an effect besides its answer.

A mutant's name is its function, the source text and what is there instead; it does not change with line numbers.
"""

from __future__ import annotations
import __future__

import ast
import copy
import importlib
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

MODULES = (
    "portalmq.broker.core.replica.state",
    "portalmq.broker.core.replica.replica",
    "portalmq.broker.core.replica.leader",
    "portalmq.broker.core.replica.follower",
    "portalmq.broker.core.replica.isr",
    "portalmq.broker.core.replica.epochs",
    "portalmq.broker.core.replica.producers",
    "portalmq.broker.core.replica.age",
    "portalmq.broker.core.queue.delivery",
    "portalmq.broker.core.queue.spans",
    "portalmq.broker.core.queue.selection",
    "portalmq.broker.core.queue.key_order",
    "portalmq.broker.core.queue.key_rates",
    "portalmq.broker.core.queue.receipts",
    "portalmq.broker.core.stream.membership",
    "portalmq.broker.core.stream.offsets",
    "portalmq.broker.core.stream.rebalance",
    "portalmq.broker.core.fold",
    "portalmq.control_plane.controller",
    "portalmq.control_plane.cluster",
    "portalmq.control_plane.stream_groups",
    "portalmq.control_plane.mirror",
    "portalmq.control_plane.locks",
)

# A comparison that has one of these words decides by age or progress. Those of the second kind have no order.
_ORDERED = re.compile(
    r"epoch|version|generation|incarnation|life|lease\b|sequence|since|refresh(_wanted)?\b|token|deliver(y|ies)\b"
)
_WATERMARK = re.compile(r"high_watermark|durable|committed|log_start|next_offset|end_offset")
_IDENTITY = re.compile(r"uuid|coordinator|member|owner|mark\b|topic_id|group_id")
_STRICT = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_EXITS = (ast.Return, ast.Continue, ast.Break, ast.Raise)
Functions = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class SyntaxMutant:
    """One edit of a function: `field` of `parent`, or an item of it, becomes `after`. `tree` holds the function alone,
    in its class."""

    name: str
    module: str
    function: str
    tree: ast.Module
    parent: ast.AST
    field: str
    index: int | None
    after: ast.expr

    def code(self) -> CodeType:
        """Compile the function with the edit."""
        before = self._put(self.after)
        try:
            tree = ast.fix_missing_locations(self.tree)
            compiled = compile(tree, f"<{self.name}>", "exec", __future__.annotations.compiler_flag, dont_inherit=True)
        finally:
            self._put(before)
        return next(code for code in _codes(compiled) if code.co_qualname == self.function)

    def _put(self, value: Any) -> Any:
        if self.index is None:
            before = getattr(self.parent, self.field)
            setattr(self.parent, self.field, value)
        else:
            values = getattr(self.parent, self.field)
            before, values[self.index] = values[self.index], value
        return before


def all_mutants() -> list[SyntaxMutant]:
    return [mutant for module in MODULES for mutant in mutants_of(module)]


def mutants_of(module: str) -> list[SyntaxMutant]:
    """Return the mutants of a module. One that equals an earlier one is left out; of several of one name, all but the
    first have a number."""
    source = importlib.import_module(module).__file__
    assert source is not None
    found: list[SyntaxMutant] = []
    names: Counter[str] = Counter()
    for qualname, tree, function in _functions(ast.parse(Path(source).read_text(encoding="utf-8"))):
        edits = {}
        for parent, field, index, after in _Sites(function):
            edits.setdefault((id(parent), field, index, ast.dump(after)), (parent, field, index, after))
        for parent, field, index, after in edits.values():
            before = getattr(parent, field)
            before = before if index is None else before[index]
            short = module.removeprefix("portalmq.").removeprefix("broker.core.")
            name = f"{short} {qualname}: {ast.unparse(before)} -> {_shown(after)}"
            names[name] += 1
            name += f" #{names[name]}" if names[name] > 1 else ""
            found.append(SyntaxMutant(name, module, qualname, tree, parent, field, index, after))
    return found


def plant(mutant: SyntaxMutant) -> None:
    """Give the function the mutant's code, in this process."""
    function_of(mutant).__code__ = mutant.code()


def function_of(mutant: SyntaxMutant) -> FunctionType:
    found: Any = importlib.import_module(mutant.module)
    for name in mutant.function.split("."):
        found = found.__dict__[name]
    found = getattr(found, "fget", None) or getattr(found, "__func__", None) or found
    return getattr(found, "__wrapped__", found)


def _codes(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from _codes(const)


def _functions(module: ast.Module) -> Iterator[tuple[str, ast.Module, Functions]]:
    """Yield the functions and methods with their qualified names, and each in a tree of its own; nested functions are
    parts of theirs."""
    for node in module.body:
        if isinstance(node, Functions):
            yield node.name, ast.Module([node], []), node
        elif isinstance(node, ast.ClassDef):
            for member in node.body:
                if isinstance(member, Functions):
                    home = ast.ClassDef(node.name, [], [], [member], [])
                    yield f"{node.name}.{member.name}", ast.Module([home], []), member


def never(test: ast.expr) -> ast.expr:
    return ast.BoolOp(ast.And(), [test, ast.Constant(False)])


def always(test: ast.expr) -> ast.expr:
    return ast.BoolOp(ast.Or(), [test, ast.Constant(True)])


def _shown(after: ast.expr) -> str:
    match after:
        case ast.BoolOp(values=[_, ast.Constant(value=bool(answer))]):
            return str(answer)
    return ast.unparse(after)


Site = tuple[ast.AST, str, int | None, ast.expr]


class _Sites:
    """The edits of one function."""

    def __init__(self, function: Functions) -> None:
        self._found: list[Site] = []
        self._is_predicate = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
        self._walk(function)

    def __iter__(self) -> Iterator[Site]:
        return iter(self._found)

    def _walk(self, node: ast.AST) -> None:
        match node:
            case ast.Assert() | ast.Raise():
                return  # what a message says is not mutated
            case ast.If(test=test, body=[only], orelse=[]) if isinstance(only, _EXITS):
                self._drops(node, "test", None, test)
            case ast.Return(value=ast.expr() as value) if self._is_predicate:
                self._holds(node, "value", None, value)
            case ast.comprehension():
                for index, test in enumerate(node.ifs):
                    self._holds(node, "ifs", index, test)
        for field, value in ast.iter_fields(node):
            if field in ("returns", "annotation", "decorator_list", "args") and not isinstance(node, ast.Call):
                continue
            for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
                if isinstance(child, ast.Compare):
                    self._compares(node, field, index, child)
                if isinstance(child, ast.AST):
                    self._walk(child)

    def _drops(self, parent: ast.AST, field: str, index: int | None, test: ast.expr) -> None:
        """A condition under which something is dropped: it is never true, and none of its alternatives is."""
        self._add(parent, field, index, never(test))
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or):
            for at, operand in enumerate(test.values):
                self._add(test, "values", at, never(operand))

    def _holds(self, parent: ast.AST, field: str, index: int | None, test: ast.expr) -> None:
        """A condition that must hold: each of its parts is left out."""
        if isinstance(test, ast.BoolOp):
            leave_out = always if isinstance(test.op, ast.And) else never
            for at, operand in enumerate(test.values):
                if not _is_type_guard(operand):
                    self._add(test, "values", at, leave_out(operand))
        elif not _is_type_guard(test) and not isinstance(test, ast.Constant):
            self._add(parent, field, index, always(test))

    def _compares(self, parent: ast.AST, field: str, index: int | None, compare: ast.Compare) -> None:
        text = ast.unparse(compare)
        ordered = bool(_ORDERED.search(text) or _WATERMARK.search(text))
        if not ordered and not _IDENTITY.search(text):
            return
        if isinstance(compare.ops[0], ast.Is | ast.IsNot | ast.In | ast.NotIn):
            return
        match parent:
            case ast.BoolOp(op=ast.And()):
                self._add(parent, field, index, always(compare))
            case ast.BoolOp(op=ast.Or()):
                self._add(parent, field, index, never(compare))
            case ast.comprehension():
                self._add(parent, field, index, always(compare))
            case ast.If(body=[only], orelse=[]) if isinstance(only, _EXITS):
                pass  # the guard is removed already
            case _ if field in ("test", "value") and not isinstance(parent, ast.keyword):
                self._add(parent, field, index, always(compare))
                self._add(parent, field, index, never(compare))
        for at, op in enumerate(compare.ops if "_ms" not in text else ()):  # a millisecond more or less is all right
            for other in self._others(op, compare, text):
                changed = copy.copy(compare)
                changed.ops = [*compare.ops[:at], other(), *compare.ops[at + 1 :]]
                self._add(parent, field, index, changed)
        match compare:
            case ast.Compare(left=ast.Tuple(elts=left), comparators=[ast.Tuple(elts=right)]) if len(left) > 1:
                for at in range(len(left)):
                    rest = [ast.Tuple(side[:at] + side[at + 1 :], ast.Load()) for side in (left, right)]
                    self._add(parent, field, index, ast.Compare(rest[0], compare.ops, [rest[1]]))

    def _others(self, op: ast.cmpop, compare: ast.Compare, text: str) -> tuple[type[ast.cmpop], ...]:
        if type(op) in _STRICT:
            return (_STRICT[type(op)],)
        if isinstance(compare.left, ast.Tuple) or not _ORDERED.search(text) or _IDENTITY.search(text):
            return ()
        return (ast.GtE, ast.LtE) if isinstance(op, ast.Eq) else (ast.Lt, ast.Gt) if isinstance(op, ast.NotEq) else ()

    def _add(self, parent: ast.AST, field: str, index: int | None, after: ast.expr) -> None:
        self._found.append((parent, field, index, after))


def _is_type_guard(test: ast.expr) -> bool:
    match test:
        case ast.Compare(ops=[ast.IsNot()], comparators=[ast.Constant(value=None)]):
            return True
    return False
