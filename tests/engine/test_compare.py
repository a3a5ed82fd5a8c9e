"""`eagletwin compare` and `bisect`, end to end: releases, trees made of one, checkouts and commits."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.bisect.measure import reduce_case
from eagletwin.harness.commands.bisect.state import Subject
from eagletwin.harness.commands.compare import one, one_report
from eagletwin.harness.commands.fuzz import looking
from eagletwin.harness.commands.fuzz.command import search
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.shrinking import Shrinking
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.errors import EXIT_INTERRUPTED, AlreadyReported
from eagletwin.harness.core.files import installed_version
from eagletwin.harness.core.patch import read_patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.provision import NotFetched
from eagletwin.harness.engines.source import INSTALLED, resolve
from eagletwin.harness.families.valid import read_case

from ..rows import long
from . import forked
from .history import History
from .planted_trees import IDLE_KERNEL, IDLE_NAME, plant
from .warm import eagletwin

# `eagletwin compare` between the installed release and trees made of it, end to end.


# What SGLang's own switch for #26329 puts there.
TAIL = "    tail_tokens = next_token_ids.to(batch.input_ids.dtype)\n"
UNDONE = ("srt/speculative/eagle_utils.py", TAIL, f"    return next_token_ids.to(batch.input_ids.dtype)\n{TAIL}")
SHOWS, SHOWN = ("--seed", "1", "--cases", "1"), "llama-tiny-0-1"  # the first generated case shows it
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
    done = compare(installed_version("sglang"), undone, *SHOWS, "--ledger", "none", "--shrink-minutes", minutes, cwd=tmp_path)
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
    done = compare(installed_version("sglang"), head, *words, *more, cwd=tmp_path)
    assert done.returncode == 1, done
    assert rule in [broken["rule"] for broken in json.loads(done.stdout)["broken"]]


@pytest.mark.long
def test_the_other_way_round_it_is_newly_fixed(undone: Path, tmp_path: Path) -> None:
    words = (*SHOWS, "--ledger", "26329", "--ledger", "small-tree", "--json")
    done = compare(undone, installed_version("sglang"), *words, cwd=tmp_path)
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
        installed_version("sglang"),
        idle,
        "--cases",
        "2",
        "--ledger",
        "25015",
        "--ledger",
        "row-overflow",
        "--markdown",
        cwd=tmp_path,
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
    done = compare(installed_version("sglang"), tmp_path / "tree", "--cases", "1", "--ledger", "none", cwd=tmp_path)
    assert done.returncode == 125, done
    assert done.stdout.startswith("CANNOT TELL  HEAD ")
    assert "Cannot tell: HEAD: SGLang cannot be imported: SyntaxError" in " ".join(done.stdout.split())
    assert (tmp_path / "eagletwin-runs" / "compare" / "import.log").is_file()


def test_one_sglang_named_twice_says_nothing(tmp_path: Path) -> None:
    done = compare(installed_version("sglang"), installed_version("sglang"), cwd=tmp_path)
    assert done.returncode == 125, done
    assert "Cannot tell: BASE and HEAD are the same SGLang" in done.stdout


# A CI job that is ended in the middle of a search reports what the search had looked at.


@pytest.mark.long
def test_a_search_that_is_cut_short_is_in_the_report_and_in_the_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, cases = looking._case_seen, []

    def ended(*arguments: Any) -> Any:
        cases.append(arguments)
        if len(cases) == 3:
            raise KeyboardInterrupt
        return seen(*arguments)

    monkeypatch.setattr(looking, "_case_seen", ended)
    monkeypatch.setattr(one, "search", lambda options: search(replace(options, processes=1)))
    summary = tmp_path / "summary.md"
    words = ("--ledger", "none", "--minutes", "2", "--seed", "3", "--summary", str(summary), "--out", str(tmp_path))
    with pytest.raises(AlreadyReported) as end:
        run_command(["compare", *words])
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
        run_command(["fuzz", "--revert", "25015", "--only", "llama-tiny", "--seed", "3", "-n", "1", "--out", str(tmp_path)])
    found_so_far = one.search_so_far(SearchOptions(only=("llama-tiny",), seed=3, out=tmp_path))
    [found] = found_so_far.findings
    assert (found.status, found.known, found_so_far.exit_code) == (one_report.UNCONFIRMED, "", 125)
    assert (Path(found.folder) / "case.json").is_file()
    page = (tmp_path / "fuzz-3" / "report.html").read_text(encoding="utf-8")
    assert "nothing was confirmed" in page
    assert "Nothing new was found" not in page


# `compare --base`: a pull request changes what it has otherwise than its base, though all of it is committed.


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> History:
    """The release, then a commit that changes what nothing here runs, then one that undoes the fix of #26329."""
    history = History(tmp_path_factory.mktemp("base") / "checkout")
    package = history.tree_of(INSTALLED.root)
    history.commit("release", package, transformers=installed_version("transformers"))
    for file, old, new in (IDLE_KERNEL, UNDONE):
        text = (INSTALLED.root / "sglang" / file).read_text()
        package = history.with_file(package, file, text.replace(old, new))
        history.commit(file, package, transformers=installed_version("transformers"))
    history.git("checkout", "--quiet", "--force", "main")
    return history


@pytest.mark.long
def test_a_job_says_which_of_the_functions_that_differ_from_its_base_ran(checkout: History, tmp_path: Path) -> None:
    words = ("compare", checkout.path, "--minutes", "0", "--ledger", "26329")
    done = eagletwin(*words, "--base", "HEAD^", cwd=tmp_path)
    assert done.returncode == 1, done
    text = " ".join(done.stdout.split())
    assert f"This tree differs from {checkout.commits[1][:10]}. Run: {UNDONE_NAME} in 1 of 1 case." in text
    assert IDLE_NAME not in text
    assert f"eagletwin compare {checkout.path} --minutes 0 --ledger 26329 --base 'HEAD^'" in text
    summary = (tmp_path / "eagletwin-runs" / "compare" / "summary.md").read_text()
    assert f"a change of: {checkout.commits[1][:10]}" in summary
    assert str(checkout.path) not in summary
    assert len(checkout.git("worktree", "list").splitlines()) == 1


def test_a_job_of_which_no_case_runs_what_differs_cannot_tell(checkout: History, tmp_path: Path) -> None:
    checkout.git("checkout", "--quiet", "--force", checkout.commits[1])
    words = ("compare", checkout.path, "--ledger", "25015", "--minutes", "0")
    done = eagletwin(*words, "--base", "HEAD^", cwd=tmp_path)
    assert done.returncode == 125, done
    assert f"Not run: {IDLE_NAME}" in " ".join(done.stdout.split())
    assert "No case ran any of that, so this job says nothing about it." in done.stdout


@pytest.mark.long
def test_a_job_that_does_not_know_what_differs_passes_unless_it_is_strict(checkout: History, tmp_path: Path) -> None:
    checkout.git("checkout", "--quiet", "--force", checkout.commits[1])
    words = ("compare", checkout.path, "--ledger", "25015", "--minutes", "0")
    without = eagletwin(*words, cwd=tmp_path)
    assert without.returncode == 0, without
    assert "it is not known what" in " ".join(without.stdout.split())
    assert eagletwin(*words, "--strict", cwd=tmp_path).returncode == 125


# Bisection on the real worker: over features of a planted fault, over published releases, over commits made of them.


EXAMPLES = Path(__file__).parents[2] / "docs/guide/examples"


def release(name: str) -> Path:
    """The folder of a release; skips the test where it is not in the cache and cannot be fetched."""
    try:
        return resolve(name).paths[0]
    except NotFetched as error:
        pytest.skip(error.cause)


def words_of(line: str, cwd: Path) -> list[str]:
    """What a shell that runs the line hands to the one command of eagletwin in it."""
    told = f"eagletwin() {{ printf '%s\\n' \"$@\" >&3; }}\n{{ {line}; }} 3>&1 >/dev/null"
    return subprocess.check_output(["bash", "-c", told], cwd=cwd, text=True).splitlines()


@pytest.mark.long
def test_a_fault_that_needs_pages_and_two_requests_is_said_to_need_exactly_these(host: Host, tmp_path: Path) -> None:
    """The example of docs/guide/bisect.md."""
    case, fault = read_case(EXAMPLES / "busy.json"), read_patch(EXAMPLES / "fault.json")
    subject = Subject(case=case, run=RunSpec(patches=(fault,)))
    found = reduce_case(host, subject, "", tmp_path, print)
    assert [feature.words for feature in found.reduced.needed] == ["several requests", "pages"]
    assert {feature.words for feature in found.reduced.gone} == {"late arrivals", "several steps", "prefix cache", "chunks"}
    assert found.reduced.answered
    assert found.reduced.fault is not None
    assert found.reduced.fault.rule == "draft.hidden_in"
    assert found.control is not None
    assert found.control.usual.status == "equal"
    assert found.interpreted is not None
    assert found.interpreted.usual.rule == "draft.hidden_in"


@pytest.mark.long
def test_git_bisect_over_the_trees_of_releases_says_the_same_and_skips_what_does_not_import(tmp_path: Path) -> None:
    history = History(tmp_path / "sglang")
    old, new = (history.tree_of(release(name)) for name in ("0.5.11", "0.5.12"))
    broken = history.with_file(new, "version.py", "raise ImportError('planted')\n")
    trees = {"0.5.11": old, "0.5.12": new, "does not import": broken, "0.5.12 again": new}
    for subject, tree in trees.items():
        history.commit(subject, tree, transformers="5.6.0")
    done = eagletwin("bisect", "25015", "--git", str(history.path), "main", history.commits[0], cwd=tmp_path)
    assert done.returncode == 0, done
    fixed = history.git("log", "-1", "--format=%h %s", history.commits[1])
    assert done.stdout.startswith(f"FIXED WITH {fixed}  pr-25015: draft.positions at request a, round 0, draft.decode step 1\n")
    assert "does not import  skipped: SGLang cannot be imported: ImportError: planted" in done.stdout
    assert len(history.git("worktree", "list").splitlines()) == 1
    for word, code in (("bad", 1), ("good", 0)):  # each in a worktree of its own, which stays
        typed = re.search(rf"^  {word}: +(.+)$", done.stdout, re.MULTILINE)
        assert typed is not None
        assert eagletwin(*words_of(typed[1], tmp_path), cwd=tmp_path).returncode == code


# Another SGLang than the installed one: a source tree as it is, by its own name in traces, scripts and comparisons.


RELEASE = installed_version("sglang")
PLACE, RIGHT, WRONG = "srt/speculative/eagle_worker_v2.py", "forward_batch.positions.add_(1)", "forward_batch.positions.add_(2)"


@pytest.fixture(scope="module")
def sources_checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed release as a repository, and in its work tree draft decode that moves on two positions a step."""
    root = tmp_path_factory.mktemp("checkout")
    package = INSTALLED.root / "sglang"
    left_out = shutil.ignore_patterns("__pycache__", "multimodal_gen", "*.so")
    shutil.copytree(package, root / "python" / "sglang", ignore=left_out)
    for words in (
        ["init", "-q"],
        ["config", "core.compression", "0"],  # packing all of it takes three times what the rest takes
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", root, *words], check=True)
    worker = root / "python" / "sglang" / PLACE
    text = worker.read_text()
    assert text.count(RIGHT) >= 2
    worker.write_text(text.replace(RIGHT, WRONG))
    return root


@pytest.mark.long
def test_a_changed_checkout_is_run_as_it_is_and_distinguished_from_its_base(sources_checkout: Path, tmp_path: Path) -> None:
    head = ["git", "-C", str(sources_checkout), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.check_output(head, text=True).strip()
    name = resolve(str(sources_checkout)).version
    assert re.fullmatch(rf"{commit}\+dirty\.[0-9a-f]{{8}}", name)
    case = tmp_path / "case.json"
    case.write_text(pretty_case(msgspec.structs.replace(LEDGER["25015"].case, name="three-steps", num_steps=3)))

    red = eagletwin("check", case, "--sglang", sources_checkout, cwd=tmp_path)
    assert red.returncode == 1, red
    assert f"DIVERGED  three-steps on SGLang {name} (cpu)" in red.stdout
    assert "draft.positions" in red.stdout

    compared = eagletwin("compare", RELEASE, sources_checkout, "--case", case, cwd=tmp_path)
    assert compared.returncode == 1, compared
    assert f"three-steps runs on SGLang {RELEASE} (left) and on {sources_checkout} (right); both" in compared.stderr
    assert compared.stdout.startswith(f"left:  SGLang {RELEASE}: equal")
    assert f"\nright: SGLang {name}: diverged draft.positions" in compared.stdout
    assert "\nDIFFERENT: " in compared.stdout

    script = tmp_path / "eagletwin-runs" / "three-steps" / "repro.py"
    assert f"sglang {name} in {sources_checkout}" in script.read_text()
    subprocess.run(["git", "-C", sources_checkout, "checkout", "-q", "."], check=True)
    refused = forked.script(script, cwd=tmp_path)
    assert refused.returncode == 128, refused
    assert f"this case was made on SGLang {name}, and {sources_checkout} is now at {commit}\n" in refused.stderr
    assert (
        forked.script(script, "--sglang", sources_checkout, cwd=tmp_path, source=resolve(str(sources_checkout))).returncode == 0
    )


def test_a_tree_that_does_not_import_is_unknown_and_the_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tree" / "python" / "sglang" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("import sys\n\ndef (:\n")
    done = eagletwin("fuzz", "--sglang", tmp_path / "tree", "--cases", "1", cwd=tmp_path)
    assert done.returncode == 125, done
    assert done.stdout.startswith("UNKNOWN\n\n  SGLang cannot be imported: SyntaxError: ")
    log = Path("eagletwin-runs") / "fuzz-0" / "import.log"
    assert f"try: look at {file}:3; the whole message is in {log}\n" in done.stdout
    assert "SyntaxError" in (tmp_path / log).read_text()
    assert "doctor" not in done.stdout
    assert "NOTHING LOOKED AT" in done.stdout


@pytest.mark.long
def test_a_commit_that_changes_neither_size_nor_time_of_a_file_is_run(sources_checkout: Path, tmp_path: Path) -> None:
    """Python would take the bytecode of the commit before."""
    subprocess.run(["git", "-C", sources_checkout, "checkout", "-q", "."], check=True)
    case, worker = tmp_path / "case.json", sources_checkout / "python" / "sglang" / PLACE
    case.write_text(pretty_case(msgspec.structs.replace(LEDGER["25015"].case, name="three-steps", num_steps=3)))
    assert eagletwin("check", case, "--sglang", sources_checkout, cwd=tmp_path).returncode == 0
    state = worker.stat()
    worker.write_text(worker.read_text().replace(RIGHT, WRONG))
    os.utime(worker, ns=(state.st_atime_ns, state.st_mtime_ns))
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", sources_checkout, *who, "commit", "-qam", "two"], check=True)
    assert "+dirty" not in resolve(str(sources_checkout)).version
    done = eagletwin("check", case, "--sglang", sources_checkout, cwd=tmp_path)
    assert done.returncode == 1, done
    assert "draft.positions" in done.stdout
