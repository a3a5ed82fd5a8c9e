"""`eagletwin compare` between the installed release and trees made of it, end to end."""

import json
import subprocess
from pathlib import Path

import pytest

from eagletwin.harness.core.versions import installed

from . import forked
from .planted_trees import IDLE_KERNEL, IDLE_NAME, plant
from .warm import eagletwin

# What SGLang's own switch for #26329 puts there.
TAIL = "    tail_tokens = next_token_ids.to(batch.input_ids.dtype)\n"
UNDONE = ("srt/speculative/eagle_utils.py", TAIL, f"    return next_token_ids.to(batch.input_ids.dtype)\n{TAIL}")
UNDONE_NAME = "sglang.srt.speculative.eagle_utils._eagle_prefill_tail_tokens"


@pytest.fixture(scope="module")
def undone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release with the fix of #26329 undone in its source."""
    return plant(tmp_path_factory.mktemp("undone"), UNDONE)


def compare(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return eagletwin("compare", *words, cwd=cwd)


def test_a_fix_that_is_undone_is_newly_broken_and_can_be_seen_again(undone: Path, tmp_path: Path) -> None:
    release = installed("sglang")
    done = compare(release, undone, "--cases", "1", "--ledger", "26329", cwd=tmp_path)
    assert done.returncode == 1, done
    assert done.stdout.startswith("1 NEWLY BROKEN  HEAD ")
    said = " ".join(done.stdout.split())
    assert "draft.input_ids (draft.extend), 2 cases: chain-1, 26329 HEAD: draft.input_ids at draft.extend, round 0, row" in said
    assert f"Changed functions that each of the cases runs: {UNDONE_NAME}." in said
    assert f"HEAD: Run: {UNDONE_NAME}" in said
    assert done.stderr == ""  # progress is for a terminal
    kept = tmp_path / "eagletwin-runs" / "compare"
    facts = json.loads((kept / "comparison.json").read_text())
    assert facts["exit_code"] == 1
    assert 'href="broken-chain-1/minimal/report.html"' in (kept / "report.html").read_text(encoding="utf-8")
    folder = kept / "broken-chain-1"
    for name in ("case.json", "trace.json", "verdict.json", "repro.py", "report.html", "sglang.patch", "replay-2"):
        assert (folder / name).exists(), name
    example = facts["broken"][0]["example"]
    assert Path(example["folder"]) == (folder / "minimal").relative_to(tmp_path)
    assert f"again:  {example['again']}\n" in done.stdout
    again = forked.script(folder / "minimal" / "repro.py", cwd=tmp_path)
    assert again.returncode == 1, again


def test_one_case_of_what_is_newly_broken_is_made_smaller(undone: Path, tmp_path: Path) -> None:
    words = ("--cases", "1", "--ledger", "none", "--shrink-minutes", "0.05", "--json")
    done = compare(installed("sglang"), undone, *words, cwd=tmp_path)
    assert done.returncode == 1, done
    [broken] = json.loads(done.stdout)["broken"]
    assert (broken["rule"], broken["cases"], broken["example"]["looks"] > 0) == ("draft.input_ids", ["chain-1"], True)
    first = tmp_path / "eagletwin-runs" / "compare" / "broken-chain-1"
    found, small = (json.loads((folder / "case.json").read_text()) for folder in (first, first / "minimal"))
    assert len(json.dumps(small)) < len(json.dumps(found))
    verdict = json.loads((first / "minimal" / "verdict.json").read_text())
    assert (verdict["status"], verdict["first"]["rule"]) == ("diverged", "draft.input_ids")


def test_the_other_way_round_it_is_newly_fixed(undone: Path, tmp_path: Path) -> None:
    words = ("--cases", "1", "--ledger", "26329", "--ledger", "small-tree", "--json")
    done = compare(undone, installed("sglang"), *words, cwd=tmp_path)
    assert done.returncode == 0, done
    facts = json.loads(done.stdout)
    assert facts["result"] == "nothing newly broken"
    by_name = {answer["name"]: answer for answer in facts["answers"]}
    assert by_name["26329"]["group"] == "newly fixed"
    assert by_name["26329"]["again"] == f"eagletwin check 26329 --sglang {undone}"
    assert (by_name["small-tree"]["group"], by_name["small-tree"]["known"]) == ("still diverged", "small-tree")
    assert facts["acceptance"][0]["base"]["rounds"] > 0


def test_a_change_that_no_case_runs_is_told_nothing_of(tmp_path: Path) -> None:
    idle = plant(tmp_path / "idle", IDLE_KERNEL)
    done = compare(installed("sglang"), idle, "--cases", "2", "--ledger", "25015", "--markdown", cwd=tmp_path)
    assert done.returncode == 125, done
    assert done.stdout.startswith("## eagletwin: cannot tell\n\n**Cannot tell: none of the changed functions ran")
    assert "3 as before" in done.stdout
    assert "<summary>Changed functions: 0 run, 1 not run</summary>" in done.stdout
    assert IDLE_NAME.replace("._", ".&#95;") in done.stdout


def test_a_side_that_does_not_import_cannot_be_told(tmp_path: Path) -> None:
    file = tmp_path / "tree" / "sglang" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("def (:\n")
    done = compare(installed("sglang"), tmp_path / "tree", "--cases", "1", "--ledger", "none", cwd=tmp_path)
    assert done.returncode == 125, done
    assert done.stdout.startswith("CANNOT TELL  HEAD ")
    assert "Cannot tell: HEAD: SGLang cannot be imported: SyntaxError" in " ".join(done.stdout.split())
    assert (tmp_path / "eagletwin-runs" / "compare" / "import.log").is_file()


def test_one_sglang_named_twice_says_nothing(tmp_path: Path) -> None:
    done = compare(installed("sglang"), installed("sglang"), cwd=tmp_path)
    assert done.returncode == 125, done
    assert "Cannot tell: BASE and HEAD are the same SGLang" in done.stdout
