"""`--patch FILE` with a unified diff: the release with it, as a tree; the release stays as it is."""

from pathlib import Path

import pytest

from eagletwin.harness.commands.run_options import spec_of
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.engines.source import Source, is_diff, patched_tree

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
