"""Instrumentation of a parsed Jinja template: insert a charge for everything that it does."""

from __future__ import annotations

from typing import Any

from jinja2 import nodes
from jinja2.exceptions import TemplateSyntaxError
from jinja2.visitor import NodeTransformer

from triolet.core.chat_template.meter import CHARS_PER_UNIT

# Names of filters that no template can spell, so that it can neither replace them nor be in their way.
CHARGE, WEIGH, COMPARE, SLICE = "charge!", "weigh!", "compare!", "slice!"


class Instrument(NodeTransformer):
    """Node transformer that inserts charges into bodies that can run more than once, and replaces some operators by
    calls.
    """

    def __init__(self) -> None:
        self._num_nodes = 0

    def visit(self, node: nodes.Node, *args: Any, **kwargs: Any) -> Any:
        """Visit a node; count it, and count long texts by their length."""
        text = getattr(node, "data", getattr(node, "value", None))  # of TemplateData, of Const
        self._num_nodes += 1 + (len(text) // CHARS_PER_UNIT if isinstance(text, str) else 0)
        return super().visit(node, *args, **kwargs)

    def _visit_body(self, node: Any) -> Any:
        before = self._num_nodes
        self.generic_visit(node)
        charge = _call(CHARGE, nodes.Const(self._num_nodes - before), lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(charge, lineno=node.lineno))
        if (
            isinstance(node, nodes.For) and node.test is not None
        ):  # runs for the items that it leaves out, too
            node.test = nodes.And(charge, node.test, lineno=node.lineno)
        return node

    visit_For = visit_Macro = visit_CallBlock = _visit_body  # noqa: N815 - Jinja's names

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:  # noqa: N802
        """Replace the comparison by a call of `compare`, which charges for what it reads."""
        self.generic_visit(node)
        operands = [part for operand in node.ops for part in (nodes.Const(operand.op), operand.expr)]
        return _call(COMPARE, node.expr, *operands, lineno=node.lineno)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        """Weigh every part of a concatenation."""
        self.generic_visit(node)
        node.nodes = [_call(WEIGH, part, lineno=node.lineno) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        """Replace a slice by a call of `take_slice`; a single item is constant work."""
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        bounds = [bound or nodes.Const(None) for bound in (node.arg.start, node.arg.stop, node.arg.step)]
        return _call(SLICE, node.node, *bounds, lineno=node.lineno)

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:  # noqa: N802
        """Weigh a computed key: hashing reads all of it."""
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = _call(WEIGH, node.key, lineno=node.lineno)
        return node

    def _refuse(self, node: nodes.Node) -> nodes.Node:
        raise TemplateSyntaxError(
            "a chat template can neither use other templates nor be used by them", node.lineno
        )

    visit_Extends = visit_Include = visit_Import = visit_FromImport = visit_Block = _refuse  # noqa: N815


def _call(name: str, value: nodes.Expr, *args: nodes.Expr, lineno: int) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=lineno)
