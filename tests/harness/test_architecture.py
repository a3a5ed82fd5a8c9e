"""The house is what ARCHITECTURE.md says: which rooms there are, who imports whom, and how large a function may be."""

import ast
import re
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from eagletwin.harness.cli.main import command_tree

from .graph import ROOT, circles, file_graph, floors, grouped, imports, modules, tree

PAGE = (ROOT / "ARCHITECTURE.md").read_text()
TABLE = re.compile(r"^\| `([\w/]+)` \| ([\w, ]*)\| ([\d,]+) \|", re.MULTILINE)
ROWS = {name.replace("/", "."): allowed for name, allowed, _ in TABLE.findall(PAGE)}
BUDGETS = {name.replace("/", "."): int(lines.replace(",", "")) for name, _, lines in TABLE.findall(PAGE)}
WHOLE = re.compile(r"at most (\d+) modules, (\d+) commands, and ([\d,]+) words of documents without findings")
SHORT = {name.rpartition(".")[2]: name for name in ROWS}

MAX_ROOMS, MAX_FLOORS = 15, 6
MAX_LINES, MAX_PARAMETERS = 60, 8
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def room_graph() -> dict[str, set[str]]:
    ours = {name: used for name, used in file_graph().items() if name != "harness"}  # harness/__init__.py is a docstring
    return grouped(ours, ROWS)


def test_every_file_is_in_a_room_of_the_table() -> None:
    assert room_graph().keys() == ROWS.keys()


def test_each_room_keeps_its_budget_of_lines() -> None:
    """Too many: take away what another line does as well, or raise the number in ARCHITECTURE.md and say there what it buys."""
    lines = Counter[str]()
    for name, file in modules().items():
        rooms = [room for room in ROWS if f"{name}.".startswith(f"{room}.")]
        lines.update({max(rooms, key=len): len(file.read_text(encoding="utf-8").splitlines())} if rooms else {})
    assert {room: count for room, count in lines.items() if count > BUDGETS[room]} == {}


def test_the_whole_keeps_its_budgets() -> None:
    found = WHOLE.search(PAGE)
    assert found is not None
    most = [int(number.replace(",", "")) for number in found.groups()]
    pages = [page for page in ROOT.joinpath("docs").rglob("*.md") if "findings" not in page.parts]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in (*ROOT.glob("*.md"), *pages))
    measured = {"modules": len(modules()), "commands": len(command_tree().commands), "words": words}
    over = {what: (number, limit) for (what, number), limit in zip(measured.items(), most, strict=True) if number > limit}
    assert over == {}, "ARCHITECTURE.md states these limits: keep them, or raise one there and say what that buys"


@pytest.mark.parametrize("room", ROWS)
def test_a_room_imports_only_what_its_row_names(room: str) -> None:
    allowed = {SHORT[name.strip()] for name in ROWS[room].split(",") if name.strip()}
    wrong = room_graph()[room] - allowed
    files = {name: used for name, used in file_graph().items() if name == room or name.startswith(f"{room}.")}
    where = [name for name, used in files.items() if grouped({name: used}, ROWS).get(room, set()) & wrong]
    assert not wrong, f"{room} imports {sorted(wrong)} in {where}"


def test_the_house_has_few_rooms_and_floors_and_no_circle(capsys: pytest.CaptureFixture[str]) -> None:
    graph = room_graph()
    heights = floors(graph)
    with capsys.disabled():
        print(f"\n{len(graph)} rooms, {max(heights.values()) + 1} floors, {sum(map(len, graph.values()))} arrows")
        for room in sorted(graph, key=lambda name: (heights[name], name)):
            print(f"  {heights[room]}  {room:26} -> {', '.join(sorted(SHORT_OF[one] for one in graph[room]))}")
    assert len(graph) <= MAX_ROOMS
    assert max(heights.values()) < MAX_FLOORS


SHORT_OF = {name: short for short, name in SHORT.items()}


def test_no_files_import_each_other_in_a_circle() -> None:
    assert not [sorted(circle) for circle in circles(file_graph())]


def test_no_room_has_the_name_of_another() -> None:
    folders = sorted({file.parent for file in modules().values()})
    names = [folder.name for folder in folders]
    assert not [str(folder.relative_to(ROOT)) for folder in folders if names.count(folder.name) > 1]


def test_no_public_class_of_the_harness_has_the_name_of_another() -> None:
    found: dict[str, list[str]] = {}
    for name, file in modules().items():
        if name.startswith("harness."):
            for node in tree(file).body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    found.setdefault(node.name, []).append(name)
    assert not {name: where for name, where in found.items() if len(where) > 1}


def test_the_reference_imports_torch_and_the_standard_library_alone() -> None:
    for file in (ROOT / "reference").rglob("*.py"):
        roots = {name.partition(".")[0] for name in imports(file)} - set(sys.stdlib_module_names)
        assert roots <= {"torch", "eagletwin"}, file


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_only_its_adapter_knows_an_engine(engine: str) -> None:
    for name, file in modules().items():
        if not name.startswith(f"harness.engines.{engine}"):
            assert not any(one.partition(".")[0] == engine for one in imports(file)), file


# What speaks of SGLang itself: its CUDA kernels, and its own switch that undoes fixes.
_OF_SGLANG = {"machine.py": 2, "patches.py": 2}


def test_what_runs_either_engine_names_none_in_its_messages() -> None:
    rooms = ("harness/engines", "harness/engines/inside")
    files = [file for room in rooms for file in (ROOT / room).glob("*.py")]
    named = Counter[str]()
    for file in files:
        texts = [node for node in ast.walk(tree(file)) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        docs = {id(node.value) for node in ast.walk(tree(file)) if isinstance(node, ast.Expr)}
        named.update({file.name: sum("SGLang" in str(node.value) and id(node) not in docs for node in texts)})
    assert +named == Counter(_OF_SGLANG)


# What names an engine above the engines' rooms, and why. All else speaks of what every engine has.
_NAMES_AN_ENGINE = {
    "harness/core/case.py": "the settings of a case that are an engine's",
    "harness/core/run_spec.py": "the table of engines",
    "harness/core/patch.py": "SGLang's own switch that undoes fixes, a field of patch files",
    "harness/check/known.py": "the same",
    "harness/families/": "how each engine calls a checkpoint's classes and arguments, and what it refuses",
    "harness/judge/engines.py": "conventions by the name in a trace",
    "harness/commands/acceptance/": "what each server's flags and counts are called",
    "harness/commands/check.py": "--model-runner, and a field of JSON that keeps its name",
    "harness/commands/both.py": "the same",
    "harness/commands/result.py": "fields of JSON that keep their names",
    "harness/commands/prove/": "the same",
    "harness/commands/fuzz/coverage.py": "which of SGLang's code cases were measured to run",
    "harness/commands/fuzz/effect.py": "a test in the form of SGLang's own",
    "harness/commands/kernels/": "calls SGLang's functions",
    "harness/commands/options.py": "options that are an engine's",
    "harness/commands/record.py": "records SGLang's servers",
    "cases/blocks.py": "what a search draws for vLLM",
    "cases/entry.py": "a settings block",
    "cases/strategies.py": "the same",
    "cases/ledger/": "bugs of each engine",
}
# A case's settings, and imports of an engine's room.
_SETTINGS = re.compile(
    r"\.(sglang|vllm)\b|(SGLang|VLLM)Settings|EngineSettings\((sglang|vllm)=|\b(sglang|vllm)=(settings|own)\b|engines[/.](sglang|vllm)"
)


def test_no_file_above_the_engines_rooms_names_an_engine() -> None:
    """But for those of the table, each of which does."""
    rooms = [f"harness/{room}" for room in ("core", "families", "judge", "check", "page", "commands", "testing", "cli")]
    named = dict.fromkeys(_NAMES_AN_ENGINE, 0)
    others = list[str]()
    for file in (file for room in (*rooms, "cases") for file in (ROOT / room).rglob("*")):
        if file.suffix not in (".py", ".html", ".css", ".js", ".svg"):
            continue
        count = len(re.findall("sglang|vllm", _SETTINGS.sub("", file.read_text(encoding="utf-8")), re.IGNORECASE))
        path = str(file.relative_to(ROOT))
        entry = next((name for name in _NAMES_AN_ENGINE if path == name or (name[-1] == "/" and path.startswith(name))), "")
        if entry:
            named[entry] += count
        elif count:
            others.append(f"{path}: {count}")
    assert others == []
    assert [name for name, count in named.items() if not count] == []


def test_of_the_commands_only_kernels_uses_the_sglang_adapter() -> None:
    """It calls SGLang's functions itself, in a process of its own, and compares them with the reference."""
    users = {name for name, used in file_graph().items() if any(one.startswith("harness.engines.sglang") for one in used)}
    commands = {name for name in users if name.startswith("harness.commands.")}
    assert commands
    assert all(name.startswith("harness.commands.kernels.") for name in commands)


def test_nothing_edits_our_own_source_by_its_text() -> None:
    for file in (file for file in modules().values() if "target" in file.read_text(encoding="utf-8")):
        for node in ast.walk(tree(file)):
            if isinstance(node, ast.keyword) and node.arg == "target" and isinstance(node.value, ast.Constant | ast.JoinedStr):
                assert "eagletwin." not in ast.unparse(node.value), f"{file}:{node.value.lineno}"


def test_nothing_imports_the_folders_by_their_bare_names() -> None:
    for file in [*modules().values(), *(ROOT / "tests").rglob("*.py")]:
        assert not any(name.partition(".")[0] in ("reference", "cases", "harness") for name in imports(file)), file


def test_no_test_imports_what_takes_seconds_where_it_is_collected() -> None:
    """Each worker of pytest-xdist collects all tests, whichever it runs."""
    for file in (ROOT / "tests").rglob("*.py"):
        for node in tree(file).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            slow = [name for name in names if name.partition(".")[0] in ("sglang", "vllm", "transformers")]
            assert not slow, f"{file}:{node.lineno}: import {slow[0]} in the tests that need it"


@cache
def functions(file: Path) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    return [node for node in ast.walk(tree(file)) if isinstance(node, FUNCTIONS)]


def test_a_function_fits_on_a_screen() -> None:
    """triton_cpu is left out: what executes a language is long."""
    long = {
        f"{file.relative_to(ROOT)}:{node.lineno} {node.name}": node.end_lineno - node.lineno + 1
        for name, file in modules().items()
        if not name.startswith("harness.engines.triton_cpu")
        for node in functions(file)
        if node.end_lineno is not None and node.end_lineno - node.lineno >= MAX_LINES
    }
    assert not long


def test_a_function_takes_few_parameters() -> None:
    """Commands are left out, since their parameters are the options that people type; and so are functions that stand in for
    others, whose parameters they have to take."""
    many = {}
    for name, file in modules().items():
        if name.startswith(("harness.engines.triton_cpu", "harness.engines.sglang.stand_ins")):
            continue
        for node in functions(file):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            words = [
                ast.unparse(one) for one in (*node.decorator_list, *(arg.annotation for arg in arguments if arg.annotation))
            ]
            command = any(part in one for one in words for part in ("run_options", ".command", "typer."))
            command |= file.name == "command.py" and node.name == file.parent.name
            own = [one for one in arguments if one.arg not in ("self", "cls")]
            if len(own) > MAX_PARAMETERS and not command:
                many[f"{file.relative_to(ROOT)}:{node.lineno} {node.name}"] = len(own)
    assert not many


def test_each_file_of_the_reference_can_be_read_in_one_sitting() -> None:
    for file in (ROOT / "reference").rglob("*.py"):
        assert len(file.read_text().splitlines()) < 300, file


def test_every_file_says_what_it_is() -> None:
    for file in [*modules().values(), *(ROOT / "tests").rglob("*.py")]:
        assert ast.get_docstring(tree(file)), file
