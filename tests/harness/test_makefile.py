"""Which Python `make` takes for the environment."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With a Python 3.11 on the path that calls itself the fastest, from a folder that make would split and cut."""
    folder = tmp_path / "check out"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    shutil.copy(ROOT / "pyproject.toml", folder)
    shutil.copytree(ROOT / "requirements", folder / "requirements")
    fake = tmp_path / "python3.11"
    fake.write_text("#!/bin/sh\necho '0 0.00000 /opt/my #1/python3.11'\n")
    fake.chmod(0o755)
    return folder


def made(checkout: Path, *words: str) -> str:
    """What make would do for the environment, or does."""
    path = f"{checkout.parent}{os.pathsep}{os.environ['PATH']}"
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHON", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", *words, "setup"], cwd=checkout, env=environment | {"PATH": path}, capture_output=True, text=True, timeout=120
    )
    return done.stdout + done.stderr


def test_it_is_the_fastest_wherever_that_lies(checkout: Path) -> None:
    assert '"/opt/my #1/python3.11" -m venv ' in made(checkout, "-n")


def test_an_environment_keeps_the_python_that_it_was_made_of(checkout: Path) -> None:
    venv.create(checkout / ".venv", symlinks=True)
    assert '".venv/bin/python" -m venv ' in made(checkout, "-n")


@pytest.mark.parametrize("same", [True, False])
def test_an_environment_of_another_python_is_made_anew(checkout: Path, same: bool) -> None:
    venv.create(checkout / ".venv", symlinks=same)  # a copy is another
    marker = checkout / ".venv" / "marker"
    marker.touch()
    wrapper = checkout.parent / "shim"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    wrapper.chmod(0o755)
    said = made(checkout, f"PYTHON={wrapper}", "PIP=@echo installs")
    assert "Error" not in said
    assert "installs torch" in said
    assert marker.exists() is same
