"""The source-to-source part of compiling a kernel: Triton's Python subset to Python over numpy values. Operators
become calls with Triton's promotion, `x += y` becomes `x = x + y` (numpy would write into shared arrays), literals
that are assigned get Triton's type, and tensor methods become functions.  Pure syntax: knows no kernel and runs
nothing.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable

PREFIX = "__tc_"  # names which the rewritten source takes from the runtime

_BINARY: dict[type[ast.operator], str] = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "truediv",
    ast.FloorDiv: "floordiv",
    ast.Mod: "mod",
    ast.BitAnd: "and_",
    ast.BitOr: "or_",
    ast.BitXor: "xor",
    ast.LShift: "shl",
    ast.RShift: "shr",
}

_COMPARE: dict[type[ast.cmpop], str] = {ast.Lt: "lt", ast.LtE: "le", ast.Gt: "gt", ast.GtE: "ge", ast.Eq: "eq", ast.NotEq: "ne"}

# Calls whose result is never a Python number, so that assigning it needs no look.
_TYPED_CALLS = frozenset(
    "load program_id num_programs arange zeros full where dot sum max min exp exp2 log to cast trans reshape".split()  # noqa: SIM905
)

_STATIC = (ast.Constant, ast.BinOp, ast.BoolOp, ast.Compare, ast.operator, ast.boolop, ast.cmpop, ast.Not, ast.UnaryOp)

DTYPE_ATTRIBUTES = frozenset(("primitive_bitwidth", "int_bitwidth"))


class Rewriter(ast.NodeTransformer):
    """`is_module(name)` says whether a global name is a module; `methods` are the tensor and dtype methods that have
    a function; `constexprs` are the parameters that are and stay Python values."""

    def __init__(self, is_module: Callable[[str], bool], methods: frozenset[str], constexprs: frozenset[str]) -> None:
        self.is_module, self.methods, self.constexprs = is_module, methods, constexprs
        self.temporaries = 0

    def call(self, name: str, *arguments: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.expr:
        return ast.Call(ast.Name(PREFIX + name, ast.Load()), list(arguments), keywords or [])

    def _static(self, node: ast.AST) -> bool:
        """Whether an expression is Python's own: constexpr parameters and literals, which need no operator of ours."""
        if isinstance(node, ast.Name):
            return node.id in self.constexprs
        return isinstance(node, _STATIC) and all(map(self._static, ast.iter_child_nodes(node)))

    def _rewrite_test(self, test: ast.expr) -> ast.expr:
        """A condition, each operand of its and/or/not asked for its truth."""
        if self._static(test):
            return test
        if isinstance(test, ast.BoolOp):
            return ast.copy_location(ast.BoolOp(test.op, [self._rewrite_test(v) for v in test.values]), test)
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return ast.copy_location(ast.UnaryOp(test.op, self._rewrite_test(test.operand)), test)
        identity = (ast.Is, ast.IsNot, ast.In, ast.NotIn)
        static = isinstance(test, ast.Compare) and all(isinstance(op, identity) for op in test.ops)
        return test if static else ast.copy_location(self.call("truth", test), test)

    def visit_If(self, node: ast.If | ast.While | ast.IfExp) -> ast.AST:
        node.test = self._rewrite_test(node.test)
        return self.generic_visit(node)

    visit_While = visit_IfExp = visit_If  # noqa: N815  as ast has them

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list, node.returns = [], None
        every = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        for argument in every:
            argument.annotation = None
        # Defaults are set from the original function after compiling: their names need not exist here.
        node.args.defaults = [ast.Constant(None) for _ in node.args.defaults]
        node.args.kw_defaults = [None if d is None else ast.Constant(None) for d in node.args.kw_defaults]
        node.body = [self.visit(statement) for statement in node.body]
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if self._static(node):
            return node
        self.generic_visit(node)
        name = _BINARY.get(type(node.op))
        return node if name is None else ast.copy_location(self.call(name, node.left, node.right), node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, (ast.Invert, ast.USub)) and not isinstance(node.operand, ast.Constant):
            name = "invert" if isinstance(node.op, ast.Invert) else "negate"
            return ast.copy_location(self.call(name, node.operand), node)
        return node

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> ast.expr:
        name = _COMPARE.get(type(op))
        return ast.Compare(left, [op], [right]) if name is None else self.call(name, left, right)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Calls; and a < b < c to (a < (t := b)) & (t < c), since Python's own chain asks blocks for a truth value."""
        if self._static(node):
            return node
        self.generic_visit(node)
        left, result = node.left, None
        for i, (op, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            next_left = right
            if i + 1 < len(node.ops):
                self.temporaries += 1
                name = f"{PREFIX}{self.temporaries}"
                right = ast.NamedExpr(ast.Name(name, ast.Store()), right)
                next_left = ast.Name(name, ast.Load())
            link = self._compare(left, op, right)
            result = link if result is None else self.call("and_", result, link)
            left = next_left
        assert result is not None
        return ast.copy_location(result, node)

    def _rewrite_value(self, value: ast.expr) -> ast.expr:
        if isinstance(value, ast.Tuple):
            return ast.copy_location(ast.Tuple([self._rewrite_value(item) for item in value.elts], value.ctx), value)
        known = isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr in _TYPED_CALLS
        return self.visit(value) if known else self.call("typed", self.visit(value))

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        node.value = self._rewrite_value(node.value)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        if node.value is None:
            return ast.copy_location(ast.Pass(), node)
        constexpr = "constexpr" in ast.unparse(node.annotation)
        value = self.visit(node.value) if constexpr else self._rewrite_value(node.value)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        target = copy.copy(node.target)
        target.ctx = ast.Load()
        value = self.visit_BinOp(ast.copy_location(ast.BinOp(target, node.op, node.value), node))
        assert isinstance(value, ast.expr)
        return ast.copy_location(ast.Assign([node.target], value), node)

    def _on_module(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and self.is_module(node.id)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        if isinstance(function, ast.Attribute) and function.attr in self.methods and not self._on_module(function.value):
            self.generic_visit(node)
            function = node.func
            assert isinstance(function, ast.Attribute)
            call = self.call(f"method_{function.attr}", function.value, *node.args, keywords=node.keywords)
            return ast.copy_location(call, node)
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "range":
            node.func.id = PREFIX + "range"
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """block[:, None] as a call, which knows about lanes; other subscripts are those of tuples."""
        self.generic_visit(node)
        keys = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if not all(ast.unparse(key) in (":", "None") for key in keys):
            return node
        plain: list[ast.expr] = [ast.Name(PREFIX + "all", ast.Load()) if isinstance(key, ast.Slice) else key for key in keys]
        return ast.copy_location(self.call("item", node.value, ast.Tuple(plain, ast.Load())), node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        self.generic_visit(node)
        if node.attr == "T":
            return ast.copy_location(self.call("method_trans", node.value), node)
        if node.attr in DTYPE_ATTRIBUTES:
            return ast.copy_location(self.call("bitwidth", node.value), node)
        return node
