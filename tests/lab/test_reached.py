"""`reached`: what is counted of the branches that cases ran."""

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.engines.blocks import Block

from .bench.reached import ReachedCode, lines_of
from .mutants.corpus import Known

CASE = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
BRANCHES = {"a.py": [Block(1, "f", ""), Block(4, "f", "if x"), Block(9, "g", "")], "b.py": [Block(1, "h", "")]}


def test_branches_are_counted_by_file_and_other_lines_are_not() -> None:
    ran = ({"sglang/a.py": (1, 4)}, {"sglang/a.py": (1, 77), "sglang/c.py": (1,)}, {"sglang/a.py": (1,), "sglang/b.py": (1,)})
    reached = ReachedCode(BRANCHES).count(Known(0, CASE, (), "slot_layout", lines) for lines in ran)
    assert reached.ran == {("a.py", 1): 3, ("a.py", 4): 1, ("b.py", 1): 1}
    assert reached.grew == [(1, 2), (3, 3)]
    assert reached.never() == ["a.py:9\tg\t"]
    assert "3 cases ran 3 of 4 branches" in lines_of(reached)
