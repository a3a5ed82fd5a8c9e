"""vLLM's own engine core, scheduler, both model runners and drafters on a CPU, held to the same reference by the same judge."""

import ast
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import cycle, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import ENTRIES, entries_in
from eagletwin.harness.check import confirm
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.prove.proof import prove
from eagletwin.harness.core.case import (
    Bias,
    Case,
    EngineSettings,
    Event,
    ModelRunner,
    Penalties,
    Request,
    Sampling,
    VLLMSettings,
)
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.run_spec import Limits, Mode, RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Verdict
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.families.valid import not_driven, strangers_trace
from eagletwin.harness.judge.engines import first_parting
from eagletwin.harness.judge.judge import judge

from ..rows import first_of_each, long, spread

pytestmark = pytest.mark.slow

VLLM = Mode(engine="vllm")
Run = Callable[..., tuple[Trace, Verdict]]


@pytest.fixture(scope="module")
def vllm() -> Iterator[Host]:
    with Host(source=resolve("", "vllm"), mode=VLLM) as host:
        yield host


@pytest.fixture
def run(vllm: Host, tmp_path: Path) -> Run:
    def run_case(case: Case, *edits: Edit) -> tuple[Trace, Verdict]:
        patches = (Patch(name="planted", edits=edits),) if edits else ()
        folder = tmp_path / f"run-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        trace = vllm.engine(case, patches).run(case, folder, Limits())
        return trace, judge(trace)

    return run_case


def case_of(model: str, runner: ModelRunner, *lengths: int, chunk: int = 32, steps: int = 3, **settings: Any) -> Case:
    """Requests of prompts of these lengths, which come one after another."""
    vocabulary = RECIPES[model].target.vocab_size
    return Case(
        name="vllm",
        model=model,
        num_steps=steps,
        page_size=16,
        chunked_prefill_size=chunk,
        requests=tuple(
            Request(id="abcdef"[n], prompt=tokens(n + 1, length, vocabulary), max_new_tokens=16, arrive=2 * n)
            for n, length in enumerate(lengths)
        ),
        engine=EngineSettings(vllm=VLLMSettings(model_runner=runner, **settings)),
    )


def stages(trace: Trace, stage: str) -> list[Record]:
    return [record for record in trace.header.records if record.stage == stage]


# What is read of a checkpoint.


def test_v2_ignores_layers_that_a_head_names_in_its_eagle_config() -> None:
    """V1 takes them. Live in 0.33.0: the guide has it; if this fails, correct the guide and deserved/draft.py."""
    root = next(path for path in resolve("", "vllm").paths if (path / "vllm").is_dir()) / "vllm/v1/worker"
    config = SimpleNamespace(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 23, 45]})
    drafts = SimpleNamespace(draft_model_config=SimpleNamespace(hf_config=config))
    v1 = function_of(root / "gpu_model_runner.py", "_get_eagle3_aux_layers_from_config")
    v2 = function_of(root / "gpu/spec_decode/eagle/eagle3_utils.py", "get_eagle3_aux_layers_from_config")
    assert v1(SimpleNamespace(speculative_config=drafts)) == (1, 23, 45)
    assert v2(drafts) is None


def function_of(file: Path, name: str) -> Callable[[Any], Any]:
    """A function of a file, without the import of all that the file needs."""
    tree = ast.parse(file.read_text())
    [found] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name]
    names: dict[str, Any] = {"SpeculativeConfig": object}
    exec(compile(ast.Module([found], []), str(file), "exec"), names)
    function: Callable[[Any], Any] = names[name]
    return function


# What is right.


@pytest.mark.parametrize(
    ("model", "runner"),
    spread(
        product(("llama-wide", "llama-tiny", "llama-eagle3-full", "llama-eagle3"), ("v2", "v1")),
        lambda row: row[0],
        lambda row: row[1],
    ),
)
def test_a_released_runner_is_equal(run: Run, model: str, runner: ModelRunner) -> None:
    """Prompts that are not cut, which runner V1 cannot do right."""
    trace, verdict = run(case_of(model, runner, 40, 21, 13, chunk=128))
    assert verdict.status == "equal", verdict
    assert {"draft_decode", "rejection", "accept_some", "batch_grows", "page_crossed_in_draft"} <= set(verdict.exercised)
    engine = trace.header.engine
    assert (engine.name, engine.version, engine.mode) == ("vllm", "0.33.0", f"runner {runner.upper()}")
    assert trace.header.fallbacks == ()
    assert any("TRITON_ATTN" in shim for shim in engine.shims)


@pytest.mark.parametrize("model", [*long("llama-wide"), "llama-eagle3"])
def test_prompts_in_chunks_are_equal_in_v2(run: Run, model: str) -> None:
    """In steps that verify rounds of requests that run, too."""
    trace, verdict = run(case_of(model, "v2", 40, 21, 33, 13, chunk=7))
    assert verdict.status == "equal", verdict
    assert {"chunked_prefill", "chunk_tail_differs"} <= set(verdict.exercised)
    prefills, rounds = ({record.iteration for record in stages(trace, stage)} for stage in ("prefill", "verify"))
    assert prefills & rounds


@pytest.mark.parametrize("steps", [1, *long(2), 5])
def test_chains_of_any_length_are_equal(run: Run, steps: int) -> None:
    _, verdict = run(case_of("llama-tiny", "v2", 17, 9, steps=steps))
    assert verdict.status == "equal", verdict


def test_a_prompt_of_one_token_is_padded_to_the_rows_of_a_round(run: Run) -> None:
    """Which are nobody's (scheduler.py: pad_spec_decode)."""
    trace, verdict = run(case_of("llama-tiny", "v2", 20, 1))
    assert verdict.status == "equal", verdict
    [prefill] = [record for record in stages(trace, "prefill") if record.request == "b"]
    assert (prefill.numbers["start"], prefill.numbers["end"]) == (0, 1)


def test_the_last_step_proposes_nothing_and_that_is_declared(run: Run) -> None:
    trace, verdict = run(case_of("llama-tiny", "v2", 9))
    assert verdict.status == "equal", verdict
    skipped = [bool(record.numbers.get("skipped")) for record in stages(trace, "extend")]
    assert skipped[-1]
    assert not any(skipped[:-1])


def test_drafts_that_a_budget_cuts_are_a_round_of_fewer_steps(run: Run) -> None:
    case = case_of("llama-tiny", "v2", 20, 9, 5, chunk=6, whole_budget=True)
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    assert {record.numbers.get("steps", 3) for record in stages(trace, "verify")} == {1, 3}


def test_a_preempted_request_is_prefilled_again(run: Run) -> None:
    trace, verdict = run(case_of("llama-tiny", "v2", 30, 30, 30, chunk=128, num_gpu_blocks=6))
    assert verdict.status == "equal", verdict
    assert any(record.round > 0 for record in stages(trace, "prefill"))


def test_an_aborted_request_ends_and_leaves_nothing(run: Run) -> None:
    events = (Event(at=2, kind="abort", request="b"), Event(at=4, kind="abort", request="a"))
    trace, verdict = run(replace(case_of("llama-tiny", "v2", 20, 9, 9), events=events))
    assert verdict.status == "equal", verdict
    ended = {record.request: record.numbers["aborted"] for record in stages(trace, "finished")}
    assert ended == {"a": 1, "b": 1, "c": 0}


def test_a_stop_token_ends_a_request(run: Run) -> None:
    case = case_of("llama-tiny", "v2", 20)
    whole, _ = run(case)
    [end] = [n for n, record in enumerate(whole.header.records) if record.stage == "finished"]
    stop = whole.integers(end, "tokens")[5]
    trace, verdict = run(replace(case, requests=(replace(case.requests[0], stop=(stop,)),)))
    assert verdict.status == "equal", verdict
    [end] = [n for n, record in enumerate(trace.header.records) if record.stage == "finished"]
    assert trace.integers(end, "tokens")[-1] == stop
    assert trace.header.records[end].numbers["finish_matched"] == stop


def test_its_kernels_are_those_of_tritons_interpreter(vllm: Host, tmp_path: Path) -> None:
    """The interpreter takes a second for a round: chunks, a batch and two rounds, with a rejection, and no more."""
    case = case_of("llama-tiny", "v2", 9, 3, chunk=8, steps=2)
    case = replace(case, requests=tuple(replace(one, max_new_tokens=3) for one in case.requests))
    trace = vllm.engine(case, kernels="shadow").run(case, tmp_path, Limits())
    verdict = judge(trace)
    assert verdict.status == "equal", verdict
    assert {"draft_decode", "chunked_prefill"} <= set(verdict.exercised)


# The live bug of runner V1: the drafter is fed the prompt's last token at the end of each chunk that is not the last.

_TAIL = ENTRIES["vllm-chunk-tail"]
assert _TAIL.remedy is not None
CHUNK_TAIL = _TAIL.remedy.edits


@pytest.mark.parametrize("model", ["llama-tiny", *long("llama-eagle3")])
def test_v1_consumes_the_prompts_last_token_at_the_end_of_a_chunk(run: Run, model: str) -> None:
    case = case_of(model, "v1", 3, chunk=1)
    case = replace(case, requests=(replace(case.requests[0], max_new_tokens=2),), num_steps=1)
    trace, verdict = run(case)
    first = verdict.first
    assert first is not None
    assert (verdict.rule, first.request, first.round, first.index) == ("draft.input_ids", "a", 0, "row 0")
    prompt = trace.header.case.requests[0].prompt
    assert (first.expected, first.actual) == (str(prompt[1]), str(prompt[2]))
    _, verdict = run(case, *CHUNK_TAIL)
    assert verdict.status == "equal", verdict


@pytest.mark.long
def test_v1_is_equal_in_chunks_with_the_next_token(run: Run) -> None:
    _, verdict = run(case_of("llama-eagle3-full", "v1", 40, 21, 13, chunk=7), *CHUNK_TAIL)
    assert verdict.status == "equal", verdict


# The ledger.


@pytest.mark.parametrize("name", entries_in("vllm"))
def test_an_entry_is_proven(vllm: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name not in first_of_each(entries_in("vllm"), lambda name: ENTRIES[name].rule):
        monkeypatch.setattr(confirm, "REPLAYS", 0)  # as in test_proofs.py
    [proof] = prove(vllm, [ENTRIES[name]], tmp_path, RunSpec(mode=VLLM))
    assert proof.holds, (proof.green.summary, proof.red.summary, proof.why, proof.unreached)


def test_a_search_knows_a_live_bug(vllm: Host) -> None:
    matcher = KnownBugMatcher(vllm, RunSpec(mode=VLLM))
    case = replace(case_of("llama-gqa", "v1", 9, chunk=4), exercises=())
    explained = matcher.explain(matcher.trials().look(case), DECLARED_VIEW)
    assert [entry.id for entry in explained.known] == ["vllm-chunk-tail"]


def test_where_two_runs_part_is_named(run: Run) -> None:
    right, _ = run(_TAIL.case, *CHUNK_TAIL)
    wrong, _ = run(_TAIL.case)
    assert first_parting(right, right) is None
    assert str(first_parting(right, wrong)) == "request a, round 0, draft.extend, row 0 of input_ids: 19 | 3"


def test_the_runners_part_where_one_of_them_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["vllm-chunk-tail", "--engine", "vllm", "--model-runner", "v1", "--model-runner", "v2", "--out", str(tmp_path)]
    assert run_command(["check", *words]) == EXIT_DIVERGED
    said = " ".join(capsys.readouterr().out.split())
    assert "Not right: runner V1 of vLLM (request a, draft.input_ids" in said
    assert (
        "; runner V2 of vLLM is right. They part first at request a, round 0, draft.extend, row 0 of input_ids: 3 | 19" in said
    )
    modes = [strangers_trace(folder).header.engine.mode for folder in sorted(tmp_path.iterdir())]
    assert modes == ["runner V1", "runner V2"]


# What else a vLLM engineer types. Each imports vLLM anew.

SUITE = """
import pytest
from hypothesis import given, settings

from eagletwin import cases
from eagletwin.cases.ledger import ENTRIES


@settings(max_examples=3)
@given(case=cases(engine="vllm", max_requests=2))
def test_the_release_is_right(eagletwin, case):
    eagletwin.check(case)


def test_a_live_bug(eagletwin):
    eagletwin.check(ENTRIES["vllm-chunk-tail"].case)


@pytest.mark.eagletwin(remedy=["vllm-chunk-tail"])
def test_its_fix(eagletwin):
    eagletwin.check(ENTRIES["vllm-chunk-tail"].case)
"""


@pytest.mark.long
def test_a_test_suite_runs_vllm_and_a_failure_is_repeated_by_its_script(tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    words = ["-q", "-p", "no:cacheprovider", "--eagletwin-vllm", "0.33.0", "--eagletwin-profile", "ci", "test_suite.py"]
    done = subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "1 failed, 2 passed" in done.stdout, done.stdout
    assert "DIVERGED  test_a_live_bug on vLLM 0.33.0" in done.stdout
    [script] = tmp_path.glob("eagletwin-runs/*/repro.py")
    assert "--vllm X" in script.read_text()
    again = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == EXIT_DIVERGED, again.stderr
    assert "vLLM 0.33.0" in (script.parent / "report.html").read_text()
    assert "SGLang" not in again.stdout + script.read_text()


@pytest.mark.long
def test_a_tree_is_compared_with_the_ledger_and_with_its_base(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--minutes", "0", "--ledger", "vllm-14464", "--ledger", "vllm-chunk-tail", "--engine", "vllm"]
    assert run_command(["compare", "0.33.0", *few, "--out", str(tmp_path / "one")]) == EXIT_EQUAL
    said = capsys.readouterr().out
    assert "vLLM 0.33.0" in said
    assert "1 holds, 1 live" in said
    assert "SGLang" not in said
    assert run_command(["compare", "0.32.0", "0.33.0", *few, "--out", str(tmp_path / "two")]) == EXIT_EQUAL
    said = capsys.readouterr().out
    assert "vLLM 0.32.0" in said
    assert "SGLang" not in said


@pytest.mark.long
@pytest.mark.parametrize(
    ("now", "code", "says"),
    [
        ("hidden_states", EXIT_DIVERGED, "vllm-14464: a fixed bug shows; ledger: 1 lacks"),
        ("residual + hidden_states", EXIT_EQUAL, "Changed statements that ran: 1 of 1."),
    ],
    ids=["fault", "harmless"],
)
def test_a_changed_tree_is_told_by_the_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], now: str, code: int, says: str
) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(resolve("", "vllm").root / "vllm", tree / "vllm", ignore=shutil.ignore_patterns("__pycache__"))
    head = tree / "vllm/model_executor/models/llama_eagle.py"
    text = head.read_text()
    assert text.count("= hidden_states + residual") == 1
    head.write_text(text.replace("= hidden_states + residual", f"= {now}"))
    few = ["--base", "0.33.0", "--engine", "vllm", "--minutes", "0", "--ledger", "vllm-14464"]
    assert run_command(["compare", str(tree), *few, "--out", str(tmp_path / "runs")]) == code
    assert says in capsys.readouterr().out


# The live bug of both runners: MTP layers make the embedding of row 0 zero, though x[0] has been shifted away.

_MASK = ENTRIES["vllm-33299"]
assert _MASK.remedy is not None
[ROW_ZERO] = _MASK.remedy.edits
_MIMO = ROW_ZERO.target


@pytest.mark.parametrize("runner", ["v2", *long("v1")])
def test_an_mtp_layer_does_not_consume_the_token_of_row_0(run: Run, runner: ModelRunner) -> None:
    case = case_of("mimo", runner, 2, steps=1)
    case = replace(case, requests=(replace(case.requests[0], max_new_tokens=2),))
    _, verdict = run(case)
    first = verdict.first
    assert first is not None
    assert (verdict.rule, first.request, first.stage) == ("draft.kv", "a", "prefill")
    assert first.index.startswith("row 0")
    _, verdict = run(case_of("mimo", runner, 40, 21, 13, chunk=7 if runner == "v2" else 128), ROW_ZERO)
    assert verdict.status == "equal", verdict
    assert {"draft_decode", "rejection", "accept_some"} <= set(verdict.exercised)


OF_MTP: dict[str, tuple[Edit, tuple[str, str, int, str]]] = {
    "the state is not normed": (
        Edit(target=_MIMO, match="self.hidden_layernorm(previous_hidden_states)", replacement="previous_hidden_states"),
        ("draft.kv", "a", 0, "prefill"),
    ),
    "the state of a step is handed on before its last norm": (
        Edit(
            target="vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator._prefill",
            match="self.hidden_states[:num_reqs] = sample_hidden_states",
            replacement=(
                "self.hidden_states[:num_reqs] = sample_hidden_states"
                " / next(iter(self.model.model.mtp_layers.values())).final_layernorm.weight"
            ),
        ),
        ("draft.hidden_in", "a", 0, "draft.decode"),
    ),
}


@pytest.mark.parametrize("name", OF_MTP)
def test_a_planted_fault_of_mtp_is_named(run: Run, name: str) -> None:
    edit, place = OF_MTP[name]
    _, verdict = run(case_of("mimo", "v2", 20), ROW_ZERO, edit)
    first = verdict.first
    assert first is not None
    assert (first.rule, first.request, first.round, first.stage) == place


# Requests that sample: what decides is hashed from seeds and places.

_WAYS = (Sampling(temperature=0.7, seed=5), Sampling(top_k=20, top_p=0.9), None, Sampling(min_p=0.05))
_SAMPLER = "vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler"


def sampled(case: Case) -> Case:
    ways = zip(case.requests, cycle(_WAYS), strict=False)
    return replace(case, requests=tuple(replace(request, sampling=way) for request, way in ways))


@pytest.mark.parametrize("settings", [{}, {"draft_sample_method": "probabilistic"}], ids=["greedy", "probabilistic"])
def test_requests_that_sample_are_equal(run: Run, settings: dict[str, Any]) -> None:
    trace, verdict = run(sampled(case_of("llama-tiny", "v2", 20, 9, 13, 5, chunk=64, **settings)))
    assert verdict.status == "equal", verdict
    assert {"sampled_verify", "coin_refuses"} <= set(verdict.exercised)
    assert trace.header.fallbacks == ()


def test_a_preempted_request_of_no_seed_is_given_another(run: Run) -> None:
    """One that asks for a seed keeps it."""
    case = case_of("llama-tiny", "v2", 30, 30, 30, chunk=128, num_gpu_blocks=6)
    ways = zip(case.requests, (Sampling(seed=5), Sampling(), Sampling()), strict=True)
    trace, verdict = run(replace(case, requests=tuple(replace(one, sampling=way) for one, way in ways)))
    assert verdict.status == "equal", verdict
    seeds: dict[str, set[int]] = {}
    for record in stages(trace, "verify"):
        seeds.setdefault(record.request, set()).add(record.numbers["seed"])
    again = {record.request for record in stages(trace, "prefill") if record.round}
    assert again - {"a"}
    assert {name: len(of) for name, of in seeds.items()} == {name: 1 + (name in again - {"a"}) for name in "abc"}


OF_SAMPLING: dict[str, tuple[Edit, str]] = {
    "coins and noise of another place": (
        Edit(
            target=f"{_SAMPLER}._verify",
            match="cu_num_logits,\n        pos,",
            replacement="cu_num_logits,\n        pos + 1,",
        ),
        "verify.accept",
    ),
    "coins and noise of another seed": (
        Edit(target=f"{_SAMPLER}._verify", match="sampling_states.seeds.gpu", replacement="sampling_states.seeds.gpu * 0"),
        "verify.accept",
    ),
    "logits are not divided by the temperature": (
        Edit(
            target="vllm.v1.worker.gpu.sample.states.SamplingStates.apply_temperature",
            match="apply_temperature(logits, expanded_idx_mapping, self.temperature.gpu)",
            replacement="pass",
        ),
        "verify.probabilities",
    ),
    "a request verifies with the seed of another": (
        Edit(
            target="vllm.v1.worker.gpu.sample.states.SamplingStates.add_request",
            match="self.seeds.np[req_idx] = seed",
            replacement="self.seeds.np[req_idx] = 7",
        ),
        "verify.coins",
    ),
    "a draft's probabilities are those of its neighbour": (
        Edit(
            target=f"{_SAMPLER}._verify",
            match="    draft_logits,\n        verify_draft_sampled,",
            replacement="    draft_logits.roll(1, 1),\n        verify_draft_sampled,",
        ),
        "verify.accept",
    ),
}


@pytest.mark.parametrize("name", OF_SAMPLING)
def test_a_planted_fault_of_sampling_is_named(run: Run, name: str) -> None:
    edit, rule = OF_SAMPLING[name]
    settings = {"draft_sample_method": "probabilistic"} if "draft" in name else {}
    _, verdict = run(sampled(case_of("llama-tiny", "v2", 20, 9, 13, 5, chunk=64, **settings)), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


# Requests that change logits: each row of a round counts the drafts before it, as plain decode does.


def changed(case: Case) -> Case:
    """Penalties, a bias, and both."""
    penalties, bias = (
        Penalties(frequency=0.7, presence=-2.0, repetition=1.3),
        (Bias(token=5, value=8.0), Bias(token=9, value=-4.0)),
    )
    more = ({"penalties": penalties}, {"logit_bias": bias}, {"penalties": penalties, "logit_bias": bias})
    ways = zip(case.requests, more, strict=False)
    return replace(case, requests=tuple(replace(request, **way) for request, way in ways))


@pytest.mark.parametrize("way", [lambda case: case, sampled], ids=["greedy", "sampled"])
def test_penalties_and_biases_are_those_of_plain_decode(run: Run, way: Callable[[Case], Case]) -> None:
    """Requests that sample are cut after them."""
    _, verdict = run(way(changed(case_of("llama-tiny", "v2", 20, 9, 13, chunk=64))))
    assert verdict.status == "equal", verdict
    assert "penalized" in verdict.exercised


OF_PENALTIES: dict[ModelRunner, Edit] = {
    "v2": Edit(
        target="vllm.v1.worker.gpu.sample.penalties.PenaltiesState.apply",
        match="self.output_bin_counts,",
        replacement="self.output_bin_counts * 0,",
    ),
    "v1": Edit(
        target="vllm.v1.sample.rejection_sampler.RejectionSampler._combine_outputs_with_spec_tokens",
        match="[*result[-1], spec[i]]",
        replacement="result[-1]",
    ),
}


@pytest.mark.parametrize("runner", OF_PENALTIES)
def test_penalties_that_leave_tokens_out_are_named(run: Run, runner: ModelRunner) -> None:
    """V2's count no token that was sent, V1's no draft of the round."""
    case, likes_what_it_said = case_of("llama-wide", runner, 20, 9, 13, chunk=64), Penalties(frequency=-2.0, presence=-2.0)
    case = replace(case, requests=tuple(replace(one, penalties=likes_what_it_said) for one in case.requests))
    _, verdict = run(case)
    assert verdict.status == "equal", verdict
    _, verdict = run(case, OF_PENALTIES[runner])
    assert (verdict.status, verdict.rule) == ("diverged", "verify.accept"), verdict


# Async scheduling, which vLLM has by default: a step runs before the output of the one before is known.


@pytest.mark.parametrize(
    "case",
    [
        case_of("llama-tiny", "v2", 40, 21, 13, chunk=7, async_scheduling=True),
        case_of("llama-eagle3", "v2", 40, 21, 13, chunk=128, async_scheduling=True),
        sampled(case_of("llama-tiny", "v2", 20, 9, 13, 5, chunk=64, async_scheduling=True)),
        case_of("llama-tiny", "v2", 30, 30, 30, chunk=128, num_gpu_blocks=6, async_scheduling=True),
    ],
    ids=["chunks", "eagle3", "sampled", "preempted"],
)
def test_steps_that_are_scheduled_ahead_are_equal(run: Run, case: Case) -> None:
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    assert any("async_scheduling" in shim for shim in trace.header.engine.shims)


def test_a_request_that_is_aborted_before_its_first_step_is_over_leaves_its_rows_to_the_cache(run: Run) -> None:
    case = replace(prefixes("v2", async_scheduling=True), events=(Event(at=1, kind="abort", request="a"),))
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    assert "a" not in begins(trace)


def test_drafts_that_reach_another_request_are_named_with_async_scheduling(run: Run) -> None:
    edit = Edit(
        target="vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample_tokens",
        match="self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens",
        replacement="self.req_states.draft_tokens[input_batch.idx_mapping] = draft_tokens.roll(1, 0)",
    )
    _, verdict = run(case_of("llama-tiny", "v2", 20, 9, 13, chunk=64, async_scheduling=True), edit)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal"), verdict


# The prefix cache: keys of blocks cover the token after them.


def prefixes(runner: ModelRunner, *, apart: int = 6, **settings: Any) -> Case:
    """A request, and some that begin as it does: b parts at the end of a block, c inside of one, d inside of the first, where a
    block later it goes on as a does, and e does not part."""
    case = case_of("llama-tiny", runner, 40, chunk=20, **{"enable_prefix_caching": True, **settings})
    [first], other = case.requests, tokens(9, 40, 96)
    prompt = first.prompt
    after = {
        "b": prompt[:32] + other[:5],
        "c": prompt[:35] + other[:6],
        "d": prompt[:8] + other[:8] + prompt[16:20],
        "e": prompt,
    }
    begun = (replace(first, id=name, prompt=own, arrive=apart * (n + 1)) for n, (name, own) in enumerate(after.items()))
    return replace(case, requests=tuple(replace(one, max_new_tokens=6) for one in (first, *begun)))


def begins(trace: Trace) -> dict[str, int]:
    """Where each request's first chunk begins."""
    return {record.request: record.numbers["start"] for record in reversed(stages(trace, "prefill"))}


@pytest.mark.parametrize(
    "case",
    [
        prefixes("v2"),
        pytest.param(prefixes("v2", num_gpu_blocks=5), marks=pytest.mark.long),
        pytest.param(prefixes("v2", apart=20), marks=pytest.mark.long),
    ],
    ids=["", "small", "one-by-one"],
)
def test_rows_that_a_prefix_cache_keeps_are_those_of_the_request_that_takes_them_over(run: Run, case: Case) -> None:
    """Of b only the first block: the last row of the second consumed the token after it."""
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    assert begins(trace) == {"a": 0, "b": 16, "c": 32, "d": 0, "e": 32}


def test_a_block_that_is_given_up_and_taken_again_is_no_longer_the_caches(run: Run) -> None:
    """In one step: its new owner's key is published when it is scheduled."""
    case = prefixes("v2", num_gpu_blocks=5)
    first, other = case.requests[0], tokens(7, 40, 96)
    ways = (("a", first.prompt[:32]), ("b", first.prompt[:10] + other[:24]), ("c", other[:27]))
    requests = (replace(first, id=name, prompt=way, arrive=3 * (name == "b")) for name, way in ways)
    _, verdict = run(replace(case, requests=tuple(requests), chunked_prefill_size=128))
    assert verdict.status == "equal", verdict


def test_a_request_takes_over_blocks_that_its_own_step_writes(run: Run) -> None:
    """vLLM's cache has them when they are scheduled (issue 41838). Each layer writes before it attends, so no row is wrong."""
    case = prefixes("v2", apart=0)
    trace, verdict = run(replace(case, chunked_prefill_size=256))
    assert verdict.status == "equal", verdict
    assert begins(trace) == {"a": 0, "b": 16, "c": 32, "d": 0, "e": 32}
    assert {record.iteration for record in stages(trace, "prefill")} == {0}


def test_without_the_next_token_in_its_keys_a_longer_hit_keeps_anothers_last_row(run: Run) -> None:
    """Live in 0.33.0 with disable_lookahead_block_hashes, and with KV connectors: the guide has it."""
    case, other = prefixes("v2", apart=8, disable_lookahead_block_hashes=True), tokens(9, 40, 96)
    first = replace(case.requests[0], max_new_tokens=2)
    again = (replace(first, id=name, prompt=first.prompt[:32] + other[:n], arrive=n) for name, n in (("b", 20), ("c", 24)))
    case = replace(case, requests=(first, *again), num_steps=1)
    trace, verdict = run(case)
    first_wrong = verdict.first
    assert first_wrong is not None
    assert (verdict.rule, first_wrong.request, first_wrong.index.partition(",")[0]) == ("draft.kv", "c", "row 31")
    assert begins(trace) == {"a": 0, "b": 16, "c": 32}


_KEYS = "vllm.v1.core.kv_cache_utils"
OF_THE_CACHE: dict[str, tuple[Edit, tuple[str, str, str]]] = {
    "keys do not cover the next token": (
        Edit(
            target=f"{_KEYS}.get_request_block_hasher",
            match="extra_keys = (extra_keys, request.all_token_ids[end_token_idx])",
            replacement="pass",
        ),
        ("draft.kv", "b", "prefill"),
    ),
    "keys cover half of a block": (
        Edit(
            target=f"{_KEYS}.hash_block_tokens",
            match="tuple(curr_block_token_ids)",
            replacement="tuple(curr_block_token_ids)[:8]",
        ),
        ("target.kv", "d", "prefill"),
    ),
    "a hit is one block too short": (
        Edit(
            target="vllm.v1.core.single_type_kv_cache_manager.FullAttentionManager.find_longest_cache_hit",
            match="max_length // block_size)",
            replacement="max_length // block_size - 1)",
        ),
        ("radix.hit", "c", "prefill"),
    ),
}


@pytest.mark.parametrize("name", OF_THE_CACHE)
def test_a_planted_fault_of_the_prefix_cache_is_named(run: Run, name: str) -> None:
    edit, place = OF_THE_CACHE[name]
    _, verdict = run(prefixes("v2"), edit)
    first = verdict.first
    assert first is not None
    assert (first.rule, first.request, first.stage) == place


# Break vLLM in one place: the judge must name the rule, at the place where the wrong number first shows.

_SPECULATOR = "vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator"
_CLASS = f"{_SPECULATOR}.TargetDependentARSpeculator"
_PROPOSE = "vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose"

# edit, runner -> the first rule that breaks, in which request, round and stage
PLANTED: dict[str, tuple[Edit, ModelRunner, tuple[str, str, int, str]]] = {
    "draft steps attend to rejected rows": (
        Edit(
            target=f"{_SPECULATOR}.prepare_decode_inputs",
            match="        num_rejected,\n",
            replacement="        num_rejected * 0,\n",
        ),
        "v2",
        ("draft.proposal", "a", 1, "draft.decode"),
    ),
    "draft steps attend to rejected rows in V1": (
        Edit(target=_PROPOSE, match="common_attn_metadata.seq_lens -= num_rejected_tokens_gpu", replacement="pass"),
        "v1",
        ("draft.proposal", "a", 1, "draft.decode"),
    ),
    "a chunk's tail consumes another token than the next": (
        Edit(
            target=f"{_SPECULATOR}.prepare_prefill_inputs",
            match="        next_prefill_tokens,\n        num_sampled,\n",
            replacement="        next_prefill_tokens * 0 + 5,\n        num_sampled,\n",
        ),
        "v2",
        ("draft.input_ids", "a", 0, "draft.extend"),
    ),
    "draft decode stands one position too far": (
        Edit(
            target=f"{_CLASS}.propose",
            match="decode_batch_sync, num_batch_tokens = (",
            replacement="self.input_buffers.positions += 1\ndecode_batch_sync, num_batch_tokens = (",
        ),
        "v2",
        ("draft.slots", "a", 0, "draft.decode"),
    ),
    "the last row is proposed from, rejected or not": (
        Edit(
            target=f"{_SPECULATOR}.prepare_prefill_inputs",
            match="return last_token_indices",
            replacement=(
                "last_token_indices[:num_reqs] = input_batch.query_start_loc[1 : num_reqs + 1] - 1\nreturn last_token_indices"
            ),
        ),
        "v2",
        ("draft.kv", "a", 0, "extend"),
    ),
    "draft decode consumes its input state again": (
        Edit(
            target=f"{_CLASS}._generate_draft",
            match="        hidden_states,\n        self.draft_tokens,",
            replacement="        self.hidden_states[:num_reqs].clone(),\n        self.draft_tokens,",
        ),
        "v2",
        ("draft.hidden_in", "a", 0, "draft.decode"),
    ),
    "a request that ends keeps its blocks": (
        Edit(
            target="vllm.v1.core.kv_cache_manager.KVCacheManager.free",
            match="self.coordinator.free(request.request_id)",
            replacement="pass",
        ),
        "v2",
        ("pool.accounting", "", 0, "iteration"),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_named(run: Run, name: str) -> None:
    edit, runner, place = PLANTED[name]
    chunk = 7 if "chunk" in name else 128
    _, verdict = run(case_of("llama-wide", runner, 40, 21, 13, chunk=chunk), edit)
    assert verdict.status == "diverged", verdict
    first = verdict.first
    assert first is not None
    assert (first.rule, first.request, first.round, first.stage) == place


def test_a_crash_is_vllms_own(run: Run) -> None:
    edit = Edit(target=f"{_CLASS}.propose", match="num_reqs = input_batch.num_reqs", replacement="raise RuntimeError('broken')")
    trace, verdict = run(case_of("llama-tiny", "v2", 9), edit)
    assert (verdict.status, verdict.rule) == ("unknown", "engine.crash")
    assert "RuntimeError: broken" in verdict.reason
    assert trace.header.ending.kind == "crashed"


# What is refused.

_CASE = case_of("llama-tiny", "v2", 9)
REFUSED = {
    "topk 2": (replace(_CASE, topk=2), "drafts chains alone"),
    "page_size 4": (replace(_CASE, page_size=4), "blocks of its Triton attention"),
    "model": (replace(_CASE, model="mimo-v2"), "its checkpoint is not tried there"),
    "event": (replace(_CASE, events=(Event(at=1, kind="flush"),)), "event 'flush' on vLLM"),
    "sampling": (sampled(case_of("llama-tiny", "v1", 9)), "not driven with model runner V1"),
    "bias": (changed(case_of("llama-tiny", "v1", 9, 9)), "logit_bias of request 'b' with model runner V1: its verify leaves"),
    "async": (case_of("llama-tiny", "v1", 9, async_scheduling=True), "async_scheduling with model runner V1"),
    "temperature": (
        replace(_CASE, requests=(replace(_CASE.requests[0], sampling=Sampling(temperature=3)),)),
        "it refuses a temperature over 2",
    ),
    "stream": (replace(_CASE, requests=(replace(_CASE.requests[0], stream=True),)), "stream of request 'a' on vLLM"),
    "room": (
        replace(
            _CASE,
            requests=(replace(_CASE.requests[0], max_new_tokens=512),),
            engine=EngineSettings(vllm=VLLMSettings(num_gpu_blocks=8)),
        ),
        "num_gpu_blocks leave room",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_driven_is_refused_with_engine_cause_and_remedy(name: str) -> None:
    case, why = REFUSED[name]
    assert why in not_driven(case, VLLM)


def test_a_refusal_says_that_the_limit_is_eagletwins(vllm: Host) -> None:
    case = replace(_CASE, topk=2, num_draft_tokens=4)
    with pytest.raises(WouldNotStart, match=r"eagletwin does not run .*vLLM(?s:.*)the limit is eagletwin's, not vLLM's"):
        vllm.engine(case)


def test_sglang_refuses_settings_of_vllm() -> None:
    case = replace(_CASE, engine=EngineSettings(vllm=VLLMSettings(model_runner="v1")))
    assert "give --engine vllm" in not_driven(case, Mode())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("25015", "--engine", "vllm", "--sglang", "0.5.17"), r"--sglang 0\.5\.17 with --engine vllm"),
        (("vllm-chunk-tail", "--engine", "vllm", "--vllm", "0.5.17"), r"'0\.5\.17' is neither a release nor a folder"),
        (("25015", "--engine", "vllm", "--revert", "25015"), "entry 25015 is a bug of SGLang, and vLLM runs"),
        (("vllm-chunk-tail", "--engine", "sglang", "--engine", "vllm"), "on both engines: settings of vLLM"),
        (("25015", "--engine", "sglang", "--engine", "vllm"), "on both engines: "),
        (("25015", "--engine", "sglang", "--engine", "vllm", "--sglang", "0.5.17"), "with two engines: it is of one"),
        (
            ("25015", "--vllm", "0.33.0", "--engine", "sglang"),
            r"--vllm 0\.33\.0 with --engine sglang: it names the engine vLLM",
        ),
        (("25015", "--vllm", "0.33.0", "--sglang", "0.5.17"), "one engine runs"),
        (("vllm-chunk-tail", "--vllm", "0.31.0"), r"(?s)one of 0\.32\.0, 0\.33\.0; older ones have another speculator"),
        (("25015", "--model-runner", "v1", "--model-runner", "v2"), "on both model runners: settings of vLLM"),
        (("26329", "--engine", "sglang", "--engine", "vllm", "--model-runner", "v1"), "model-runner v1 with two engines"),
    ],
)
def test_what_one_engine_alone_has_is_refused_on_another(words: tuple[str, ...], why: str) -> None:
    with pytest.raises(InputError, match=why):
        run_command(["check", *words])
