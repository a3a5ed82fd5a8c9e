"""A user's test suite: the fixture, the strategies, the marker, failures that argue, and xdist."""

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from eagletwin.harness.core import case
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.families.valid import read_case

from ..rows import long
from . import forked
from .test_kernels import UNKNOWN_KERNEL

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

UNDONE = """
import pytest
from eagletwin.cases.ledger import LEDGER

@pytest.mark.eagletwin(revert=[26329])
def test_a_fix_is_undone(eagletwin):
    eagletwin.check(LEDGER["26329"].case)
"""


WORDS = ("-p", "no:cacheprovider", "--eagletwin-profile", "ci")


@pytest.fixture
def suite(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("CI", "true")  # Hypothesis draws the same cases in every run then
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    pytester.makepyfile(test_other=SUITE)
    return pytester


def run(suite: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """A session of pytest with eagletwin's profile for CI. With workers (`-n`) it is a process of its own."""
    if "-n" in arguments:
        return suite.runpytest_subprocess(*WORDS, *arguments, timeout=300)
    return forked.session(suite.path, *WORDS, *arguments)


@dataclass(frozen=True)
class Shrunk:
    """A session without workers in which a fix is undone, in a folder of its own, and what it printed."""

    folder: Path
    result: pytest.RunResult
    kept: Path


@pytest.fixture(scope="module")
def shrunk(tmp_path_factory: pytest.TempPathFactory) -> Shrunk:
    folder = tmp_path_factory.mktemp("shrunk")
    (folder / "test_other.py").write_text(SUITE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CI", "true")
        patch.delenv("PYTEST_XDIST_WORKER", raising=False)
        result = forked.session(folder, *WORDS, "-k", "undone")
    [kept] = (folder / "eagletwin-runs").iterdir()
    return Shrunk(folder, result, kept)


def test_a_suite_of_somebody_else_finds_shrinks_and_keeps(shrunk: Shrunk) -> None:
    shrunk.result.assert_outcomes(failed=1, deselected=1)
    assert shrunk.result.ret == 1
    text = shrunk.result.stdout.str()
    assert "eagletwin 0.1.0: SGLang" in text
    assert "draft.input_ids" in text
    assert "its tail row" in text
    assert f"folder: {shrunk.kept.relative_to(shrunk.folder)}" in text
    smallest = json.loads((shrunk.kept / "case.json").read_text())
    assert len(smallest["requests"]) == 1  # one request, one boundary
    assert len(smallest["requests"][0]["prompt"]) == 2
    assert smallest["chunks"] == [1]
    script = forked.script(shrunk.kept / "repro.py", cwd=shrunk.folder, source=INSTALLED)
    assert script.returncode == 1, script.stderr
    assert "draft.input_ids" in script.stdout


@pytest.mark.long
def test_workers_of_such_a_suite_find_the_same(suite: pytest.Pytester, shrunk: Shrunk) -> None:
    result = run(suite, "-n", "2")
    result.assert_outcomes(passed=1, failed=1)
    [folder] = (suite.path / "eagletwin-runs").iterdir()
    for part in ("case.json", "verdict.json", "trace.safetensors"):
        assert (folder / part).read_bytes() == (shrunk.kept / part).read_bytes()
    page = (shrunk.kept / "report.html").read_text(encoding="utf-8").replace(shrunk.kept.name, folder.name)
    assert (folder / "report.html").read_text(encoding="utf-8") == page  # it names its own folder


def test_a_test_of_which_nothing_is_stored_does_not_pass_by_replaying_nothing(
    suite: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(suite.path / "cache"))
    result = run(suite, "-k", "right", "--eagletwin-profile", "repro")
    result.assert_outcomes(failed=1, deselected=1)
    assert "nothing was run: Hypothesis was to run only what failed before, and has nothing stored" in result.stdout.str()


def test_a_finding_is_kept_elsewhere_where_its_folder_cannot_be_written(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_other=UNDONE)
    (suite.path / "taken").write_text("a file stands where the folder would be made")
    result = run(suite, "--eagletwin-out", "taken/runs")
    result.assert_outcomes(failed=1)
    [line] = [line for line in result.stdout.lines if line.startswith("  folder: ")]
    folder = Path(line.removeprefix("  folder: "))
    assert (folder / "verdict.json").is_file()
    assert not folder.is_relative_to(suite.path)
    shutil.rmtree(folder.parent)


def test_an_unknown_release_is_refused(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(): pass")
    result = forked.session(pytester.path, "--eagletwin-sglang", "0.0.1")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--eagletwin-sglang 0.0.1: '0.0.1' is neither a release nor a folder*"])


def test_a_marker_that_cannot_be_followed_fails_its_test_alone_and_says_why(pytester: pytest.Pytester) -> None:
    """Patch files are looked for in the folder of the test, wherever pytest was started."""
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
    result = forked.session(pytester.path, "-p", "no:cacheprovider")
    result.assert_outcomes(passed=2, errors=8)
    text = result.stdout.str()
    assert f"{folder / 'missing.json'}: No such file or directory\n  so:  nothing was run\n  try: give a patch file" in text
    assert "patches has a int" in text
    for words in (
        "not rever\n",
        "not 26329\n",
        "revert is not a list, but 26329\n",
        "kernels is 'quick', and not one of fast, ",
    ):
        assert words in text, words
    assert "the ledger has no entry '1'" in text
    assert "'draft.magic' is not a rule that can be switched off" in text
    assert "plugin.py" not in text
    assert "During handling" not in text


@pytest.mark.parametrize("workers", [False, *long(True)])
def test_a_test_without_time_for_any_case_fails(pytester: pytest.Pytester, workers: bool) -> None:
    pytester.makepyfile(
        test_other=SUITE.partition("@pytest.mark")[0]
        + """
from eagletwin.cases.ledger import LEDGER

def test_one_case(eagletwin):
    eagletwin.check(LEDGER["26329"].case)

def test_one_case_is_played(eagletwin):
    eagletwin.start(LEDGER["26329"].case).finish()
"""
    )
    words = ("-p", "no:cacheprovider", "--eagletwin-seconds", "0")
    result = pytester.runpytest_subprocess(*words, "-n", "1") if workers else forked.session(pytester.path, *words)
    result.assert_outcomes(failed=3)
    lines = result.stdout.lines
    for name, ran in (("the_release_is_right", "0 of 4"), ("one_case", "0"), ("one_case_is_played", "0")):
        assert f"eagletwin: test_other.py::test_{name} ran {ran} cases: --eagletwin-seconds 0 was up" in lines
    assert "0 of 4 cases ran before --eagletwin-seconds 0 was up, and 4 must" in lines
    # Once a failure: pytest prints the line in its summary as well where CI is set, in whole.
    raised = [line for line in lines if line.startswith("E ")]
    assert sum("TimeUp: --eagletwin-seconds 0 was up before this case" in line for line in raised) == 2
    assert "filtering out" not in result.stdout.str()


SHORT = """
import pytest
from hypothesis import given, settings
from eagletwin.cases.strategies import Focus, cases

FOCUS = Focus(num_steps=2)

def three(eagletwin, case):  # the time is up after three cases
    eagletwin.check(case)
    if eagletwin.looked == 3:
        eagletwin._deadline = 0.0

@settings(max_examples=20)
@given(case=cases(FOCUS, max_requests=2))
def test_three_of_twenty(eagletwin, case):
    three(eagletwin, case)

@settings(max_examples=3)
@given(case=cases(FOCUS, max_requests=2))
def test_three_of_three(eagletwin, case):
    three(eagletwin, case)

@settings(max_examples=20)
@given(case=cases(FOCUS, max_requests=2))
def test_it_fails_otherwise(eagletwin, case):
    three(eagletwin, case)
    assert eagletwin.looked < 3

def test_fifty_by_hand(eagletwin):
    from eagletwin.cases.ledger import LEDGER

    for _ in range(50):
        three(eagletwin, LEDGER["26329"].case)

def test_the_time_is_up_in_what_it_calls(eagletwin):
    @settings(max_examples=20, database=None)
    @given(case=cases(FOCUS, max_requests=2))
    def inner(case):
        three(eagletwin, case)

    with pytest.raises(AssertionError):
        inner()
"""


def test_a_test_whose_time_was_up_before_it_ran_enough_cases_fails(suite: pytest.Pytester) -> None:
    suite.makepyfile(test_other=SHORT)
    result = run(suite, "-rA")
    result.assert_outcomes(passed=1, failed=4)
    assert "PASSED test_other.py::test_three_of_three" in result.stdout.lines
    late = {"three_of_twenty": "3 of 20", "fifty_by_hand": "3", "the_time_is_up_in_what_it_calls": "3"}
    for name, ran in late.items():
        assert f"eagletwin: test_other.py::test_{name} ran {ran} cases: --eagletwin-seconds inf was up" in result.stdout.lines
    # what was found before stands, and so does what a test expects of Hypothesis
    assert "FAILED test_other.py::test_it_fails_otherwise - assert " in result.stdout.str()
    enough = run(suite, "-rA", "--eagletwin-min-cases", "3", "-k", "three_of_twenty")
    enough.assert_outcomes(passed=1, deselected=4)
    said = "eagletwin: test_other.py::test_three_of_twenty ran 3 of 20 cases: --eagletwin-seconds inf was up"
    assert said in enough.stdout.lines


def test_no_cases_at_all_cannot_be_enough(pytester: pytest.Pytester) -> None:
    result = forked.session(pytester.path, "--eagletwin-min-cases", "0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--eagletwin-min-cases: invalid *value: '0'"])


def test_a_case_that_is_played_and_left_fails_its_test(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_other="""
import pytest
from hypothesis import assume, given, settings, strategies as st
from eagletwin.cases.ledger import LEDGER

CASE = LEDGER["26329"].case

def test_left(eagletwin):
    eagletwin.start(CASE).step()

def test_closed(eagletwin):
    live = eagletwin.start(CASE)
    live.step()
    live.close()

def test_finished(eagletwin):
    live = eagletwin.start(CASE)
    live.step()
    live.finish()

@settings(max_examples=4)
@given(st.integers(0, 1))
def test_some_are_rejected(eagletwin, number):
    live = eagletwin.start(CASE)
    try:
        assume(number)
        live.finish()
    finally:
        live.close()
"""
    )
    result = run(suite, "-rA")
    result.assert_outcomes(passed=2, failed=2)
    for name in ("left", "closed"):
        assert (
            f"FAILED test_other.py::test_{name} - Failed: case pr-26329 was started and never finished" in result.stdout.str()
        )


def test_a_test_that_compares_nothing_fails_unless_it_says_otherwise_itself(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_other="""
import pytest
from hypothesis import given, settings
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.strategies import Focus, cases
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import PatchDoesNotApply

UNFIT = Patch(name="unfit", edits=(Edit(target="sglang.srt.nothing.f", match="a", replacement="b"),))

@pytest.fixture
def checked(eagletwin):
    eagletwin.check(LEDGER["26329"].case)

@pytest.fixture(scope="module")
def lent(eagletwin):
    return eagletwin.host

def test_forgotten(eagletwin):
    pass

@settings(max_examples=2)
@given(case=cases(Focus(num_steps=2)))
def test_forgotten_case(eagletwin, case):
    pass

def test_skipped(eagletwin):
    pytest.skip("not here")

def test_failed(eagletwin):
    assert eagletwin is None

def test_in_a_fixture(eagletwin, checked):
    pass

def test_of_the_host(lent):
    pass

@pytest.mark.eagletwin(patches=[UNFIT])
def test_refused(eagletwin):
    with pytest.raises(PatchDoesNotApply):
        eagletwin.check(LEDGER["26329"].case)

def test_without():
    pass
"""
    )
    result = run(suite, "-rA")
    result.assert_outcomes(passed=4, failed=3, skipped=1)
    text = result.stdout.str()
    for name in ("forgotten", "forgotten_case"):
        assert f"FAILED test_other.py::test_{name} - Failed: this test asks for the fixture eagletwin, and no case" in text
    assert "FAILED test_other.py::test_failed - assert " in text
    assert "  so:  nothing was compared, so the test fails\n" in text


def test_a_patch_that_does_not_apply_is_said_at_the_line_of_the_test(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_other="""
import pytest
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.patch import Edit, Patch

UNFIT = Patch(name="unfit", edits=(Edit(target="sglang.srt.nothing.f", match="a", replacement="b"),))

@pytest.mark.eagletwin(patches=[UNFIT])
def test_checked(eagletwin):
    eagletwin.check(LEDGER["26329"].case)

@pytest.mark.eagletwin(patches=[UNFIT])
def test_played(eagletwin):
    eagletwin.start(LEDGER["26329"].case)
"""
    )
    result = run(suite)
    result.assert_outcomes(failed=2)
    text = result.stdout.str()
    for name, call in (("checked", "check"), ("played", "start")):
        assert f"FAILED test_other.py::test_{name} - PatchDoesNotApply: sglang.srt.nothing.f does not" in text
        assert f'>       eagletwin.{call}(LEDGER["26329"].case)' in text
    for line in ("so:  the patched engine was not built", "try: adapt the patch to this release"):
        assert len([one for one in text.splitlines() if re.match(rf"E +{line}", one)]) == 2, line
    assert "host.py" not in text
    assert "raise PatchDoesNotApply(" not in text


@pytest.mark.parametrize("workers", [False, *long(True)])
def test_a_gpu_that_is_asked_for_and_not_there_is_a_usage_error(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: bool
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    pytester.makepyfile("def test_nothing(eagletwin): pass")
    words = ("--eagletwin-device", "cuda")
    result = pytester.runpytest_subprocess(*words, "-n", "1") if workers else forked.session(pytester.path, *words)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--eagletwin-device cuda: *torch*", "  so:  nothing was run: *", "  try: *"])


def test_a_release_of_the_other_engine_is_refused(pytester: pytest.Pytester) -> None:
    result = forked.session(pytester.path, "--eagletwin-engine", "sglang", "--eagletwin-vllm", "0.33.0")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*--eagletwin-vllm 0.33.0*"])


def test_a_finding_that_cannot_be_confirmed_fails_its_test_and_no_other(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_other="""
import pytest
from eagletwin.cases.ledger import LEDGER

@pytest.mark.eagletwin(revert=[26329])
def test_found(eagletwin, tmp_path):
    try:
        eagletwin.check(LEDGER["26329"].case)
    finally:  # the tree is edited while the test runs: it cannot be imported any more
        (tmp_path / "sglang").mkdir()
        (tmp_path / "sglang" / "__init__.py").write_text("raise ImportError('edited')")
        eagletwin.host.close()
        eagletwin.host.source = type(eagletwin.host.source)(name="edited", paths=(tmp_path,), version="edited")

def test_another():
    pass
"""
    )
    result = run(suite)
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert "It was seen once, and could not be confirmed: SGLang cannot be imported" in text
    assert "  draft.input_ids\n  at        request a, round 0, draft extend (prefill)" in text
    assert "INTERNALERROR" not in text


def failures(result: pytest.RunResult) -> list[str]:
    """The lines of tests that failed, each of which fits 80 columns, in a text that argues once and shows no object."""
    text = result.stdout.str()
    assert "CaseFailed: draft.input_ids, request " in text
    assert "Explanation" not in text
    assert " object at 0x" not in text
    lines = [line for line in result.stdout.lines if line.startswith("FAILED ")]
    assert all(len(line) <= 80 for line in lines)
    return lines


def test_the_case_that_hypothesis_prints_can_be_pasted(suite: pytest.Pytester, shrunk: Shrunk) -> None:
    printed = shrunk.result.stdout.str().partition("E           case=")[2].partition("\n")[0].rstrip(",")
    assert len(printed) < 250
    pasted = eval(printed, {name: getattr(case, name) for name in ("Case", "EngineSettings", "Request", "SGLangSettings")})
    assert msgspec.structs.replace(pasted, name="test_a_fix_is_undone") == read_case(shrunk.kept / "case.json")
    suite.makepyfile(
        test_pasted=f"""
from hypothesis import example, given, settings
import pytest
from eagletwin.cases.strategies import cases
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings

@pytest.mark.eagletwin(revert=[26329])
@settings(phases=["explicit"])
@given(case=cases())
@example(case={printed})
def test_pasted(eagletwin, case):
    eagletwin.check(case)
"""
    )
    result = run(suite, "test_pasted.py")
    result.assert_outcomes(failed=1)
    assert "CaseFailed: draft.input_ids" in result.stdout.str()


def test_a_marker_applies_the_candidate_fix_of_a_live_bug(suite: pytest.Pytester) -> None:
    suite.makepyfile(
        test_other="""
import pytest
from eagletwin.cases.ledger import LEDGER

def test_live(eagletwin):
    eagletwin.check(LEDGER["multi-layer-chunk-tail-2"].case)

@pytest.mark.eagletwin(remedy=["multi-layer-chunk-tail-2"])
def test_fixed(eagletwin):
    eagletwin.check(LEDGER["multi-layer-chunk-tail-2"].case)

@pytest.mark.eagletwin(remedy=["26329"])
def test_it_has_none():
    pass
"""
    )
    result = run(suite, "-rA")
    result.assert_outcomes(passed=1, failed=1, errors=1)
    assert "PASSED test_other.py::test_fixed" in result.stdout.lines
    assert "entry 26329 has no candidate fix" in result.stdout.str()


def test_settings_that_a_newer_hypothesis_keeps_elsewhere_are_missed_aloud(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        del item.obj._hypothesis_internal_use_settings
"""
    )
    pytester.makepyfile(SUITE.partition("@pytest.mark")[0])
    result = forked.session(pytester.path, "--collect-only")
    result.stdout.fnmatch_lines(["*eagletwin does not find the settings of a test in this version of Hypothesis*"])


def test_the_plugin_is_light(pytester: pytest.Pytester) -> None:
    """A suite that does not use it pays for no import of torch, Hypothesis or SGLang."""
    pytester.makepyfile(
        """
        import sys
        def test_light():
            assert not {"torch", "sglang", "eagletwin.harness.testing.twin", "eagletwin.cases.strategies"} & set(sys.modules)
        """
    )
    pytester.runpytest_subprocess("-p", "no:hypothesispytest").assert_outcomes(passed=1)


REPORTED = """
import pytest
from eagletwin.cases.ledger import LEDGER

@pytest.mark.eagletwin(revert=[26329])
@pytest.mark.parametrize("name", ["a,b: 1%"])
def test_undone(eagletwin, name):
    eagletwin.check(LEDGER["26329"].case)

def test_live(eagletwin):
    eagletwin.check(LEDGER["multi-layer-chunk-tail-2"].case)

@pytest.mark.eagletwin(patches=["patch.json"])
def test_unchecked(eagletwin):
    eagletwin.check(LEDGER["25015"].case)
"""


@pytest.mark.parametrize("workers", [False, *long(True)])
def test_a_session_needs_no_options_and_hands_on_what_programs_read(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: bool
) -> None:
    """A worker of pytest-xdist hands JUnit's properties, GitHub's annotations, the line of a failure and the kernels that were
    not checked on to its controller. The first test has no profile and no deadline, as documented: its first case waits for an
    engine, for longer than Hypothesis would."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(pytester.path))
    for name in ("CI", "PYTEST_XDIST_WORKER"):
        monkeypatch.delenv(name, raising=False)
    (pytester.path / "patch.json").write_bytes(msgspec.json.encode(UNKNOWN_KERNEL))
    pytester.makepyfile(test_documented=SUITE.partition("@pytest.mark")[0], test_reported=REPORTED)
    words = ("-p", "no:cacheprovider", "--junitxml", "junit.xml")
    result = pytester.runpytest_subprocess(*words, "-n", "1") if workers else forked.session(pytester.path, *words)
    result.assert_outcomes(passed=2, failed=2)
    assert [line.partition(" - ")[2][:27] for line in failures(result)] == ["CaseFailed: draft.input_ids"] * 2
    assert result.stdout.str().count("  expected  ") == 2  # argued once each
    result.stdout.fnmatch_lines(["*eagletwin: not checked by kernel.*Triton's interpreter ran it: _fwd_kernel*"])
    found = {
        case.get("name"): {one.get("name"): one.get("value") for one in case.iter("property")}
        for case in ElementTree.parse(pytester.path / "junit.xml").iter("testcase")
    }
    undone, live = found["test_undone[a,b: 1%]"], found["test_live"]
    assert (undone["eagletwin.status"], undone["eagletwin.rule"]) == ("diverged", "draft.input_ids")
    assert undone["eagletwin.place"] == "request a, round 0, draft extend (prefill)"
    assert "eagletwin.entry" not in undone
    assert live["eagletwin.entry"] == "multi-layer-chunk-tail-2"
    for facts in (undone, live):
        assert (pytester.path / facts["eagletwin.report"]).is_file()
        assert facts["eagletwin.again"].startswith("python eagletwin-runs/")
    first, second = [line for line in result.stdout.lines if "::error" in line]
    assert first.startswith("::error file=test_reported.py,line=4,title=test_undone[a%2Cb%3A 1%25]%3A draft.input_ids::")
    assert first.endswith(f"%0Aagain: {undone['eagletwin.again']}%0Areport: {undone['eagletwin.report']}")
    assert second.startswith("::error file=test_reported.py,line=9,title=test_live%3A draft.input_ids::")
