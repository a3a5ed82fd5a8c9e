"""The tables of kernels in docs/explanation/states.md: each that is said to run in the fast runtime was launched in it."""

import ast
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, SGLangSettings
from eagletwin.harness.core.patch import Edit

from .conftest import Runner

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "states.md"
SECTIONS = {
    "qwen3-next-nextn": "Which kernels run",
    "qwen3.5-nextn": "Qwen3.5 with its MTP layer",
    "nemotron-h-nextn": "Nemotron-H with its MTP layer",
}


def kernels_of(section: str) -> Iterator[str]:
    """Those of the rows that say so."""
    text = PAGE.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\|(.*\| the fast runtime \|.*)$", text, re.MULTILINE):
        yield from re.findall(r"`(\w+)`", row.partition("|")[0])


def noted(kernel: str) -> Edit:
    """An edit that changes nothing, by which a trace tells whether the kernel was launched: a comment behind a statement."""
    package = find_spec("sglang")
    assert package is not None
    assert package.submodule_search_locations is not None
    root = Path(package.submodule_search_locations[0])
    for path in sorted((root / "kernels").rglob("*.py")) + sorted((root / "srt").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if f"def {kernel}(" not in text:
            continue
        function = next(node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name == kernel)
        lines = text.splitlines()
        own = lines[function.lineno - 1 : function.end_lineno]
        for statement in function.body:
            line = lines[statement.lineno - 1].strip()
            if statement.lineno == statement.end_lineno and "\n".join(own).count(line) == 1 and "#" not in line:
                module = ".".join(path.relative_to(root.parent).with_suffix("").parts)
                return Edit(target=f"{module}.{kernel}", match=line, replacement=f"{line}  # noted")
    raise AssertionError(f"SGLang has no kernel {kernel}")


@pytest.mark.parametrize("model", SECTIONS)
def test_each_kernel_of_the_table_ran_in_the_fast_runtime(run: Runner, states_case: Case, model: str) -> None:
    kernels = list(kernels_of(SECTIONS[model]))
    assert len(kernels) >= 2
    settings = SGLangSettings(max_total_tokens=256, max_running_requests=2, radix_cache=True)
    engine = replace(states_case.engine, sglang=settings)
    case = replace(states_case, model=model, engine=engine, exercises=())
    trace, verdict = run(case, *map(noted, kernels))
    assert verdict.status == "equal", verdict
    assert trace.header.idle_edits == ()
    assert trace.header.fallbacks == ()
