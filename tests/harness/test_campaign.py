"""A campaign outlives its workers and its driver: nothing that was found is lost, and little is run twice. No engine runs here:
what the workers of these campaigns answer is fixed (campaigns.py)."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from eagletwin.cases.blocks import BLOCK
from eagletwin.harness.cli.main import typed
from eagletwin.harness.commands.campaign import books, command
from eagletwin.harness.commands.campaign.command import conduct, gone_on
from eagletwin.harness.commands.campaign.corpus import blocks_of, read_corpus
from eagletwin.harness.commands.campaign.journal import JOURNAL, InquiryOver, Saw, read_journal
from eagletwin.harness.commands.campaign.messages import Leg, Packed
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.errors import EXIT_HARNESS, InputError
from eagletwin.harness.core.exits import guarded
from eagletwin.harness.engines import source
from eagletwin.harness.engines.source import INSTALLED

from . import campaigns
from .campaigns import CRASH, KNOWN, LEAK, PROBE, Doubles, Killed, case_of, terms

CASES = 10 * BLOCK


@pytest.fixture(autouse=True)
def sglang_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not asked whether the installed SGLang is the release's: that takes a second."""
    for module in (source, books):
        monkeypatch.setattr(module, "resolve", lambda name: INSTALLED)


ALL = {f"{block}-{number}" for block in range(CASES // BLOCK) for number in range(BLOCK)}


def cases_of(folder: Path) -> Counter[str]:
    """How often the journal has each case."""
    told = [record.told for record in read_journal(folder) if isinstance(record, Saw)]
    return Counter(one.case.name for one in told if isinstance(one, CaseSeen))


def found_in(folder: Path) -> list[str]:
    """What the summary says was found."""
    summary = json.loads((folder / "summary.json").read_text())
    return sorted(str(one["signature"]["rule"] or one["signature"]["cause"]) for one in summary["findings"])


def twice(log: Counter[str]) -> int:
    """Cases that were run more than once."""
    return sum(log[name] - 1 for name in ALL if log[name])


def whole(folder: Path, log: Counter[str]) -> None:
    """The campaign has seen each case once, and has found each thing once."""
    seen = cases_of(folder)
    assert set(seen) == ALL
    assert set(seen.values()) == {1}
    assert found_in(folder) == ["IndexError", "draft.kv"]
    assert log[str(KNOWN)] >= 1
    for name in ("finding-1", "finding-2"):
        assert (folder / name / "minimal" / "case.json").is_file()


def test_each_thing_is_found_once_and_looked_into_once(tmp_path: Path) -> None:
    crew = Doubles()
    assert conduct(terms(CASES), tmp_path, crew) == 1
    whole(tmp_path, crew.log)
    assert (crew.log[str(LEAK)], crew.log[str(CRASH)], twice(crew.log)) == (1, 1, 0)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["tally"]["statuses"] == {"diverged": 3, "equal": 33, "known": 2, "unknown": 2}
    assert {one["cases"] for one in summary["set_aside"]} == {1, 2}  # the other cases of the two findings
    assert "3 workers on 1 machine" in (tmp_path / "report.html").read_text()


def test_a_worker_that_dies_is_replaced_and_its_last_case_runs_again(tmp_path: Path) -> None:
    crew = Doubles(deaths=(5, 12, 20, 21, 34))
    assert conduct(terms(CASES), tmp_path, crew) == 1
    whole(tmp_path, crew.log)
    assert 0 < twice(crew.log) <= 5
    summary = json.loads((tmp_path / "summary.json").read_text())["campaign"]
    assert summary["deaths"] == 5
    assert twice(crew.log) <= summary["again"] <= 5


@pytest.mark.parametrize("first", range(2, 40, 6))
def test_a_driver_that_is_killed_goes_on_where_it_was(tmp_path: Path, first: int) -> None:
    """Killed twice, wherever it is, and a worker with it."""
    log: Counter[str] = Counter()
    for killed in (first, 13):
        with pytest.raises(Killed):
            conduct(terms(CASES), tmp_path, Doubles(deaths=(4,), killed=killed, log=log))
    assert conduct(gone_on(asked(), [""], None, tmp_path), tmp_path, Doubles(log=log)) == 1
    whole(tmp_path, log)
    again = json.loads((tmp_path / "summary.json").read_text())["campaign"]["again"]
    assert twice(log) <= 8  # three workers, twice, and two that died
    assert twice(log) <= again
    concluded = [one.told for one in read_journal(tmp_path) if isinstance(one, InquiryOver)]
    assert len([told for told in concluded if isinstance(told, Packed)]) == 2


def asked(**more: object) -> SearchOptions:
    return SearchOptions(minutes=command.MINUTES, **more)  # type: ignore[arg-type]


def test_a_line_that_was_not_written_to_its_end_is_none(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        conduct(terms(CASES), tmp_path, Doubles(killed=40))
    journal = tmp_path / JOURNAL
    lines = len(journal.read_bytes().splitlines())
    with journal.open("r+b") as file:
        file.truncate(journal.stat().st_size - 5)
    assert len(list(read_journal(tmp_path))) == lines - 1
    crew = Doubles()
    conduct(terms(CASES), tmp_path, crew)
    assert set(cases_of(tmp_path)) == ALL
    assert all(json.loads(line) for line in journal.read_bytes().splitlines())


def test_a_block_over_which_three_workers_die_is_given_up_and_the_exit_code_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaigns, "SHOWS", {})
    crew = Doubles(workers=1, deaths=(1, 2, 3))
    assert conduct(terms(BLOCK), tmp_path, crew) == 125
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["campaign"]["lost"]) == ["leg 0, block 0, after 0 cases of installed"]
    assert set(cases_of(tmp_path)) == {f"1-{number}" for number in range(BLOCK)}


def test_a_campaign_that_found_nothing_ends_in_0_and_goes_on_with_more_cases(tmp_path: Path) -> None:
    assert conduct(terms(BLOCK), tmp_path, Doubles(workers=1)) == 0
    crew = Doubles(workers=1)
    assert conduct(gone_on(asked(max_cases=2 * BLOCK), [""], None, tmp_path), tmp_path, crew) == 1
    assert set(crew.log) == {f"1-{number}" for number in range(BLOCK)} | {str(LEAK)}
    said = json.loads((tmp_path / "summary.json").read_text())["command"]
    assert f"--cases {BLOCK}" in terms(BLOCK).command
    assert said == terms(BLOCK).command.replace(f"--cases {BLOCK}", f"--cases {2 * BLOCK}")
    assert gone_on(asked(), [""], None, tmp_path).command == terms(BLOCK).command  # with the limits that it began with


def test_what_a_campaign_is_stays_as_it_began(tmp_path: Path) -> None:
    conduct(terms(BLOCK), tmp_path, Doubles(workers=1))
    with pytest.raises(InputError, match="options that a campaign is begun with"):
        gone_on(asked(model="llama-tiny"), [""], None, tmp_path)
    with pytest.raises(InputError, match="there is no campaign"):
        gone_on(asked(), [""], None, tmp_path / "elsewhere")


def test_two_drivers_do_not_work_on_one_folder(tmp_path: Path) -> None:
    class Second(Doubles):
        def idle(self) -> list[int]:
            with pytest.raises(InputError, match="another driver works on"):
                conduct(terms(BLOCK), tmp_path, Doubles())
            return super().idle()

    conduct(terms(BLOCK), tmp_path, Second())


def test_each_sglang_has_its_share(tmp_path: Path) -> None:
    both = terms(CASES)
    both = type(both)(both.version, both.options, (Leg("0.5.22"), Leg("0.5.21")), both.command)
    conduct(both, tmp_path, Doubles(workers=2))
    legs = json.loads((tmp_path / "summary.json").read_text())["campaign"]["legs"]
    assert [one["leg"] for one in legs] == ["0.5.22", "0.5.21"]
    assert sum(one["cases"] for one in legs) == CASES
    assert abs(legs[0]["blocks"] - legs[1]["blocks"]) <= 4  # a worker imports another SGLang where its own is further ahead


def test_a_corpus_is_run_in_blocks_of_one_configuration_each_case_once(tmp_path: Path) -> None:
    for number in range(6):
        file = tmp_path / f"{number}.json"
        file.write_text(pretty_case(case_of(0, number).case if number < 5 else PROBE))
    cases = read_corpus(tmp_path)
    assert len(cases) == 6
    blocks = blocks_of(cases)
    assert [len(block.cases()) for block in blocks] == [4, 2]
    assert [case for block in blocks for case in block.cases()] == list(cases)
    with pytest.raises(InputError, match="holds no case"):
        read_corpus(tmp_path / "none")


def test_without_ray_nothing_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert guarded(lambda: typed(["campaign", "--out", str(tmp_path / "runs")])) == EXIT_HARNESS
    assert "Ray is not installed\n  so:  nothing was run" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
