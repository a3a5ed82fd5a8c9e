"""Multi-layer drafts (MTP) on the real worker: every rule per layer, and what is wrong with it in this release."""

from itertools import product
from pathlib import Path

import msgspec
import pytest

from eagletwin.cases.blocks import SearchConstraints
from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger.multi_layer import ALL_LAYERS, ONE_TOKEN, THREE, TWO
from eagletwin.cases.ledger.multi_layer_topk import PATH, WINDOWS
from eagletwin.cases.ledger.pr_22954 import OWN_REQ_POOLS
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.commands.fuzz.tally import Tally
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import long, spread
from .conftest import Runner
from .test_fuzz import PLAIN

WORKER = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
MODELS = ("llama-mtp", "llama-mtp-chain")
BOTH = pytest.mark.parametrize("model", ["llama-mtp-chain", *long("llama-mtp")])
# "step" of the worker's two loops over the layers -> its assignment of the layer's pools to the batch (PR #22954)
SWAPS = [
    Edit(
        target=f"{WORKER}.{function}",
        match=f"forward_batch.{pool} = self.draft_runner_list[",
        replacement="unused = self.draft_runner_list[",
    )
    for function in ("_draft_extend_for_prefill", "_draft_extend_for_decode")
    for pool in ("req_to_token_pool", "token_to_kv_pool")
]


def _play(host: Host, case: Case, folder: Path, *patches: Patch) -> Trace:
    folder.mkdir()
    return host.engine(case, patches).run(case, folder)


def _tails(tally: Tally) -> list[str]:
    """The bugs of chunk tails that a case showed, though they are mended: what requests ask for has known bugs of its own."""
    return [name for name, bug in tally.known.items() if bug.cases and "multi-layer-chunk-tail" in name]


@pytest.mark.long
@pytest.mark.parametrize("model", MODELS)
def test_generated_cases_are_equal_once_the_chunk_tail_is_right(host: Host, tmp_path: Path, model: str) -> None:
    trials = Trials(host, RunSpec(patches=(ALL_LAYERS,)))
    search = Fuzz(
        trials,
        tmp_path,
        Plan(
            seed=6,
            seconds=1e9,
            max_cases=40,
            shrink_seconds=0.0,
            command="",
            asked=SearchConstraints(held={"model": model, "topk": 1}, sampling="", wanted=PLAIN),
        ),
    )
    assert [(finding.signature, finding.outcome.report) for finding in search.search()] == []
    tally = search.tally
    assert tally.cases == tally.statuses["equal"] + tally.statuses["known"] == 40
    assert not _tails(tally)
    assert not tally.fallbacks
    for feature in ("chunk_tail_differs", "look_ahead_rejected", "accept_all", "accept_some", "batch", "radix_hit"):
        assert tally.exercised[feature] >= 3, feature


@pytest.mark.long
@pytest.mark.parametrize(("model", "cases"), [("mimo-v2", 15), ("mimo-v2-window", 20), ("step-3.5-window", 8)])
def test_generated_cases_in_the_classes_of_two_model_families_are_equal(
    host: Host, tmp_path: Path, model: str, cases: int
) -> None:
    """SGLang's own MiMo-V2 and Step-3.5, each layer of their drafts with a hybrid KV pool of its own."""
    trials = Trials(host, RunSpec(patches=(ALL_LAYERS,)))
    search = Fuzz(
        trials,
        tmp_path,
        Plan(
            seed=7,
            seconds=1e9,
            max_cases=cases,
            shrink_seconds=0.0,
            command="",
            asked=SearchConstraints(held={"model": model, "topk": 1}, sampling="", wanted=PLAIN),
        ),
    )
    assert [(finding.signature, finding.outcome.report) for finding in search.search()] == []
    assert search.tally.cases == search.tally.statuses["equal"] + search.tally.statuses["known"] == cases
    assert not _tails(search.tally)
    for feature in ("chunk_tail_differs", "look_ahead_rejected", "accept_all", "batch", "radix_hit"):
        assert search.tally.exercised[feature] >= 1, feature


@pytest.mark.parametrize("model", ["mimo-v2-window", "step-3.5", "step-3.5-window"])
def test_the_chunk_tail_is_as_wrong_in_the_classes_of_two_model_families(host: Host, tmp_path: Path, model: str) -> None:
    case = msgspec.structs.replace(THREE.case, model=model, exercises=())
    found = {}
    for name, patches in {"none": (), "one": (ONE_TOKEN,), "all": (ALL_LAYERS,)}.items():
        trace = _play(host, case, tmp_path / name, *patches)
        found[name] = [_wrong_rows(trace, layer) for layer in range(3)]
        assert judge(trace).status == ("equal" if name == "all" else "diverged")
    assert found == {"none": [[2], [1, 2], [0, 1, 2]], "one": [[], [2], [1, 2]], "all": [[], [], []]}


@pytest.mark.parametrize("entry", [*long(TWO), THREE], ids=lambda entry: entry.id)
def test_a_token_for_the_first_layer_alone_leaves_every_other_wrong(host: Host, tmp_path: Path, entry: Entry) -> None:
    """Of layer k, rows K-1-k..K-1 are wrong without any fix; with the one-token fix all but the first of them."""
    layers, found = range(entry.case.num_steps), {}
    for name, patches in {"none": (), "one": (ONE_TOKEN,), "all": (ALL_LAYERS,)}.items():
        trace = _play(host, entry.case, tmp_path / name, *patches)
        found[name] = [_wrong_rows(trace, layer) for layer in layers]
        first = judge(trace).first
        assert (first and first.layer) == {"none": 0, "one": 1, "all": None}[name]
    end = entry.case.chunked_prefill_size
    assert found["none"] == [list(range(end - 1 - layer, end)) for layer in layers]
    assert found["one"] == [list(range(end - layer, end)) for layer in layers]
    assert found["all"] == [[] for _ in layers]


def _wrong_rows(trace: Trace, layer: int) -> list[int]:
    """Rows of the first chunk that did not consume the prompt's own token."""
    prompt = trace.header.case.requests[0].prompt
    where = ("draft.extend", 0, layer)
    [number] = [n for n, record in enumerate(trace.header.records) if (record.stage, record.step, record.layer) == where]
    ids = trace.integers(number, "input_ids")
    return [row for row, token in enumerate(ids) if token != prompt[row + 1 + layer]]


@BOTH
def test_where_the_prompt_ends_inside_the_window_a_draft_stands_in(run: Runner, host: Host, tmp_path: Path, model: str) -> None:
    case = msgspec.structs.replace(
        THREE.case,
        name="short",
        model=model,
        num_steps=4,
        requests=(msgspec.structs.replace(THREE.case.requests[0], prompt=(7, 19, 3, 5)),),
        exercises=("look_ahead_past_prompt",),
    )
    trace = _play(host, case, tmp_path / "short", ALL_LAYERS)
    assert judge(trace).status == "equal"
    _, verdict = run(case)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.input_ids")


@BOTH
def test_a_rejected_draft_stays_in_the_rows_that_were_fed_it(host: Host, tmp_path: Path, model: str) -> None:
    """Boundary KV: as declared the case is equal; held to what was committed, only layers above the first are wrong."""
    case = msgspec.structs.replace(
        TWO.case,
        name="boundary",
        model=model,
        num_steps=3,
        chunked_prefill_size=64,
        requests=(msgspec.structs.replace(TWO.case.requests[0], max_new_tokens=12),),
        exercises=("look_ahead_rejected",),
    )
    trace = _play(host, case, tmp_path / "boundary")
    assert judge(trace).status == "equal"
    strict = judge(trace, view="committed")
    assert (strict.status, strict.rule) == ("diverged", "draft.kv")
    assert strict.first is not None
    assert strict.first.layer >= 1
    alone = msgspec.structs.replace(case, num_steps=1, exercises=())  # one layer looks at nothing but what is committed
    assert judge(_play(host, alone, tmp_path / "alone"), view="committed").status == "equal"


@pytest.mark.long
@BOTH
def test_the_pools_that_are_put_on_the_batch_are_never_read(host: Host, tmp_path: Path, model: str) -> None:
    """PR #22954 undone, and more: in this release a forward takes its pools from its own runner's attention backend."""
    case = msgspec.structs.replace(THREE.case, model=model)
    trace = _play(host, case, tmp_path / "swapped", ALL_LAYERS, Patch(name="revert-22954", edits=tuple(SWAPS)))
    assert judge(trace).status == "equal"
    assert judge(trace).checked["draft.runner"] == 3 * 3  # three layers, in two chunks and a round


# What the worker puts on the batch of a layer, in the place of an object that raises whatever is asked of it.
_NOBODY = "type('Nobody', (), {'__getattribute__': lambda self, name: [][0]})()"
_CALLS = {
    "_draft_extend_for_prefill": ("output: ModelRunnerOutput = self.draft_runner_list[step].forward(", "step_forward_batch"),
    "_draft_extend_for_decode": ("draft_logits_output = self.draft_runner_list[step].forward(", "forward_batch"),
}


@pytest.mark.long
@pytest.mark.parametrize("model", ["llama-mtp-chain", *long("mimo-v2")])
def test_a_read_of_a_pool_of_the_batch_would_fail(host: Host, tmp_path: Path, model: str) -> None:
    """`replace()` in the prefill loop drops both attributes, and the loop after verify keeps them: it makes no difference."""
    mines = [
        Edit(
            target=f"{WORKER}.{function}",
            match=call,
            replacement=f"{batch}.req_to_token_pool = {batch}.token_to_kv_pool = {_NOBODY}\n{call}",
        )
        for function, (call, batch) in _CALLS.items()
    ]
    case = msgspec.structs.replace(THREE.case, model=model, exercises=())
    trace = _play(host, case, tmp_path / "mined", ALL_LAYERS, Patch(name="mined", edits=tuple(mines)))
    assert judge(trace).status == "equal"


def test_layers_with_request_pools_of_their_own_are_equal(host: Host, tmp_path: Path) -> None:
    """The pools that the red side of 22954-req-pool is given make no difference by themselves."""
    case = msgspec.structs.replace(THREE.case, exercises=())
    trace = _play(host, case, tmp_path / "own", ALL_LAYERS, Patch(name="own-pools", edits=(OWN_REQ_POOLS,)))
    assert judge(trace).status == "equal"


@pytest.mark.long
def test_generated_trees_of_several_layers_are_equal_once_their_path_is_moved(host: Host, tmp_path: Path) -> None:
    trials, held = (
        Trials(host, RunSpec(patches=(ALL_LAYERS, *WINDOWS.green.patches))),
        {"model": "llama-mtp-chain", "topk": 3, "num_steps": 3},
    )
    search = Fuzz(
        trials,
        tmp_path,
        Plan(
            seed=2,
            seconds=1e9,
            max_cases=30,
            shrink_seconds=0.0,
            command="",
            asked=SearchConstraints(held=held, sampling="", wanted=PLAIN),
        ),
    )
    assert [(finding.signature, finding.outcome.report) for finding in search.search()] == []
    assert search.tally.cases == 30
    for feature in ("path_not_in_front", "tree", "chunk_tail_differs", "batch"):
        assert search.tally.exercised[feature] >= 3, feature


PLANTED = {
    "layer 1 runs with layer 0's attention backend": (
        Edit(
            target=f"{WORKER}.init_attention_backend",
            match="translator = self.draft_runner_list[step].kv_index_translator",
            replacement="self.draft_runner_list[step].attn_backend = self.draft_runner_list[0].attn_backend\n"
            "translator = self.draft_runner_list[step].kv_index_translator",
        ),
        "draft.runner",
        1,
    ),
    "the layers' windows are not moved on after verify": (
        Edit(
            target=f"{WORKER}._draft_extend_for_decode",
            match="if forward_batch.extend_seq_lens is not None:",
            replacement="if False:",
        ),
        "draft.input_ids",
        1,
    ),
    "the layers' windows are not moved on in a prefill": (
        Edit(
            target=f"{WORKER}._draft_extend_for_prefill",
            match="if forward_batch.extend_seq_lens is not None:",
            replacement="if False:",
        ),
        "draft.input_ids",
        1,
    ),
    "a layer proposes the token of the layer below": (
        Edit(
            target=f"{WORKER}._draft_extend_for_prefill",
            match="topk_index_list.append(topk_index)",
            replacement="topk_index_list.append(topk_index_list[-1] if topk_index_list else topk_index)",
        ),
        "draft.proposal",
        1,
    ),
    "positions are one off in the upper layers": (
        Edit(
            target=f"{WORKER}._draft_extend_for_prefill",
            match="step_forward_batch = replace(forward_batch)",
            replacement="step_forward_batch = replace(forward_batch, positions=forward_batch.positions + (step > 0))",
        ),
        "draft.positions",
        1,
    ),
}


@pytest.mark.parametrize(
    ("fault", "model"), spread(product(sorted(PLANTED), MODELS), lambda row: PLANTED[row[0]][1], lambda row: row[1])
)
def test_a_fault_in_one_layer_is_found_there(run: Runner, model: str, fault: str) -> None:
    edit, rule, layer = PLANTED[fault]
    case = msgspec.structs.replace(THREE.case, model=model, chunked_prefill_size=64, exercises=())
    assert run(case)[1].status == "equal"
    _, verdict = run(case, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert verdict.first is not None
    assert verdict.first.layer == layer


@pytest.mark.parametrize(
    ("model", "edit"),
    [("llama-mtp", "not self.chain_mtp_hidden_states"), ("llama-mtp-chain", "False")],
)
@pytest.mark.parametrize("function", ["_draft_extend_for_prefill", "_draft_extend_for_decode"])
def test_a_chain_that_is_none_and_one_that_is_missing_are_found_by_the_state_of_layer_1(
    run: Runner, model: str, edit: str, function: str
) -> None:
    """The other kind of model's states. A model that is not chained computes those of its last row alone in a prefill."""
    case = msgspec.structs.replace(THREE.case, model=model, chunked_prefill_size=64, exercises=())
    fault = Edit(target=f"{WORKER}.{function}", match="self.chain_mtp_hidden_states\n", replacement=f"{edit}\n")
    trace, verdict = run(case, fault)
    if model == "llama-mtp" and function == "_draft_extend_for_prefill":
        assert (verdict.status, trace.header.ending.kind) == ("unknown", "crashed")
        return
    assert (verdict.status, verdict.rule) == ("diverged", "draft.hidden_in"), (verdict, trace.header.ending)
    assert verdict.first is not None
    assert verdict.first.layer == 1


def test_trees_of_several_layers_change_the_output(host: Host, tmp_path: Path) -> None:
    """The gravest: greedy output is wrong, and neither crash nor message says so."""
    trace = _play(host, PATH.case, tmp_path / "topk")
    assert trace.header.ending.kind == "finished"
    verdict = judge(trace)
    assert verdict.later["output.tokens"] == 1
    alone = judge(trace, frozenset({"commit.path", "draft.input_ids", "draft.hidden_in", "draft.kv", "draft.proposal"}))
    assert (alone.status, alone.rule) == ("diverged", "output.tokens")


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("function", ["_draft_extend_for_prefill", "_draft_extend_for_decode"])
def test_a_death_between_two_layers_is_unknown_and_what_was_seen_before_is_judged(
    run: Runner, model: str, function: str
) -> None:
    case = msgspec.structs.replace(THREE.case, model=model, chunked_prefill_size=64, exercises=())
    match = "forward_batch.token_to_kv_pool = self"

    def dies(before: str) -> Edit:
        text = f"{before}if step == 2:\n    raise ValueError('the worker raised')\n{match}"
        return Edit(target=f"{WORKER}.{function}", match=match, replacement=text)

    _, verdict = run(case, dies(""))
    assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), verdict
    assert "the worker raised" in verdict.reason
    assert "judge" not in verdict.reason
    _, verdict = run(case, dies("forward_batch.input_ids[0] = 1 - forward_batch.input_ids[0].clamp(0, 1)\n"))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.input_ids"), verdict
