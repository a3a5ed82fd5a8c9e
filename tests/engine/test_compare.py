"""`eagletwin compare` between the installed release and trees made of it, end to end."""

import json
import subprocess
from pathlib import Path

import pytest

from eagletwin.harness.core.environment import installed

from ..rows import long
from . import forked
from .planted_trees import IDLE_KERNEL, IDLE_NAME, plant
from .warm import eagletwin

# What SGLang's own switch for #26329 puts there.
TAIL = "    tail_tokens = next_token_ids.to(batch.input_ids.dtype)\n"
UNDONE = ("srt/speculative/eagle_utils.py", TAIL, f"    return next_token_ids.to(batch.input_ids.dtype)\n{TAIL}")
SHOWS, SHOWN = ("--seed", "193", "--cases", "1"), "llama-gqa-0-1"  # the first generated case shows it
# Faults of requests that sample, and of layers that keep a state: edits, options that draw a case of it at once, rule.
_CUT = """\
        if sampling_info.need_top_{0}_sampling:
            target_probs = top_{0}_renorm_prob(
                target_probs,
                torch.repeat_interleave(
                    sampling_info.top_{0}s, verify_input.draft_token_num, dim=0
                ),
            )"""
_BETWEEN = """  # (bs * num_draft_tokens, vocab_size)
            maybe_detect_nan(target_probs, "v2 verify: target_probs after top_k_renorm")
"""
_UTILS, _WORKER = "srt/speculative/eagle_utils.py", "srt/speculative/eagle_worker_v2.py"
_DRAWN = "                    draft_probs_list.append(probs)\n"
_NEXT = "                    forward_batch.positions.add_(1)\n"
_STEP, _CLAMPED = (
    "        ti = tp - pre - 1\n",
    "        ti = tl.where(ti < 0, 0, ti)\n        cand = tl.load(accept_index_ptr + row + ti)",
)
FAULTS: dict[str, tuple[list[tuple[str, str, str]], tuple[str, ...], str]] = {
    "verify cuts by top_p before top_k": (
        [(_UTILS, *(_BETWEEN.join(_CUT.format(cut) for cut in order) for order in ("kp", "pk")))],
        ("--seed", "227", "--cases", "1"),
        "verify.probabilities",
    ),
    "a draft that samples stays at its position": (
        [(_WORKER, _DRAWN + _NEXT, _DRAWN)],
        ("--seed", "385", "--cases", "1"),
        "draft.positions",
    ),
    "the state that is kept is the one after the next row": (
        [("kernels/ops/mamba/mamba_state_scatter_triton.py", _STEP + _CLAMPED, "        ti = tp - pre\n" + _CLAMPED)],
        ("--seed", "832", "--cases", "1"),
        "state.tracked",
    ),
}
UNDONE_NAME = "sglang.srt.speculative.eagle_utils._eagle_prefill_tail_tokens"


@pytest.fixture(scope="module")
def undone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The release with the fix of #26329 undone in its source."""
    return plant(tmp_path_factory.mktemp("undone"), UNDONE)


def compare(*words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return eagletwin("compare", *words, cwd=cwd)


@pytest.mark.parametrize("minutes", ["0", *long("1")])
def test_a_fix_that_is_undone_is_newly_broken_and_can_be_seen_again(undone: Path, tmp_path: Path, minutes: str) -> None:
    done = compare(installed("sglang"), undone, *SHOWS, "--ledger", "none", "--shrink-minutes", minutes, cwd=tmp_path)
    assert done.returncode == 1, done
    assert done.stdout.startswith("1 NEWLY BROKEN  HEAD ")
    said = " ".join(done.stdout.split())
    assert "1 of 1 case ran the change: 1 newly broken." in said
    assert f"Changed functions that each of the cases runs: {UNDONE_NAME}." in said
    assert f"What differs between the two: Run: {UNDONE_NAME} in 1 of 1 case." in said
    assert "pipelines (--pp 2)" in said.partition("Not looked at")[2]
    assert done.stderr == ""  # progress is for a terminal
    kept = tmp_path / "eagletwin-runs" / "compare"
    facts = json.loads((kept / "comparison.json").read_text())
    assert facts["exit_code"] == 1
    [broken] = facts["broken"]
    [name] = broken["cases"]
    assert f"draft.input_ids (draft.extend), 1 case: {name} HEAD: draft.input_ids at draft.extend, round" in said
    folder = kept / f"broken-{name}"
    for name in ("case.json", "trace.json", "verdict.json", "repro.py", "report.html", "sglang.patch", "replay-2"):
        assert (folder / name).exists(), name
    example = broken["example"]
    assert (broken["rule"], example["looks"] > 0) == ("draft.input_ids", minutes != "0")
    if minutes == "0":
        return
    assert f'href="{folder.name}/minimal/report.html"' in (kept / "report.html").read_text(encoding="utf-8")
    found, small = (json.loads((place / "case.json").read_text()) for place in (folder, folder / "minimal"))
    assert len(json.dumps(small | {"name": ""})) < len(json.dumps(found | {"name": ""}))
    assert Path(example["folder"]) == (folder / "minimal").relative_to(tmp_path)
    assert f"again:  {example['again']}\n" in done.stdout
    verdict = json.loads((folder / "minimal" / "verdict.json").read_text())
    assert (verdict["status"], verdict["first"]["rule"]) == ("diverged", "draft.input_ids")
    again = forked.script(folder / "minimal" / "repro.py", cwd=tmp_path)
    assert again.returncode == 1, again


@pytest.mark.long
@pytest.mark.parametrize("what", FAULTS)
def test_faults_of_what_fuzz_draws_are_found(what: str, tmp_path: Path) -> None:
    """A comparison that draws less than fuzz says nothing of requests that sample, or of layers that keep a state."""
    edits, words, rule = FAULTS[what]
    head = plant(tmp_path / "head", *edits)
    more = ("--ledger", "none", "--shrink-minutes", "0", "--json")
    done = compare(installed("sglang"), head, *words, *more, cwd=tmp_path)
    assert done.returncode == 1, done
    assert rule in [broken["rule"] for broken in json.loads(done.stdout)["broken"]]


@pytest.mark.long
def test_the_other_way_round_it_is_newly_fixed(undone: Path, tmp_path: Path) -> None:
    words = (*SHOWS, "--ledger", "26329", "--ledger", "small-tree", "--json")
    done = compare(undone, installed("sglang"), *words, cwd=tmp_path)
    assert done.returncode == 0, done
    facts = json.loads(done.stdout)
    assert facts["result"] == "none newly wrong"
    by_name = {answer["name"]: answer for answer in facts["answers"]}
    assert by_name["26329"]["group"] == "newly fixed"
    assert by_name["26329"]["again"] == f"eagletwin check 26329 --sglang {undone}"
    assert (by_name["small-tree"]["group"], by_name["small-tree"]["known"]) == ("still diverged", "small-tree")
    assert by_name[SHOWN]["group"] == "newly fixed"
    assert [answer["ran_change"] for answer in by_name.values()] == [True] * 3
    assert facts["acceptance"][0]["base"]["rounds"] > 0


@pytest.mark.long
def test_a_change_that_no_case_runs_is_told_nothing_of(tmp_path: Path) -> None:
    idle = plant(tmp_path / "idle", IDLE_KERNEL)
    done = compare(
        installed("sglang"), idle, "--cases", "2", "--ledger", "25015", "--ledger", "row-overflow", "--markdown", cwd=tmp_path
    )
    assert done.returncode == 125, done
    assert done.stdout.startswith("## eagletwin: cannot tell\n\n**Cannot tell: none of the changed functions ran")
    assert "1 still diverged, 3 as before" in done.stdout
    assert "known live bugs: 1 case diverged by them on both sides" in done.stdout
    assert "Tokens a round commits: no generated case" in done.stdout  # none had to run on BASE
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
