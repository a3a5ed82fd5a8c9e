"""Which statements of a function changed, and that each of them is noted when it runs, and only then."""

import ast
import textwrap
from typing import Any

import pytest

from eagletwin.harness.core.differs import Point
from eagletwin.harness.engines.changed_code import add_calls, changed

OLD = '''
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
    assert OLD.count(old) == 1
    new = OLD.replace(old, text)
    points = tuple(point for place in changed(OLD, new, "m").places for point in place.points)
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
    points = changed(GATED, new, "m").places[0].points
    lines = new.splitlines()
    gates = {lines[point.line - 1].strip(): point.gate for point in points}
    assert gates == {"a = 2": "x.is_cuda", "b = 2": "not (x.is_cuda)", "c = 2": "_is_hip", "d = 2": "not (_is_hip)"}


def test_places_of_one_line_are_told_apart() -> None:
    [place] = changed("def f(x):\n    if x: y = 1; z = 1\n", "def f(x):\n    if x: y = 2; z = 2\n", "m").places
    assert place.of_file("m.py").places == ("m.py:2:11", "m.py:2:18")


def test_a_function_whose_original_is_not_at_hand_counts_as_a_whole() -> None:
    [unlisted] = changed(None, "def f(x):\n    a = x\n    return a\n", "m").places
    assert [point.where for point in unlisted.points] == ["entry"]
    [new] = changed("", "def f(x):\n    a = x\n    return a\n", "m").places
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
    [place] = changed(before, now, "m").places
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
    [place] = changed("def f(x=1):\n    return x\n", new, "m").places
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
    found = changed(BOUND, BOUND.replace(old, new), "m")
    assert ({place.name: place.points[0].test for place in found.places}, found.outside) == (readers, True)
