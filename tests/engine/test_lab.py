"""Parts of the laboratory on the real worker: pauses, jobs that are explained, batch sizes, mutants, and counts of samples."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Ending, Jitter, Jittered
from eagletwin.harness.core.run_spec import CPU, Limits
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.sglang.drive import Pauses, streams_of
from eagletwin.harness.engines.source import init_file
from eagletwin.harness.judge.judge import judge

from ..lab.bench.speed import rate_case
from ..lab.draws.campaign import Portion, share
from ..lab.draws.distribution import PROMPTS, TOGETHER, WAYS, findings
from ..lab.gpu.compared import TOLD, race, raced, told
from ..lab.gpu.faults import HIDDEN, WAITS
from ..lab.gpu.job import PATHS, CaseResult, Job, path, paths
from ..lab.gpu.jobs import explained, run_job
from ..lab.gpu.plan import CONFIGURATIONS, SIZES, every_size
from ..lab.gpu.summary import statuses_of
from ..lab.mutants.corpus import Known
from ..lab.mutants.draw import Mutant, mutants_of
from ..lab.mutants.hunt import hunt
from ..rows import long, spread

# Pauses between streams: where they fall, that they leave a CPU engine's answers alone, and what a race looks like.


class _Cuda:
    """As much of torch.cuda as pauses touch. done: calls of events, and sleeps: on which stream, and how many cycles."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        done = self.done

        class Event:
            def record(self, stream: Any = None) -> None:  # noqa: ARG002  as torch has it
                done.append(("record", 0))

            def wait(self, stream: Any = None) -> None:  # noqa: ARG002
                done.append(("wait", 0))

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                event.wait(self)

            def wait_stream(self, other: Any) -> None:
                event = Event()
                event.record(other)
                self.wait_event(event)

        cuda = self

        class StreamContext:
            def __init__(self, stream: Stream) -> None:
                self._stream = stream

            def __enter__(self) -> None:
                self._before, cuda.current = cuda.current, self._stream

            def __exit__(self, *_: object) -> None:
                cuda.current = self._before

        self.Event, self.Stream, self.StreamContext = Event, Stream, StreamContext
        self.current = Stream("default")

    def current_stream(self) -> Any:
        return self.current

    def _sleep(self, cycles: int) -> None:
        self.done.append((self.current.name, cycles))


def _use(cuda: _Cuda, seed: int, share: float = 1.0) -> Jittered:
    """A batch or so, with pauses."""
    forward, copy = cuda.Stream("forward"), cuda.Stream("copy")
    pauses = Pauses(Jitter(seed=seed, share=share), lambda stream: str(stream.name), cuda)
    pauses.start()
    forward.wait_stream(copy)
    with cuda.StreamContext(forward):
        event = cuda.Event()
        event.record()
        event.wait(copy)
    pauses.stop()
    return pauses.jittered


def test_a_pause_follows_the_call_on_the_stream_that_goes_on() -> None:
    cuda = _Cuda()
    jittered = _use(cuda, seed=3)
    assert [pause.place for pause in jittered.pauses] == [
        "Stream.wait_stream on forward",  # with the event inside it, one point
        "StreamContext.enter on forward",
        "Event.record on forward",
        "Event.wait on copy",
        "StreamContext.exit on default",
    ]
    assert [pause.point for pause in jittered.pauses] == list(range(jittered.points))
    slept = [stream for stream, cycles in cuda.done if cycles]
    assert slept == ["forward", "forward", "forward", "copy", "default"]
    assert [word for word, cycles in cuda.done if not cycles] == ["record", "wait", "record", "wait"]
    assert all(200 <= pause.microseconds <= 20_000 for pause in jittered.pauses)
    assert cuda.current.name == "default"


def test_the_same_seed_has_the_same_pauses_and_none_are_left_behind() -> None:
    first, again, other = (_use(_Cuda(), seed, share=0.5) for seed in (1, 1, 2))
    assert first == again
    assert first.pauses != other.pauses
    cuda = _Cuda()
    _use(cuda, seed=1)
    before = len(cuda.done)
    with cuda.StreamContext(cuda.Stream("forward")):
        pass
    assert len(cuda.done) == before
    assert not _use(_Cuda(), seed=1, share=0.0).pauses


def test_torch_has_what_pauses_change() -> None:
    pauses, before = Pauses(Jitter(seed=0), str), torch.cuda.Event.record
    pauses.start()
    assert torch.cuda.Event.record is not before
    pauses.stop()
    assert torch.cuda.Event.record is before


def test_a_stream_is_called_by_what_the_scheduler_has_it_for() -> None:
    scheduler = SimpleNamespace(
        schedule_stream=1, forward_stream=2, copy_stream=3, future_map=SimpleNamespace(fwd_prepare_d2h_stream=4)
    )
    name = streams_of(scheduler)
    assert [name(number) for number in range(1, 6)] == ["schedule", "forward", "copy", "lengths", "another"]


@pytest.mark.parametrize("topk", [1, 3])
def test_a_run_with_pauses_is_answered_as_the_one_that_was_judged(overlapped: Host, tmp_path: Path, topk: int) -> None:
    case = rate_case(1, topk)
    case = replace(case, engine=replace(case.engine, sglang=replace(case.engine.sglang, radix_cache=True)))
    judged = _run(overlapped, case, tmp_path / "judged")
    assert judge(judged).status == "equal"
    (tmp_path / "raced").mkdir()
    run = race(overlapped.engine(case), case, judged, Jitter(seed=7), tmp_path / "raced")
    assert not run.differs
    assert run.compared >= 20
    assert {record.stage for record in told(judged).header.records} == set(TOLD)
    assert run.points == 0  # a CPU has no streams


def test_what_another_draft_changes_shows_in_the_drafts_that_were_accepted(overlapped: Host, tmp_path: Path) -> None:
    """A draft that was raced is a wrong draft: greedy tokens stay as they are."""
    case = rate_case(1, 1)
    judged = _run(overlapped, case, tmp_path / "judged")
    wrong = Patch(
        name="wrong-first-token",
        edits=(
            Edit(
                target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
                match="draft_input: EagleDraftInput = batch.spec_info",
                replacement="draft_input: EagleDraftInput = batch.spec_info\n"
                "draft_input.topk_index = torch.zeros_like(draft_input.topk_index)",
            ),
        ),
    )
    other = _run(overlapped, case, tmp_path / "other", (wrong,))
    run = raced(judged, other, Jitter(seed=5))
    assert run.differs.startswith("finished")
    assert ", tokens" not in run.differs
    assert ", decoded" not in run.differs


def test_a_run_that_does_not_end_is_a_race(overlapped: Host, tmp_path: Path) -> None:
    judged = _run(overlapped, LEDGER["25015"].case, tmp_path / "judged")
    header = replace(judged.header, ending=Ending(kind="hung", detail="no end"), jittered=Jittered(Jitter(seed=5), 9, ()))
    run = raced(judged, Trace(header, judged.tensors), Jitter(seed=5))
    assert (run.differs, run.points, run.compared) == ("hung no end", 9, 0)


@pytest.mark.parametrize("patch", spread(WAITS + HIDDEN), ids=lambda patch: str(patch.name))
def test_missing_waits_fit_the_release_and_are_none_on_a_cpu(overlapped: Host, tmp_path: Path, patch: Patch) -> None:
    case = rate_case(1, 1)
    trace = _run(overlapped, case, tmp_path / "run", (patch,))
    assert judge(trace).status == "equal"
    assert not trace.header.idle_edits or "_apply_war_barrier" in "".join(trace.header.idle_edits)


def _run(host: Host, case: Any, folder: Path, patches: tuple[Patch, ...] = ()) -> Trace:
    folder.mkdir()
    return host.engine(case, patches).run(case, folder)


# Jobs of a plan on SGLang's own worker: known bugs are mended beforehand, or named afterwards, as a search does it.


def _job(name: str, *, known: str = "", mend: bool = False) -> Job:
    remedies: dict[str, Patch] = {known: remedy} if (remedy := LEDGER[known or name].remedy) is not None else {}
    return Job(name=name, mode=CPU, cases=(LEDGER[name].case,), known=remedies, mend=mend)


@pytest.mark.long
def test_a_bug_that_was_not_foreseen_is_named_by_the_case(tmp_path: Path) -> None:
    done = run_job(_job("input-logprob-id", known="certain-node"), tmp_path)
    assert [(one.status, one.rule, one.known) for one in done.seen] == [("diverged", "output.logprobs", "input-logprob-id")]
    assert statuses_of(done) == {"known": 1}


@pytest.mark.long
def test_a_crash_that_is_a_known_bug_is_known(tmp_path: Path) -> None:
    done = run_job(_job("adaptive-rejection", known="certain-node"), tmp_path)
    assert [(one.rule, one.known) for one in done.seen] == [("engine.crash", "adaptive-rejection")]
    assert statuses_of(done) == {"known": 1}


@pytest.mark.long
def test_bugs_that_are_mended_do_not_show(tmp_path: Path) -> None:
    done = run_job(_job("input-logprob-id", known="input-logprob-id", mend=True), tmp_path)
    assert "input-logprob-id" in done.mended
    assert [(one.status, one.known) for one in done.seen] == [("equal", "")]


@pytest.mark.long
def test_a_patch_of_the_job_that_nothing_calls_is_no_remedy(tmp_path: Path) -> None:
    """A case says nothing of it, whatever was mended beside it."""
    never = "sglang.srt.speculative.spec_utils.load_token_map"
    idle = Patch(name="idle", edits=(Edit(target=never, match="weights_only=True", replacement="weights_only=False"),))
    job = replace(_job("input-logprob-id", known="input-logprob-id", mend=True), patches=(idle,))
    done = run_job(job, tmp_path)
    assert done.error == ""
    [seen] = done.seen
    assert seen.status == "unknown"
    assert seen.reason.startswith(f"the patch edits {never}, and none of its changed statements ran: sglang/srt/speculative/")


@pytest.mark.long
def test_what_no_known_bug_explains_stays_new(tmp_path: Path) -> None:
    undone = LEDGER["25015"]
    job = Job(name="undone", mode=CPU, cases=(undone.case,), patches=undone.red.patches, known=_job("certain-node").known)
    [seen] = run_job(job, tmp_path).seen
    assert (seen.status, seen.rule, seen.known) == ("diverged", undone.rule, "")


@pytest.mark.parametrize("several", [*long(False), True])
def test_a_case_that_is_right_without_a_remedy_is_not_known(several: bool) -> None:
    """What was seen of it took the cases before it, or the pauses of a race. It calls what each of these remedies changes."""
    names = ("tree-window", "certain-node") if several else ("tree-window",)
    known = {name: remedy for name in names if (remedy := LEDGER[name].remedy) is not None}
    job = Job(name="right", mode=CPU, cases=(LEDGER["25015"].case,), known=known)
    [seen] = explained(job, [CaseResult(case="right", status="diverged", rule="race")], Limits())
    assert (seen.status, seen.known) == ("diverged", "")


@pytest.mark.long
def test_a_case_that_is_wrong_in_another_way_again_is_not_known() -> None:
    job = _job("certain-node", known="certain-node")
    [seen] = explained(job, [CaseResult(case="other", status="diverged", rule="draft.kv")], Limits())
    assert (seen.status, seen.known) == ("diverged", "")


# The plan for a GPU that names every batch size and every path: run on a CPU, the batches are the same ones.


@pytest.mark.long
def test_every_batch_size_takes_every_path_with_overlap_and_without(overlapped: Host, tmp_path: Path) -> None:
    """Batches depend on arrivals alone, so one run of a configuration, with overlap, stands for all engines of it."""
    jobs = every_size()
    for name in CONFIGURATIONS:
        mine = [job for job in jobs if job.name.startswith(f"sizes-{name}-")]
        first = mine[0].cases[0]
        (tmp_path / name).mkdir()
        trace = overlapped.engine(first).run(first, tmp_path / name)
        assert judge(trace).status == "equal"
        sizes = {int(key.split()[0]) for key in paths(trace, ())}
        assert sizes == set(SIZES)
        for overlap in (False, True):
            captured = [job.mode.graphs for job in mine if job.mode.overlap == overlap]
            taken = {(size, path(size, graphs, size <= max(graphs, default=0))) for graphs in captured for size in sizes}
            assert taken == {(size, how) for size in SIZES for how in PATHS}
        assert {job.cases[0].page_size for job in mine} == {1, 4}
        assert {event.kind for event in mine[0].cases[1].events} == {"abort", "retract", "pause", "resume"}


# One mutant of the real worker after the other: killed by a rule, by a crash, or not run at all.


FILE = "sglang/srt/speculative/eagle_utils.py"


def mutant(host: Host, function: str, before: str, after: str) -> Mutant:
    init = init_file(host.source)
    assert init is not None
    drawn = mutants_of((init.parents[1] / FILE).read_text(), FILE.removesuffix(".py").replace("/", "."), FILE)
    return next(one for one in drawn if one.function == function and (one.before, one.after) == (before, after))


@pytest.mark.parametrize(
    ("planted", "outcome", "by"),
    [
        (
            ("_eagle_prefill_tail_tokens", "next_prompt_token is not None", "next_prompt_token is None"),
            "rule",
            "draft.input_ids",
        ),
        (("organize_draft_results", "num_draft_token - 1", "num_draft_token + 1"), "not run", ""),
    ],
)
def test_a_mutant_is_killed_or_not_run(
    host: Host, busy_case: Case, planted: tuple[str, str, str], outcome: str, by: str
) -> None:
    one = mutant(host, *planted)
    known = Known(block=0, case=busy_case, mended=(), view="slot_layout", ran={FILE: (one.block,)})
    found = hunt(host, one, [known], most=1, seconds=60.0)
    assert (found.outcome, found.by) == (outcome, by)
    assert hunt(host, one, [Known(0, busy_case, (), "slot_layout", {})], 1, 60.0).outcome == "not run"


# Counts of sampled tokens, from the real worker: one case's worth, which any fault that is not small must already show in.
# docs/records/detection.md has the counts that say something about small ones.


@pytest.mark.long
def test_the_worker_emits_what_the_target_may(tmp_path: Path) -> None:
    """Rejection sampling, in every way: three tokens of 64 requests."""
    tally = share(Portion(setting="rejection", mode=CPU, number=0, step=1, seconds=0), tmp_path)
    assert tally.requests == TOGETHER
    assert {key: counts.total() for key, counts in tally.joint.items()} == {
        (prompt, way): TOGETHER // len(PROMPTS) // len(WAYS) for prompt in range(len(PROMPTS)) for way in range(len(WAYS))
    }
    assert len({emitted for counts in tally.joint.values() for emitted in counts}) > 20, "tokens are drawn"
    assert all(finding.agreement.chance > 1e-9 for finding in findings(tally))
    assert tally.impossible == []
