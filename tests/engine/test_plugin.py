"""Somebody else's test suite: the fixture, the strategies, the marker, failures that argue, and xdist."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest_plugins = ["pytester"]

SUITE = """
import pytest
from hypothesis import given, settings
from eagletwin.cases.strategies import Focus, cases

FOCUS = Focus(num_steps=2)

@settings(max_examples=4)
@given(case=cases(FOCUS, max_requests=2))
def test_the_release_is_right(eagletwin, case):
    eagletwin.check(case)

@pytest.mark.eagletwin(revert=[26329])
@given(case=cases(FOCUS, max_requests=2))
def test_a_fix_is_undone(eagletwin, case):
    eagletwin.check(case)
"""


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("CI", "true")  # Hypothesis draws the same cases in every run then
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(test_other=SUITE)
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    return suite.runpytest_subprocess("-p", "no:cacheprovider", "--eagletwin-profile", "ci", *arguments, timeout=300)


def test_a_suite_of_somebody_else_finds_shrinks_and_keeps_and_does_so_again(suite: pytest.Pytester) -> None:
    result = run(suite, "-n", "2")
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == 1
    text = result.stdout.str()
    assert "eagletwin 0.1.0: SGLang" in text
    assert "draft.input_ids" in text
    assert "its tail row" in text
    [folder] = (suite.path / "eagletwin-runs").iterdir()
    assert f"folder: {folder.relative_to(suite.path)}" in text
    case = json.loads((folder / "case.json").read_text())
    assert len(case["requests"]) == 1  # shrunk: one request, one boundary
    assert len(case["requests"][0]["prompt"]) == 2
    assert case["chunks"] == [1]
    script = subprocess.run([sys.executable, folder / "repro.py"], cwd=suite.path, capture_output=True, text=True, check=False)
    assert script.returncode == 1, script.stderr
    assert "draft.input_ids" in script.stdout
    run(suite, "-n", "2", "--eagletwin-out", "second").assert_outcomes(passed=1, failed=1)
    [second] = (suite.path / "second").iterdir()
    for part in ("case.json", "verdict.json", "trace.safetensors"):
        assert (folder / part).read_bytes() == (second / part).read_bytes()


def test_a_finding_is_kept_elsewhere_where_its_folder_cannot_be_written(suite: pytest.Pytester) -> None:
    (suite.path / "taken").write_text("a file stands where the folder would be made")
    result = run(suite, "-k", "undone", "--eagletwin-out", "taken/runs")
    result.assert_outcomes(failed=1, deselected=1)
    [line] = [line for line in result.stdout.lines if line.startswith("  folder: ")]
    folder = Path(line.removeprefix("  folder: "))
    assert (folder / "verdict.json").is_file()
    assert not folder.is_relative_to(suite.path)
    shutil.rmtree(folder.parent)


def test_an_unknown_release_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = pytester.runpytest_subprocess("--eagletwin-sglang", "0.0.1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--eagletwin-sglang 0.0.1: '0.0.1' is neither a release nor a folder*"])


def test_a_marker_that_cannot_be_followed_fails_its_test_alone_and_says_why(pytester: pytest.Pytester) -> None:
    """Patch files are looked for beside the test, wherever pytest was started."""
    there = {"name": "there", "edits": [{"target": "a.b", "match": "c", "replacement": "d"}]}
    marked = {
        "there": "patches=['there.json']",
        "missing": "patches=['missing.json']",
        "number": "patches=[1]",
        "entry": "revert=[1]",
        "rule": "without=['draft.magic']",
        "parts": "revert=[26997]",
        "name": "rever=[26329]",
        "position": "26329",
        "single": "revert=26329",
        "kernels": "kernels='quick'",
    }
    tests = "".join(f"@pytest.mark.eagletwin({asked})\ndef test_{name}(): pass\n" for name, asked in marked.items())
    folder = pytester.mkdir("below")
    (folder / "test_marked.py").write_text(f"import pytest\n{tests}")
    (folder / "there.json").write_text(json.dumps(there))
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=8)
    text = result.stdout.str()
    assert f"{folder / 'missing.json'}: No such file or directory\n  so:  nothing was run\n  try: give a patch file" in text
    assert "patches has a int" in text
    for told in ("not rever\n", "not 26329\n", "revert is no list, but 26329\n", "kernels is 'quick', and none of fast, "):
        assert told in text, told
    assert "the ledger has no entry '1'" in text
    assert "'draft.magic' is not a rule that can be switched off" in text
    assert "plugin.py" not in text
    assert "During handling" not in text


def test_the_documented_use_needs_no_options(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile, no deadline: the first case of a test waits for an engine, for longer than Hypothesis would."""
    monkeypatch.delenv("CI", raising=False)
    pytester.makepyfile(SUITE.partition("@pytest.mark")[0])
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "-n", "1", timeout=300)
    result.assert_outcomes(passed=1)


def test_cases_after_a_tests_time_are_counted_not_passed_in_silence(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE.partition("@pytest.mark")[0])
    for workers in ("0", "1"):
        result = pytester.runpytest_subprocess("-p", "no:cacheprovider", "--eagletwin-seconds", "0", "-n", workers)
        result.stdout.fnmatch_lines(["eagletwin: * not run, because the time of their test was up"])
        result.assert_outcomes(skipped=1)


def test_the_plugin_is_light(pytester: pytest.Pytester) -> None:
    """A suite that does not use it pays for no import of torch, Hypothesis or SGLang."""
    pytester.makepyfile(
        """
        import sys
        def test_light():
            assert not {"torch", "sglang", "eagletwin.harness.twin", "eagletwin.cases.strategies"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:hypothesispytest").assert_outcomes(passed=1)
