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


def test_it_is_python3_11_unless_another_is_named(checkout: Path) -> None:
    assert '"python3.11" -m venv ' in made(checkout, "-n")
    assert '"/opt/my python" -m venv ' in made(checkout, "-n", "PYTHON=/opt/my python")


@pytest.mark.parametrize("verb", ["setup", "python"])
def test_a_python_that_is_missing_is_named_with_the_remedy_and_nothing_is_made(checkout: Path, verb: str) -> None:
    said = made(checkout, "PYTHON=/no/such/python", verb=verb)
    assert "error: /no/such/python is not there, or older than Python 3.1" in said
    assert "  so:  nothing was installed" in said
    assert "  try: make " in said
    assert not (checkout / ".venv").exists()
    assert not (checkout / "build").exists()


def test_packages_are_installed_by_their_digests_alone(checkout: Path) -> None:
    [line] = [line for line in made(checkout, "-n").splitlines() if "requirements/engine.lock" in line]
    assert "--require-hashes" in line
    assert "--no-deps" in line


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.slow
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
