"""Which functions and statements a change touches, which of them ran, and when an equal case says nothing of it."""

import ast
import textwrap
from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.harness.commands.fuzz.effect import edits_between
from eagletwin.harness.core.differs import (
    Changes,
    Differs,
    Point,
    merge_differs,
    needs_cuda,
    together,
    unknown_changes,
    with_executed,
)
from eagletwin.harness.engines.changed_code import add_calls, compare_sources

# Which functions of a file changed: those whose own code did, and those that read a name that means something else now.


OLD = '''
"""What the module is for."""
import os
from typing import List

LIMIT = 4

if os.name == "posix":
    from a import place
else:
    from b import place


def untouched(x):
    """Says what it does."""
    # and how
    return x + 1


def reads_limit(x):
    return x < LIMIT


def shadows_limit(LIMIT):
    return LIMIT


def reads_place():
    return place()


def outer():
    def inner():
        return 1

    return inner


def helper():
    return 2


def calls_helper():
    return helper()


class Worker:
    width = 3

    def run(self):
        return 1

    def wide(self):
        return self.width

    @property
    def name(self):
        return "a"

    @name.setter
    def name(self, value):
        pass


@triton.jit
def kernel(pointer):
    store(pointer, 0)


@triton.jit(do_not_specialize=["n"])
def sized_kernel(pointer, n):
    store(pointer, n)
'''

CHANGES = {
    "nothing": (("", ""), set(), set(), False),
    "a comment": (("# and how", "# and why"), set(), set(), False),
    "a docstring": (("Says what it does", "Adds one"), set(), set(), False),
    "the docstring of the module": (("What the module is for", "A module"), set(), set(), False),
    "a body": (("return x + 1", "return x + 2"), {"untouched"}, set(), False),
    "a default": (("def untouched(x)", "def untouched(x=1)"), {"untouched"}, set(), False),
    "a decorator": (("@property\n", "@cached_property\n"), {"Worker.name"}, set(), False),
    "one of two of one name": (("        pass", "        self._name = value"), {"Worker.name"}, set(), False),
    "a function in a function": (
        ("return 1\n\n    return inner", "return 3\n\n    return inner"),
        {"outer.inner"},
        set(),
        False,
    ),
    "what is around a function": (("    return inner", "    return inner()"), {"outer"}, set(), False),
    "a method": (("return 1\n\n    def wide", "return 2\n\n    def wide"), {"Worker.run"}, set(), False),
    "a constant": (("LIMIT = 4", "LIMIT = 5"), {"reads_limit"}, set(), True),
    "an attribute of a class": (("width = 3", "width = 4"), {"Worker.wide"}, set(), True),
    "an import that takes one name more": (("import List", "import List, Tuple"), set(), set(), True),
    "an import from elsewhere": (("from a import place", "from c import place"), {"reads_place"}, set(), True),
    "a condition": (('== "posix"', '!= "posix"'), {"reads_place"}, set(), True),
    "a base class": (("class Worker:", "class Worker(Base):"), {"Worker.run", "Worker.wide", "Worker.name"}, set(), True),
    "a function that is gone": (("def helper():\n    return 2\n", ""), {"calls_helper"}, {"helper"}, False),
    "a function that is new": (("def helper():", "def new():\n    pass\n\n\ndef helper():"), {"new"}, set(), False),
    "a kernel": (("store(pointer, 0)", "store(pointer, 1)"), {"kernel"}, set(), False),
    "lines": (("import os\n", "import os\n\n\n\n"), set(), set(), False),
}


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_the_functions_that_a_change_reaches_are_named(what: str) -> None:
    (old, new), functions, removed, outside = CHANGES[what]
    assert OLD.count(old) == 1 or not old
    text = OLD.replace(old, new) if old else OLD
    found = compare_sources(OLD, text, "m")
    assert {place.name for place in found.places} == {f"m.{name}" for name in functions}
    assert set(found.removed) == {f"m.{name}" for name in removed}
    assert found.outside == outside
    lines = text.splitlines()
    for place in found.places:
        assert f"def {place.name.rpartition('.')[2]}(" in lines[place.line - 1]


def test_kernels_are_distinguished_from_functions() -> None:
    kernels = {place.name for place in compare_sources(None, OLD, "m").places if place.kernel}
    assert kernels == {"m.kernel", "m.sized_kernel"}


def test_all_functions_of_a_new_file_are_new() -> None:
    found = compare_sources(None, "def f():\n    pass\n", "m")
    assert [place.name for place in found.places] == ["m.f"]
    assert not found.removed


TWINS = {
    "bodies that change places": (
        "if A:\n    def f():\n        return 1\nelse:\n    def f():\n        return 2\n",
        "if A:\n    def f():\n        return 2\nelse:\n    def f():\n        return 1\n",
    ),
    "another one is the last": (
        "def f():\n    return 1\n\ndef f():\n    return 2\n",
        "def f():\n    return 2\n\ndef f():\n    return 1\n",
    ),
    "the last is gone": ("def f():\n    return 1\n\ndef f():\n    return 2\n", "def f():\n    return 1\n"),
    "a value that is bound in another order": (
        "x = 1\nx = 2\ndef f():\n    return x\n",
        "x = 2\nx = 1\ndef f():\n    return x\n",
    ),
    "a value that is added to once more": (
        "x = 1\nx += 1\ndef f():\n    return x\n",
        "x = 1\nx += 1\nx += 1\ndef f():\n    return x\n",
    ),
    "what an except waits for": (
        "try:\n    from a import b\nexcept OSError:\n    b = 1\ndef f():\n    return b\n",
        "try:\n    from a import b\nexcept ImportError:\n    b = 1\ndef f():\n    return b\n",
    ),
}


@pytest.mark.parametrize("what", sorted(TWINS))
def test_of_what_has_one_name_twice_the_order_counts(what: str) -> None:
    assert "m.f" in {place.name for place in compare_sources(*TWINS[what], "m").places}


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.5.23", True), ("0.5.12.post1+dirty.12345678", True), ("tree-12345678", False), ("a1b2c3d4e5", False)],
)
def test_a_tree_without_a_base_is_told(version: str, known: bool) -> None:
    assert (unknown_changes(version) == "") is known


# Which statements of a function changed, and that each of them is noted when it runs, and only then.


STATEMENTS_OLD = '''
def f(x, seen):
    """Says what it does."""
    seen.append("begin")
    if x > 3:
        seen.append("large")
        seen.append("very")
    elif x < 0:
        seen.append("negative")
    else:
        seen.append("small")
    for number in range(x):
        seen.append(number)
    try:
        seen.append(1 / x)
    except ZeroDivisionError:
        seen.append("zero")
    if seen: return seen
    return None
'''

# (old, new, the points that ran with x = 5, with x = 0, and those that ran with neither): by the text of their lines
EDITS = {
    "a statement": ('append("large")', 'append("LARGE")', {'seen.append("LARGE")'}, set(), set()),
    "a condition": ("x > 3", "x >= 3", {"if x >= 3:"}, {"if x >= 3:"}, set()),
    "the condition of an elif": ("x < 0", "x <= 0", set(), {"elif x <= 0:"}, set()),
    "what never runs": ('append("negative")', 'append("below")', set(), set(), {'seen.append("below")'}),
    "a raise that is new, under a condition": (
        '        seen.append("negative")',
        '        raise ValueError\n        seen.append("negative")',
        set(),
        set(),
        {"raise ValueError"},
    ),
    "a statement that is gone, before another": ('        seen.append("large")\n', "", {'seen.append("very")'}, set(), set()),
    "a statement that is gone, at a block's end": ('        seen.append("very")\n', "", {'seen.append("large")'}, set(), set()),
    "an else that is gone": ('    else:\n        seen.append("small")\n', "", set(), {"elif x < 0:"}, set()),
    "the body of a loop": ("append(number)", "append(-number)", {"seen.append(-number)"}, set(), set()),
    "the list of a loop": ("range(x)", "range(x + 1)", {"for number in range(x + 1):"}, {"for number in range(x + 1):"}, set()),
    "a handler": ('append("zero")', 'append("none")', set(), {'seen.append("none")'}, set()),
    "a handler of another exception": (
        "ZeroDivisionError",
        "ArithmeticError",
        set(),
        {'seen.append("zero")'},
        {"try:"},  # the handler that is gone, which nothing notes
    ),
    "one of two statements of a line": (
        "return seen",
        "return [*seen]",
        {"if seen: return [*seen]"},
        {"if seen: return [*seen]"},
        set(),
    ),
    "a default": ("seen):", "seen=None):", {"def f(x, seen=None):"}, {"def f(x, seen=None):"}, set()),
    "a comment": ('    seen.append("begin")', '    # at first\n    seen.append("begin")', set(), set(), set()),
}


def noted(new: str, points: tuple[Point, ...], x: int) -> set[Point]:
    """The points that run."""
    tree, ran = ast.parse(new), set[int]()
    add_calls(tree, [(point, number) for number, point in enumerate(points)], "_note")  # type: ignore[misc]
    scope = {"_note": ran.add}
    exec(compile(tree, "f.py", "exec"), scope)
    plain: dict[str, object] = {}
    exec(new, plain)
    assert scope["f"](x, []) == plain["f"](x, [])  # type: ignore[operator]
    return {points[number] for number in ran}


@pytest.mark.parametrize("what", EDITS)
def test_each_changed_statement_is_noted_when_it_runs(what: str) -> None:
    old, text, large, zero, never = EDITS[what]
    assert STATEMENTS_OLD.count(old) == 1
    new = STATEMENTS_OLD.replace(old, text)
    points = tuple(point for place in compare_sources(STATEMENTS_OLD, new, "m").places for point in place.points)
    lines = new.splitlines()

    def texts(some: set[Point]) -> set[str]:
        return {lines[point.line - 1].strip() for point in some}

    ran = noted(new, points, 5), noted(new, points, 0)
    assert texts(ran[0]) == large
    assert texts(ran[1]) == zero
    assert texts({*points} - ran[0] - ran[1]) == never


GATED = """
def f(x):
    if x.is_cuda:
        a = 1
        return a
    b = 1
    if _is_hip:
        c = 1
    elif x.size > 1:
        d = 1
    return b
"""


def test_a_statement_says_under_which_condition_on_the_device_it_stands() -> None:
    new = GATED.replace("= 1", "= 2")
    points = compare_sources(GATED, new, "m").places[0].points
    lines = new.splitlines()
    gates = {lines[point.line - 1].strip(): point.gate for point in points}
    assert gates == {"a = 2": "x.is_cuda", "b = 2": "not (x.is_cuda)", "c = 2": "_is_hip", "d = 2": "not (_is_hip)"}


def test_places_of_one_line_are_told_apart() -> None:
    [place] = compare_sources("def f(x):\n    if x: y = 1; z = 1\n", "def f(x):\n    if x: y = 2; z = 2\n", "m").places
    assert place.of_file("m.py").places == ("m.py:2:11", "m.py:2:18")


def test_a_function_whose_original_is_not_at_hand_counts_as_a_whole() -> None:
    [unlisted] = compare_sources(None, "def f(x):\n    a = x\n    return a\n", "m").places
    assert [point.where for point in unlisted.points] == ["entry"]
    [new] = compare_sources("", "def f(x):\n    a = x\n    return a\n", "m").places
    assert [(point.line, point.where) for point in new.points] == [(2, "before"), (3, "before")]


class Device:
    is_cuda, size = False, 3


# (old, new, whether the change acts where x is a Device of no GPU): the body of a function of x, y and seen
CONDITIONAL = {
    "an if that is gone": ("seen.append(1)\nif x.is_cuda:\n    seen.append(2)\n", "seen.append(1)\n", False),
    "an if that is gone, whose condition holds": ("seen.append(1)\nif x.size:\n    seen.append(2)\n", "seen.append(1)\n", True),
    "an else that is gone": (
        "if x.is_cuda:\n    seen.append(1)\nelse:\n    seen.append(2)\n",
        "if x.is_cuda:\n    seen.append(1)\n",
        True,
    ),
    "an elif that is gone": (
        "if x.size > 5:\n    seen.append(1)\nelif x.is_cuda:\n    seen.append(2)\n",
        "if x.size > 5:\n    seen.append(1)\n",
        False,
    ),
    "an early return that is gone": ("if x.is_cuda:\n    return 1\nseen.append(2)\n", "seen.append(2)\n", False),
    "an if in an if that is gone": (
        "if x.size:\n    if x.is_cuda:\n        seen.append(2)\nseen.append(1)\n",
        "seen.append(1)\n",
        False,
    ),
    "a condition that does something": ("if seen.append(3):\n    seen.append(2)\nseen.append(1)\n", "seen.append(1)\n", False),
    "a try that is gone": ("try:\n    seen.append(2)\nfinally:\n    pass\nseen.append(1)\n", "seen.append(1)\n", True),
    "an operand that is passed over": (
        "if x.is_cuda and x.size > 1:\n    seen.append(1)\n",
        "if x.is_cuda and x.size > 2:\n    seen.append(1)\n",
        False,
    ),
    "an operand that is read": (
        "if x.size and x.size > 1:\n    seen.append(1)\n",
        "if x.size and x.size > 2:\n    seen.append(1)\n",
        True,
    ),
    "an operand that is bound as well": ("z = 0\nz = x.is_cuda and y\n", "z = 0\nz = x.is_cuda and z\n", False),
    "an operand that a block repeats": (
        "if x.size and x.is_cuda:\n    match y:\n        case x.size:\n            pass\n",
        "if x.size and x.size:\n    match y:\n        case x.size:\n            pass\n",
        True,
    ),
    "an operand that is a part of a text": ("z = x.is_cuda and 'a'\n", "z = x.is_cuda and f'b{y}'\n", False),
    "a text in an operand": ("z = x.size and f'b{y}'\n", "z = x.size and f'b{y + 1}'\n", True),
    "an operator": ("z = x.is_cuda and y\n", "z = x.is_cuda or y\n", True),
    "an arm that is not taken": ("z = y if x.is_cuda else x.size\n", "z = y + 1 if x.is_cuda else x.size\n", False),
    "an arm that is taken": ("z = y if x.is_cuda else x.size\n", "z = y if x.is_cuda else x.size + 1\n", True),
    "the condition of an arm": ("z = y if x.is_cuda else 1\n", "z = y if x.size else 1\n", True),
    "a comprehension of nothing": ("z = [y for one in ()]\n", "z = [y + 1 for one in ()]\n", False),
    "a comprehension": ("z = [y for one in (1, 2)]\n", "z = [y + 1 for one in (1, 2)]\n", True),
    "a lambda that is not called": ("z = lambda: y\n", "z = lambda: y + 1\n", False),
    "the message of an assertion": ("assert x.size, 'a'\n", "assert x.size, 'b'\n", False),
    "two handlers that changed places": (
        "try:\n    seen.append(1)\nexcept ValueError:\n    pass\nexcept KeyError:\n    pass\n",
        "try:\n    seen.append(1)\nexcept KeyError:\n    pass\nexcept ValueError:\n    pass\n",
        False,
    ),
    "one of two cases that wait for the same": (
        "match y:\n    case 1:\n        z = 1\n    case 1:\n        z = 2\n",
        "match y:\n    case 1:\n        z = 1\n    case 1:\n        z = 3\n",
        False,
    ),
}


@pytest.mark.parametrize("what", CONDITIONAL)
def test_a_change_that_is_passed_over_is_not_noted(what: str) -> None:
    old, new, acts = CONDITIONAL[what]
    before, now = (f"def f(x, y, seen):\n{textwrap.indent(body, '    ')}" for body in (old, new))
    [place] = compare_sources(before, now, "m").places
    tree, ran = ast.parse(now), set[int]()
    add_calls(tree, [(point, number) for number, point in enumerate(place.points)], "_note")  # type: ignore[misc]
    scope: dict[str, Any] = {"_note": ran.add}
    plain: dict[str, Any] = {}
    seen = list[int](), list[int]()
    exec(compile(tree, "f.py", "exec"), scope)
    exec(now, plain)
    assert scope["f"](Device(), 1, seen[0]) == plain["f"](Device(), 1, seen[1])
    assert seen[0] == seen[1]
    assert bool(ran) == acts


@pytest.mark.parametrize(
    ("default", "given", "acts"), [("2", (), True), ("2", (5,), False), ("None", (), True), ("[]", (), False)]
)
def test_a_default_acts_in_a_call_that_has_it(default: str, given: tuple[int, ...], acts: bool) -> None:
    new, ran = f"def f(x={default}):\n    return x\n", set[int]()
    [place] = compare_sources("def f(x=1):\n    return x\n", new, "m").places
    add_calls(tree := ast.parse(new), [(point, 1) for point in place.points], "_note")  # type: ignore[misc,list-item]
    scope: dict[str, Any] = {"_note": ran.add}
    exec(compile(tree, "f.py", "exec"), scope)
    scope["f"](*given)
    assert bool(ran) == acts


BOUND = """
if is_cuda():
    from a import g
else:
    g = None
class Base:
    limit = 1
class Used(Base):
    size = 2
    def count(self):
        return self.limit
def read(x):
    return x.size, x.limit
def call(x):
    return g
"""


@pytest.mark.parametrize(
    ("old", "new", "readers"),
    [
        ("from a import g", "from b import g", {"m.call": "is_cuda()"}),
        ("    g = None", "    g = 1", {"m.call": "not (is_cuda())"}),
        ("limit = 1", "limit = 2", {"m.Used.count": ""}),
        ("size = 2", "size = 3", {}),
    ],
)
def test_who_reads_a_changed_name_is_changed_where_that_is_known(old: str, new: str, readers: dict[str, str]) -> None:
    found = compare_sources(BOUND, BOUND.replace(old, new), "m")
    assert ({place.name: place.points[0].test for place in found.places}, found.outside) == (readers, True)


# When an equal case says nothing about a change, and which part of a change no case ran.


TWO = Differs(base="1", functions=("m.f", "m.g"), statements={"m.f": ("m.py:2", "m.py:3"), "m.g": ("m.py:9",)})

SAYS = {
    "comments alone": (Differs(base="1"), True),
    "a statement that ran": (with_executed(TWO, ["m.py:2"]), True),
    "statements that did not run": (TWO, False),
    "a function of an older trace that was called": (Differs(base="1", functions=("m.f",), ran=("m.f",)), True),
    "a function that did not run": (Differs(base="1", functions=("m.f",), modules=("m",), imported=("m",)), False),
    "a module that was imported": (Differs(base="1", modules=("m",), imported=("m",), removed=("m.f",)), False),
    "a module that was not imported": (Differs(base="1", modules=("m",)), False),
    "a file that is gone": (Differs(base="1", removed=("m",)), False),
    "a file that is no Python": (Differs(base="1", files=("m.json",)), False),
    "a file that is gone, and a function that ran": (Differs(base="1", removed=("m",), functions=("n.f",), ran=("n.f",)), True),
    "a patch that did not run": (Differs(base="", patch="p", functions=("m.f",), statements={"m.f": ("m.py:2",)}), False),
}


@pytest.mark.parametrize("what", SAYS)
def test_a_case_says_something_about_a_change_that_it_ran(what: str) -> None:
    differs, says = SAYS[what]
    assert differs.reached == says
    assert (differs.doubt == "") == says


def test_the_doubt_names_the_file_that_is_gone() -> None:
    assert Differs(base="0.5.23", removed=("sglang.gone",)).doubt == (
        "this tree differs from 0.5.23 in sglang.gone, and nothing here runs it"
    )


def test_a_function_ran_if_one_of_its_changed_statements_did() -> None:
    ran = with_executed(TWO, ["m.py:3", "another.py:1"])
    assert (ran.ran, ran.executed, ran.idle, ran.unexecuted) == (("m.f",), ("m.py:3",), ("m.g",), ("m.py:2", "m.py:9"))
    assert ran.headline == "2 of 3 changed statements did not run: m.py:2, m.py:9"
    assert ran.lines() == [
        "This tree differs from 1. Run: m.f.",
        "Not run: m.g.",
        "Changed statements that ran: 1 of 3; not: m.py:2, m.py:9.",
    ]


def test_there_is_no_headline_where_all_ran_or_nothing_did() -> None:
    assert with_executed(TWO, TWO.places).headline == ""
    assert TWO.headline == ""
    assert "(m.py:2, m.py:3, m.py:9)" in TWO.doubt


def test_a_statement_behind_a_condition_on_the_device_names_the_option_that_meets_it() -> None:
    gates = {"m.py:2": "x.is_cuda", "m.py:9": "not (x.is_cuda)"}
    differs = with_executed(Differs(base="1", functions=TWO.functions, statements=TWO.statements, gates=gates), ["m.py:3"])
    assert differs.headline.endswith("m.py:2 (only if x.is_cuda; --device cuda runs it), m.py:9 (only if not (x.is_cuda))")


def test_the_headline_names_what_nothing_here_runs_beside_what_ran() -> None:
    differs = with_executed(replace(TWO, modules=("m", "n"), imported=("m",), files=("hash.cpp",)), TWO.places)
    assert differs.headline == "nothing here runs hash.cpp, n"
    assert replace(differs, executed=("m.py:2",), ran=("m.f",)).headline == (
        "2 of 3 changed statements did not run: m.py:3, m.py:9; nothing here runs hash.cpp, n"
    )


@pytest.mark.parametrize(
    ("gate", "needs"),
    [
        ("x.is_cuda", True),
        ("_is_cuda or _is_hip", True),
        ("not (not _is_cuda)", True),
        ("not _is_cuda", False),
        ("not (x.is_cuda)", False),
        ("x.is_cuda is False", False),
        ("disable_cuda_graph", False),
        ("_is_hip", False),
    ],
)
def test_which_conditions_a_gpu_meets(gate: str, needs: bool) -> None:
    assert needs_cuda(gate) == needs


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.5.23", True),
        ("0", True),
        ("1a2b3c4d5e+dirty.12345678", True),
        ("1a2b3c4d5e", False),
        ("1234567890", False),
        ("tree-12", False),
    ],
)
def test_of_a_commit_it_is_not_known_what_it_changes(version: str, known: bool) -> None:
    assert (unknown_changes(version) == "") == known


def test_cases_are_counted_by_statement() -> None:
    changes = Changes()
    for ran in (["m.py:2"], ["m.py:2", "m.py:9"], []):
        changes.add(with_executed(TWO, ran))
    assert (changes.of, changes.ran, changes.executed) == (3, {"m.f": 2, "m.g": 1}, {"m.py:2": 2, "m.py:9": 1})
    assert changes.headline == "1 of 3 changed statements did not run: m.py:3"
    assert changes.lines[0] == "This tree differs from 1. Run: m.f in 2 of 3 cases, m.g in 1 of 3 cases."


def test_what_a_change_does_to_the_numbers_is_said_where_the_base_was_run() -> None:
    changes = Changes()
    changes.add(with_executed(TWO, TWO.places))
    assert changes.effect == ""
    changes.compared = 4
    assert changes.lines[-1] == "It changed no recorded number in 4 cases that ran it and are right."
    changes.altered = 3
    assert changes.lines[-1] == "It changed recorded numbers in 3 of 4 cases that ran it and are right."


def test_ranks_run_a_change_together_and_a_tree_with_a_patch_is_one_change() -> None:
    both = merge_differs([with_executed(TWO, ["m.py:2"]), with_executed(TWO, ["m.py:9"])])
    assert both.ran == ("m.f", "m.g")
    patch = Differs(base="", patch="p", functions=("n.h",), statements={"n.h": ("n.py:1 (p)",)})
    one = together([both, patch])
    assert one is not None
    assert (one.idle, one.unexecuted) == (("n.h",), ("m.py:3", "n.py:1 (p)"))
    assert together([]) is None


PICK = """def pick(self, x):
    for i in x:
        if i:
            self.add(1)
        self.add(1)
    return x"""


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        self.add(1)\n    return", "        self.add(2)\n    return"),  # a line that stands there twice
        ("        if i:\n            self.add(1)\n", "        if i > 1:\n            self.add(1)\n            self.add(3)\n"),
        ("        self.add(1)\n    return x", "    return x"),
        ("    return x", "        self.last = i\n    del x\n    return None"),
        ("def pick(self, x):", "def pick(self, x, y=0):\n    x = x or y"),
    ],
)
def test_edits_make_one_source_of_a_function_the_other(old: str, new: str) -> None:
    changed = PICK.replace(old, new)
    edits = edits_between("a.pick", PICK.split("\n"), changed.split("\n"))
    assert edits
    text = PICK
    for edit in edits:
        assert text.count(edit.match) == 1
        before = text[: text.index(edit.match)].rpartition("\n")[2]
        margin = before[: len(before) - len(before.lstrip())]
        text = text.replace(edit.match, edit.replacement.replace("\n", "\n" + margin))
    assert ast.dump(ast.parse(text)) == ast.dump(ast.parse(changed))


def test_near_a_changed_comparison_its_branches_and_how_far_apart_its_sides_are_is_noted() -> None:
    old = "def f(a, b):\n    while a < b:\n        a += 1\n    if a.size > len(b):\n        return 1\n    return 2\n"
    (found,) = compare_sources(old, new := old.replace("a.size >", "a.size >="), "m").places
    tree, met = ast.parse(new), list[str]()
    add_calls(tree, found.goal_calls, "note")
    names: dict[str, Any] = {"note": met.append}
    exec(compile(tree, "m.py", "exec"), names)
    tests = {name: point.test for point, name in found.goal_calls}
    distances = "isinstance(a.size, int) and isinstance(len(b), int) and {} <= abs((a.size) - (len(b))) <= {}"
    for size, taken, apart in ((3, True, (0, 0)), (2, False, (1, 1)), (9, True, (5, 16))):
        met.clear()
        names["f"](Sized(size), [1, 2, 3])
        assert [tests[name] for name in met] == [
            "a.size >= len(b)" if taken else "not (a.size >= len(b))",
            distances.format(*apart),
        ]


@pytest.mark.parametrize(("size", "goals"), [("rows.shape[0]", 6), ("rows.sizes[0]", 0), ("rows.shape[count()]", 0)])
def test_an_element_of_a_shape_is_read_once_more_and_what_may_change_something_is_not(size: str, goals: int) -> None:
    old = f"def f(rows):\n    if {size} > 0:\n        return 1\n"
    (found,) = compare_sources(old, old.replace("> 0", "> 1"), "m").places
    assert len(found.goals) == goals


class Sized:
    def __init__(self, size: int) -> None:
        self.size = size

    def __lt__(self, _: object) -> bool:
        return False
