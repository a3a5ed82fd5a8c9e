"""The fixture under rough handling, the scheduler played step by step, and reproductions that turn green."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.machine import machine
from eagletwin.cases.strategies import Focus
from eagletwin.harness.check.confirm import check
from eagletwin.harness.check.known import KnownBugMatcher, entries_of
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.commands.fuzz.looking import NO_BLOCK, CaseSeen
from eagletwin.harness.commands.fuzz.shrinking import Finding, ShrinkCallbacks, Shrinking
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import installed_version
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import INSTALLED, resolve
from eagletwin.harness.testing.twin import CaseFailed, Twin

from ..rows import long
from . import forked
from .planted_trees import WORKER, plant

# The fixture under rough handling: one test must not reach into another's case, engine or verdict.


FORWARD = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
BAD = Patch(
    name="bad", edits=(Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = torch.argmin("),)
)


def case(name: str, new: int = 6, steps: int = 2, arrive: int = 0) -> Case:
    return Case(
        name=name,
        model="llama-tiny",
        num_steps=steps,
        requests=(Request(id="a", prompt=(7, 19, 3), max_new_tokens=new, arrive=arrive),),
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=512)),
    )


@pytest.mark.eagletwin(patches=[BAD])
def test_a_failure_does_not_cut_later_cases_short(eagletwin: Twin) -> None:
    for late in (0, 5):
        with pytest.raises(CaseFailed, match=r"draft\.proposal"):
            eagletwin.check(case("late", arrive=late))


@pytest.fixture
def checked_in_a_fixture(eagletwin: Twin) -> str:
    return eagletwin.check(case("fixture")).status


def test_a_fixture_runs_as_this_tests_marker_says_not_the_last_ones(checked_in_a_fixture: str) -> None:
    assert checked_in_a_fixture == "equal"


def test_a_case_for_something_is_not_known_from_one_for_nothing(eagletwin: Twin) -> None:
    plain = case("plain")
    assert eagletwin.check(plain).status == "equal"
    with pytest.raises(CaseFailed, match="which did not happen"):
        eagletwin.check(Case(**{**{f: getattr(plain, f) for f in plain.__struct_fields__}, "exercises": ("batch",)}))


def test_a_case_is_run_as_often_as_it_is_checked(eagletwin: Twin) -> None:
    before = eagletwin.ran
    for _ in range(3):
        eagletwin.check(case("again"))
    assert eagletwin.ran == before + 3


class Rung(Exception):
    """What a time limit of pytest raises, in the middle of anything."""


def test_who_stops_waiting_leaves_no_answer_for_the_next_case(eagletwin: Twin) -> None:
    def ring(*_: object) -> NoReturn:
        raise Rung

    eagletwin.check(case("warm"))
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Rung):
            eagletwin.check(case("long", new=400))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for name in ("one", "two"):
        assert eagletwin.check(case(name)).status == "equal"


@pytest.mark.long
def test_a_session_may_idle_and_pause_for_long(eagletwin: Twin) -> None:
    live = eagletwin.start(case("idle", new=1))
    for _ in range(40):
        live.step()
    live.step(events=(Event(at=0, kind="pause"),))
    for _ in range(40):
        live.step()
    assert live.finish().status == "equal"


@pytest.mark.long
def test_sessions_keep_their_engine_and_say_when_somebody_else_wants_it(eagletwin: Twin) -> None:
    live = eagletwin.start(case("open"))
    for call in (lambda: eagletwin.check(case("other")), lambda: eagletwin.start(case("second"))):
        with pytest.raises(InputError, match="a session is open on this engine"):
            call()
    for steps in range(3, 13):  # more configurations than engines stand at once
        eagletwin.check(case("elsewhere", steps=steps))
    with pytest.raises(InputError, match="the same id"):
        live.step(requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    live.step()
    assert live.finish().status == "equal"
    with pytest.raises(InputError, match="the session is over"):
        live.finish()
    assert eagletwin.check(case("after")).status == "equal"


@pytest.mark.eagletwin(patches=[BAD])
def test_what_a_session_failed_on_can_be_concluded_while_it_is_open(
    eagletwin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagletwin, "_out", tmp_path)
    live = eagletwin.start(case("failing"))
    live.step()
    with pytest.raises(CaseFailed, match=r"draft\.proposal") as failed:
        live.step()
    assert eagletwin.conclude(failed.value).verdict.status == "diverged"


# The scheduler played by hand: what a state machine does step by step is judged at each step, and is a case in the end.


QUICK = settings(
    max_examples=6,
    stateful_step_count=12,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)
TIGHT = Focus(num_steps=3, page_size=4, radix_cache=True, max_total_tokens=96)


TREES = Focus(num_steps=3, topk=3, tree_size=2, page_size=4, radix_cache=True, max_total_tokens=96)


@pytest.mark.parametrize("focus", [*long(Focus(num_steps=2)), TIGHT, *long(TREES)], ids=["plain", "tight", "trees"])
def test_the_unmodified_release_is_equal_at_every_step(eagletwin: Twin, focus: Focus) -> None:
    played = machine(eagletwin.start, focus)
    seed(1)(played)
    run_state_machine_as_test(played, settings=settings(QUICK, max_examples=3))  # type: ignore[no-untyped-call]


@pytest.mark.eagletwin(revert=[26329])
def test_the_machine_finds_a_reverted_fix(eagletwin: Twin) -> None:
    # Hypothesis takes constants from the modules that are imported: what is played first may run nothing of the change
    trial = None
    for number in range(1, 20):
        played = machine(eagletwin.start, Focus(num_steps=2))
        seed(number)(played)
        with pytest.raises(CaseFailed) as failed:
            run_state_machine_as_test(played, settings=settings(QUICK, phases=(Phase.generate,)))  # type: ignore[no-untyped-call]
        trial = failed.value.trial
        if not trial.verdict.vacuous:
            break
    assert trial is not None
    assert "draft.input_ids" in str(failed.value)
    # what was played is a case like any other, and shows the same when it is run as one
    with pytest.raises(CaseFailed, match=r"draft\.input_ids"):
        eagletwin.check(trial.case)


def test_what_was_played_runs_again_as_a_case(eagletwin: Twin, tmp_path: Path) -> None:
    case = Case(
        name="played",
        model="llama-tiny",
        num_steps=3,
        page_size=4,
        chunked_prefill_size=8,
        requests=(Request(id="a", prompt=tuple(range(3, 22)), max_new_tokens=9),),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    )
    live = eagletwin.start(case)
    live.step(chunk=4)
    live.step(requests=(Request(id="b", prompt=tuple(range(3, 15)), max_new_tokens=6),))
    live.step(chunk=4)
    live.step(events=(Event(at=0, kind="retract"),))
    live.step(events=(Event(at=0, kind="pause"),))
    live.step(events=(Event(at=0, kind="flush"),))
    live.step(events=(Event(at=0, kind="resume"),))
    for _ in range(4):
        live.step()
    live.step(events=(Event(at=0, kind="abort", request="a"),))
    verdict = live.finish()
    trace = live.trace
    live.close()
    assert verdict.status == "equal"
    assert {"retraction", "chunked_prefill", "batch"} <= set(verdict.exercised)
    engine = eagletwin.host.engine(live.case)
    again = check(engine, live.case, tmp_path)
    # the same in every number; only the session waited longer before it was ended
    theirs = {record.key: number for number, record in enumerate(again.trace.header.records) if record.request}
    compared = 0
    for number, record in enumerate(trace.header.records):
        if record.request and record.stage != "cached":
            other = theirs[record.key]
            assert again.trace.header.records[other] == record
            for name in record.tensors:
                assert again.trace.tensor(other, name).equal(trace.tensor(number, name))
                compared += 1
    assert compared > 50


# A reproduction turns green: it has no candidate fix that its case does not need, and one that it has casts no doubt.


FILE, BEFORE, AFTER = WORKER
# Each position that a draft chain decodes at is one too large.
FAULT = FILE, BEFORE, AFTER.replace("self = self", "forward_batch.positions.add_(1)")
# Of a multi-layer worker, of pages, of prefills after a retraction: a chain in one request has none of that.
RIDING = ("multi-layer-chunk-tail-2", "row-overflow", "retracted-chunk-tail")
CASE: Case = replace(LEDGER["25015"].case, exercises=())
FINDING = "draft.positions (draft.decode)"


@dataclass(frozen=True)
class Found:
    tree: Path
    finding: Finding

    @property
    def script(self) -> Path:
        return self.finding.outcome.folder / "repro.py"


def conclude(matcher: KnownBugMatcher, case: Case, riding: tuple[str, ...], folder: Path) -> Finding:
    """What a search keeps of a case that it ran with candidate fixes of other bugs, where it has no time to make it smaller."""
    trial = matcher.trials(entries_of(riding)).look_alone(case)
    assert trial.signature is not None
    seen = CaseSeen(block=NO_BLOCK, case=case, verdict=trial.verdict, signature=trial.signature, mended=riding)
    teller = ShrinkCallbacks(aside=lambda *_: None, news=print, look=print)
    shrinking = Shrinking(seen, matcher, folder / "finding-1", seconds=0.0, seed=0, command="", teller=teller)
    shrinking.shrink(None)
    return shrinking.conclude(1, 0.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Found]:
    """The fault of a tree."""
    tree, folder = plant(tmp_path_factory.mktemp("tree"), FAULT), tmp_path_factory.mktemp("run")
    with Host(source=resolve(str(tree))) as host:
        yield Found(tree, conclude(KnownBugMatcher(host, replace(DEFAULT_RUN, release=str(tree))), CASE, RIDING, folder))


def test_what_rides_along_is_dropped_also_where_time_is_up(found: Found) -> None:
    finding = found.finding
    assert finding.partial
    assert (finding.status, str(finding.signature)) == ("diverged", FINDING)
    assert (finding.run.workarounds, finding.facts.changes) == ((), [])
    assert ", with " not in finding.outcome.report.splitlines()[0]
    assert not any(name in found.script.read_text() for name in RIDING)


def test_it_is_1_on_the_broken_tree_and_0_on_the_release(found: Found, tmp_path: Path) -> None:
    broken = forked.script(found.script, cwd=tmp_path, source=resolve(str(found.tree)))
    assert broken.returncode == 1, broken
    fixed = forked.script(found.script, "--sglang", installed_version("sglang"), cwd=tmp_path, source=INSTALLED)
    assert fixed.returncode == 0, fixed
    assert f"Fixed: {FINDING} does not show on SGLang {installed_version('sglang')}." in fixed.stdout


# Of a function that the case calls, in a text that this SGLang does not have.
UNFIT = Patch(
    name="another text",
    edits=(
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
            match="no such text",
            replacement="nor this",
        ),
    ),
)


def script(folder: Path, run: RunSpec) -> Path:
    return write_script(folder, CASE, run, command="")


def test_a_workaround_that_is_not_called_or_does_not_fit_is_a_note(tmp_path: Path) -> None:
    """As on a tree that has the other bug fixed in a way of its own."""
    idle = LEDGER[RIDING[0]].remedy
    assert idle is not None
    file = script(tmp_path, RunSpec(finding=FINDING, workarounds=(idle, UNFIT)))
    done = forked.script(file, cwd=tmp_path, source=INSTALLED)
    assert done.returncode == 0, done
    assert f"Not needed here: nothing called what {idle.name} changes." in done.stdout
    assert "Left out: another text does not fit this SGLang." in done.stdout


@pytest.mark.parametrize(("patch", "code"), [(LEDGER[RIDING[0]].remedy, 125), (UNFIT, 129)])
def test_a_patch_under_test_that_is_not_called_or_does_not_fit_is_never_green(tmp_path: Path, patch: Patch, code: int) -> None:
    done = forked.script(script(tmp_path, RunSpec(finding=FINDING, patches=(patch,))), cwd=tmp_path, source=INSTALLED)
    assert done.returncode == code, done


@pytest.mark.long
def test_a_candidate_fix_without_which_a_known_bug_shows_first_stays(host: Host, tmp_path: Path) -> None:
    """A multi-layer worker that consumes a wrong token at a chunk's end, and a fault of ours in the same case."""
    tail = LEDGER[RIDING[0]]
    worker = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
    backup = "next_token_ids_backup = batch_result.next_token_ids.clone()"
    edit = Edit(target=f"{worker}._draft_extend_for_decode", match=backup, replacement=backup.removesuffix(".clone()"))
    case = replace(tail.case, exercises=(), requests=(Request(id="a", prompt=(7, 19, 3, 5), max_new_tokens=4),))
    matcher = KnownBugMatcher(host, replace(DEFAULT_RUN, patches=(Patch(name="planted", edits=(edit,)),)))
    finding = conclude(matcher, case, (RIDING[1], tail.id, RIDING[2]), tmp_path)
    assert finding.signature.rule != tail.rule
    assert (finding.run.workarounds, finding.facts.changes) == ((tail.remedy,), ["--remedy", tail.id])


def test_a_test_that_fails_keeps_no_candidate_fix_that_it_does_not_need(host: Host, tmp_path: Path) -> None:
    entry, remedy = LEDGER["25015"], LEDGER[RIDING[0]].remedy
    assert entry.revert is not None
    assert remedy is not None
    twin = Twin(tmp_path)
    twin.host = host
    twin.begin("case", patches=(entry.revert, remedy))
    with pytest.raises(CaseFailed) as failed:
        twin.check(CASE)
    outcome = twin.conclude(failed.value)
    assert outcome.verdict.status == "diverged"
    text = (outcome.folder / "repro.py").read_text()
    assert remedy.name not in text
    assert f"finding='{failed.value.trial.signature}'" in text
