"""Cases that the reference cannot decide end no search: they are set aside, counted and said."""

import re
from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.report import document_of, exit_code, write_summary
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.valid import read_case
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.page.text import text_of

from ..rows import long
from .plain import GREEDY


@pytest.mark.parametrize(("every", "word", "code"), [*long((10, "NOTHING NEW", 0)), (5, "CANNOT TELL", 125)])
def test_a_search_goes_on_and_says_how_many_it_could_not_decide(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, word: str, code: int
) -> None:
    ran = 0

    def sometimes(trace: Trace, *how: object) -> Verdict:
        nonlocal ran
        ran += 1
        verdict = judge(trace, *how)  # type: ignore[arg-type]
        reason = f"{ran} of 30 choices are ties"
        return verdict if ran % every else msgspec.structs.replace(verdict, status="unknown", undecided=True, reason=reason)

    monkeypatch.setattr("eagletwin.harness.check.trials.judge", sometimes)
    plan = Plan(seed=2, seconds=1e9, max_cases=10, shrink_seconds=0.0, command="eagletwin fuzz", asked=GREEDY)
    looking = Fuzz(Trials(host), tmp_path, plan)
    found = list(looking.search())
    assert not found
    assert (looking.tally.cases, looking.tally.undecided) == (10, 10 // every)
    [aside] = looking.asides.values()
    assert (aside.undecided, aside.cases) == (True, 10 // every)
    assert read_case(aside.example).requests
    text = text_of(document_of(write_summary(tmp_path, looking, found), tmp_path), 400, verbose=True)
    assert text.startswith(word)
    share = f"The reference could not decide {10 // every} of them ({100 // every}%)"
    assert share + ("." if code == 0 else ", more than the 10% that may be.") in text
    assert re.search(rf"unknown \(# of # choices are ties\) +│ {10 // every} +│ undecided +│ set-aside/1-", text)
    assert exit_code(looking, found) == code
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes())["tally"]["undecided"] == 10 // every
