"""A rule that cannot fail is not a rule: each has a planted fault, which a test of the judge or of the worker must see it name.

Read from the tests' source, so that this needs neither SGLang nor their traces. A fault is a row of a table that a test is
parametrized with, or an assertion that a verdict names the rule.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

from eagletwin.harness.judge.rules import catalogue

TESTS = Path(__file__).parents[1]
ROOMS = ("engine", "triton_cpu", "kernels")


def _strings(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def planted(source: str) -> set[str]:
    """Names of rules that the tests of a file must see named."""
    module = ast.parse(source)
    tables = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                found.update(_strings(mark))
                for name in ast.walk(mark):
                    if isinstance(name, ast.Name) and name.id in tables:
                        found.update(_strings(tables[name.id]))
        elif (
            isinstance(node, ast.Compare)
            and any(isinstance(part, ast.Attribute) and part.attr == "rule" for part in ast.walk(node.left))
            and isinstance(node.ops[0], ast.Eq)
        ):
            found.update(_strings(node))
    return found & catalogue().keys()


def test_each_rule_has_a_planted_fault() -> None:
    found = set[str]()
    for room in ROOMS:
        for path in sorted((TESTS / room).rglob("test_*.py")):
            found |= planted(path.read_text(encoding="utf-8"))
    assert catalogue().keys() - found == set(), "plant a fault for it: CONTRIBUTING.md, Add a rule"


def test_a_rule_that_is_merely_named_has_no_fault() -> None:
    idle = 'def test_a(verdict):\n    idle = ("draft.kv",)\n    assert set(verdict.checked) == {"draft.kv"}\n'
    assert planted(idle) == set()
    assert planted('ROWS = ["draft.kv"]\n') == set()
    assert planted('ROWS = [("x", "draft.kv")]\n@pytest.mark.parametrize("a", ROWS)\ndef test_a(a): ...\n') == {"draft.kv"}
    assert planted('def test_a(v):\n    assert (v.status, v.rule) == ("diverged", "draft.kv")\n') == {"draft.kv"}
