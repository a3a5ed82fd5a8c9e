"""What a search says at its end, of what it met."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace as changed

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.report import document_of, exit_code, summary_facts, write_summary
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.commands.fuzz.tally import SUMMARY
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN, Mode, RunSpec
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.page.render import NAME, text_of

NEEDS_OVERLAP = "retracted-stream"


def searched(
    folder: Path, cases: int = 1, mode: Mode = CPU, run: RunSpec = DEFAULT_RUN, called: str = "0.5.23", **verdict: Any
) -> Fuzz:
    """A search after so many equal cases, in which two known bugs were mended."""
    host = SimpleNamespace(source=SimpleNamespace(tree="", called=called, base=None), mode=mode)
    trials: Any = SimpleNamespace(host=host, run=changed(run, mode=mode))
    fuzz = Fuzz(trials, folder, Plan(seed=0, seconds=1.0, max_cases=cases, shrink_seconds=1.0, command="eagletwin fuzz"))
    entry, mended = LEDGER["25015"], (NEEDS_OVERLAP, "penalties", "min-p")
    for _ in range(cases):
        equal = Verdict(status="equal", **verdict)
        fuzz.count(CaseSeen(block=0, case=entry.case, verdict=equal, mended=mended, could_show=mended[:2]))
    return fuzz


def said(folder: Path, fuzz: Fuzz, code: int | None = None, columns: int = 2000, *, verbose: bool = False) -> str:
    return text_of(document_of(write_summary(folder, fuzz, [], code), folder), columns, verbose=verbose)


def test_a_known_bug_counts_as_mended_where_a_case_may_show_it(tmp_path: Path) -> None:
    fuzz = searched(tmp_path, 3)
    assert {bug.id: bug.mended for bug in fuzz.tally.known.values()} == {NEEDS_OVERLAP: 3, "penalties": 3}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_bug_that_needs_overlap_is_explained_in_a_search_without(overlap: bool, tmp_path: Path) -> None:
    fuzz = searched(tmp_path, mode=Mode(overlap=overlap))
    note = f"{NEEDS_OVERLAP}: of cases whose draft reads the target's rows, which run with overlap in every search."
    assert (note in said(tmp_path, fuzz, verbose=True)) == (not overlap)
    assert write_summary(tmp_path, fuzz, []).known_note == ("" if overlap else note)


def test_the_exit_code_is_said_with_what_it_means(tmp_path: Path) -> None:
    enough, none = searched(tmp_path), searched(tmp_path, 0)
    assert (exit_code(enough, []), exit_code(none, [])) == (EXIT_EQUAL, EXIT_UNKNOWN)
    text = said(tmp_path, enough, EXIT_EQUAL)
    assert f"\n  Exit code 0: nothing new was found.\n  again:  eagletwin fuzz\n  folder: {tmp_path}\n" in text
    assert "\n  Exit code 125: cannot tell: a crash" in said(tmp_path, none, EXIT_UNKNOWN)
    interrupted = said(tmp_path, enough, EXIT_INTERRUPTED)
    assert interrupted.startswith("INTERRUPTED, NOTHING NEW")
    assert "\n  Exit code 130: the search was interrupted.\n" in interrupted
    assert "Exit code" not in said(tmp_path, enough)
    write_summary(tmp_path, enough, [], EXIT_EQUAL)
    assert msgspec.json.decode((tmp_path / SUMMARY).read_bytes())["exit_code"] == EXIT_EQUAL
    assert "<p>Exit code 0: nothing new was found.</p>" in (tmp_path / NAME).read_text()


@pytest.mark.parametrize("strict", [False, True])
def test_a_search_of_a_change_that_is_not_known_says_so_on_top_and_strict_makes_it_125(strict: bool, tmp_path: Path) -> None:
    committed = searched(tmp_path, 20, run=RunSpec(strict=strict), called="0123456789")
    code = exit_code(committed, [])
    assert code == (EXIT_UNKNOWN if strict else EXIT_EQUAL)
    text = said(tmp_path, committed, code)
    assert text.splitlines()[1].strip().startswith("NOT SEEN  it is not known what 0123456789 changes"), text
    assert ("the change is not known, which --strict does not let pass" in text) == strict
    assert exit_code(searched(tmp_path, 20, run=RunSpec(strict=strict)), []) == EXIT_EQUAL  # a release


def test_progress_says_how_much_of_the_change_ran(tmp_path: Path) -> None:
    fuzz, lines = searched(tmp_path, 2), list[str]()
    fuzz.progress, fuzz._told_at = lines.append, -1e9
    fuzz.tally.changes.add(
        Differs(base="1", functions=("m.f",), ran=("m.f",), statements={"m.f": ("f.py:1", "f.py:2")}, executed=("f.py:1",))
    )
    fuzz.tally.reached = 1
    fuzz.tell()
    assert lines[0].endswith("; changed statements run: 1 of 2, in 1 case")


def test_excuses_are_counted_by_kind(tmp_path: Path) -> None:
    fuzz = searched(tmp_path, 3, excused={"tie": 2, "nudge": 1})
    assert " Excused: nudge 3, tie 6." in said(tmp_path, fuzz)
    summary: Any = summary_facts(write_summary(tmp_path, fuzz, []))
    assert summary["tally"]["excused"] == {"tie": 6, "nudge": 3}
    assert " Excused: nudge 3, tie 6." in (tmp_path / NAME).read_text()
    assert "Excused" not in said(tmp_path, searched(tmp_path))


@pytest.mark.parametrize(("gaps", "code"), [(0, EXIT_EQUAL), (2, EXIT_EQUAL), (3, EXIT_UNKNOWN)])
def test_a_search_with_many_cases_in_which_something_was_never_compared_cannot_tell(
    gaps: int, code: int, tmp_path: Path
) -> None:
    fuzz = searched(tmp_path, 20 - gaps)
    for _ in range(gaps):
        verdict = Verdict(status="unknown", vacuous=True, gap="draft.* of request a was never compared")
        fuzz.count(CaseSeen(block=0, case=LEDGER["25015"].case, verdict=verdict))
    assert exit_code(fuzz, []) == code
    text, more = said(tmp_path, fuzz, code), ", more than the 10% that may be" if code else ""
    gap = f"A stage of a request, or a family of rules, was never compared in {gaps} of them ({gaps / 20:.0%}){more}."
    assert (gap in text) == (gap in (tmp_path / NAME).read_text()) == bool(gaps)


def test_what_never_happened_is_said_with_where_it_is_explained(tmp_path: Path) -> None:
    text = said(tmp_path, searched(tmp_path), verbose=True)
    assert re.search("chunked_prefill +│ a prompt", text)


@pytest.mark.parametrize(
    ("tokens", "declared"),
    [(1, "1 token is not the one that plain decode sends"), (3, "3 tokens are not those that plain decode sends")],
)
def test_tokens_that_plain_decode_would_send_otherwise_are_a_sentence(tokens: int, declared: str, tmp_path: Path) -> None:
    fuzz = searched(tmp_path, relaxed=tokens)
    assert f" {declared}: in verify SGLang's penalties do not count the tokens of the same round." in said(tmp_path, fuzz)
    assert declared in (tmp_path / NAME).read_text()


def test_a_search_that_found_nothing_fits_on_a_screen(tmp_path: Path) -> None:
    """--verbose and the page have the rest."""
    text = said(tmp_path, searched(tmp_path, 3), EXIT_EQUAL, 80)
    assert len(text.split("\n")) <= 25
    assert f"\n  Known bugs, mended in memory: {NEEDS_OVERLAP}, penalties.\n" in text
    assert "\n  Not looked at: " in text
    assert len(said(tmp_path, searched(tmp_path, 3), EXIT_EQUAL, 80, verbose=True).split("\n")) > 40
