"""What `--sglang` and `--patch` name, what traces call it, and which packages come along."""

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagletwin.harness.commands.options import spec_of
from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.core.files import installed_version
from eagletwin.harness.engines import difference, source
from eagletwin.harness.engines.inside import own_loader
from eagletwin.harness.engines.provision import Section, lock, parse, releases
from eagletwin.harness.engines.source import INSTALLED, Source, is_diff, patched_tree, resolve

from .wheels import make_release

# What `--sglang` names, what its traces will call it, and which packages come along.


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
        [files] = re.findall(rf"^# files: (.+)\nsglang=={re.escape(name)} ", text, re.MULTILINE)
        platforms = files.split()
        [digests] = lock()[f"releases/{name}"].pins.values()
        assert len(platforms) == len(set(platforms)) == len(digests)
        for python in ("cp311", "cp312"):
            for machine in ("x86_64", "aarch64"):
                assert "py3-none-any" in platforms or any(
                    tag.startswith(python) and tag.endswith(machine) for tag in platforms
                ), (name, python, machine)
    for section in lock().values():
        assert section.pins
        assert all(len(digest) == 64 for digests in section.pins.values() for digest in digests)


def test_vllm_has_releases_of_its_own() -> None:
    assert releases("vllm")[-1] == "0.33.0"
    assert not set(releases("vllm")) & set(releases())
    with pytest.raises(InputError, match=r"'0\.5\.23' is neither a release nor a folder\n.*\n.*vLLM or one of 0\.32\.0, "):
        resolve("0.5.23", "vllm")


def test_the_installed_one_is_not_fetched() -> None:
    assert resolve("") == resolve(installed_version("sglang")) == INSTALLED


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
def test_a_checkout_that_was_changed_is_called_by_its_commit_and_by_what_was_changed(tree: Path, file: str) -> None:
    name = commit(tree)
    place = tree / "python" / "sglang" / file
    before = place.read_text() if place.exists() else None
    versions = []
    for text in ("one = 2\n", "one = 3\n", "one = 2\n"):
        place.write_text(text)
        versions.append(resolve(str(tree)).version)
    assert all(re.fullmatch(rf"{name}\+dirty\.[0-9a-f]{{8}}", version) for version in versions)
    assert versions[0] == versions[2] != versions[1]
    git(tree, "add", ".")  # whether it is staged does not matter
    assert resolve(str(tree)).version == versions[0]
    place.unlink() if before is None else place.write_text(before)
    assert resolve(str(tree)).version == name


@pytest.mark.parametrize("flag", ["--assume-unchanged", "--skip-worktree"])
def test_a_file_that_git_was_told_not_to_look_at_is_compared_by_its_content(tree: Path, flag: str) -> None:
    name = commit(tree)
    git(tree, "update-index", flag, "python/sglang/__init__.py")
    assert resolve(str(tree)).version == name
    (tree / "python" / "sglang" / "__init__.py").write_text("one = 2\n")
    assert git(tree, "status", "--porcelain") == ""
    changed = resolve(str(tree))
    assert re.fullmatch(rf"{name}\+dirty\.[0-9a-f]{{8}}", changed.version)
    assert changed.difference is not None
    assert "+one = 2\n" in changed.difference.patch


def test_a_repository_whose_git_goes_by_size_and_time_alone_is_looked_at(tree: Path) -> None:
    name = commit(tree)
    git(tree, "config", "core.checkStat", "minimal")
    git(tree, "config", "core.trustctime", "false")
    file = tree / "python" / "sglang" / "__init__.py"
    os.utime(file, (1, 1))
    git(tree, "update-index", "--refresh")
    file.write_text("one = 2\n")
    os.utime(file, (1, 1))
    assert git(tree, "status", "--porcelain") == ""
    assert resolve(str(tree)).version.startswith(f"{name}+dirty.")


def test_where_a_checkout_writes_files_in_another_way_git_says_what_was_changed(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tree / ".gitattributes").write_text("*.py eol=crlf\n")
    files = [tree / "python" / "sglang" / f"{number}.py" for number in range(3)]
    for file in files:
        file.write_bytes(b"one = 1\r\n")
    name = commit(tree)
    monkeypatch.setattr(source, "_MANY", 1)
    monkeypatch.setattr(source, "_of_head", lambda root, path: pytest.fail(path))
    assert resolve(str(tree)).version == name
    monkeypatch.undo()
    monkeypatch.setattr(source, "_MANY", 1)
    files[1].write_bytes(b"two = 1\r\n")
    changed = resolve(str(tree)).difference
    assert changed is not None
    assert "+two = 1" in changed.patch
    assert changed.patch.count("--- a/") == 1


def put_before_git(folder: Path, lines: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that runs these lines before the real one."""
    script = folder / "bin" / "git"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\n{lines}\nexec {shutil.which("git")} "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")


def test_a_staged_file_that_is_ignored_is_a_change(tree: Path) -> None:
    (tree / ".gitignore").write_text("new.py\n")
    name = commit(tree)
    (tree / "python" / "sglang" / "new.py").write_text("two = 2\n")
    git(tree, "add", "--force", "python/sglang/new.py")
    assert resolve(str(tree)).version.startswith(f"{name}+dirty.")


def test_a_repository_that_git_refuses_is_called_by_its_files_and_said_so(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = commit(tree)
    refuse = "export GIT_TEST_ASSUME_DIFFERENT_OWNER=1 GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null"
    put_before_git(tmp_path, refuse, monkeypatch)
    version = resolve(str(tree)).version
    assert version.startswith("tree-")
    assert name not in version
    said = capsys.readouterr().err
    assert f"note: git does not read the repository {tree}: fatal: detected dubious ownership" in said
    assert f"  try: git config --global --add safe.directory {tree}" in said


@pytest.mark.parametrize("command", ["diff", "diff --cached", "read-tree", "ls-files --others"])
def test_a_git_that_fails_to_list_changes_says_nothing_of_a_clean_tree(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    commit(tree)
    fail = f'case "$*" in *" {command} "*) echo "fatal: it broke" >&2; exit 128;; esac'
    put_before_git(tmp_path, fail, monkeypatch)
    with pytest.raises(HarnessError, match=r"fails in .*: fatal: it broke\n.*whether the tree was changed"):
        resolve(str(tree))


def test_what_git_ignores_is_no_change(tree: Path) -> None:
    (tree / ".gitignore").write_text("_version.py\n")
    name = commit(tree)
    (tree / "python" / "sglang" / "_version.py").write_text("version = 1\n")
    assert resolve(str(tree)).version == name


@pytest.fixture
def copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of a release with its dist-info, whose originals are in the cache."""
    make_release(tmp_path)
    for folder in (tmp_path / "copy", tmp_path / "cache" / "releases" / "0.0.1"):
        with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
            wheel.extractall(folder)
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "copy"


CHANGES: dict[str, tuple[str, bytes | None]] = {
    "an edit": ("sglang/srt/engine.py", b"two = 3\n"),
    "no line feed at the end": ("sglang/srt/engine.py", b"two = 2"),
    "other line ends": ("sglang/srt/engine.py", b"two = 2\r\n"),
    "a file that had been empty": ("sglang/srt/__init__.py", b"three = 3\n"),
    "a new file": ("sglang/srt/new.py", b"four = 4\n\x0c\n"),
    "a file that is gone": ("sglang/srt/engine.py", None),
}


def make(root: Path, file: str, content: bytes | None) -> None:
    (root / file).unlink() if content is None else (root / file).write_bytes(content)


@pytest.mark.parametrize("what", sorted(CHANGES))
def test_the_patch_of_a_changed_release_makes_the_same_tree_by_the_same_name(copy: Path, what: str) -> None:
    other = copy.with_name("other")
    shutil.copytree(copy, other)
    assert resolve(str(copy)).version == "0.0.1"
    make(copy, *CHANGES[what])
    changed = resolve(str(copy))
    assert re.fullmatch(r"0\.0\.1\+dirty\.[0-9a-f]{8}", changed.version)
    assert changed.difference is not None
    subprocess.run(["git", "apply"], cwd=other, input=changed.difference.patch.encode(), check=True)
    assert resolve(str(other)).version == changed.version


def link_files(package: Path, real: Path) -> None:
    """Move a package there, and leave a link in the place of each file."""
    package.rename(real)
    for file in [file for file in real.rglob("*") if file.is_file()]:
        link = package / file.relative_to(real)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(file)


def link_folders(package: Path, real: Path) -> None:
    """The same with a link in the place of each file and folder of the package."""
    package.rename(real)
    package.mkdir()
    for inside in real.iterdir():
        (package / inside.name).symlink_to(inside)


def link_package(package: Path, real: Path) -> None:
    package.rename(real)
    package.symlink_to(real)


Links = Callable[[Path, Path], None]
LINKS = (link_files, link_folders, link_package)


@pytest.mark.parametrize("links", LINKS)
def test_a_release_that_holds_links_is_compared_by_what_they_lead_to(copy: Path, tmp_path: Path, links: Links) -> None:
    links(copy / "sglang", tmp_path / "real")
    assert resolve(str(copy)).version == "0.0.1"
    (tmp_path / "real" / "srt" / "engine.py").write_text("def f():\n    pass\n")
    found = resolve(str(copy)).difference
    assert found is not None
    assert [*found.watch.modules] == ["sglang.srt.engine"]


@pytest.mark.parametrize("links", LINKS)
def test_a_checkout_that_holds_links_is_compared_by_what_they_lead_to(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: Links
) -> None:
    asked: list[str] = []
    of_head = source._of_head
    monkeypatch.setattr(source, "_of_head", lambda root, path: asked.append(path) or of_head(root, path))
    (tree / "python" / "sglang" / "srt").mkdir()
    (tree / "python" / "sglang" / "srt" / "engine.py").write_text("two = 2\n")
    name = commit(tree)
    links(tree / "python" / "sglang", tmp_path / "real")
    assert resolve(str(tree)).version == name
    assert not asked  # a process each, and there are thousands
    (tmp_path / "real" / "srt" / "engine.py").write_text("two = 3\n")
    found = resolve(str(tree)).difference
    assert found is not None
    assert [*found.watch.modules] == ["sglang.srt.engine"]
    assert "-two = 2\n+two = 3\n" in found.patch
    assert asked == ["sglang/srt/engine.py"]


def test_a_tree_of_links_without_a_base_is_called_by_what_they_lead_to(tree: Path, tmp_path: Path) -> None:
    (tree / "python" / "sglang" / "srt").mkdir()
    (tree / "python" / "sglang" / "srt" / "engine.py").write_text("two = 2\n")
    name = resolve(str(tree)).version
    link_folders(tree / "python" / "sglang", tmp_path / "real")
    assert resolve(str(tree)).version == name
    (tmp_path / "real" / "srt" / "engine.py").write_text("two = 3\n")
    assert resolve(str(tree)).version != name


def test_a_link_to_a_folder_that_it_lies_in_is_a_change(copy: Path) -> None:
    (copy / "sglang" / "srt" / "again").symlink_to(copy / "sglang")
    found = resolve(str(copy)).difference
    assert found is not None
    assert found.watch.differs.files == ("sglang/srt/again",)


def test_all_changes_of_a_release_have_names_of_their_own(copy: Path) -> None:
    versions = set()
    for file, content in CHANGES.values():
        before = (copy / file).read_bytes() if (copy / file).exists() else None
        make(copy, file, content)
        versions.add(resolve(str(copy)).version)
        make(copy, file, before)
    assert len(versions) == len(CHANGES)
    assert resolve(str(copy)).version == "0.0.1"


def test_what_a_patch_cannot_hold_is_named_in_it(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (copy / "sglang" / "kernel.so").write_bytes(b"\0\xff")
    (copy / "sglang" / "long.py").write_text("five = 5\n" * 100)
    (copy / "sglang" / "short.py").write_text("six = 6\n")
    monkeypatch.setattr(difference, "MAX_FILE", 500)
    found = resolve(str(copy)).difference
    assert found is not None
    assert "Not here: sglang/kernel.so (binary); sha256 " in found.patch
    assert "Not here: sglang/long.py (longer than 500 bytes); sha256 " in found.patch
    assert "+six = 6\n" in found.patch
    assert found.watch.differs.files == ("sglang/kernel.so",)
    monkeypatch.setattr(difference, "MAX_PATCH", 10)
    found = resolve(str(copy)).difference
    assert found is not None
    assert "Not here: sglang/short.py (left out, since the patch is longer than 10 bytes)" in found.patch


def test_a_file_whose_original_is_not_at_hand_is_named_and_each_of_its_functions_counts(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "cache")
    (copy / "sglang" / "srt" / "engine.py").write_text("def f():\n    pass\n")
    found = resolve(str(copy)).difference
    assert found is not None
    assert found.watch.differs.functions == ("sglang.srt.engine.f",)
    assert found.watch.differs.unlisted == ("sglang/srt/engine.py",)
    assert "Not here: sglang/srt/engine.py (its original is not at hand" in found.patch
    assert "`eagletwin info releases fetch 0.0.1` brings those" in capsys.readouterr().err


def test_a_copy_whose_record_was_written_anew_is_compared_with_the_record_of_the_release(copy: Path) -> None:
    """As a wheel has it that was built of an edited tree and names the release's version."""
    file, record = copy / "sglang" / "srt" / "engine.py", next(copy.glob("*.dist-info/RECORD"))
    old = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    file.write_text("two = 3\n")
    new = base64.urlsafe_b64encode(hashlib.sha256(file.read_bytes()).digest()).rstrip(b"=").decode()
    assert old in record.read_text()
    record.write_text(record.read_text().replace(old, new))
    found = resolve(str(copy))
    assert found.version.startswith("0.0.1+dirty.")
    assert found.difference is not None
    assert "+two = 3\n" in found.difference.patch


def test_a_release_without_a_record_is_called_by_all_of_its_files(copy: Path) -> None:
    next(copy.glob("*.dist-info/RECORD")).unlink()
    first = resolve(str(copy))
    (copy / "sglang" / "srt" / "engine.py").write_text("two = 3\n")
    second = resolve(str(copy))
    assert first.version != second.version
    assert first.version.startswith("0.0.1+dirty.")
    assert first.difference is None


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
    monkeypatch.setattr(source, "lock", lambda: parse("# [layers/transformers-1.2.3]\ntransformers==1.2.3 --hash=sha256:00\n"))
    monkeypatch.setattr(source, "provide", lambda section: fetched.append(section) or layer)
    project = tree / "python" / "pyproject.toml"
    project.write_text('[project]\ndependencies = ["sentence-transformers==9.9", "transformers==1.2.3"]\n')
    assert resolve(str(tree)).paths == (tree / "python", layer)
    assert [section.name for section in fetched] == ["transformers-1.2.3"]
    project.write_text(f'[project]\ndependencies = ["transformers=={installed_version("transformers")}"]\n')
    assert resolve(str(tree)).paths == (tree / "python",)
    assert not capsys.readouterr().err
    project.write_text('[project]\ndependencies = ["transformers==99.0"]\n')
    assert resolve(str(tree)).paths == (tree / "python",)
    assert "pins transformers 99.0, which is not in eagletwin's lock file" in capsys.readouterr().err


@pytest.mark.skipif(not [*importlib.metadata.distributions(name="sglang")], reason="SGLang is not installed")
def test_another_sglang_in_front_of_the_installed_one_is_not_called_by_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang").mkdir()
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__path__=[str(tmp_path / "sglang")]))  # by PYTHONPATH
    with pytest.raises(ImportError, match=f"or name it, --sglang {re.escape(str(tmp_path))}$"):
        own_loader.confirm_installed("sglang")
    installed_one = importlib.metadata.distribution("sglang").locate_file("sglang")
    monkeypatch.setitem(sys.modules, "sglang", SimpleNamespace(__path__=[str(installed_one)]))
    own_loader.confirm_installed("sglang")


def test_the_installed_one_is_called_by_its_content_if_it_was_edited_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, about = tmp_path / "sglang" / "__init__.py", tmp_path / "sglang-9.9.dist-info"
    code.parent.mkdir()
    about.mkdir()
    code.write_text("one = 1\n")
    digest = base64.urlsafe_b64encode(hashlib.sha256(code.read_bytes()).digest()).decode().rstrip("=")
    (about / "METADATA").write_text("Name: sglang\nVersion: 9.9\n")
    (about / "RECORD").write_text(f"sglang/__init__.py,sha256={digest},8\n")
    found = SimpleNamespace(submodule_search_locations=[str(code.parent)])
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: found)
    assert resolve("") == INSTALLED
    while code.stat().st_ctime_ns <= (about / "RECORD").stat().st_ctime_ns:  # clocks of file systems tick in milliseconds
        code.write_text("one = 2\n")
    edited = resolve("")
    assert edited.version.startswith("9.9+dirty.")
    assert edited.difference is not None
    code.write_text("one = 1\n")
    assert resolve("") == INSTALLED


# `--patch FILE` with a unified diff: the release with it, as a tree; the release stays as it is.


DIFF = """\
diff --git a/{0}sglang/srt/step.py b/{0}sglang/srt/step.py
--- a/{0}sglang/srt/step.py
+++ b/{0}sglang/srt/step.py
@@ -1,2 +1,2 @@
 def step():
-    return 1
+    return 2
--- a/{0}test/test_step.py
+++ b/{0}test/test_step.py
@@ -1,1 +1,1 @@
-nowhere
+here
"""


@pytest.fixture
def release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    root = tmp_path / "release"
    (root / "sglang" / "srt").mkdir(parents=True)
    (root / "sglang-0.5.23.dist-info").mkdir()
    (root / "sglang" / "__init__.py").write_text("")
    (root / "sglang" / "srt" / "step.py").write_text("def step():\n    return 1\n")
    return Source("0.5.23", (root,), "0.5.23")


def written(folder: Path, text: str) -> Path:
    file = folder / "change.diff"
    file.write_text(text)
    return file


@pytest.mark.parametrize("above", ["", "python/", "up/sglang/python/"])
def test_a_diff_becomes_a_tree_once_and_the_release_stays_as_it_is(release: Source, above: str, tmp_path: Path) -> None:
    file = written(tmp_path, DIFF.format(above))
    assert is_diff(file)
    tree = patched_tree(release, file)
    assert (tree / "sglang" / "srt" / "step.py").read_text() == "def step():\n    return 2\n"
    assert (release.root / "sglang" / "srt" / "step.py").read_text() == "def step():\n    return 1\n"
    assert {path.name for path in tree.iterdir()} == {"sglang", "sglang-0.5.23.dist-info"}
    assert patched_tree(release, file) == tree
    assert [*tree.parent.iterdir()] == [tree]


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (DIFF.format("").replace("return 1", "return 3"), "change.diff does not apply: "),
        ("once upon a time", "is neither JSON nor a unified diff"),
        ("--- a/other/step.py\n+++ b/other/step.py\n", "is neither JSON nor a unified diff"),
    ],
)
def test_a_diff_that_does_not_apply_leaves_nothing(release: Source, text: str, cause: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=cause):
        patched_tree(release, written(tmp_path, text))
    assert not [*(tmp_path / "cache" / "patched").glob("*")]


def test_a_diff_needs_a_release(release: Source, tmp_path: Path) -> None:
    (release.root / "sglang-0.5.23.dist-info").rmdir()
    with pytest.raises(InputError, match=r"is a diff, and 0\.5\.23 is not a release"):
        patched_tree(release, written(tmp_path, DIFF))


def test_a_diff_is_for_a_command_of_one_sglang(tmp_path: Path) -> None:
    file = str(written(tmp_path, DIFF.format("")))
    with pytest.raises(InputError, match="is a diff, in a command of several releases"):
        spec_of({"patch": [file]})
    with pytest.raises(InputError, match="is a diff, in several diffs"):
        spec_of({"patch": [file, file], "sglang": ""})


def test_a_diff_that_changes_what_nothing_here_runs_is_refused_and_a_deeper_sglang_misleads_nobody(
    release: Source, tmp_path: Path
) -> None:
    kernel = "--- a/sgl-kernel/csrc/tree.cu\n+++ b/sgl-kernel/csrc/tree.cu\n@@ -1,1 +1,1 @@\n-a\n+b\n"
    with pytest.raises(InputError, match=r"also changes .*sgl-kernel/csrc/tree\.cu.*nothing here runs it"):
        patched_tree(release, written(tmp_path, DIFF.format("python/") + kernel))
    guide = "--- a/docs/guides/sglang/notes.txt\n+++ b/docs/guides/sglang/notes.txt\n@@ -1,1 +1,1 @@\n-a\n+b\n"
    tree = patched_tree(release, written(tmp_path, guide + DIFF.format("python/")))
    assert "return 2" in (tree / "sglang" / "srt" / "step.py").read_text()
