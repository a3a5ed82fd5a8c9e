"""What `make test` runs of tables whose rows are long in part: each rule, each entry, each recipe, each table of faults."""

import ast
import contextlib
import dataclasses
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from eagletwin.cases.ledger import ENTRIES
from eagletwin.cases.reach import on_a_cpu, why_unreachable
from eagletwin.harness.core.case import Case
from eagletwin.harness.families import RECIPES
from eagletwin.harness.judge.rules import catalogue

pytestmark = pytest.mark.slow  # it imports the tests of the engine

TESTS = Path(__file__).parents[1]
Test = Callable[..., object]


@cache
def modules_of(*rooms: str) -> tuple[ModuleType, ...]:
    found = []
    for file in (file for room in rooms for file in sorted((TESTS / room).glob("test_*.py"))):
        with contextlib.suppress(pytest.skip.Exception):  # it needs what is not installed
            found.append(importlib.import_module(f"..{file.parent.name}.{file.stem}", __package__))
    return tuple(found)


def functions_of(module: ModuleType) -> Iterator[FunctionType]:
    for name, function in vars(module).items():
        if name.startswith("test_") and callable(function):
            yield inspect.unwrap(function)


def marks_of(of: object) -> list[pytest.Mark]:
    marks = getattr(of, "pytestmark", [])
    return [getattr(mark, "mark", mark) for mark in (marks if isinstance(marks, list) else [marks])]


def is_long(of: object) -> bool:
    return any(mark.name == "long" for mark in marks_of(of))


def tables_of(test: Test) -> dict[str, list[Any]]:
    """The rows of each table of a test that `make test` runs, by the names of its columns."""
    found: dict[str, list[Any]] = {}
    for mark in marks_of(test):
        if mark.name == "parametrize":
            names, rows = mark.args
            column = names if isinstance(names, str) else ", ".join(names)
            short = [row for row in rows if not any(one.name == "long" for one in getattr(row, "marks", ()))]
            found[column] = [getattr(row, "values", row) if hasattr(row, "marks") else row for row in short]
    return found


def run(test: Test, module: ModuleType) -> bool:
    """Whether `make test` runs it at all."""
    return not is_long(module) and not is_long(test) and all(tables_of(test).values())


def rows_of(test: FunctionType) -> Iterator[object]:
    """The parts of its rows, and of what these are keys of."""
    tables = [value for name in test.__code__.co_names if isinstance(value := test.__globals__.get(name), dict)]
    for row in (row for rows in tables_of(test).values() for row in rows):
        for key in parts(row):
            yield key
            for table in tables if isinstance(key, str) else ():
                yield from parts(table.get(key))


def named_in(test: FunctionType) -> Iterator[object]:
    """The cases and words that it and its fixtures name. A table that it names is not among them: of that its rows are."""
    for value in (*map(test.__globals__.get, test.__code__.co_names), *test.__code__.co_consts):
        if isinstance(value, Case | str | tuple):
            yield from parts(value)
    for name in inspect.signature(test).parameters:
        if hasattr(fixture := test.__globals__.get(name), "__wrapped__"):
            yield from named_in(inspect.unwrap(fixture))


def parts(value: object) -> Iterator[object]:
    """A value, and what it is made of."""
    yield value
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, tuple | list | set | frozenset):
        for one in value:
            yield from parts(one)


def asserted(source: str) -> set[str]:
    """The rules that these statements compare the rule of a verdict with."""
    found = set[str]()
    for node in ast.walk(ast.parse(textwrap.dedent(source))):
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq):
            left = [part.attr for part in ast.walk(node.left) if isinstance(part, ast.Attribute)]
            if "rule" in left:
                found |= {one.value for one in ast.walk(node) if isinstance(one, ast.Constant) and isinstance(one.value, str)}
    return found


def short(*rooms: str) -> Iterator[FunctionType]:
    """The tests of these rooms that `make test` runs, in some row."""
    return (test for module in modules_of(*rooms) for test in functions_of(module) if run(test, module))


def test_each_rule_has_a_planted_fault_in_a_row_that_is_not_long() -> None:
    found = set[object]()
    for test in short("engine", "triton_cpu", "kernels"):
        found |= {one for one in rows_of(test) if isinstance(one, str)} | asserted(inspect.getsource(test))
    assert catalogue().keys() - found == set(), "a row of each of these rules is to run in `make test`"


def test_each_entry_of_the_ledger_is_proven_in_a_row_that_is_not_long() -> None:
    proofs = {"sglang": "test_an_entry_is_red_without_its_fix_and_green_with_it", "vllm": "test_an_entry_is_proven"}
    modules = {module.__name__.rpartition(".")[2]: module for module in modules_of("engine")}
    proven = set[str]()
    for module, name in ((modules["test_proofs"], proofs["sglang"]), (modules["test_vllm"], proofs["vllm"])):
        test = getattr(module, name)
        assert run(test, module)
        proven |= {*tables_of(test)["name"]}
    assert proven == {name for name, entry in ENTRIES.items() if not why_unreachable(entry, on_a_cpu(entry))}


def test_each_recipe_runs_on_an_engine_in_a_row_that_is_not_long() -> None:
    found = set[object]()
    for test in short("engine"):
        for one in (*rows_of(test), *named_in(test)):
            found |= {one.model if isinstance(one, Case) else one} if isinstance(one, Case | str) else set()
    assert RECIPES.keys() - found == set(), "a row of each of these recipes is to run in `make test`"


def test_each_table_of_faults_has_a_row_that_is_not_long() -> None:
    seen = 0
    for module in modules_of("engine", "kernels"):
        for test in functions_of(module):
            for column, rows in tables_of(test).items():
                if "fault" in column.split(", ")[0] and not is_long(test):
                    seen += 1
                    assert rows, (module.__name__, test.__name__)
    assert seen > 30
