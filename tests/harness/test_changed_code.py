"""Which functions of a file changed: those whose own code did, and those that read a name that means something else now."""

import pytest

from eagletwin.harness.core.differs import unknown_changes
from eagletwin.harness.engines.changed_code import changed

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
    found = changed(OLD, text, "m")
    assert {place.name for place in found.places} == {f"m.{name}" for name in functions}
    assert set(found.removed) == {f"m.{name}" for name in removed}
    assert found.outside == outside
    lines = text.splitlines()
    for place in found.places:
        assert f"def {place.name.rpartition('.')[2]}(" in lines[place.line - 1]


def test_kernels_are_distinguished_from_functions() -> None:
    kernels = {place.name for place in changed(None, OLD, "m").places if place.kernel}
    assert kernels == {"m.kernel", "m.sized_kernel"}


def test_all_functions_of_a_new_file_are_new() -> None:
    found = changed(None, "def f():\n    pass\n", "m")
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
    assert "m.f" in {place.name for place in changed(*TWINS[what], "m").places}


@pytest.mark.parametrize(
    ("version", "known"),
    [("0.5.23", True), ("0.5.12.post1+dirty.12345678", True), ("tree-12345678", False), ("a1b2c3d4e5", False)],
)
def test_a_tree_without_a_base_is_told(version: str, known: bool) -> None:
    assert (unknown_changes(version) == "") is known
