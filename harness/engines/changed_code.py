"""Which functions of a Python file changed, which of their statements, and calls that say which of them run."""

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher

from msgspec.structs import replace

from eagletwin.harness.core.differs import ChangedFunction, Point

# Which statements of a function changed, and calls that say which of them run.
#
# A change is located by its points: a statement that is new or differs, or the place where one was removed. Comments and layout
# do not count. A point of a removed statement runs where that statement would have, under the conditions under which it stood;
# a point in an expression that may be passed over, as the second operand of `and`, when that is evaluated.

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


_PLAIN = (
    *(ast.Expression, ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.BinOp, ast.Tuple),
    *(ast.expr_context, ast.cmpop, ast.boolop, ast.unaryop, ast.operator),
)
# Fields that hold an expression that may be passed over.
_OPTIONAL: dict[type[ast.AST], tuple[str, ...]] = {
    ast.IfExp: ("body", "orelse"),
    ast.Lambda: ("body",),
    ast.Assert: ("msg",),
    ast.DictComp: ("key", "value"),
    **dict.fromkeys((ast.ListComp, ast.SetComp, ast.GeneratorExp), ("elt",)),
}
# Calls that change nothing.
_HARMLESS = (
    "isinstance",
    "hasattr",
    "len",
    "is_cuda",
    "is_hip",
    "is_npu",
    "is_xpu",
    "is_cpu",
    "is_musa",
    "is_idle",
    "is_extend",
    "is_decode",
    "is_none",
)


def changed_points(old: Function | None, new: Function, read: Mapping[str, str] | None = None) -> tuple[Point, ...]:
    """The points of a function that changed, in the order of its lines. old None: there was none.

    read  names whose meaning changed outside of the function, with the condition under which it did: a statement that reads
          one is changed as well
    """
    points = list(_Comparison(new).points(old))
    if read:
        points += _reading(new.body, read, _gates(new))
    if not points:  # handlers that changed places, or another function of this name: only who reads a name is known to run
        points = [_entry(new) if read else Point(new.lineno, new.col_offset, "lost")]
    return tuple(sorted(dict.fromkeys(points)))


def entry(function: Function) -> tuple[Point, ...]:
    """The one point of a function that is changed as a whole: it runs with each call."""
    return (_entry(function),)


def _entry(function: Function) -> Point:
    return Point(function.lineno, function.col_offset, "entry")


# Where an `if` or a comparison stands in a changed statement: what a search wants to meet there, nearer and nearer.
_NUMERIC = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_APART = ((0, 0), (1, 1), (2, 4), (5, 16))


def goal_points(function: Function, points: Iterable[Point]) -> tuple[Point, ...]:
    """Of the statements at these points: each `if` taken and not taken, and the two sides of each comparison of numbers so far
    apart. Only what can be evaluated once more."""
    statements, found = _statements(function), list[Point]()
    for line, column in dict.fromkeys(
        (point.line, point.column) for point in points if point.where in ("before", "expression")
    ):
        if (line, column) not in statements:
            continue
        _, statement = statements[line, column]
        tests = list[str]()
        if isinstance(statement, ast.If | ast.While) and _is_pure(test := ast.unparse(statement.test)):
            tests += [test, f"not ({test})"]
        values = [value for _, field in _own_fields(statement) for value in (field if isinstance(field, list) else [field])]
        for one in (node for value in values if isinstance(value, ast.AST) for node in ast.walk(value)):
            if isinstance(one, ast.Compare) and len(one.ops) == 1 and isinstance(one.ops[0], _NUMERIC):
                left, right = ast.unparse(one.left), ast.unparse(one.comparators[0])
                if _is_pure(left) and _is_pure(right):
                    numbers = f"isinstance({left}, int) and isinstance({right}, int)"
                    tests += [f"{numbers} and {least} <= abs(({left}) - ({right})) <= {most}" for least, most in _APART]
        found += [Point(line, column, test=test) for test in dict.fromkeys(tests)]
    return tuple(found)


class _Comparison:
    """Compares a function with what it was."""

    def __init__(self, new: Function) -> None:
        self._new, self._gate = new, _gates(new)

    def points(self, old: Function | None) -> Iterator[Point]:
        if old is None:
            yield from self._whole(self._new.body)
            return
        if _head(old) != _head(self._new):
            yield from _of_defaults(old, self._new) or [_entry(self._new)]
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
                yield from _removal_points(old[i:j], self._gap(new, k))
            elif kind == "replace":
                yield from self._compare_replaced(old[i:j], new, k, m)

    def _compare_replaced(self, old: _Block, block: _Block, first: int, last: int) -> Iterator[Point]:
        """Statements that took the place of others: those that hold blocks are compared by them, by heads that are the same
        first, then in order."""
        new = block[first:last]
        for kind, i, j, k, m in _opcodes([_head(one) for one in old], [_head(one) for one in new]):
            if kind == "equal":
                for before, now in zip(old[i:j], new[k:m], strict=True):
                    yield from self._inside(before, now)
            elif kind == "delete":
                yield from _removal_points(old[i:j], self._gap(block, first + k))
            elif kind == "insert":
                yield from self._whole(new[k:m])
            else:
                for number, now in enumerate(new[k:m]):
                    was = old[i + number] if i + number < j else None
                    if was is not None and type(was) is type(now) and any(True for _ in _blocks(now)):
                        parts = _passed_over(was, now)
                        yield from (replace(self._at(now), where="expression", test=part) for part in parts)
                        yield from () if parts else (self._at(now),)
                        yield from self._inside(was, now)
                    elif was is not None and (parts := _passed_over(was, now)):
                        yield from (replace(self._at(now), where="expression", test=part) for part in parts)
                    else:
                        yield from self._whole([now])
                yield from _removal_points(old[i + m - k : j], self._gap(block, first + m))

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
                yield from _removal_points(before[name], self._at(new, "else"))
            elif name == "finalbody":
                yield from _removal_points(before[name], self._at(new, "after"))
            else:  # an `except` or a `case`: whether it would have been taken cannot be seen
                yield self._at(new, "lost")

    def _gap(self, block: _Block, at: int) -> Point:
        """Where statements were removed from a block."""
        if at < len(block):
            return self._at(block[at])
        return self._at(block[-1], "after") if block else _entry(self._new)


def _of_defaults(old: Function, new: Function) -> list[Point]:
    """Where two heads differ in defaults of arguments alone: each acts in a call whose argument has the value. []: in more."""
    before, now = _defaults(old), _defaults(new)
    heads = [_dump([_without_defaults(one), *one.decorator_list, one.returns]) for one in (old, new)]
    if before.keys() != now.keys() or heads[0] != heads[1]:
        return []
    points = []
    for name, value in now.items():
        if ast.dump(value) != ast.dump(before[name]):
            test = f"{name} {'is' if getattr(value, 'value', 0) in (None, True, False) else '=='} {ast.unparse(value)}"
            points.append(_with_test(_entry(new), test if isinstance(value, ast.Constant) else ""))
    return points


def _without_defaults(function: Function) -> ast.arguments:
    return ast.arguments(**{name: value for name, value in ast.iter_fields(function.args) if "defaults" not in name})


def _defaults(function: Function) -> dict[str, ast.expr]:
    args = function.args
    placed = [*args.posonlyargs, *args.args]
    found = {arg.arg: value for arg, value in zip(placed[len(placed) - len(args.defaults) :], args.defaults, strict=True)}
    return found | {arg.arg: value for arg, value in zip(args.kwonlyargs, args.kw_defaults, strict=True) if value is not None}


def _removal_points(statements: Sequence[ast.stmt], at: Point, test: str = "") -> Iterator[Point]:
    """Where statements were removed: each runs there if what it stood under holds. at: where; test: what holds."""
    for statement in statements:
        if isinstance(statement, ast.If):
            own = ast.unparse(statement.test)
            yield from _removal_points(statement.body, at, _both(test, own))
            yield from _removal_points(statement.orelse, at, _both(test, f"not ({own})"))
        elif isinstance(statement, ast.While):
            yield from _removal_points(statement.body, at, _both(test, ast.unparse(statement.test)))
        elif isinstance(statement, ast.With | ast.AsyncWith | ast.Try):
            yield from _removal_points(statement.body, at, test)
        elif isinstance(statement, ast.Match):
            yield replace(at, where="lost")
        else:
            yield _with_test(at, test) if test else at


def _both(one: str, other: str) -> str:
    return f"({one}) and ({other})" if one else other


def _with_test(at: Point, test: str) -> Point:
    """The point, under a condition; lost if to evaluate that once more might do something."""
    gate = at.gate or (test if _of_device(test) else "")
    return replace(at, test=test, gate=gate) if test and _is_pure(test) else replace(at, where="lost", gate=gate)


def _is_pure(test: str) -> bool:
    nodes = [node for node in ast.walk(ast.parse(test, mode="eval")) if not isinstance(node, _PLAIN)]
    return all(_is_size(node) or (isinstance(node, ast.Call) and _name_of(node.func) in _HARMLESS) for node in nodes)


def _is_size(node: ast.AST) -> bool:
    """Whether it is an element of a shape, as `rows.shape[0]`."""
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Attribute) and node.value.attr == "shape"


def _name_of(node: ast.expr) -> str:
    return ast.unparse(node).rpartition(".")[2]


def _passed_over(old: ast.stmt, new: ast.stmt) -> list[str]:
    """The expressions of a statement that may be passed over and in which alone it differs: operands after the first of `and`
    and `or`, arms of a conditional expression, what a comprehension or a lambda computes, the message of an assertion."""
    found = list[ast.AST]()
    operands = {id(value) for node in ast.walk(new) if isinstance(node, ast.BoolOp) for value in node.values[1:]}

    def differ(was: object, now: object, part: ast.AST | None) -> bool:
        """Whether all that differs is in such an expression. part: the one around."""
        if isinstance(was, ast.AST) and isinstance(now, ast.AST) and type(was) is type(now):
            if ast.dump(was) == ast.dump(now):
                return True
            fields = ((name, getattr(was, name, None), value) for name, value in _own_fields(now))
            return all(differ(one, other, _optional(now, name, other) or part) for name, one, other in fields)
        if isinstance(was, list) and isinstance(now, list) and len(was) == len(now):
            return all(
                differ(one, other, other if id(other) in operands else part) for one, other in zip(was, now, strict=True)
            )
        if was == now or (isinstance(was, ast.AST) and isinstance(now, ast.AST) and ast.dump(was) == ast.dump(now)):
            return True
        if part is not None:
            found.append(part)
        return part is not None

    return list(dict.fromkeys(ast.unparse(part) for part in found)) if differ(old, new, None) else []


def _optional(node: ast.AST, name: str, value: object) -> ast.AST | None:
    """The value of a field, if it is an expression that may be passed over."""
    return value if isinstance(value, ast.expr) and name in _OPTIONAL.get(type(node), ()) else None


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
    for number, handler in enumerate(getattr(statement, "handlers", ())):
        yield f"handlers {ast.dump(handler.type) if handler.type is not None else number}", handler.body
    for number, case in enumerate(getattr(statement, "cases", ())):
        guard = ast.dump(case.guard) if case.guard is not None else ""
        yield f"cases {number} {ast.dump(case.pattern)} {guard}", case.body


def _head(statement: ast.AST) -> str:
    """A statement without the blocks that it holds."""
    parts = [f"{name}={_dump(value)}" for name, value in _own_fields(statement)]
    return f"{type(statement).__name__}({', '.join(parts)})"


def _own_fields(statement: ast.AST) -> Iterator[tuple[str, object]]:
    """The fields of a statement that are no blocks."""
    return ((name, value) for name, value in ast.iter_fields(statement) if not (name in _HELD and isinstance(value, list)))


def _dump(value: object) -> str:
    if isinstance(value, list):
        return f"[{', '.join(_dump(one) for one in value)}]"
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)


def _reading(block: Sequence[ast.stmt], read: Mapping[str, str], gates: Mapping[int, str]) -> Iterator[Point]:
    """The statements that read one of these names themselves, and not in a block that they hold."""
    for statement in block:
        own = (value if isinstance(value, list) else [value] for _, value in _own_fields(statement))
        nodes = (node for values in own for one in values if isinstance(one, ast.AST) for node in ast.walk(one))
        tests = {read[name] for node in nodes if (name := _name(node)) in read}
        if tests:
            point = Point(statement.lineno, statement.col_offset, "before", gates.get(id(statement), ""))
            yield from [point] if "" in tests else [_with_test(point, test) for test in sorted(tests)]
        for _, each in _blocks(statement):
            yield from _reading(each, read, gates)


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return _attribute(node)
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else ""


def _gates(function: Function) -> dict[int, str]:
    """The conditions on the device under which statements stand, by the statement's id."""
    found: dict[int, str] = {}

    def visit(block: Sequence[ast.stmt], gate: str) -> None:
        for statement in block:
            found[id(statement)] = gate
            inner = gate
            if isinstance(statement, ast.If) and _of_device(ast.unparse(statement.test)):
                inner = ast.unparse(statement.test)
            for name, each in _blocks(statement):
                visit(each, f"not ({inner})" if name == "orelse" and inner != gate else inner)
            if inner != gate and isinstance(statement, ast.If) and isinstance(statement.body[-1], _ENDS):
                gate = f"not ({inner})"

    visit(function.body, "")
    return found


def _of_device(test: str) -> bool:
    text = test.lower()
    return any(word in text for word in _DEVICE)


def add_calls(tree: ast.AST, points: Iterable[tuple[Point, str]], name: str) -> None:
    """Have the code at each point call the global `name` with its text first. Lines keep their numbers. A point that this tree
    lacks is left out, and so never runs."""
    blocks = _statements(tree)
    for point, text in points:
        note = ast.Expr(ast.Call(ast.Name(name, ast.Load()), [ast.Constant(text)], []))
        found = blocks.get((point.line, point.column)) or blocks.get((point.line, -1))
        if found is None or point.where == "lost":
            continue
        block, statement = found
        if point.where == "expression":
            _Wrap(point.test, note).wrap(statement)
            continue
        call = _under(point.test, note) if point.test else note
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


def _under(test: str, call: ast.stmt) -> ast.stmt:
    """The call if a condition holds, which may name what this place lacks."""
    condition = ast.If(ast.parse(test, mode="eval").body, [call], [])
    return ast.Try([condition], [ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [ast.Pass()])], [], [])


class _Wrap(ast.NodeTransformer):
    """Has an expression call first when it is evaluated."""

    def __init__(self, text: str, call: ast.Expr) -> None:
        self._text, self._call = text, call.value

    def wrap(self, statement: ast.stmt) -> None:
        """Wherever the statement itself reads it, and not in blocks that it holds."""
        held = {name: getattr(statement, name) for name in _HELD if hasattr(statement, name)}
        for name in held:
            setattr(statement, name, [])
        self.generic_visit(statement)
        for name, block in held.items():
            setattr(statement, name, block)

    def _in_text(self, node: ast.JoinedStr) -> ast.AST:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                part.value = self.visit(part.value)  # type: ignore[assignment]
        return node

    def visit(self, node: ast.AST) -> ast.AST:
        stored = not isinstance(getattr(node, "ctx", ast.Load()), ast.Load)
        if not isinstance(node, ast.expr) or stored or ast.unparse(node) != self._text:
            return self._in_text(node) if isinstance(node, ast.JoinedStr) else self.generic_visit(node)
        both = ast.Subscript(ast.Tuple([self._call, node], ast.Load()), ast.Constant(1), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(both, node))


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

_DIGITS = 16  # hexadecimal digits that name the code of a function
_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Changed:
    """places: functions of the new source that changed; removed: names of those that it has no more; outside: whether code
    outside of functions changed. Names begin with the module's."""

    places: tuple[ChangedFunction, ...]
    removed: tuple[str, ...]
    outside: bool


def compare_sources(old: str | bytes | None, new: str | bytes, module: str) -> Changed:
    """Compare two sources of a module; old None: there was none, or it is not at hand, and each function counts as changed as a
    whole. Raises SyntaxError for one of them."""
    before, now = _read(old or ""), _read(new)
    known, counted = _number_functions(before.functions), _number_functions(now.functions)
    names = {one.name for one in now.functions}
    removed = tuple(dict.fromkeys(one.name for one in before.functions if one.name not in names))
    changes = set(_in_order(before.bindings)) ^ set(_in_order(now.bindings))
    bound = {name for name, *_ in changes}
    read = dict.fromkeys(removed, "")
    for name, code, _ in changes:
        test = before.tests.get((name, code)) or now.tests.get((name, code), "")
        read[name] = test if read.get(name, test) == test else ""
    earlier = {(number[0], number[2]): one for one, number in zip(before.functions, known, strict=True)}
    places = tuple(
        ChangedFunction(
            f"{module}.{one.name}",
            one.line,
            one.kernel,
            points,
            code=hashlib.sha256(one.code.encode()).hexdigest()[:_DIGITS],
            goals=() if one.kernel else goal_points(one.node, points),
        )
        for one, number in zip(now.functions, counted, strict=True)
        for own in [_as_read(read, one.owner, now.bases)]
        if number not in known or not one.reads.isdisjoint(own) or (one.owner and one.owner in bound)
        for points in [
            _points(
                one,
                earlier.get((number[0], number[2])),
                old is None,
                {name: test for name, test in own.items() if name in one.reads},
                bound,
            )
        ]
    )
    return Changed(places, tuple(f"{module}.{name}" for name in removed), bool(bound))


def _as_read(names: Mapping[str, str], owner: str, bases: Mapping[str, list[str]]) -> dict[str, str]:
    """These names of a module as a function with this class reads them: `self.x` for an attribute of the class or of a base of
    it in the module."""
    classes, found = [owner], dict(names)
    for one in classes:
        classes += [base for base in bases.get(one, ()) if base not in classes]
    for name, test in names.items():
        of, _, attribute = name.rpartition(".")
        if of and of in classes:
            found |= dict.fromkeys((f"self.{attribute}", f"cls.{attribute}", f"super().{attribute}"), test)
    return found


def _points(
    one: "_Function", before: "_Function | None", unlisted: bool, read: Mapping[str, str], bound: set[str]
) -> tuple[Point, ...]:
    """What changed in a function. unlisted: what it was is not known."""
    if unlisted:
        return entry(one.node)
    if before is None:
        return changed_points(None, one.node)
    points = changed_points(before.node, one.node, read)
    if one.kernel:  # Triton compiles no expression that calls, and no handler
        points = tuple(
            replace(point, where="before" if point.where == "expression" else point.where, test="") for point in points
        )
    return points if one.owner not in bound else tuple(sorted({*points, *entry(one.node)}))


def _number_functions(functions: "Sequence[_Function]") -> list[tuple[object, ...]]:
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
    bases: dict[str, list[str]] = field(default_factory=dict)
    tests: dict[tuple[str, str], str] = field(default_factory=dict)

    def bind(self, bindings: Iterable[tuple[str, str, str]]) -> None:
        for name, code, test in bindings:
            self.bindings.append((name, code))
            self.tests[name, code] = test


def _read(source: str | bytes) -> _Source:
    found = _Source()
    tree = ast.parse(source)
    _Take(found).visit(tree)
    _strip_docstring(tree)
    found.bind(_bindings(tree.body, "", ""))
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
        _strip_docstring(node)
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
        self._found.bases[name] = [ast.unparse(base) for base in node.bases]
        self._found.bind(_bindings(node.body, f"{name}.", ""))
        return ast.copy_location(_mark(name), node)


class _Mark(ast.Pass):
    """Stands where a function or a class was."""

    _fields = ("name",)


def _mark(name: str) -> ast.AST:
    mark = _Mark()
    mark.name = name  # type: ignore[attr-defined]
    return mark


def _bindings(statements: Sequence[ast.stmt], owner: str, around: str, test: str = "") -> Iterator[tuple[str, str, str]]:
    """What code outside of functions binds, one name at a time, and under which condition on the device. An import that takes
    one name more changes that name alone."""
    for statement in statements:
        if isinstance(statement, _Mark):
            if around:  # where a function stands does not matter, but for the condition that it stands under
                yield owner + statement.name.rpartition(".")[2], around, test  # type: ignore[attr-defined]
        elif isinstance(statement, ast.Import | ast.ImportFrom):
            place = f"{statement.level}{statement.module}" if isinstance(statement, ast.ImportFrom) else ""
            for one in statement.names:
                bound = one.asname or (one.name if place else one.name.partition(".")[0])
                yield owner + bound, f"{around}import {place} {one.name}", test
        elif blocks := [value for _, value in ast.iter_fields(statement) if _is_block(value)]:
            head = around + type(statement).__name__
            values = [value for _, value in ast.iter_fields(statement) if value not in blocks]
            parts = (part for value in values for part in (value if isinstance(value, list) else [value]))
            head += "".join(ast.dump(part) for part in parts if isinstance(part, ast.AST))
            for number, block in enumerate(blocks):
                own = (
                    ast.unparse(statement.test)
                    if isinstance(statement, ast.If) and _of_device(ast.unparse(statement.test))
                    else ""
                )
                within = _both(test, f"not ({own})" if number else own) if own else test
                for part in block:
                    inner = part.body if isinstance(part, ast.ExceptHandler | ast.match_case) else [part]
                    yield from _bindings(inner, owner, f"{head}{number}{_condition(part)}", within)
        else:
            stored = [node.id for node in ast.walk(statement) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
            yield from ((owner + name if name else "", around + ast.dump(statement), test) for name in stored or [""])


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
    """Names that a function's own code takes from outside, and attributes that it takes of a name."""
    nodes = list(ast.walk(function))
    own = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    read = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)} - own
    return frozenset(read | {_attribute(node) for node in nodes if isinstance(node, ast.Attribute)})


def _attribute(node: ast.Attribute) -> str:
    """An attribute of a name, or of `super()`; "" of anything else, whose class is not known."""
    if isinstance(node.value, ast.Call):
        return f"super().{node.attr}" if isinstance(node.value.func, ast.Name) and node.value.func.id == "super" else ""
    return f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""


def _strip_docstring(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.Module | _Definition)
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        del node.body[0]
    return node


def _is_kernel(decorator: ast.expr) -> bool:
    """Whether a decorator makes a Triton kernel of a function: triton.jit, with or without options."""
    name = ast.unparse(decorator.func if isinstance(decorator, ast.Call) else decorator)
    return name in ("jit", "triton.jit")


# Which functions of a module differ in their bodies alone: those that take other code where they are, without an import.

# Decorators that neither read the code of a function nor run it; torch.compile gives the function back (boot/preimport.py).
_LEAVE_CODE_ALONE = frozenset(
    "abstractmethod asynccontextmanager cache cached_property classmethod compile contextmanager deleter getter "  # noqa: SIM905
    "inference_mode lru_cache no_grad override property setter staticmethod wraps".split()
)


def changed_bodies(old: bytes, new: bytes) -> frozenset[str] | None:
    """The names of the outermost functions and methods whose bodies differ, docstrings apart. None: something else differs as
    well, or a decorator of one of them may have read its code. Raises SyntaxError."""
    before, now = _Bodies(), _Bodies()
    outside, outside_now = (
        ast.dump(_strip_docstring(taken.visit(ast.parse(source)))) for taken, source in ((before, old), (now, new))
    )
    if outside != outside_now:
        return None
    changed = [one for one, was in zip(now.found, before.found, strict=True) if one != was]
    if any(decorator not in _LEAVE_CODE_ALONE for _, decorators, _ in changed for decorator in decorators):
        return None
    return frozenset(name for name, *_ in changed)


class _Bodies(ast.NodeTransformer):
    """Takes the bodies out of the functions of a module and of its classes: (name, decorators, body)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, tuple[str, ...], str]] = []
        self._within: list[str] = []

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        self._within.append(node.name)
        self.generic_visit(node)
        self._within.pop()
        return _strip_docstring(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
        return self._function(node)

    def _function(self, node: Function) -> ast.AST:
        for inner in ast.walk(node):
            if isinstance(inner, _Definition):
                _strip_docstring(inner)
        calls = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
        decorators = tuple(ast.unparse(one).rpartition(".")[2] for one in calls)
        self.found.append((".".join((*self._within, node.name)), decorators, _dump(node.body)))
        node.body = []
        return node
