"""A CI job that is ended in the middle of a search reports what the search had looked at."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagletwin.harness.cli.main import typed
from eagletwin.harness.commands.compare import one, one_report
from eagletwin.harness.commands.fuzz import looking
from eagletwin.harness.commands.fuzz.command import search
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.shrinking import Shrinking
from eagletwin.harness.core.errors import EXIT_INTERRUPTED, AlreadyReported


@pytest.mark.long
def test_a_search_that_is_cut_short_is_in_the_report_and_in_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, cases = looking._seen, []

    def ended(*arguments: Any) -> Any:
        cases.append(arguments)
        if len(cases) == 3:
            raise KeyboardInterrupt
        return seen(*arguments)

    monkeypatch.setattr(looking, "_seen", ended)
    monkeypatch.setattr(one, "search", lambda options: search(replace(options, processes=1)))
    summary = tmp_path / "summary.md"
    words = ("--ledger", "none", "--minutes", "2", "--seed", "3", "--summary", str(summary), "--out", str(tmp_path))
    with pytest.raises(AlreadyReported) as end:
        typed(["compare", *words])
    assert end.value.exit_code == EXIT_INTERRUPTED
    found = re.search(
        r"Search of everything: (INTERRUPTED, CANNOT TELL .* 1 configuration, seed 3)\.",
        " ".join(capsys.readouterr().out.split()),
    )
    assert found is not None
    said = found[1]
    assert " of 2 cases equal" in said
    text = summary.read_text(encoding="utf-8")
    assert f"Search of everything: {said}." in text
    assert text.endswith("Again: `eagletwin compare --minutes 2 --seed 3 --ledger none`\n")
    facts = json.loads((tmp_path / "compare" / "ci.json").read_bytes())
    [searched] = facts["searches"]
    assert (facts["interrupted"], searched["cases"], searched["exit_code"]) == (True, 2, 125)
    assert said in " ".join((tmp_path / "compare" / "report.html").read_text(encoding="utf-8").split())


@pytest.mark.long
def test_what_was_still_made_smaller_is_told_and_said_to_be_unconfirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Shrinking, "shrink", ended)
    with pytest.raises(AlreadyReported):
        typed(["fuzz", "--revert", "25015", "--only", "llama-tiny", "--seed", "3", "-n", "1", "--out", str(tmp_path)])
    found_so_far = one.search_so_far(SearchOptions(only=("llama-tiny",), seed=3, out=tmp_path))
    [found] = found_so_far.findings
    assert (found.status, found.known, found_so_far.exit_code) == (one_report.UNCONFIRMED, "", 125)
    assert (Path(found.folder) / "case.json").is_file()
    page = (tmp_path / "fuzz-3" / "report.html").read_text(encoding="utf-8")
    assert "nothing was confirmed" in page
    assert "Nothing new was found" not in page
