"""Who may import whom (DESIGN §1), read from the source, so that the architecture stays what it says."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def imports(file: Path) -> set[str]:
    """Absolute names of the modules that a file imports, at any depth."""
    package = ["eagletwin", *file.relative_to(ROOT).with_suffix("").parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(f"{package}.") for package in packages)


RULES = [
    # (folder, what its files must not import)
    ("reference", ("eagletwin.harness", "eagletwin.cases", "sglang", "triton", "transformers", "msgspec", "safetensors")),
    ("cases", ("eagletwin.harness.engines", "sglang", "triton")),
    ("harness/judge", ("eagletwin.harness.engines", "eagletwin.cases", "sglang", "triton", "transformers")),
    ("harness/models", ("eagletwin.harness.engines", "eagletwin.harness.judge", "sglang")),
    ("harness/engines", ("eagletwin.harness.judge", "eagletwin.reference", "eagletwin.cases", "eagletwin.harness.report")),
    ("harness/report", ("sglang", "eagletwin.harness.engines.sglang")),
]


@pytest.mark.parametrize(("folder", "forbidden"), RULES, ids=lambda value: value if isinstance(value, str) else "")
def test_a_room_imports_only_what_it_may(folder: str, forbidden: tuple[str, ...]) -> None:
    assert files(folder)
    for file in files(folder):
        wrong = {name for name in imports(file) if within(name, *forbidden)}
        assert not wrong, f"{file.relative_to(ROOT)} imports {sorted(wrong)}"


def test_the_reference_imports_torch_and_the_standard_library_alone() -> None:
    import sys

    for file in files("reference"):
        roots = {name.partition(".")[0] for name in imports(file)} - set(sys.stdlib_module_names)
        assert roots <= {"torch", "eagletwin"}, file


def test_only_the_sglang_adapter_knows_sglang() -> None:
    for file in files("reference", "cases", "harness"):
        if (ROOT / "harness/engines/sglang") not in file.parents:
            assert not any(within(name, "sglang") for name in imports(file)), file


def test_only_engines_and_those_who_run_them_import_engines() -> None:
    allowed = {
        "check.py",
        "prove.py",
        "probes.py",
        "cli.py",
        "campaign.py",
        "cli_bench.py",
        "cli_bisect.py",
        "cli_fuzz.py",
        "cli_gpu.py",
        "cli_options.py",
        "cli_releases.py",
        "cli_traces.py",
        "doctor.py",
        "draws.py",
        "trial.py",
        "twin.py",
        "repro.py",
        "bench.py",
        "bench_search.py",
        "pair.py",
        "plan.py",
        "sizes.py",
        "faults.py",
        "plugin.py",
        "reach.py",
    }
    for file in files("harness"):
        if {ROOT / "harness/engines", ROOT / "harness/releases"} & {*file.parents} or file.name in allowed:
            continue
        if file.parent == ROOT / "harness/bisect" and file.name in ("measure.py", "state.py"):
            continue
        assert not any(within(name, "eagletwin.harness.engines") for name in imports(file)), file


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    for file in files("reference", "cases", "harness", "tests"):
        assert not any(within(name, "reference", "cases", "harness") for name in imports(file)), file


def test_each_file_of_the_reference_can_be_read_in_one_sitting() -> None:
    for file in files("reference"):
        assert len(file.read_text().splitlines()) < 300, file


def test_every_file_says_what_it_is() -> None:
    for file in files("reference", "cases", "harness", "tests"):
        assert ast.get_docstring(ast.parse(file.read_text())), file
