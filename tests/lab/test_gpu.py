"""What is planned for a GPU host, and what is said without a GPU."""

from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.ledger.multi_layer_topk import WINDOWS
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.commands.options import mode_of
from eagletwin.harness.core.case import Adapter, Adaptive, Case, EngineSettings, SGLangSettings, Tier
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Jitter, Pause
from eagletwin.harness.core.run_spec import CPU, Dtype, Limits, Mode, RunSpec
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import PatchDoesNotApply
from eagletwin.harness.engines.machine import missing_for_cuda
from eagletwin.harness.engines.sglang.taps.inner import Captures
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import check_case

from .gpu import jobs as gpu_jobs
from .gpu.command import gpu_plan, gpu_run
from .gpu.compared import Race
from .gpu.faults import CASES, HIDDEN, ONE_GRAPH_OF_LAYERS, SINGLE_HEAD, WAITS, faults, missing_waits, races
from .gpu.job import CaseResult, Job, JobResult, MustShow, path, runs_on_a_gpu, table
from .gpu.jobs import _gpus_of, read_plan
from .gpu.plan import GRAPHS, MODES, Options, generated, plain, proofs, release_of, sampling
from .gpu.summary import CampaignSummary, exit_code, statuses_of, waits
from .models.survey import proofs_in_model

ROOT = Path(__file__).parents[2]
NEWEST = Options(release="0.5.23")
ADAPTIVE = Adaptive(tiers=(Tier(batch=1, steps=(1, 2)),))


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    plan = generated(2, 3, 5, NEWEST) + proofs([LEDGER["25015"]], NEWEST)
    assert [len(job.cases) for job in plan] == [3, 3, *[1] * 6]
    assert plan[0].mode == MODES["graphs"] == Mode(device="cuda", graphs=GRAPHS)
    assert plan[0].cases != plan[1].cases
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode(plan))
    assert read_plan(file) == plan
    file.write_bytes(b"[{}]")
    with pytest.raises(InputError, match="plan"):
        read_plan(file)


def test_a_plan_of_cases_that_sample_holds_what_can_be_judged() -> None:
    plan = sampling(10, 4, 3, "0.5.23")
    assert plan == sampling(10, 4, 3, "0.5.23")
    for job in plan:
        for case in job.cases:
            check_case(case, job.name)
            assert any(case.sampling_of(request.id) or request.sampling for request in case.requests)
            assert case.engine.sglang.rejection_sampling == ("rejection" in job.name)
            assert not job.mode.overlap or all(event.kind != "retract" for event in case.events)  # it loses a round
    assert {case.topk for job in plan for case in job.cases} == {1, 2, 3, 4}
    assert {job.mode.overlap for job in plan if "rejection" in job.name} == {True, False}


def test_decode_batches_are_counted_by_size_and_path() -> None:
    assert [path(size, (2, 5), size <= 5) for size in (1, 2, 4, 5, 6)] == ["padded", "exact", "padded", "exact", "eager"]
    assert path(2, (1, 2, 4), False) == "eager"  # a graph that was captured and not replayed does not count as a path
    lines = table(Counter({"1 exact": 12, "3 padded": 1200, "3 eager": 1})).splitlines()
    assert [line.split() for line in lines] == [
        ["batch", "exact", "padded", "eager"],
        ["1", "12", "0", "0"],
        ["3", "0", "1,200", "1"],
    ]


def test_a_plan_for_several_ranks_says_so_in_every_job() -> None:
    plan = generated(1, 2, 5, Options(release="0.5.17", tp=2)) + proofs(
        [LEDGER["33758"]], Options(release="0.5.17", tp=2), ("eager",)
    )
    assert {job.mode.tp for job in plan} == {2}
    assert plan[0].beside == Mode(tp=2)
    assert [job.name for job in plan[1:]] == ["33758/eager-tp2/green", "33758/eager-tp2/red"]
    assert [bool(job.patches) for job in plan[1:]] == [True, False]  # the bundle's release lacks the fix
    assert [_gpus_of(job, number, 2) for number, job in enumerate(plan)] == ["0,1"] * 3
    assert [_gpus_of(job, number, 4) for number, job in enumerate(plan)] == ["0,1", "2,3", "0,1"]


def test_a_plan_that_measures_a_rate_has_equal_work_for_each_gpu() -> None:
    plan = plain(2, 3, seed=5, copies=2)
    assert [_gpus_of(job, number, 2) for number, job in enumerate(plan)] == ["0", "1", "0", "1"]
    assert plan[0].cases == plan[1].cases != plan[2].cases == plan[3].cases
    assert not any(job.again or job.beside or job.known for job in plan)


def test_without_a_gpu_the_device_is_refused_and_says_what_is_missing() -> None:
    assert mode_of("cpu", None, None) == CPU
    assert mode_of("cpu", "none", True) == Mode(overlap=True)
    missing = missing_for_cuda()
    if missing is None:
        pytest.skip("there is a GPU here")
    with pytest.raises(InputError) as refused:
        mode_of("cuda", "1,2,4", None)
    assert refused.value.cause == missing[0]


@pytest.mark.parametrize("sizes", ["", "4,2", "1,,2", "0", "a"])
def test_sizes_of_graphs_are_an_ascending_list(sizes: str) -> None:
    with pytest.raises(InputError, match="batch sizes"):
        mode_of("cuda", sizes, None)


def test_sizes_of_prefill_graphs_are_token_counts_beside_other_graphs() -> None:
    with pytest.raises(InputError, match="--prefill-graphs 64,16: not an ascending list of token counts"):
        mode_of("cuda", None, None, prefill_graphs="64,16")
    with pytest.raises(InputError, match="both are captured, or neither"):
        mode_of("cuda", "none", None, prefill_graphs="16,64")
    assert mode_of("cpu", None, None, prefill_graphs="16").graphs == (1, 2, 4)


def test_a_draft_that_a_graph_of_prefill_misreads_is_known_in_that_mode_alone() -> None:
    options = Options(release="0.5.23", model="qwen3-next-nextn", mode="prefill")
    prefill = generated(2, 1, 3, options)
    assert [job.mode for job in prefill] == [MODES["prefill"]] * 2
    assert all("prefill-graph" in job.known for job in prefill)
    assert not any("prefill-graph" in job.known for job in generated(5, 1, 3, replace(options, mode="")))
    plan = proofs([LEDGER["prefill-graph"]], Options(release="0.5.23"))
    assert [(job.name, job.mode) for job in plan] == [
        (f"prefill-graph/prefill/{side}", MODES["prefill"]) for side in ("green", "red")
    ]


def test_a_model_that_chooses_experts_runs_without_graphs_in_bfloat16() -> None:
    def graphs(model: str, dtype: Dtype) -> set[bool]:
        jobs = generated(3, 1, 3, Options(release="0.5.23", model=model, dtype=dtype))
        return {bool(job.mode.graphs) for job in jobs}

    assert graphs("deepseek-nextn", "bfloat16") == {False}
    assert graphs("deepseek-nextn-wide", "bfloat16") == graphs("deepseek-nextn", "float32") == {True}


@pytest.mark.parametrize("steps", [1, 3])
def test_what_a_graph_of_a_tree_holds_is_read_for_the_requests_of_the_batch(
    monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    size, count, topk = 4, 3, 2
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    captures = Captures()
    for step in range(steps):
        wide = 1 if step == 0 else topk
        tokens = torch.arange(size * wide * topk).reshape(size, wide * topk) + 100 * step
        scores = tokens.reshape(size, wide, topk) / 2
        captures.note(step, (torch.arange(size * topk) + 1000 * step, None, None, (scores, tokens, None)))
    candidates, consumed = captures.read(size, count, topk)
    assert [tokens.shape for tokens, _ in candidates] == [(count, topk)] + [(count, topk * topk)] * (steps - 1)
    assert [list(tokens[0][:2]) for tokens, _ in candidates] == [[100 * step, 100 * step + 1] for step in range(steps)]
    # the tokens that went on from each step but the last
    assert consumed.tolist() == [
        [1000 * step + topk * n + k for step in range(steps - 1) for k in range(topk)] for n in range(count)
    ]


def test_what_was_typed_can_be_typed_again() -> None:
    assert CPU.options == []
    assert Mode(overlap=True).options == ["--overlap"]
    assert Mode(tp=2).options == ["--tp", "2"]
    assert Mode(device="cuda", graphs=(1, 2)).options == ["--device", "cuda", "--graphs", "1,2", "--no-overlap"]
    assert MODES["eager"].options == ["--device", "cuda", "--graphs", "none", "--no-overlap"]
    assert MODES["prefill"].options == [
        *("--device", "cuda", "--graphs", "1,2,4", "--prefill-graphs", "16,64,256", "--overlap")
    ]


def test_a_script_of_a_case_that_ran_on_a_gpu_says_so(tmp_path: Path) -> None:
    entry = LEDGER["25015"]
    text = write_script(tmp_path, entry.case, RunSpec(mode=MODES["overlap"]), command="").read_text()
    call = next(line for line in text.splitlines() if "reproduce(CASE" in line)
    assert "mode={'device': 'cuda', 'graphs': [1, 2, 4], 'overlap': True}" in call
    assert "mode" not in write_script(tmp_path, entry.case, command="").read_text().rpartition("reproduce(CASE")[2]


def test_a_plan_in_bfloat16_runs_each_case_in_float32_as_well() -> None:
    for job in generated(20, 1, 3, Options(release="0.5.23", dtype="bfloat16")):
        assert job.mode.dtype == "bfloat16"
        assert job.beside is None
        assert job.apart is not None
        assert msgspec.structs.replace(job.apart, dtype="bfloat16") == job.mode
        assert all(case.topk <= 4 for case in job.cases)
    assert {job.mode.dtype for job in proofs([LEDGER["25015"]], Options(release="0.5.23", dtype="bfloat16"))} == {"bfloat16"}


def test_what_is_printed_of_a_mode_is_that_mode_again() -> None:
    mode = mode_of("cpu", None, True, 1, "bfloat16")
    assert mode == Mode(overlap=True, dtype="bfloat16")
    assert mode.options == ["--overlap", "--dtype", "bfloat16"]
    assert CPU.options == []
    assert Mode(device="cuda", graphs=(1, 2), dtype="bfloat16").options[-2:] == ["--dtype", "bfloat16"]


def test_what_is_planned_in_float32_alone_is_not_asked_for_in_bfloat16(tmp_path: Path) -> None:
    for asked in ({"sizes": True}, {"samples": 1}, {"rate": 1}):
        with pytest.raises(InputError, match="float32 alone"):
            gpu_plan(tmp_path / "plan.json", groups=0, dtype="bfloat16", **asked)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("device", "dtype"), [("cuda", "float32")])
def test_flash_attention_is_refused_where_it_cannot_run(device: str, dtype: Dtype) -> None:
    with pytest.raises(InputError, match=r"no float32(?s:.*)--device cuda --dtype bfloat16"):
        mode_of(device, "1,2,4", None, 1, dtype, "fa3")


def test_a_plan_with_flash_attention_has_drafts_of_layers_and_mends_the_one_graph_of_them() -> None:
    flash = Options(release="0.5.23", dtype="bfloat16", attention="fa3")
    jobs = generated(4, 1, 3, flash)
    assert [RECIPES[job.cases[0].model].mtp_layers > 0 for job in jobs] == [False, True, True, False]
    assert all(job.mode.attention == "fa3" and job.beside is None and job.apart is None for job in jobs)
    plan = proofs([WINDOWS], flash, ("graphs", "eager"))
    assert [job.patches for job in plan] == [WINDOWS.green.patches, ()] * 2
    assert plan[0].mode.words == "graphs 1 2 4, no overlap, bfloat16, fa3"
    assert plan[0].mode.options[-4:] == ["--dtype", "bfloat16", "--attention", "fa3"]


def test_flashinfer_is_planned_for_models_whose_heads_it_has_kernels_for(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(InputError, match=r"heads are 16 wide(?s:.*)give --model llama-wide"):
        gpu_plan(file, groups=1, cases=1, dtype="bfloat16", attention="flashinfer")
    with pytest.raises(InputError, match="llama-tiny"):  # an entry's own model
        gpu_plan(file, groups=0, dtype="bfloat16", attention="flashinfer", entries=["25015"])
    gpu_plan(tmp_path / "proof.json", groups=0, dtype="bfloat16", attention="flashinfer", entries=["draft-plan"])
    assert {job.cases[0].model for job in read_plan(tmp_path / "proof.json")} == {"deepseek-nextn-wide"}
    gpu_plan(file, groups=2, cases=1, dtype="bfloat16", attention="flashinfer", model="llama-wide")
    jobs = read_plan(file)
    assert {case.model for job in jobs for case in job.cases} == {"llama-wide"}
    assert {job.mode.attention for job in jobs} == {"flashinfer"}
    assert all(job.apart is not None and job.apart.attention == "triton" for job in jobs)


def test_entries_are_planned_in_a_model_by_the_cases_that_show_them_there() -> None:
    records = ROOT / "docs" / "records"
    options = Options(release="0.5.23", model="llama-standalone")
    jobs, others = proofs_in_model([LEDGER["26997-kv"], LEDGER["multi-layer-topk-path"]], options, records)
    assert {case.model for job in jobs for case in job.cases} == {"llama-standalone"}
    shift = LEDGER["standalone-shift"].remedy
    assert all(shift in job.patches for job in jobs)  # without it the case diverges on both sides
    assert [len(job.patches) for job in jobs] == [1, 2] * 3
    [left_out] = others
    assert left_out.startswith("multi-layer-topk-path in llama-standalone: ")
    with pytest.raises(InputError, match=r"does not say(?s:.*)models llama-standalone --entry 26997-kv"):
        proofs_in_model([LEDGER["26997-kv"]], options, Path("nowhere"))
    # there the layer with a window is the last of the target: no row of a layer behind it is wrong
    jobs, _ = proofs_in_model([LEDGER["deterministic-window"]], Options(release="0.5.23", model="mimo-v2-window"), records)
    assert {job.expected.rule for job in jobs if job.expected is not None} == {"target.hidden"}


def test_faults_of_graphs_are_planned_next_to_the_release_as_it_is() -> None:
    plan = faults()
    assert {len(case.requests) for case in plan[0].cases} == {2, 3, 5}  # a graph of its size, a padded one, and none
    assert [job.patches for job in plan[:7]] == [(), *((patch,) for patch in SINGLE_HEAD)]
    assert not any(patch in ONE_GRAPH_OF_LAYERS for job in plan for patch in job.patches)
    assert all((patch,) in [job.patches for job in faults("bfloat16", "fa3")] for patch in ONE_GRAPH_OF_LAYERS)


def test_drafts_of_greedy_requests_are_proven_one_with_the_other_fixed() -> None:
    plan = proofs([LEDGER["greedy-drafts-decode"], LEDGER["greedy-drafts-prefill"]], Options(release="0.5.17"), ("eager",))
    assert [len(job.patches) for job in plan] == [2, 1, 2, 1]
    assert plan[1].patches != plan[3].patches
    assert {*plan[1].patches, *plan[3].patches} == {*plan[0].patches}


def test_an_entry_that_needs_flash_attention_is_planned_with_it_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, other = tmp_path / "plan.json", tmp_path / "other.json"
    with pytest.raises(InputError, match=r"needs --dtype bfloat16 --attention fa3(?s:.*)no plan was written"):
        gpu_plan(file, groups=0, entries=["context-end"])
    assert not file.exists()
    gpu_plan(other, groups=0, entries=["all"], dtype="bfloat16")
    assert "left out: context-end-stores is not reached" in capsys.readouterr().out
    assert not any(job.name.startswith("context-end-stores") for job in read_plan(other))
    gpu_plan(file, groups=0, entries=["context-end"], dtype="bfloat16", attention="fa3")
    stores, reads = LEDGER["context-end-stores"], LEDGER["context-end-reads"]
    assert {job.name: job.patches for job in read_plan(file)} == {  # neither without graphs, one without overlap, one with it
        "context-end-stores/graphs-bfloat16-fa3/green": (),
        "context-end-stores/graphs-bfloat16-fa3/red": (stores.revert,),
        "context-end-reads/overlap-bfloat16-fa3/green": (reads.remedy,),
        "context-end-reads/overlap-bfloat16-fa3/red": (),
    }


def test_what_is_written_for_another_attention_backend_is_left_out_with_its_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.json"
    gpu_plan(file, groups=0, entries=["all"], dtype="bfloat16", attention="fa3")
    said = capsys.readouterr().out
    for name in ("indices-overflow", "standalone-shift"):
        assert f"left out: {name} is proven with --attention triton alone: " in said
        assert not any(job.name.startswith(f"{name}/") for job in read_plan(file))


def test_a_plan_is_never_empty_and_takes_the_place_of_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(InputError, match="the plan would be empty"):
        gpu_plan(file, groups=0)
    assert not file.exists()
    gpu_plan(file, groups=1, cases=1)
    assert capsys.readouterr().out == f"1 job, 1 case: {file}\n"
    before = file.read_bytes()
    with pytest.raises(InputError, match="no plan was written"):
        gpu_plan(file, groups=1, cases=1, seed=1)
    assert file.read_bytes() == before
    file.write_bytes(b"[]")
    with pytest.raises(InputError, match="has no cases"):
        read_plan(file)


def test_what_is_live_goes_by_the_release_of_the_plan() -> None:
    old, new = Options(release="0.5.17"), NEWEST
    assert "33758" in generated(1, 1, 5, old)[0].known
    assert "33758" not in generated(1, 1, 5, new)[0].known
    assert any("draft-probabilities-in-graph" in job.known for job in sampling(10, 1, 3, "0.5.20"))
    assert not any("draft-probabilities-in-graph" in job.known for job in sampling(10, 1, 3, "0.5.21"))
    undone = proofs([LEDGER["33758"]], new, ("graphs",))
    assert [job.patches for job in undone] == [(), (LEDGER["33758"].revert,)]


def test_a_plan_of_one_model_has_it_in_every_case_and_runs_it_without_graphs_too() -> None:
    plan = generated(5, 2, 3, Options(release="0.5.23", model="llama-standalone"))
    assert {case.model for job in plan for case in job.cases} == {"llama-standalone"}
    assert [bool(job.mode.graphs) for job in plan] == [True] * 4 + [False]
    assert {job.view for job in plan} == {"shifted"}  # as the release shifts its rows; the entries say that it does
    assert {tuple(job.known) for job in plan} == {("standalone-keys",)}
    layered = generated(1, 1, 3, Options(release="0.5.23", model="llama-mtp"))
    assert tuple(layered[0].known) == ("multi-layer-chunk-tail",)


@pytest.mark.parametrize(("typed", "read"), [("0.5.23", "0.5.23"), ("0.5.9.post1", "0.5.9.post1")])
def test_a_plan_is_for_a_release(typed: str, read: str) -> None:
    assert release_of(typed) == read


@pytest.mark.parametrize("typed", ["main", "../sglang", "0.5.23-dirty-"])
def test_a_plan_for_what_is_no_release_is_refused(tmp_path: Path, typed: str) -> None:
    with pytest.raises(InputError, match=r"version of no release(?s:.*)no plan was written"):
        gpu_plan(tmp_path / "plan.json", groups=1, sglang=typed)
    with pytest.raises(InputError, match="no model recipe is called 'llama-huge'"):
        gpu_plan(tmp_path / "plan.json", groups=1, model="llama-huge")
    assert not list(tmp_path.iterdir())


def test_results_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_bytes(msgspec.json.encode(plain(1, 1, 1, 1)))
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").touch()
    with pytest.raises(InputError, match="another run"):
        gpu_run(plan, tmp_path / "out")


def test_cases_that_race_run_with_overlap(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    gpu_plan(file, groups=0, races=4, cases=1)
    plan = read_plan(file)
    assert plan == races(4, 1, 0)
    assert all(job.mode.overlap and job.races for job in plan)
    assert [bool(job.mode.graphs) for job in plan] == [True, False, True, False]
    assert [case.engine.sglang.radix_cache for job in plan for case in job.cases] == [True] * 3 + [False]
    with pytest.raises(InputError, match="float32 alone"):
        gpu_plan(tmp_path / "other.json", groups=0, races=1, dtype="bfloat16")


@pytest.mark.long
def test_each_missing_wait_is_planned_until_it_is_found(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    gpu_plan(file, groups=0, races=1, cases=1, missing_waits=True)
    plan = read_plan(file)
    assert plan == races(1, 1, 0) + missing_waits(0)
    assert all(job.mode.overlap and job.races for job in plan)
    planted = plan[1:]
    assert [job.patches for job in planted] == [(patch,) for patch in WAITS + HIDDEN] * 2
    for job in planted:
        assert job.expected is not None
        assert job.until_found != bool(job.expected.hidden)
        assert len(job.cases) <= CASES
        for case in job.cases:
            check_case(case, job.name)


def test_a_race_counts_and_says_its_seed_and_where_the_pauses_fell() -> None:
    pause = Pause(4, "Event.wait on schedule", 250)
    same = Race(jitter=Jitter(seed=0), points=90, pauses=(pause, pause), compared=12)
    other = Race(
        jitter=Jitter(seed=3), points=80, pauses=(pause,), compared=12, differs="finished of request r0, tokens: 1 | 2"
    )
    equal = CaseResult(case="a", status="equal", races=(same,))
    wrong = CaseResult(
        case="b", status="diverged", rule="race", where=f"with the pauses of seed 3, {other.differs}", races=(other,)
    )
    release = JobResult(name="races-graphs-000", mode=MODES["overlap"], seen=(equal, wrong))
    assert exit_code(statuses_of(release)) == 1
    missing, hidden = MustShow(), MustShow(hidden="the fence")
    found = JobResult(name="races/graphs/copy-for-forward", mode=MODES["overlap"], seen=(equal, wrong), expected=missing)
    unfound = JobResult(name="races/graphs/process-for-copy", mode=MODES["overlap"], seen=(equal,), expected=missing)
    fenced = JobResult(name="races/graphs/schedule", mode=MODES["overlap"], seen=(equal,), expected=hidden)
    assert [dict(statuses_of(job)) for job in (found, unfound, fenced)] == [{"found": 1}, {"unknown": 1}, {"hidden": 1}]
    assert list(waits([unfound, fenced, found])) == [
        "graphs/copy-for-forward: found by race in case 2: with the pauses of seed 3, finished of request r0, tokens: 1 | 2",
        "graphs/process-for-copy: NOT FOUND: equal in 1 case",
        "graphs/schedule: hidden: the fence",
    ]
    summary = CampaignSummary()
    summary.add(release)
    text = summary.text(1.0, Path(), None)
    assert "runs with pauses: 2, of them answered otherwise 1; 24 comparisons; points 170, pauses 3, together 0.0 s" in text
    assert "      3 Event.wait on schedule" in text
    assert msgspec.json.decode(msgspec.json.encode(release), type=JobResult) == release


def test_flashmla_is_planned_for_chains_in_its_pages_and_for_latent_attention_alone(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    with pytest.raises(InputError, match=r"kernels are those of latent attention(?s:.*)give --model deepseek-nextn-wide"):
        gpu_plan(file, groups=1, cases=1, dtype="bfloat16", attention="flashmla")
    gpu_plan(file, groups=2, cases=2, dtype="bfloat16", attention="flashmla", model="deepseek-nextn-wide")
    found = [case for job in read_plan(file) for case in job.cases]
    assert {(case.topk, case.page_size) for case in found} == {(1, 64)}


def test_the_candidate_fix_without_graphs_is_another_where_sglang_has_the_fault_twice() -> None:
    entry = LEDGER["draft-plan"]
    plan = proofs([entry], Options(release="0.5.23", dtype="bfloat16", attention="flashinfer"))
    assert [(job.name.split("/")[1].partition("-")[0], job.patches) for job in plan if job.name.endswith("green")] == [
        ("graphs", entry.green.patches),
        ("overlap", entry.green.patches),
        ("eager", (entry.on_cuda.eager,)),
    ]
    assert not any(job.patches for job in plan if job.name.endswith("red"))


def test_blocks_of_a_search_are_drawn_by_their_jobs_and_have_what_a_gpu_runs(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    gpu_plan(file, groups=0, blocks=40, cases=8, seed=3)
    jobs = read_plan(file)
    assert len(jobs) == 40
    assert not any(job.cases for job in jobs)
    assert [job.mend for job in jobs[:16]] == [True, True, True, True, False, True, True, True] * 2
    assert {job.mode for job in jobs} == {MODES[name] for name in ("overlap", "graphs", "eager", "prefill")}
    draws = [job.draw for job in jobs if job.draw is not None]
    probes = [draw.block.probe for draw in draws]
    assert all(runs_on_a_gpu(probe) for probe in probes)
    assert len({probe.model for probe in probes}) > 10
    layered = next(job for job, probe in zip(jobs, probes, strict=True) if RECIPES[probe.model].mtp_layers)
    assert {"multi-layer-chunk-tail-2", "multi-layer-chunk-tail-3"} & {*layered.known}
    some = draws[0].draw()
    assert some == draws[0].draw()
    assert 1 <= len(some) <= 8
    assert {case.configuration() for case in some} == {probes[0].configuration()}


@pytest.mark.parametrize(
    "change",
    [{"plain_decode": True}, {"update_weights": "distributed"}],
)
def test_what_the_cuda_engine_does_not_drive_is_no_block(change: dict[str, Any]) -> None:
    case = LEDGER["25015"].case
    settings = msgspec.structs.replace(case.engine.sglang, **change)
    assert runs_on_a_gpu(case)
    driven = msgspec.structs.replace(case.engine.sglang, host_pages=4, adaptive=ADAPTIVE)
    assert runs_on_a_gpu(msgspec.structs.replace(case, engine=EngineSettings(sglang=driven)))
    assert not runs_on_a_gpu(msgspec.structs.replace(case, engine=EngineSettings(sglang=settings)))
    assert not runs_on_a_gpu(msgspec.structs.replace(case, model="gpt-oss-eagle3"))


def test_adapters_by_torch_are_no_block() -> None:
    """SGLang's graphs do not start with them."""
    [request] = LEDGER["25015"].case.requests
    settings = EngineSettings(sglang=SGLangSettings(lora_backend="torch_native"))
    without = msgspec.structs.replace(LEDGER["25015"].case, engine=settings)
    assert runs_on_a_gpu(without)
    adapted = msgspec.structs.replace(request, adapter=Adapter())
    assert not runs_on_a_gpu(msgspec.structs.replace(without, requests=(adapted,)))


def test_a_job_with_cases_of_two_configurations_is_refused(tmp_path: Path) -> None:
    case = LEDGER["25015"].case
    other = msgspec.structs.replace(case, page_size=4)
    file = tmp_path / "plan.json"
    file.write_bytes(msgspec.json.encode([Job(name="mixed", mode=MODES["eager"], cases=(case, other))]))
    with pytest.raises(InputError, match="the cases of job mixed do not share a configuration"):
        read_plan(file)


def test_known_bugs_are_tried_by_their_rule_and_then_together_as_far_as_they_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """First it must be wrong again. It needs `tree-window` and `decode-window`; the last of five fits beside no other."""
    names = ("tree-window", "decode-window", "certain-node", "penalties", "deterministic-window")
    known = {name: Patch(name=name, edits=(Edit(target="a.b", match=name, replacement=""),)) for name in names}
    tried: list[tuple[str, ...]] = []

    class Engine:
        def __init__(self, patches: tuple[Patch, ...]) -> None:
            self.names = tuple(patch.name for patch in patches)

        def run(self, *_: object) -> tuple[str, ...]:
            tried.append(self.names)
            return self.names

    class Doubles:
        def __init__(self, **_: object) -> None: ...
        def __enter__(self) -> "Doubles":
            return self

        def __exit__(self, *_: object) -> None: ...
        def engine(self, _: Case, patches: tuple[Patch, ...]) -> Engine:
            if len(patches) > 1 and patches[-1].name == names[-1]:
                raise PatchDoesNotApply("they edit one line", consequence="", remedy="")
            return Engine(patches)

    def right(ran: tuple[str, ...], **_: object) -> Verdict:
        return Verdict(status="equal" if {"tree-window", "decode-window"} <= {*ran} else "diverged", rule="draft.proposal")

    monkeypatch.setattr(gpu_jobs, "Host", Doubles)
    monkeypatch.setattr(gpu_jobs, "judge", right)
    job = Job(name="trees", mode=MODES["eager"], cases=(LEDGER["tree-window"].case,), known=known)
    seen = [CaseResult(case="a", status="diverged", rule=LEDGER["decode-window"].rule)]
    assert gpu_jobs.explained(job, seen, Limits())[0].known == "several of 4 known bugs"
    assert tried == [(), ("decode-window",), names[:4]]
