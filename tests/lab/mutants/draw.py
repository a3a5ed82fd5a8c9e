"""One-place mutants of a Python source: which there are, as data.

A mutant changes one expression of one function: a comparison, an operator, a constant, the bound of a slice, two arguments of a
call, a condition. Nothing is mutated that no number depends on: what is raised, asserted, logged or printed, and annotations.
"""

import ast
import textwrap
from collections.abc import Container, Iterator, Sequence
from itertools import pairwise

from msgspec import Struct

from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.blocks import blocks_of

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

_COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
    ast.Div: "*",
    ast.Mod: "//",
    ast.LShift: ">>",
    ast.RShift: "<<",
    ast.BitAnd: "|",
    ast.BitOr: "&",
    ast.MatMult: "*",
    ast.Pow: "*",
}
# Calls that no number depends on.
_SILENT = ("logger", "logging", "log_info_on_rank0", "warnings", "print", "trace", "tracer")


class Mutant(Struct, frozen=True, kw_only=True):
    """One mutant.

    target  the function, by its dotted name; line: of the file
    block   the first line of the block that holds it (engines/blocks.py)
    kind    what was changed; before, after: the expression
    match, replacement  whole lines of the function's source without the indentation of its def
    """

    file: str
    target: str
    line: int
    block: int
    kind: str
    before: str
    after: str
    match: str
    replacement: str

    @property
    def name(self) -> str:
        return f"{self.file.rpartition('/')[2]}:{self.line} {self.before} -> {self.after}"

    @property
    def function(self) -> str:
        return self.target.rpartition(".")[2]

    @property
    def change(self) -> tuple[str, str]:
        """The first line that differs, as it is and as mutated."""
        pairs = zip(self.match.splitlines(), self.replacement.splitlines(), strict=False)
        was, became = next(((was, became) for was, became in pairs if was != became), (self.match, self.replacement))
        return was.strip(), became.strip()

    @property
    def patch(self) -> Patch:
        return Patch(name=self.name[:200], edits=(Edit(target=self.target, match=self.match, replacement=self.replacement),))


# Decorators under which an engine's function is not a plain one: it is compiled elsewhere, or is asked for as a value.
WRAPPED = ("jit", "property", "setter", "compile", "overload", "cache")


def mutants_of(
    source: str, module: str, file: str, unfit: Sequence[str] = WRAPPED, of: Container[str] | None = None
) -> Iterator[Mutant]:
    """All mutants of a module, each once: two that make the same program are one. unfit: words in decorators of functions that
    are left out; of: the functions that are not, by their names in the module; None: all."""
    tree = ast.parse(source)
    block_at = {
        id(node): block.line
        for block, body, _ in blocks_of(tree)  # an outer block comes before those inside it, which take its place
        for statement in body
        for node in ast.walk(statement)
    }
    for name, function in _functions(tree, unfit):
        if of is not None and name not in of:
            continue
        text = _Text(source, function)
        seen = {ast.dump(ast.parse(text.dedented))}
        for node, kind, at, after in _changes(function, text):
            mutated = text.replaced(at, after)
            try:
                what = ast.dump(ast.parse(mutated))
            except SyntaxError:
                continue
            if what in seen:
                continue
            seen.add(what)
            match, replacement = text.lines_around(at, mutated)
            if match == replacement:
                continue
            yield Mutant(
                file=file,
                target=f"{module}.{name}",
                line=node.lineno,
                block=block_at.get(id(node), function.body[0].lineno),
                kind=kind,
                before=" ".join(text.at(at).split()),
                after=" ".join(after.split()),
                match=match,
                replacement=replacement,
            )


def _functions(tree: ast.Module, unfit: Sequence[str]) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Plain functions of a module and of its classes, by their names in it."""
    for node in tree.body:
        inside, prefix = (node.body, f"{node.name}.") if isinstance(node, ast.ClassDef) else ([node], "")
        for one in inside:
            if isinstance(one, ast.FunctionDef):
                decorators = " ".join(ast.unparse(decorator) for decorator in one.decorator_list)
                if not any(word in decorators for word in unfit):
                    yield prefix + one.name, one


Span = tuple[int, int]  # of the function's source


class _Text:
    """The source of one function, as `inspect` gives it without its indentation."""

    def __init__(self, source: str, function: ast.FunctionDef) -> None:
        lines = source.splitlines(keepends=True)
        self.first = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        own = lines[self.first - 1 : function.end_lineno]
        self.dedented = textwrap.dedent("".join(own))
        self._lines = self.dedented.splitlines(keepends=True)
        self._margin = len(own[0]) - len(self._lines[0])
        starts = [0]
        for line in self._lines:
            starts.append(starts[-1] + len(line))
        self._starts = starts

    def span(self, node: ast.expr) -> Span:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _offset(self, line: int, column: int) -> int:
        text = self._lines[line - self.first]
        behind = len(text.encode()[: max(0, column - self._margin)].decode())
        return self._starts[line - self.first] + behind

    def at(self, span: Span) -> str:
        return self.dedented[span[0] : span[1]]

    def of(self, node: ast.expr) -> str:
        return self.at(self.span(node))

    def replaced(self, span: Span, text: str) -> str:
        return self.dedented[: span[0]] + text + self.dedented[span[1] :]

    def lines_around(self, span: Span, mutated: str) -> tuple[str, str]:
        """Whole lines with the span, as they are and as mutated: as many as it takes for them to occur once."""
        first = max(number for number, start in enumerate(self._starts[:-1]) if start <= span[0])
        last = max(number for number, start in enumerate(self._starts[:-1]) if start < max(span[1], span[0] + 1))
        while self.dedented.count(self._between(first, last)) != 1:
            if last + 1 < len(self._lines):
                last += 1
            else:
                first -= 1
        match = self._between(first, last)
        behind = len(self.dedented) - self._starts[last + 1]
        return match, mutated[self._starts[first] : len(mutated) - behind]

    def _between(self, first: int, last: int) -> str:
        return self.dedented[self._starts[first] : self._starts[last + 1]]


Change = tuple[ast.expr | ast.stmt, str, Span, str]


def _changes(function: ast.FunctionDef, text: _Text) -> Iterator[Change]:
    for statement in function.body:
        for node in _numbers(statement):
            yield from _of_node(node, text)


def _numbers(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a statement that a number may depend on."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.Import | ast.ImportFrom):
        return
    if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in _SILENT:
        return
    if isinstance(node, ast.If) and "logger" in ast.unparse(node.test):
        return
    yield node
    skipped: list[ast.AST | None] = []
    if isinstance(node, ast.AnnAssign):
        skipped = [node.annotation]
    if isinstance(node, (*FUNCTIONS, ast.Lambda)):
        skipped = [node.args, getattr(node, "returns", None), *getattr(node, "decorator_list", [])]
    for child in ast.iter_child_nodes(node):
        if child not in skipped:
            yield from _numbers(child)


def _of_node(node: ast.AST, text: _Text) -> Iterator[Change]:
    match node:
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            for other in _COMPARISONS[type(op)]:
                yield node, "comparison", text.span(node), f"{text.of(left)} {other} {text.of(right)}"
        case ast.BinOp(left=left, op=op, right=right) if not isinstance(left, ast.Constant) or not isinstance(left.value, str):
            between = text.span(left)[1], text.span(right)[0]
            yield from _operator(node, text, between, op)
        case ast.BoolOp(op=op, values=values):
            for left, right in pairwise(values):
                words = {"and": "or", "or": "and"}
                between = text.span(left)[1], text.span(right)[0]
                yield from _word(node, text, between, words, "boolean")
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield node, "boolean", text.span(node), f"bool({text.of(operand)})"
        case ast.UnaryOp(op=ast.USub(), operand=operand) if not isinstance(operand, ast.Constant):
            yield node, "arithmetic", text.span(node), f"({text.of(operand)})"
        case ast.Constant(value=bool(value)):
            yield node, "constant", text.span(node), str(not value)
        case ast.Constant(value=int(value)):
            yield node, "constant", text.span(node), str(value + 1)
            if value:
                yield node, "constant", text.span(node), str(value - 1)
        case ast.Slice(lower=lower, upper=upper):
            yield from _slice(text, lower, upper)
        case ast.Call(args=args) if not any(isinstance(arg, ast.Starred) for arg in args):
            for left, right in pairwise(args):
                first, second = text.span(left), text.span(right)
                swapped = text.at(second) + text.at((first[1], second[0])) + text.at(first)
                yield left, "arguments", (first[0], second[1]), swapped
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if not isinstance(test, ast.Compare | ast.UnaryOp):
            yield test, "condition", text.span(test), f"not ({text.of(test)})"
        case _:
            return


def _operator(node: ast.expr, text: _Text, between: Span, op: ast.operator) -> Iterator[Change]:
    word = ast.unparse(ast.BinOp(ast.Name("a"), op, ast.Name("b")))[2:-2]
    if type(op) in _OPERATORS:
        yield from _word(node, text, between, {word: _OPERATORS[type(op)]}, "arithmetic")


def _word(node: ast.expr, text: _Text, between: Span, words: dict[str, str], kind: str) -> Iterator[Change]:
    """The one of these words that stands between two operands, replaced. What is shown is the whole expression."""
    gap = text.at(between)
    for word, other in words.items():
        if gap.count(word) == 1 and "#" not in gap:
            whole = text.span(node)
            start = between[0] - whole[0]
            shown = text.at(whole)
            yield node, kind, whole, shown[:start] + gap.replace(word, other) + shown[start + len(gap) :]


def _slice(text: _Text, lower: ast.expr | None, upper: ast.expr | None) -> Iterator[Change]:
    for bound, ways in ((lower, ("({}) + 1", "")), (upper, ("({}) - 1", ""))):
        for way in ways if bound is not None else ():
            assert bound is not None
            yield bound, "slice", text.span(bound), way.format(text.of(bound))
