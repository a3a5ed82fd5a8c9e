"""Which functions of a Python file changed: two sources in, names out. Comments, docstrings and places do not count.

A function counts as changed if its own code did, decorators and defaults included; functions defined inside it count by
themselves. It also counts as changed if it reads a name whose binding in its module or class changed: a constant, an import, a
function that was removed.
"""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from eagletwin.harness.core.differs import ChangedFunction, Point

from .changed_statements import changed_points, entry

_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Changed:
    """places: functions of the new source that changed; removed: names of those that it has no more; outside: whether code
    outside of functions changed. Names begin with the module's."""

    places: tuple[ChangedFunction, ...]
    removed: tuple[str, ...]
    outside: bool


def changed(old: str | bytes | None, new: str | bytes, module: str) -> Changed:
    """Compare two sources of a module; old None: there was none, or it is not at hand, and each function counts as changed as a
    whole. Raises SyntaxError for one of them."""
    before, now = _read(old or ""), _read(new)
    known, counted = _numbered(before.functions), _numbered(now.functions)
    names = {one.name for one in now.functions}
    removed = tuple(dict.fromkeys(one.name for one in before.functions if one.name not in names))
    bound = {name for name, *_ in set(_in_order(before.bindings)) ^ set(_in_order(now.bindings))}
    # a method is read as an attribute, whatever the object is
    gone = {f".{name.rpartition('.')[2]}" if "." in name else name for name in removed}
    read = gone | {f".{name.rpartition('.')[2]}" if "." in name else name for name in bound}
    earlier = {(number[0], number[2]): one for one, number in zip(before.functions, known, strict=True)}
    places = tuple(
        ChangedFunction(
            f"{module}.{one.name}",
            one.line,
            one.kernel,
            _points(one, earlier.get((number[0], number[2])), old is None, read, bound),
        )
        for one, number in zip(now.functions, counted, strict=True)
        if number not in known or not read.isdisjoint(one.reads) or (one.owner and one.owner in bound)
    )
    return Changed(places, tuple(f"{module}.{name}" for name in removed), bool(bound))


def _points(one: "_Function", before: "_Function | None", unlisted: bool, read: set[str], bound: set[str]) -> tuple[Point, ...]:
    """What changed in a function. unlisted: what it was is not known."""
    if unlisted:
        return entry(one.node)
    if before is None:
        return changed_points(None, one.node)
    points = changed_points(before.node, one.node, frozenset(read & one.reads))
    return points if one.owner not in bound else tuple(sorted({*points, *entry(one.node)}))


def _numbered(functions: "Sequence[_Function]") -> list[tuple[object, ...]]:
    """Of several functions of one name, which one is there depends on how many there are, and in which order."""
    total = Counter(one.name for one in functions)
    return [(*one, total[one[0]]) for one in _in_order((one.name, one.code) for one in functions)]


def _in_order(bindings: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, int]]:
    """(name, code, how many of this name stand before it): the last of several is what is read."""
    before: Counter[str] = Counter()
    for name, code in bindings:
        yield name, code, before[name]
        before[name] += bool(name)  # code that binds nothing has no order


@dataclass(frozen=True, slots=True)
class _Function:
    name: str
    code: str
    line: int
    kernel: bool
    reads: frozenset[str]
    node: ast.FunctionDef | ast.AsyncFunctionDef  # with marks in place of what is defined in it

    @property
    def owner(self) -> str:
        """The class of a method; "" of a function of the module."""
        return self.name.rpartition(".")[0]


@dataclass(slots=True)
class _Source:
    """All functions of a module, and what its other code binds: (name, code), "" for code that binds nothing."""

    functions: list[_Function] = field(default_factory=list)
    bindings: list[tuple[str, str]] = field(default_factory=list)


def _read(source: str | bytes) -> _Source:
    found = _Source()
    tree = ast.parse(source)
    _Take(found).visit(tree)
    _undocumented(tree)
    found.bindings += _bindings(tree.body, "", "")
    return found


class _Take(ast.NodeTransformer):
    """Takes functions and classes out of a tree, from the innermost on, and leaves a mark in the place of each."""

    def __init__(self, found: _Source) -> None:
        self._found = found
        self._within: list[str] = []

    def _inside(self, node: _Definition) -> str:
        self._within.append(node.name)
        self.generic_visit(node)
        name = ".".join(self._within)
        self._within.pop()
        _undocumented(node)
        return name

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        name = self._inside(node)
        kernel = any(_is_kernel(one) for one in node.decorator_list)
        self._found.functions.append(_Function(name, ast.dump(node), node.lineno, kernel, _reads(node), node))
        return ast.copy_location(_mark(name), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        name = self._inside(node)
        head = "".join(ast.dump(part) for part in (*node.bases, *node.keywords, *node.decorator_list))
        self._found.bindings.append((name, head))
        self._found.bindings += _bindings(node.body, f"{name}.", "")
        return ast.copy_location(_mark(name), node)


class _Mark(ast.Pass):
    """Stands where a function or a class was."""

    _fields = ("name",)


def _mark(name: str) -> ast.AST:
    mark = _Mark()
    mark.name = name  # type: ignore[attr-defined]
    return mark


def _bindings(statements: Sequence[ast.stmt], owner: str, around: str) -> Iterator[tuple[str, str]]:
    """What code outside of functions binds, one name at a time: an import that takes one name more changes that name alone."""
    for statement in statements:
        if isinstance(statement, _Mark):
            if around:  # where a function stands does not matter, but for the condition that it stands under
                yield owner + statement.name.rpartition(".")[2], around  # type: ignore[attr-defined]
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            place = f"{statement.level}{statement.module}" if isinstance(statement, ast.ImportFrom) else ""
            for one in statement.names:
                bound = one.asname or (one.name if place else one.name.partition(".")[0])
                yield owner + bound, f"{around}import {place} {one.name}"
        elif blocks := [value for _, value in ast.iter_fields(statement) if _is_block(value)]:
            head = around + type(statement).__name__
            values = [value for _, value in ast.iter_fields(statement) if value not in blocks]
            parts = (part for value in values for part in (value if isinstance(value, list) else [value]))
            head += "".join(ast.dump(part) for part in parts if isinstance(part, ast.AST))
            for number, block in enumerate(blocks):
                for part in block:
                    inner = part.body if isinstance(part, ast.ExceptHandler | ast.match_case) else [part]
                    yield from _bindings(inner, owner, f"{head}{number}{_condition(part)}")
        else:
            stored = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
            yield from ((owner + name if name else "", around + ast.dump(statement)) for name in stored or [""])


def _condition(part: ast.AST) -> str:
    """What an `except` or a `case` waits for."""
    if isinstance(part, ast.ExceptHandler):
        return ast.dump(part.type) if part.type is not None else "all"
    if isinstance(part, ast.match_case):
        return ast.dump(part.pattern) + (ast.dump(part.guard) if part.guard is not None else "")
    return ""


def _is_block(value: object) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ast.stmt | ast.ExceptHandler | ast.match_case)


def _reads(function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Names that a function's own code takes from outside, and attributes that it takes of anything, with a dot before them."""
    nodes = list(ast.walk(function))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - own
    return frozenset(read | {f".{node.attr}" for node in nodes if isinstance(node, ast.Attribute)})


def _undocumented(node: ast.Module | _Definition) -> None:
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        del node.body[0]


def _is_kernel(decorator: ast.expr) -> bool:
    """Whether a decorator makes a Triton kernel of a function: triton.jit, with or without options."""
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return name in ("jit", "triton.jit")
