"""Mutation operators: the small changes of a module's source that its tests have to notice.

A mutant is one change of one node of the syntax tree. Texts, annotations and decorators stay as they are: a message
that reads otherwise is no defect, and types are mypy's. Changes that fail at once wherever they are run (an
assignment deleted, so that its name is unknown) are left out, since every test would notice them and the score would
say nothing.

Source: R. A. DeMillo, R. J. Lipton, F. G. Sayward, "Hints on Test Data Selection", Computer 11(4), 1978; the
operators are those of mutmut and cosmic-ray, without those that make equivalent mutants most of the time.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import attrs

Step = tuple[str, int | None]
"""One step down a syntax tree: a field, and the index in it where it is a list."""

BOUNDARY: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}
NEGATION: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.GtE,
    ast.LtE: ast.Gt,
    ast.Gt: ast.LtE,
    ast.GtE: ast.Lt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
OPPOSITE_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LEFT_AS_THEY_ARE = {"annotation", "returns", "decorator_list", "type_params", "msg"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@attrs.frozen
class Mutant:
    """One change of a module's source.

    Args:
        function: Qualified name of the outermost function that holds the change; empty in a module or class body.
        first_line: Where that function begins, its decorators included.
        lines: First and last of the changed statement, of a jump those of the condition or the loop around it: a test
            that runs none of them cannot notice the change.
        nth: Counts the mutants of a function that are alike in operator, before and after.
    """

    file: str
    function: str
    first_line: int
    line: int
    lines: tuple[int, int]
    operator: str
    before: str
    after: str
    nth: int
    steps: tuple[Step, ...] = attrs.field(repr=False)
    replacement: ast.AST = attrs.field(repr=False, eq=False)

    @property
    def key(self) -> tuple[str, str, str, str, str, int]:
        """Name of the mutant that stays the same while lines move."""
        return (self.file, self.function, self.operator, self.before, self.after, self.nth)

    def apply(self, tree: ast.Module) -> ast.Module:
        """Return a copy of `tree` with the change in it."""
        # Only the nodes on the way to the change are copied: a copy of the whole tree takes longer than most tests.
        changed = copy.copy(tree)
        node: ast.AST = changed
        for field, index in self.steps[:-1]:
            node = _replace_child(node, field, index, copy.copy(_child(node, field, index)))
        _replace_child(node, *self.steps[-1], ast.fix_missing_locations(self.replacement))
        return changed


@attrs.frozen
class _Place:
    """Where in a module a node stands."""

    function: str = ""
    first_line: int = 0
    prefix: str = ""
    lines: tuple[int, int] = (1, 1)

    def inside(self, node: ast.AST) -> _Place:
        """Return the place of what stands inside `node`."""
        place = self
        if isinstance(node, ast.stmt):
            place = attrs.evolve(place, lines=_own_lines(node))
        if isinstance(node, ast.ClassDef) and not self.function:
            return attrs.evolve(place, prefix=f"{self.prefix}{node.name}.")
        if isinstance(node, FUNCTIONS) and not self.function:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return attrs.evolve(place, function=self.prefix + node.name, first_line=first)
        return place


def _child(node: ast.AST, field: str, index: int | None) -> ast.AST:
    child = getattr(node, field)
    found: ast.AST = child if index is None else child[index]
    return found


def _replace_child(node: ast.AST, field: str, index: int | None, child: ast.AST) -> ast.AST:
    """Put `child` into a node whose lists may still be those of another tree."""
    if index is None:
        setattr(node, field, child)
    else:
        children = list(getattr(node, field))
        children[index] = child
        setattr(node, field, children)
    return child


def mutants_of(tree: ast.Module, file: str) -> list[Mutant]:
    """Return the mutants of a module in the order of its source."""
    seen: Counter[tuple[str, str, str, str]] = Counter()
    found = []
    for place, steps, node in _walk(tree, _Place(), ()):
        for operator, replacement in _changes(node):
            before, after = _text(node), _text(replacement)
            alike = (place.function, operator, before, after)
            ast.copy_location(replacement, node)
            line = getattr(node, "lineno", place.lines[0])
            found.append(
                Mutant(
                    file, place.function, place.first_line, line, place.lines, operator, before, after,
                    seen[alike], steps, replacement,
                )
            )  # fmt: skip
            seen[alike] += 1
    return found


def load(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _own_lines(node: ast.stmt) -> tuple[int, int]:
    """Return the lines of a statement without those of the statements that it holds."""
    body = getattr(node, "body", None)
    last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
    return node.lineno, max(node.lineno, last)


def _walk(
    node: ast.AST, place: _Place, steps: tuple[Step, ...]
) -> Iterator[tuple[_Place, tuple[Step, ...], ast.AST]]:
    for field, value in ast.iter_fields(node):
        if field in LEFT_AS_THEY_ARE:
            continue
        # Defaults are computed when the function is defined, outside of it.
        within = place if isinstance(node, FUNCTIONS) and field == "args" else place.inside(node)
        for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if not isinstance(child, ast.AST) or _is_no_code(child):
                continue
            here = (*steps, (field, index))
            if isinstance(child, ast.stmt) and not isinstance(child, ast.Continue | ast.Break):
                yield attrs.evolve(within, lines=_own_lines(child)), here, child
            else:
                # A jump may be compiled into its condition, so that no test seems to run the line of a `continue`.
                yield within, here, child
            yield from _walk(child, within, here)


def _is_no_code(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.JoinedStr | ast.Import | ast.ImportFrom)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
        # Members of a type that is written as an expression: `int | None`, `Literal[1]`.
        or (isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("Literal", "ClassVar", "Final"))
        # Which arguments a class of attrs takes is part of its type, and what its repr shows is a text.
        or (isinstance(node, ast.keyword) and node.arg in ("init", "kw_only", "repr"))
    )


def _text(node: ast.AST) -> str:
    """Return the source of a node, of a compound statement its first line."""
    text = ast.unparse(node).partition("\n")[0] if isinstance(node, ast.stmt) else ast.unparse(node)
    return text if len(text) <= 160 else text[:157] + "..."


def _changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        yield from _compare(node)
    elif isinstance(node, ast.BoolOp):
        yield from _bool_op(node)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield "not removed", copy.deepcopy(node.operand)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield "sign removed", copy.deepcopy(node.operand)
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC and not _is_text(node):
        yield (
            "arithmetic",
            ast.BinOp(copy.deepcopy(node.left), ARITHMETIC[type(node.op)](), copy.deepcopy(node.right)),
        )
    elif isinstance(node, ast.Constant):
        yield from _constant(node)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in OPPOSITE_CALLS:
        changed = copy.deepcopy(node)
        changed.func = ast.Name(OPPOSITE_CALLS[node.func.id], ast.Load())
        yield "opposite call", changed
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield from _condition(node)
    elif isinstance(node, ast.stmt):
        yield from _statement(node)


def _compare(node: ast.Compare) -> Iterator[tuple[str, ast.AST]]:
    for operator, table in (("boundary", BOUNDARY), ("comparison negated", NEGATION)):
        if (other := table.get(type(node.ops[0]))) is not None:
            changed = copy.deepcopy(node)
            changed.ops = [other()]
            yield operator, changed


def _bool_op(node: ast.BoolOp) -> Iterator[tuple[str, ast.AST]]:
    changed = copy.deepcopy(node)
    changed.op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
    yield "and/or", changed
    for left_out in range(len(node.values)):
        kept = [copy.deepcopy(value) for index, value in enumerate(node.values) if index != left_out]
        yield "operand removed", kept[0] if len(kept) == 1 else ast.BoolOp(copy.deepcopy(node.op), kept)


def _constant(node: ast.Constant) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node.value, bool):
        yield "boolean", ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield "number", ast.Constant(node.value + 1)


def _condition(node: ast.If | ast.While | ast.IfExp) -> Iterator[tuple[str, ast.AST]]:
    """Negate a condition, unless the change of what it consists of is the same."""
    negated_elsewhere = isinstance(node.test, ast.Compare) and len(node.test.ops) == 1
    endless = isinstance(node.test, ast.Constant)
    if not (negated_elsewhere or endless or isinstance(node.test, ast.BoolOp | ast.UnaryOp)):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield "condition negated", changed


def _statement(node: ast.stmt) -> Iterator[tuple[str, ast.AST]]:
    # A constant that is false decides as None does; a change of its value is another mutant.
    if isinstance(node, ast.Return) and not isinstance(node.value, ast.Constant | None):
        yield "return value", ast.Return(ast.Constant(None))
    if isinstance(node, ast.AugAssign) and type(node.op) in ARITHMETIC and not _is_text(node.value):
        changed = copy.deepcopy(node)
        changed.op = ARITHMETIC[type(node.op)]()
        yield "arithmetic", changed
    if _may_be_deleted(node):
        yield "statement deleted", ast.Pass()


def _may_be_deleted(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return not isinstance(node.value, ast.Yield | ast.YieldFrom)
    if isinstance(node, ast.Assign):
        return not any(isinstance(target, ast.Name | ast.Tuple) for target in node.targets)
    if isinstance(node, ast.AnnAssign):
        return node.value is not None and not isinstance(node.target, ast.Name)
    return isinstance(node, ast.AugAssign | ast.Delete | ast.Raise | ast.Continue | ast.Break)


def _is_text(node: ast.AST) -> bool:
    """Return whether a text is added to another: with a minus it fails wherever it is run."""
    return any(
        isinstance(part, ast.JoinedStr)
        or (isinstance(part, ast.Constant) and isinstance(part.value, str | bytes))
        for part in ast.walk(node)
    )
