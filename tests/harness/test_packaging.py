"""What is declared is what is imported, and pinned by digest; and which Python `make` takes."""

import ast
import os
import re
import shutil
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

import pytest

from eagletwin.harness.engines.provision import parse

ROOT = Path(__file__).parents[2]
SHIPPED = [
    path for folder in ("cases", "harness", "reference", "src/eagletwin") for path in sorted((ROOT / folder).rglob("*.py"))
]
# Imported only where SGLang is (by its engine, or by what the engine runs kernels with), which brings them.
OF_THE_ENGINE = {"sglang", "vllm", "triton", "transformers", "psutil", "xgrammar", "llguidance"}
# Of extras: what each brings, and the folder that imports it.
OF_EXTRAS = {
    "acceptance": ({"transformers", "huggingface_hub"}, "harness/deserved"),
    "ray": ({"ray"}, "harness/commands/fuzz"),
}
# Loaded by pytest alone, as its plugin.
OF_THE_PLUGIN = {"pytest"}


@cache
def roots(file: Path) -> frozenset[str]:
    """The packages that a file imports, at any depth."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return frozenset(found - set(sys.stdlib_module_names) - {"eagletwin"})


def test_each_imported_package_is_declared_and_each_declared_one_imported() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [listed] = re.findall(r"^dependencies = \[\n(.*?)^\]", project, re.MULTILINE | re.DOTALL)
    declared = set(re.findall(r'^ *"([\w-]+)', listed, re.MULTILINE))
    optional = {name for extra in OF_EXTRAS for name in re.findall(rf'^{extra} = \["([\w-]+)', project, re.MULTILINE)}
    assert optional == {"transformers", "ray"}
    imported = {name for file in SHIPPED for name in roots(file)} - OF_THE_ENGINE - OF_THE_PLUGIN
    assert imported - {name for names, _ in OF_EXTRAS.values() for name in names} == declared


def test_only_the_engine_the_plugin_and_extras_import_what_is_not_declared() -> None:
    for file in SHIPPED:
        where, found = file.relative_to(ROOT), roots(file)
        for names, folder in OF_EXTRAS.values():
            found -= names if where.is_relative_to(folder) else set()
        assert not found & OF_THE_ENGINE or where.is_relative_to("harness/engines"), where
        assert not found & OF_THE_PLUGIN or file.name == "plugin.py", where
        assert not found & {"huggingface_hub", "ray"}, where


@pytest.mark.parametrize("name", ["engine", "dev", "gpu", "gpu23"])
def test_a_lock_has_each_pin_and_no_other_with_the_digests_of_its_files(name: str) -> None:
    text = (ROOT / "requirements" / f"{name}.in").read_text(encoding="utf-8")
    pins = {line.lower().replace("_", "-") for line in text.splitlines() if line and not line.startswith("#")}
    locked = parse(f"# [a/b]\n{(ROOT / 'requirements' / f'{name}.lock').read_text(encoding='utf-8')}")["a/b"].pins
    assert pins == {pin.replace("_", "-") for pin in locked}
    assert all(digests and all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests) for digests in locked.values())


def test_no_list_of_packages_names_a_host() -> None:
    lists = [*(ROOT / "requirements").iterdir(), *(ROOT / "harness").rglob("*.lock")]
    assert len(lists) >= 9
    for file in lists:
        assert not re.search(r"://|index-url|find-links|trusted-host", file.read_text(encoding="utf-8")), file


def test_python_3_10_can_read_every_file() -> None:
    for file in [*SHIPPED, *(ROOT / "tests").rglob("*.py"), ROOT / "conftest.py"]:
        ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 10))


@pytest.mark.slow
def test_python_3_10_compiles_every_file(tmp_path: Path) -> None:
    """feature_version lets some of a later grammar pass."""
    python = shutil.which("python3.10")
    if python is None or subprocess.run([python, "-c", ""], check=False, capture_output=True).returncode:
        python = sys.executable  # ruff and mypy hold the files to 3.10 everywhere
    program = "import sys\nfor file in sys.argv[1:]: compile(open(file, encoding='utf-8').read(), file, 'exec')"
    files = [str(file) for file in [*SHIPPED, *(ROOT / "tests").rglob("*.py")]]
    done = subprocess.run(
        [python, "-W", "ignore", "-c", program, *files], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """In a folder whose name make would split."""
    folder = tmp_path / "check out"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    return folder


def made(checkout: Path, *words: str, verb: str = "setup") -> str:
    """What make would do for the environment, or does."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(["make", *words, verb], cwd=checkout, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


@needs_make
def test_it_is_python3_11_unless_another_is_named(checkout: Path) -> None:
    assert '"python3.11" -m venv ' in made(checkout, "-n")
    assert '"/opt/my python" -m venv ' in made(checkout, "-n", "PYTHON=/opt/my python")


@pytest.mark.parametrize("verb", ["setup", "python"])
@needs_make
def test_a_python_that_is_missing_is_named_with_the_remedy_and_nothing_is_made(checkout: Path, verb: str) -> None:
    said = made(checkout, "PYTHON=/no/such/python", verb=verb)
    assert "error: /no/such/python is not there, or older than Python 3.1" in said
    assert "  so:  nothing was installed" in said
    assert "  try: make " in said
    assert not (checkout / ".venv").exists()
    assert not (checkout / "build").exists()


@needs_make
def test_packages_are_installed_by_their_digests_alone(checkout: Path) -> None:
    [line] = [line for line in made(checkout, "-n").splitlines() if "requirements/engine.lock" in line]
    assert "--require-hashes" in line
    assert "--no-deps" in line


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.slow
@needs_make
def test_an_environment_of_another_python_is_made_anew(checkout: Path, same: bool) -> None:
    venv.create(checkout / ".venv", symlinks=same)  # a copy is another
    marker = checkout / ".venv" / "marker"
    marker.touch()
    wrapper = checkout.parent / "shim"
    # pip is not looked at, and putting it there takes four seconds
    wrapper.write_text(f'#!/bin/sh\n[ "$1 $2" = "-m venv" ] && set -- "$@" --without-pip\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    said = made(checkout, f"PYTHON={wrapper}", "PIP=@echo installs")
    assert "Error" not in said
    assert "installs torch" in said
    assert marker.exists() is same
