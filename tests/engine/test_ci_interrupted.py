"""A CI job that is ended in the middle of a search reports what the search had looked at."""

import json
from pathlib import Path

import pytest

from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.cli.main import typed
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EXIT_INTERRUPTED, AlreadyReported


def test_a_search_that_is_cut_short_is_in_the_report_and_in_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    look, looks = Trials.look, []

    def ended(self: Trials, case: Case, until: int = -1, *, anew: bool = False) -> Trial:
        looks.append(case)
        if len(looks) == 3:
            raise KeyboardInterrupt
        return look(self, case, until, anew=anew)

    monkeypatch.setattr(Trials, "look", ended)
    summary = tmp_path / "summary.md"
    with pytest.raises(AlreadyReported) as end:
        typed(["ci", "--ledger", "none", "--minutes", "2", "--seed", "3", "--summary", str(summary), "--out", str(tmp_path)])
    assert end.value.exit_code == EXIT_INTERRUPTED
    said = "interrupted: CANNOT TELL  2 of 2 cases equal, 2 configurations, seed 3"
    assert f"  search   Llamas with a single draft layer: {said}" in capsys.readouterr().out
    row = f"| `Llamas with a single draft layer` | 2 | {' '.join(said.split())} |"
    assert row in summary.read_text(encoding="utf-8")
    facts = json.loads((tmp_path / "ci" / "ci.json").read_bytes())
    [search] = facts["searched"]
    assert (facts["interrupted"], search["cases"], search["exit_code"]) == (True, 2, 125)
    assert said in (tmp_path / "ci" / "report.html").read_text(encoding="utf-8")
