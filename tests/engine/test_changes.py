"""What a source tree changes, and what of that a case runs: a change that no case runs is never a pass."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, Event
from eagletwin.harness.core.files import installed_version
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.judge.judge import judge

from ..rows import long
from . import forked
from .planted_trees import IDLE_KERNEL, IDLE_NAME, WORKER, WORKER_NAME, change, plant
from .warm import eagletwin

pytest_plugins = ["pytester"]

# A kernel that every chain launches, and a function that only such kernels call.
KERNELS = "kernels/ops/attention/decode_attention.py"
LAUNCHED, CALLED = "_fwd_kernel_stage2", "tanh"
ABORT = "sglang.srt.managers.scheduler.Scheduler.abort_request"


@pytest.fixture(scope="module")
def idle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("idle"), IDLE_KERNEL)


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tree that changes what every chain runs, what none does, a method that aborts call, and a file that is not Python."""
    root = plant(tmp_path_factory.mktemp("both"), IDLE_KERNEL, WORKER)
    scheduler = root / "sglang" / "srt" / "managers" / "scheduler.py"
    [line] = [line for line in scheduler.read_text().splitlines(keepends=True) if "def abort_request(" in line]
    change(root, "srt/managers/scheduler.py", line, line + '        """Aborts."""\n        recv_req = recv_req\n')
    (root / "sglang" / "srt" / "fast.cu").write_text("// a kernel\n")
    return root


@pytest.fixture(scope="module")
def changed_host(both: Path) -> Iterator[Host]:
    with Host(source=resolve(str(both))) as host:
        yield host


@pytest.mark.long
def test_a_search_in_which_no_case_runs_the_change_cannot_tell(idle: Path, tmp_path: Path) -> None:
    done = eagletwin("fuzz", "--sglang", idle, "--cases", "4", "--only", "llama-tiny", "--not", "sampling", cwd=tmp_path)
    assert done.returncode == 125, done
    assert done.stdout.startswith("CANNOT TELL  0 of 4 cases ran the change, ")
    assert f"This tree differs from {installed_version('sglang')}. Not run: {IDLE_NAME}." in " ".join(done.stdout.split())
    assert "No case ran any of that, so this search says nothing about it." in done.stdout
    tally = json.loads((tmp_path / "eagletwin-runs" / "fuzz-0" / "summary.json").read_text())["tally"]
    assert tally["changes"]["of"] == tally["cases"] == 4
    assert tally["changes"]["ran"] == {}


@pytest.mark.long
def test_a_search_counts_how_many_cases_ran_each_change(both: Path, tmp_path: Path) -> None:
    done = eagletwin("fuzz", "--sglang", both, "--cases", "4", "--only", "llama-tiny", "--not", "sampling", cwd=tmp_path)
    assert done.returncode == 0, done
    text = " ".join(done.stdout.split())
    assert f"This tree differs from {installed_version('sglang')}. Run: " in text
    ran = re.search(rf"{re.escape(WORKER_NAME)} in (\d) of 4 cases", text.partition("Not run: ")[0])
    assert ran is not None
    unknown = 4 - int(ran[1])
    assert f": {ran[1]} equal" in text
    assert not unknown or f"{unknown} unknown (or ran nothing of the change)." in text
    assert IDLE_NAME in text.partition("Not run: ")[2].partition("Not run here: sglang/srt/fast.cu.")[0]


def test_a_case_is_judged_as_ever_where_it_runs_a_change_and_says_which(both: Path, tmp_path: Path) -> None:
    checked = eagletwin("check", "25015", "--sglang", both, cwd=tmp_path)
    assert checked.returncode == 0, checked
    text = " ".join(checked.stdout.split())
    assert f"This tree differs from {installed_version('sglang')}. Run: {WORKER_NAME}. Not run: " in text
    assert "Not run here: sglang/srt/fast.cu." in text
    folder = tmp_path / "eagletwin-runs" / "pr-25015"
    assert "+        self = self\n" in (folder / "sglang.patch").read_text()
    judged = eagletwin("judge", folder, cwd=tmp_path)
    assert (judged.returncode, WORKER_NAME in judged.stdout) == (0, True), judged


# A branch that no case of this model takes, of a function that each round calls.
DEAD = "draft_probs_list.append(probs)", "raise RuntimeError"


@pytest.mark.parametrize("door", ["check", *long("prove", "fuzz")])
def test_a_tree_whose_changed_statement_never_runs_is_never_a_pass(dead: Path, tmp_path: Path, door: str) -> None:
    """Its function is called in every round."""
    words = {
        "check": ("25015",),
        "prove": ("26329",),
        "fuzz": ("--cases", "4", "--only", "llama-tiny", "--not", "sampling"),
    }[door]
    done = eagletwin(door, *words, "--sglang", dead, cwd=tmp_path)
    assert done.returncode == 125, done
    assert f"Not run: {WORKER_NAME}. Changed statements that ran: 0 of 1; not: sglang/srt/speculative/" in " ".join(
        done.stdout.split()
    )


def test_a_patch_whose_changed_statement_never_runs_is_never_a_pass(tmp_path: Path) -> None:
    edit = {"target": WORKER_NAME, "match": DEAD[0], "replacement": DEAD[1]}
    (tmp_path / "dead.json").write_text(json.dumps({"name": "dead", "edits": [edit]}))
    done = eagletwin("check", "25015", "--patch", "dead.json", cwd=tmp_path)
    assert done.returncode == 125, done
    assert f"the patch edits {WORKER_NAME}, and none of its changed statements ran: sglang/srt/speculative/" in " ".join(
        done.stdout.split()
    )


def test_what_of_a_change_did_not_run_stands_on_top_and_strict_makes_it_125(partly: Path, tmp_path: Path) -> None:
    for words, code in (((), 0), (("--strict",), 125)):
        done = eagletwin("check", "25015", "--sglang", partly, *words, cwd=tmp_path)
        assert done.returncode == code, done
        first = " ".join(done.stdout.split("\n\n")[0].split())
        assert first.startswith("EQUAL  pr-25015".replace("  ", " ")), first
        assert re.search(
            r"NOT SEEN 1 of 2 changed statements did not run: sglang/srt/speculative/eagle_worker_v2.py:\d+$", first
        )
        assert "No recorded number differs from a run without the change" in " ".join(done.stdout.split())
    verdict = json.loads((tmp_path / "eagletwin-runs" / "pr-25015" / "verdict.json").read_text())
    assert verdict["not_seen"].startswith("1 of 2 changed statements did not run: ")
    assert "1 of 2 changed statements did not run" in (tmp_path / "eagletwin-runs" / "pr-25015" / "report.html").read_text()


@pytest.mark.long
def test_a_search_says_what_of_a_change_no_case_ran_and_what_it_does(partly: Path, tmp_path: Path) -> None:
    words = ("--cases", "6", "--minutes", "10", "--only", "llama-tiny", "--not", "sampling", "--sglang", partly)
    done = eagletwin("fuzz", *words, "--strict", cwd=tmp_path)
    assert done.returncode == 125, done
    lines = done.stdout.splitlines()
    assert lines[1].startswith("NOT SEEN  1 of 2 changed statements did not run:"), lines[:3]
    summary = json.loads((tmp_path / "eagletwin-runs" / "fuzz-0" / "summary.json").read_text())
    changes = summary["tally"]["changes"]
    assert summary["not_seen"].startswith("1 of 2 ")
    assert changes["altered"] == 0 < changes["compared"]
    text = " ".join(done.stdout.split())
    assert f"It changed no recorded number in {changes['compared']} cases that ran it and are right" in text
    assert "Exit code 125: a changed statement did not run, which --strict does not let pass." in text


@pytest.fixture(scope="module")
def dead(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plant(tmp_path_factory.mktemp("dead"), ("srt/speculative/eagle_worker_v2.py", *DEAD))


@pytest.fixture(scope="module")
def partly(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A change of two statements of one function: one runs in every round, and does nothing."""
    return plant(tmp_path_factory.mktemp("partly"), ("srt/speculative/eagle_worker_v2.py", *DEAD), WORKER)


@pytest.mark.long
def test_a_script_refuses_a_tree_of_another_content_in_the_same_place(idle: Path, tmp_path: Path) -> None:
    """A change that no case runs gave the same name, and so 'equal', to whatever lay there."""
    tree = plant(tmp_path / "tree", WORKER)
    name = resolve(str(tree)).version
    made = eagletwin("check", "25015", "--sglang", tree, cwd=tmp_path)
    assert made.returncode == 0, made
    script = tmp_path / "eagletwin-runs" / "pr-25015" / "repro.py"
    assert "`patch -p1 < sglang.patch`" in script.read_text()
    change(tree, WORKER[0], "        self = self\n", "        self = self  # so\n")
    now = resolve(str(tree)).version
    refused = forked.script(script, cwd=tmp_path)
    assert refused.returncode == 128, refused
    assert f"this case was made on SGLang {name}, and {tree} is now at {now}" in refused.stderr
    assert f"bring back {name} with the sglang.patch next to this script, or ask another one: --sglang {tree}" in refused.stderr
    asked = forked.script(script, "--sglang", idle, cwd=tmp_path)
    assert asked.returncode == 125, asked
    assert f"note: this case was made on SGLang {name}; this is {resolve(str(idle)).version}" in asked.stderr


@pytest.mark.long
def test_two_traces_that_are_the_same_say_nothing_of_a_change_that_neither_ran(idle: Path, tmp_path: Path) -> None:
    release = installed_version("sglang")
    done = eagletwin("compare", release, idle, "--case", "25015", cwd=tmp_path)
    assert done.returncode == 125, done
    assert f"That says nothing about a change: this tree differs from {release} in {IDLE_NAME}" in done.stdout
    assert (tmp_path / "eagletwin-runs" / "pr-25015-compare" / "right" / "sglang.patch").is_file()
    listed = done.stdout.partition("The two differ, file by file:\n")[2].splitlines()
    assert [line for line in listed if "Not run: " in line] == [
        f"  left:  Not run: {IDLE_NAME}.",
        f"  right: Not run: {IDLE_NAME}.",
    ]
    assert sum("Changed statements that ran: 0 of 1; not: sglang/" in line for line in listed) == 2


@pytest.mark.long
def test_two_trees_of_which_one_ran_a_difference_are_compared(both: Path, idle: Path, tmp_path: Path) -> None:
    """What both change, in the same way, is no difference between them."""
    done = eagletwin("compare", idle, both, "--case", "25015", cwd=tmp_path)
    assert done.returncode == 0, done
    listed = done.stdout.partition("The two differ, file by file:\n")[2]
    assert [line.partition("Run: ")[2] for line in listed.splitlines() if "Run: " in line] == [f"{WORKER_NAME}."] * 2
    assert f"Not run: {ABORT}." in listed
    assert "Not run here: sglang/srt/fast.cu." in listed
    assert IDLE_NAME not in listed


@pytest.mark.long
def test_what_an_earlier_case_of_the_process_ran_is_not_counted_for_the_next(changed_host: Host, tmp_path: Path) -> None:
    case = replace(LEDGER["25015"].case, exercises=())
    aborting = replace(
        case, requests=(replace(case.requests[0], max_new_tokens=8),), events=(Event(kind="abort", at=2, request="a"),)
    )
    ran = []
    for number, one in enumerate((aborting, case)):
        (tmp_path / str(number)).mkdir()
        trace = changed_host.engine(one).run(one, tmp_path / str(number), fresh=False)
        assert trace.header.before == number
        assert trace.differs is not None
        ran.append(set(trace.differs.ran))
    assert ran == [{WORKER_NAME, ABORT}, {WORKER_NAME}]


def test_a_release_says_nothing_of_changes(host: Host, busy_case: Case, tmp_path: Path) -> None:
    trace = host.engine(busy_case).run(busy_case, tmp_path)
    assert trace.differs is None
    assert b"differs" not in (tmp_path / "trace.json").read_bytes()


@pytest.mark.long
@pytest.mark.parametrize("kernels", ["fast", "interpreter"])
def test_kernels_count_as_run_when_they_are_launched(kernel_host: Host, tmp_path: Path, kernels: Kernels) -> None:
    case = LEDGER["25015"].case
    trace = kernel_host.engine(case, kernels=kernels).run(case, tmp_path)
    assert judge(trace).status == "equal", trace.header.ending
    assert trace.differs is not None
    ran = {name.rpartition(".")[2] for name in trace.differs.ran}
    assert LAUNCHED in ran
    launched = next(places for name, places in trace.differs.statements.items() if name.endswith(f".{LAUNCHED}"))
    assert [place in trace.differs.executed for place in launched] == [True, True, False]
    assert "_draft_extend_inputs_kernel" not in ran
    assert (CALLED in ran) == (kernels == "interpreter")  # where it is not known what a kernel calls, all that it names counts


@pytest.fixture(scope="module")
def kernel_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    root = plant(tmp_path_factory.mktemp("kernels"), IDLE_KERNEL)
    text = (root / "sglang" / KERNELS).read_text()
    for name in (LAUNCHED, CALLED):
        head = text.index(f"\ndef {name}(")
        body = text.index("):\n", head) + len("):\n")
        text = text[:body] + "    unused = 0\n    if unused == 1:\n        unused = 2\n" + text[body:]
    (root / "sglang" / KERNELS).unlink()
    (root / "sglang" / KERNELS).write_text(text)
    with Host(source=resolve(str(root))) as host:
        yield host


SUITE = """
import pytest
from eagletwin.cases.ledger import LEDGER

def test_a_case(eagletwin):
    eagletwin.check(LEDGER["25015"].case)

@pytest.mark.eagletwin(idle_changes=True)
def test_of_something_else(eagletwin):
    eagletwin.check(LEDGER["25015"].case)
"""


@pytest.mark.parametrize("workers", [False, *long(True)])
def test_a_test_whose_cases_run_nothing_of_the_change_fails(idle: Path, pytester: pytest.Pytester, workers: bool) -> None:
    pytester.makepyfile(SUITE)
    words = ("-p", "no:cacheprovider", "--eagletwin-sglang", str(idle))
    if workers:
        result = pytester.runpytest_subprocess(*words, "-n", "1")
    else:
        result = forked.session(pytester.path, *words, source=resolve(str(idle)))
    result.assert_outcomes(passed=1, failed=1)
    text = result.stdout.str()
    assert (
        f"eagletwin: cannot tell, of any case of this test: this tree differs from {installed_version('sglang')} in {IDLE_NAME}"
        in text
    )
    assert f"Not run: {IDLE_NAME}." in text
    assert "eagletwin: no case ran any of that, so this session says nothing about it" in text


def test_a_session_that_runs_nothing_of_the_change_is_no_success(idle: Path, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SUITE)
    words = ("-p", "no:cacheprovider", "--eagletwin-sglang", str(idle), "-k", "else")
    result = forked.session(pytester.path, *words, source=resolve(str(idle)))
    result.assert_outcomes(passed=1, deselected=1)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
