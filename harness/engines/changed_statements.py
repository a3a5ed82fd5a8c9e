"""Which statements of a function changed, and calls that say which of them run.

A change is located by its points: a statement that is new or differs, or the place where one was removed. Comments and layout
do not count. A point of a removed statement runs where that statement would have.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher

from eagletwin.harness.core.differs import Point

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
