"""What comments, documents, lists and CI name must be there: documents, rules, releases, and files of ours."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

from eagletwin.cases import sample_cases
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.judge.rules import catalogue

# What comments, docstrings and messages name must be there: documents, sections of the design, and files of ours.


ROOT = Path(__file__).parents[2]
ROOMS = ("cases", "harness", "reference", "tests", "requirements")
TEXTS = (".py", ".in", ".toml", ".sh")
DESIGN = ROOT / "docs/explanation/design.md"

_DOCUMENT = re.compile(r"\bdocs/[\w/.-]*\w\.(?:md|svg|json)\b")
_SECTION = re.compile(r"\b(?:DESIGN §?|design §)(\d+(?:\.\d+)*)")
# Files of SGLang, and of flashinfer
_THEIRS = ("sglang/", "python/", "srt/", "kernels/ops/", "mem_cache/", "debug_utils/", "flashinfer/")
_FILE = re.compile(r"(?<![\w/.{}*-])(?:[a-z_0-9]+/)+[a-z_0-9]+\.py\b")


def sources() -> Iterator[Path]:
    for room in ROOMS:
        yield from (path for path in sorted((ROOT / room).rglob("*")) if path.suffix in TEXTS)
    yield from (ROOT / name for name in ("Makefile", "conftest.py", "pyproject.toml", ".gitignore", "tests/README.md"))


@cache
def sections() -> frozenset[str]:
    """The numbers of the design's headings."""
    return frozenset(re.findall(r"^#+ (\d+(?:\.\d+)*)\.? ", DESIGN.read_text(encoding="utf-8"), re.MULTILINE))


@cache
def files() -> frozenset[str]:
    """Our Python files, each by every end of its path: `harness/judge/replay.py`, `judge/replay.py`."""
    paths = (path.relative_to(ROOT).parts for room in ROOMS for path in (ROOT / room).rglob("*.py"))
    return frozenset("/".join(parts[at:]) for parts in paths for at in range(len(parts)))


def absent(text: str, *, ours: bool = True) -> list[str]:
    """What a text names that is not there. ours: its files are ours or SGLang's, and no test makes them up."""
    found = [name for name in _DOCUMENT.findall(text) if not (ROOT / name).exists()]
    found += [f"design §{number}" for number in _SECTION.findall(text) if number not in sections()]
    named = _FILE.findall(text) if ours else ()
    return found + [name for name in named if name not in files() and not name.startswith(_THEIRS)]


def test_what_a_source_file_names_is_there() -> None:
    found = {path: absent(path.read_text(encoding="utf-8"), ours=ROOT / "tests" not in path.parents) for path in sources()}
    assert {path: names for path, names in found.items() if names and path != Path(__file__)} == {}


def test_what_is_not_there_is_found() -> None:
    """As it stood in files of ours."""
    assert absent("docs/figures.md, docs/records/detection.md") == ["docs/figures.md"]
    assert absent("(DESIGN §9), design §3.8, DESIGN §10, DESIGN §2") == ["design §9", "design §10"]
    assert absent("models/eagle3.py, reference/draft_heads.py, judge/replay.py, srt/x.py") == ["models/eagle3.py"]


def test_a_word_has_one_meaning() -> None:
    """docs/words.md says so."""
    words = re.findall(r"^\| ([^|]+) \|", (ROOT / "docs/words.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {word: count for word, count in Counter(words).items() if count > 1 and word not in ("word", "---")} == {}


def test_no_comment_of_the_makefile_is_longer_than_a_line_of_code() -> None:
    lines = (ROOT / "Makefile").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith("#") and len(line) > 128] == []


# The missed bugs of docs/records/detection.md: their rows name rules that exist, and the counts are theirs.


PAGE = Path(__file__).parents[2] / "docs" / "records" / "detection.md"
STATES = ("judged", "not run")


def section() -> str:
    return PAGE.read_text(encoding="utf-8").split("\n## Missed bugs\n", 1)[1].split("\n## ", 1)[0]


def rows() -> list[list[str]]:
    """The cells of each row of the list of reports."""
    lines = [line for line in section().partition("| report |")[2].split("\n") if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_row_has_a_state_and_a_reason_and_names_rules_that_exist() -> None:
    assert len(rows()) > 30
    for report, _, state, why in rows():
        assert state in STATES, report
        assert why, report
        for name in re.findall(r"`([a-z]+\.[a-z_]+)`", why):
            assert name in catalogue(), (report, name)


def test_the_counts_are_those_of_the_rows() -> None:
    counted = Counter(state for _, _, state, _ in rows())
    assert f"| {' | '.join(str(counted[state]) for state in STATES)} |" in section()


# CI brings the releases that its tests run, and each list that it reads says what is so. A release that is not brought skips a
# test, and a skip fails CI.


TESTS = Path(__file__).parents[1]


def test_ci_fetches_no_release_but_those_that_tests_of_the_engine_name() -> None:
    fetched = (TESTS / "releases.txt").read_text().split()
    assert fetched == sorted(set(fetched), key=releases().index)
    named = {
        node.value
        for file in (TESTS / "engine").glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Constant) and node.value in releases()
    }
    assert set(fetched) <= named


def test_ci_checks_skips_and_prints_the_longest_tests() -> None:
    script = (TESTS.parent / ".ci" / "run").read_text()
    for part in ("releases fetch < tests/releases.txt", "--durations=25", "-rs", "--known-skips tests/skips.txt"):
        assert part in script


# What eagletwin uses of Hypothesis that is internal to it: a version that lacks it fails here.


def test_the_settings_of_a_test_are_where_the_plugin_changes_them() -> None:
    asked: list[int] = []

    @settings(max_examples=50, database=None)
    @given(st.integers())
    def test(number: int) -> None:
        asked.append(number)

    assert test.is_hypothesis_test  # type: ignore[attr-defined]
    drawn = test._hypothesis_internal_use_settings  # type: ignore[attr-defined]
    assert drawn.max_examples == 50
    test._hypothesis_internal_use_settings = settings(drawn, max_examples=3)  # type: ignore[attr-defined]
    test()
    assert len(asked) == 3


def test_the_numbers_that_hypothesis_finds_in_source_files_are_where_they_are_taken_from() -> None:
    assert callable(providers._get_local_constants)
    assert hasattr(providers.CONSTANTS_CACHE, "cache")
    assert not list(Constants().integers)


def test_a_version_that_finds_them_in_another_way_is_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(providers, "_get_local_constants")
    with pytest.warns(UserWarning, match="the same seed may draw other cases in another process"):
        sample_cases.draw_from_seeds_alone()


def test_no_profile_explains_which_lines_of_python_a_failing_case_ran() -> None:
    sample_cases.register()
    for name in ("dev", "ci", "nightly", "repro"):
        assert Phase.explain not in settings.get_profile(f"eagletwin-{name}").phases
