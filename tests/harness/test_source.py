"""What `--sglang` names, what its traces will call it, and which packages come along."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagletwin.harness.engines import source
from eagletwin.harness.engines.lock import Section, lock, parse, releases
from eagletwin.harness.engines.sglang import identity
from eagletwin.harness.engines.source import INSTALLED, resolve
from eagletwin.harness.errors import InputError
from eagletwin.harness.versions import installed


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The root of what looks like a checkout, without a repository."""
    (tmp_path / "checkout" / "python" / "sglang").mkdir(parents=True)
    (tmp_path / "checkout" / "python" / "sglang" / "__init__.py").write_text("one = 1\n")
    return tmp_path / "checkout"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    return subprocess.run(
        ["git", "-C", str(folder), *identity, *words], check=True, capture_output=True, text=True
    ).stdout.strip()


def commit(folder: Path) -> str:
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    return git(folder, "rev-parse", "--short=10", "HEAD")


def test_the_lock_has_all_nineteen_releases_for_two_pythons_and_two_machines() -> None:
    assert len(releases()) == 19
    assert (releases()[0], releases()[-1]) == ("0.5.9", "0.5.23")
    text = (Path(source.__file__).with_name("releases.lock")).read_text()
    for name in releases():
        platforms = set(re.findall(rf"^sglang=={re.escape(name)} (\S+) sha256:[0-9a-f]{{64}}$", text, re.MULTILINE))
        for python in ("cp311", "cp312"):
            for machine in ("x86_64", "aarch64"):
                assert "py3-none-any" in platforms or any(
                    tag.startswith(python) and tag.endswith(machine) for tag in platforms
                ), (name, python, machine)
    for section in lock().values():
        assert section.pins
        assert all(len(digest) == 64 for digests in section.pins.values() for digest in digests)


def test_the_installed_one_is_not_fetched() -> None:
    assert resolve("") == resolve(installed("sglang")) == INSTALLED


def test_an_unknown_release_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"'0\.4\.1' is neither a release nor a folder\n.*\n.*0\.5\.9, 0\.5\.10, "):
        resolve("0.4.1")


def test_a_folder_without_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no sglang"):
        resolve(str(tmp_path))


def test_a_checkout_is_called_by_its_commit(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = commit(tree)
    monkeypatch.setenv("GIT_DIR", str(tree / "elsewhere"))  # as inside a git hook
    assert resolve(str(tree)).version == resolve(str(tree / "python")).version == name
    assert resolve(str(tree)).paths == (tree / "python",)


@pytest.mark.parametrize("file", ["__init__.py", "new.py"])
def test_a_checkout_that_was_changed_is_called_dirty(tree: Path, file: str) -> None:
    name = commit(tree)
    (tree / "python" / "sglang" / file).write_text("one = 2\n")
    assert resolve(str(tree)).version == f"{name}-dirty"


def test_what_is_dirty_outside_sglang_does_not_matter(tree: Path) -> None:
    name = commit(tree)
    (tree / "notes.txt").write_text("")
    assert resolve(str(tree)).version == name


def test_a_folder_inside_another_repository_is_not_called_by_its_commit(tree: Path) -> None:
    (tree.parent / "a").write_text("")
    (tree.parent / ".gitignore").write_text("checkout/\n")
    name = commit(tree.parent)
    version = resolve(str(tree)).version
    assert version.startswith("tree-")
    assert name not in version
    (tree / "python" / "sglang" / "__init__.py").write_text("one = 2\n")
    assert resolve(str(tree)).version != version


def test_a_tree_brings_the_packages_that_it_pins(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetched: list[Section] = []
    layer = tmp_path / "layer"
    monkeypatch.setattr(source, "lock", lambda: parse("[layers/transformers-1.2.3]\ntransformers==1.2.3 any sha256:00\n"))
    monkeypatch.setattr(source, "provide", lambda section: fetched.append(section) or layer)
    project = tree / "python" / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["sentence-transformers==9.9", "transformers==1.2.3"]\n')
    assert resolve(str(tree)).paths == (tree / "python", layer)
    assert [section.name for section in fetched] == ["transformers-1.2.3"]
    project.write_text(f'[project]\ndependencies = ["transformers=={installed("transformers")}"]\n')
    assert resolve(str(tree)).paths == (tree / "python",)
    assert not capsys.readouterr().err
    project.write_text('[project]\ndependencies = ["transformers==99.0"]\n')
    assert resolve(str(tree)).paths == (tree / "python",)
    assert "pins transformers 99.0, which is not in eagletwin's lock file" in capsys.readouterr().err


def test_another_sglang_in_front_of_the_installed_one_is_not_called_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang").mkdir()
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__path__=[str(tmp_path / "sglang")]))  # by PYTHONPATH
    with pytest.raises(ImportError, match=f"or name it, --sglang {re.escape(str(tmp_path))}$"):
        identity.confirm_installed()
    installed_one = importlib.metadata.distribution("sglang").locate_file("sglang")
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__path__=[str(installed_one)]))
    identity.confirm_installed()
