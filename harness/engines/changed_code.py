"""Which functions of a Python file changed, which of their statements, and calls that say which of them run."""

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from eagletwin.harness.core.differs import ChangedFunction, Point

# Which statements of a function changed, and calls that say which of them run.
#
# A change is located by its points: a statement that is new or differs, or the place where one was removed. Comments and layout
# do not count. A point of a removed statement runs where that statement would have.

Function = ast.FunctionDef | ast.AsyncFunctionDef
_Block = list[ast.stmt]
_BLOCKS = ("body", "orelse", "finalbody")
_HELD = (*_BLOCKS, "handlers", "cases")
_ENDS = (ast.Return, ast.Raise, ast.Continue, ast.Break)
# What a condition names that decides by the device.
_DEVICE = (
    "cuda",
    "is_hip",
    "_hip",
    "is_npu",
    "_npu",
    "is_xpu",
    "_xpu",
    "is_musa",
    "is_cpu",
    "_is_amx",
    "device_type",
    "capability",
)


def changed_points(old: Function | None, new: Function, read: frozenset[str] = frozenset()) -> tuple[Point, ...]:
    """The points of a function that changed, in the order of its lines. old None: there was none.

    read  names and .attributes whose meaning changed outside of the function: a statement that reads one is changed as well
    """
    points = list(_Comparison(new).points(old))
    if read:
        points += _reading(new.body, read, _gates(new))
    return tuple(sorted(dict.fromkeys(points))) or (_entry(new),)


def entry(function: Function) -> tuple[Point, ...]:
    """The one point of a function that is changed as a whole: it runs with each call."""
    return (_entry(function),)


def _entry(function: Function) -> Point:
    return Point(function.lineno, function.col_offset, "entry")


class _Comparison:
    """Compares a function with what it was."""

    def __init__(self, new: Function) -> None:
        self._new, self._gate = new, _gates(new)

    def points(self, old: Function | None) -> Iterator[Point]:
        if old is None:
            yield from self._whole(self._new.body)
            return
        if _head(old) != _head(self._new):
            yield _entry(self._new)
        yield from self._block(old.body, self._new.body)

    def _at(self, statement: ast.stmt, where: str = "before") -> Point:
        return Point(statement.lineno, statement.col_offset, where, self._gate.get(id(statement), ""))  # type: ignore[arg-type]

    def _whole(self, block: Sequence[ast.stmt]) -> Iterator[Point]:
        """A block that is new: each statement in it."""
        for statement in block:
            yield self._at(statement)
            for _, inner in _blocks(statement):
                yield from self._whole(inner)

    def _block(self, old: _Block, new: _Block) -> Iterator[Point]:
        for kind, i, j, k, m in _opcodes([ast.dump(one) for one in old], [ast.dump(one) for one in new]):
            if kind == "insert":
                yield from self._whole(new[k:m])
            elif kind == "delete":
                yield self._gap(new, k)
            elif kind == "replace":
                yield from self._replaced(old[i:j], new, k, m)

    def _replaced(self, old: _Block, block: _Block, first: int, last: int) -> Iterator[Point]:
        """Statements that took the place of others: those that hold blocks are compared by them, by heads that are the same
        first, then in order."""
        new = block[first:last]
        for kind, i, j, k, m in _opcodes([_head(one) for one in old], [_head(one) for one in new]):
            if kind == "equal":
                for before, now in zip(old[i:j], new[k:m], strict=True):
                    yield from self._inside(before, now)
            elif kind == "delete":
                yield self._gap(block, first + k)
            elif kind == "insert":
                yield from self._whole(new[k:m])
            else:
                for number, now in enumerate(new[k:m]):
                    was = old[i + number] if i + number < j else None
                    if was is not None and type(was) is type(now) and any(True for _ in _blocks(now)):
                        yield self._at(now)
                        yield from self._inside(was, now)
                    else:
                        yield from self._whole([now])
                if j - i > m - k:
                    yield self._gap(block, first + m)

    def _inside(self, old: ast.stmt, new: ast.stmt) -> Iterator[Point]:
        """The blocks of two statements of one kind."""
        before, now = dict(_blocks(old)), dict(_blocks(new))
        for name, block in now.items():
            if name in before:
                yield from self._block(before[name], block)
            else:
                yield from self._whole(block)
        for name in before.keys() - now.keys():
            if name == "orelse":
                yield self._at(new, "else")
            elif name == "finalbody":
                yield self._at(new, "after")
            else:  # an `except` or a `case`: whether it would have been taken cannot be seen
                yield self._at(new, "lost")

    def _gap(self, block: _Block, at: int) -> Point:
        """Where statements were removed from a block."""
        if at < len(block):
            return self._at(block[at])
        return self._at(block[-1], "after") if block else _entry(self._new)


def _opcodes(old: list[str], new: list[str]) -> list[tuple[str, int, int, int, int]]:
    return list(SequenceMatcher(None, old, new, autojunk=False).get_opcodes())


def _blocks(statement: ast.AST) -> Iterator[tuple[str, _Block]]:
    """The blocks of a statement, by name: `handlers` and `cases` have one for each, named by what it waits for."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return  # compared by themselves
    for name in _BLOCKS:
        block = getattr(statement, name, None)
        if isinstance(block, list) and block:
            yield name, block
    for handler in getattr(statement, "handlers", ()):
        yield f"handlers {ast.dump(handler.type) if handler.type is not None else ''}", handler.body
    for case in getattr(statement, "cases", ()):
        guard = ast.dump(case.guard) if case.guard is not None else ""
        yield f"cases {ast.dump(case.pattern)} {guard}", case.body


def _head(statement: ast.AST) -> str:
    """A statement without the blocks that it holds."""
    parts = [f"{name}={_dumped(value)}" for name, value in _own_fields(statement)]
    return f"{type(statement).__name__}({', '.join(parts)})"


def _own_fields(statement: ast.AST) -> Iterator[tuple[str, object]]:
    """The fields of a statement that are no blocks."""
    return ((name, value) for name, value in ast.iter_fields(statement) if not (name in _HELD and isinstance(value, list)))


def _dumped(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_dumped(one) for one in value)}]"
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)


def _reading(block: Sequence[ast.stmt], read: frozenset[str], gates: Mapping[int, str]) -> Iterator[Point]:
    """The statements that read one of these names themselves, and not in a block that they hold."""
    for statement in block:
        own = (value if isinstance(value, list) else [value] for _, value in _own_fields(statement))
        nodes = (node for values in own for one in values if isinstance(one, ast.AST) for node in ast.walk(one))
        if any(_name(node) in read for node in nodes):
            yield Point(statement.lineno, statement.col_offset, "before", gates.get(id(statement), ""))
        for _, each in _blocks(statement):
            yield from _reading(each, read, gates)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f".{node.attr}"
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""


def _gates(function: Function) -> dict[int, str]:
    """The conditions on the device under which statements stand, by the statement's id."""
    found: dict[int, str] = {}

    def visit(block: Sequence[ast.stmt], gate: str) -> None:
        for statement in block:
            found[id(statement)] = gate
            inner = gate
            if isinstance(statement, ast.If) and _of_device(statement.test):
                inner = ast.unparse(statement.test)
            for name, each in _blocks(statement):
                visit(each, f"not ({inner})" if name == "orelse" and inner != gate else inner)
            if inner != gate and isinstance(statement, ast.If) and isinstance(statement.body[-1], _ENDS):
                gate = f"not ({inner})"

    visit(function.body, "")
    return found


def _of_device(test: ast.expr) -> bool:
    text = ast.unparse(test).lower()
    return any(word in text for word in _DEVICE)


def add_calls(tree: ast.AST, points: Iterable[tuple[Point, str]], name: str) -> None:
    """Have the code at each point call the global `name` with its text first. Lines keep their numbers. A point that this tree
    lacks is left out, and so never runs."""
    blocks = _statements(tree)
    for point, text in points:
        call = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [ast.Constant(text)], []))
        found = blocks.get((point.line, point.column)) or blocks.get((point.line, -1))
        if found is None or point.where == "lost":
            continue
        block, statement = found
        ast.fix_missing_locations(ast.copy_location(call, statement))
        if point.where == "entry" and isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            documented = ast.get_docstring(statement, clean=False) is not None
            at = statement.body[documented] if len(statement.body) > documented else statement.body[0]
            ast.fix_missing_locations(ast.copy_location(call, at))
            statement.body.insert(int(documented), call)
        elif point.where == "else":
            statement.orelse.insert(0, call)  # type: ignore[attr-defined]
        else:
            block.insert(block.index(statement) + (point.where == "after"), call)


def _statements(tree: ast.AST) -> dict[tuple[int, int], tuple[_Block, ast.stmt]]:
    """Each statement and the block that it stands in, by line and column; under column -1 the first of a line, for a source
    without its indentation."""
    found: dict[tuple[int, int], tuple[_Block, ast.stmt]] = {}
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, list):
                for statement in value:
                    if isinstance(statement, ast.stmt):
                        found[statement.lineno, statement.col_offset] = value, statement
                        found.setdefault((statement.lineno, -1), (value, statement))
    return found


# Which functions of a Python file changed: two sources in, names out. Comments, docstrings and places do not count.
#
# A function counts as changed if its own code did, decorators and defaults included; functions defined inside it count by
# themselves. It also counts as changed if it reads a name whose binding in its module or class changed: a constant, an import,
# a function that was removed.

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
