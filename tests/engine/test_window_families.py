"""gpt-oss, Gemma-4 with its assistant, and windows of the draft alone: SGLang's own classes, and faults in their parts."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.valid import check_case
from eagletwin.harness.judge.judge import judge

from ..rows import long, spread
from .conftest import Runner

# gpt-oss with an EAGLE-3 head: SGLang's own class is equal, a fault in each of its parts is named; trees of it are wrong.


ATTENTION = "sglang.srt.models.gpt_oss.GptOssAttention.forward_core"
EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
MODEL = "gpt-oss-eagle3"
# A node of a tree sees the window of its own path: live, docs/findings/tree-window.
WINDOW = LEDGER["tree-window"]
assert WINDOW.remedy is not None
TREES = WINDOW.remedy

PROMPT = (5, 17, 33, 8, 60, 41, 2, 19, 77, 50, 3, 9, 12, 25, 31, 4, 70, 66, 1)
CHAIN = Case(
    name="gpt-oss-chain",
    model=MODEL,
    num_steps=3,
    page_size=4,
    chunked_prefill_size=512,
    chunks=(8, 8),
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=12),
        Request(id="b", prompt=(*PROMPT[:12], 5, 7), max_new_tokens=5, arrive=5),
        Request(id="c", prompt=(*PROMPT[:17], 9), max_new_tokens=6, arrive=12),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    exercises=("chunked_prefill", "batch", "radix_hit"),
)
TREE = Case(
    name="gpt-oss-tree",
    model=MODEL,
    num_steps=3,
    topk=3,
    num_draft_tokens=8,
    requests=(Request(id="a", prompt=PROMPT, max_new_tokens=16),),
    exercises=("tree", "path_not_in_front"),
)

PLANTED = {
    "sinks are left out": (ATTENTION, "sinks=self.sinks,", "", "target.kv"),
    "sinks are those of another head": (ATTENTION, "sinks=self.sinks,", "sinks=self.sinks.flip(0),", "target.kv"),
    "sinks of verify are those of another head": (
        ATTENTION,
        "sinks=self.sinks,",
        "sinks=self.sinks.flip(0) if forward_batch.forward_mode.is_target_verify() else self.sinks,",
        "target.kv",
    ),
    "layers with a window have no sinks": (
        ATTENTION,
        "sinks=self.sinks,",
        "sinks=None if self.attn.sliding_window_size > 0 else self.sinks,",
        "target.kv",
    ),
    "gates have no limit": (EXPERTS, "moe_runner_config.gemm1_clamp_limit,\n", "1e9,\n", "target.kv"),
    "the experts' last bias is left out": (EXPERTS, 'getattr(layer, "w2_weight_bias", None)', "None", "target.kv"),
    "experts are swapped behind the router": (
        EXPERTS,
        "topk_weights, topk_ids, _ = topk_output",
        "topk_weights, topk_ids, _ = topk_output\ntopk_ids = topk_ids.flip(1)",
        "target.kv",
    ),
}


def test_a_chain_is_equal(run: Runner) -> None:
    _, verdict = run(CHAIN)
    assert verdict.status == "equal", verdict
    assert min(verdict.checked[rule] for rule in ("window.slots", "radix.hit", "pool.accounting")) > 0


@pytest.mark.parametrize("fault", spread(sorted(PLANTED)))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    target, match, replacement, rule = PLANTED[fault]
    _, verdict = run(CHAIN, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.long
def test_an_accepted_path_without_its_rows_of_windows_is_named(run: Runner) -> None:
    """They lie in slots of their own, and are moved by a call of their own."""
    move = "sglang.srt.mem_cache.swa_memory_pool.SWAKVPool.move_kv_cache"
    fault = Edit(target=move, match="self.swa_kv_pool.move_kv_cache(tgt_loc_swa, src_loc_swa)", replacement="pass")
    for edits, found in ((TREES.edits, ("equal", "")), ((*TREES.edits, fault), ("diverged", "commit.path"))):
        _, verdict = run(TREE, *edits)
        assert (verdict.status, verdict.rule) == found, verdict


@pytest.mark.long
def test_the_window_of_a_node_is_counted_by_its_number_and_the_output_is_wrong(run: Runner) -> None:
    """Live: SGLang's Triton backend. What the target says alone is what it says with the remedy, which is equal."""
    emitted = []
    for edits, found in (((), ("diverged", "commit.path")), (TREES.edits, ("equal", ""))):
        trace, verdict = run(WINDOW.case, *edits)
        assert (verdict.status, verdict.rule) == found, verdict
        [number] = [number for number, record in enumerate(trace.header.records) if record.stage == "finished"]
        emitted.append(trace.integers(number, "tokens"))
    assert emitted == [[52, 33, 73, 31, 52], [52, 33, 73, 31, 39]]


@pytest.mark.long
def test_deterministic_inference_counts_the_window_of_a_node_by_its_number_too(run: Runner) -> None:
    """Live, in the backend's other kernel. Past the mask that it reads at a wrong place, the same remedy is right."""
    mask = LEDGER["deterministic-window"].remedy
    assert mask is not None
    settings = EngineSettings(sglang=SGLangSettings(deterministic=True))
    case = msgspec.structs.replace(WINDOW.case, name="deterministic-tree", engine=settings)
    for edits, found in ((mask.edits, ("diverged", WINDOW.rule)), ((*mask.edits, *TREES.edits), ("equal", ""))):
        _, verdict = run(case, *edits)
        assert (verdict.status, verdict.rule) == found, verdict


@pytest.mark.long
@pytest.mark.slow
def test_it_runs_where_the_package_triton_kernels_is_installed(tmp_path: Path) -> None:
    """SGLang would choose that package's kernels, which store the experts the other way round and know a GPU alone."""
    (tmp_path / "site" / "triton_kernels").mkdir(parents=True)
    (tmp_path / "site" / "triton_kernels" / "__init__.py").touch()
    (tmp_path / "case.json").write_bytes(msgspec.json.encode(replace(CHAIN, exercises=())))
    paths = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "eagletwin", "check", "case.json"]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


# Gemma-4 with its assistant (frozen-KV MTP): SGLang's own worker is equal, and a fault in what the draft reads is named.


GEMMA4_MODEL = "gemma-4-assistant"
WORKER = "sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker"
UTILS = "sglang.srt.speculative.frozen_kv_mtp_utils"
ASSISTANT = "sglang.srt.models.gemma4_mtp.Gemma4AssistantForCausalLM"

GEMMA4_PROMPT = (5, 17, 33, 8, 60, 41, 2, 19, 77, 50, 3, 9, 12, 25, 31, 4, 70, 66, 1)
GEMMA4_CHAIN = Case(
    name="frozen-chain",
    model=GEMMA4_MODEL,
    num_steps=3,
    page_size=4,
    chunked_prefill_size=512,
    chunks=(8, 8),
    requests=(
        Request(id="a", prompt=GEMMA4_PROMPT, max_new_tokens=12),
        Request(id="b", prompt=(*GEMMA4_PROMPT[:12], 5, 7), max_new_tokens=5, arrive=5),
    ),
    events=(Event(at=7, kind="retract"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    exercises=("chunked_prefill", "batch", "radix_hit", "rejection", "retraction_in_decode"),
)
GEMMA4_TREE = replace(
    GEMMA4_CHAIN,
    name="frozen-tree",
    topk=3,
    num_draft_tokens=8,
    exercises=("tree", "path_not_in_front", "branch_changes_parent"),
)

# what is planted -> function, what is replaced, by what, and the rule that names it
GEMMA4_PLANTED = {
    "layers with a window read the rows of the first one": (
        f"{ASSISTANT}.build_frozen_kv_mtp_context",
        "physical[i] = by_type[t]",
        "physical[i] = target_text.layer_types.index(t)",
        "draft.proposal",
    ),
    "each step stands one position on": (
        f"{WORKER}.draft_forward",
        "self._set_positions(forward_batch)\n\n        with (",
        "forward_batch.positions = forward_batch.positions + 1\n\nwith (",
        "draft.positions",
    ),
    "all steps stand where the bonus token does": (
        f"{UTILS}.set_frozen_kv_positions",
        "torch.clamp(seq_lens - 1, min=0)",
        "torch.clamp(seq_lens, min=0)",
        "draft.positions",
    ),
    "the last committed row is not read": (
        f"{WORKER}._init_frozen_kv_metadata",
        "self.draft_attn_backend.init_forward_metadata(forward_batch)",
        "whole = forward_batch.seq_lens\nforward_batch.seq_lens = whole - 1\n"
        "self.draft_attn_backend.init_forward_metadata(forward_batch)\nforward_batch.seq_lens = whole",
        "draft.proposal",
    ),
    "the state of another node is handed on": (
        f"{WORKER}._draft_extend_for_decode",
        "- 1\n",
        "- 2\n",
        "draft.hidden_in",
    ),
    "the state of the first row of a chunk is handed on": (
        f"{UTILS}.select_last_extend_hidden",
        "torch.cumsum(lens, dim=0) - 1",
        "torch.cumsum(lens, dim=0) - lens",
        "draft.hidden_in",
    ),
    "a step consumes the state that the target handed over": (
        f"{WORKER}.draft_forward",
        "forward_batch.spec_info.hidden_states = hidden_states",
        "forward_batch.spec_info.hidden_states = seed_prev_hidden",
        "draft.hidden_in",
    ),
    "the target's embedding is not scaled": (
        f"{ASSISTANT}.forward",
        "* self.target_embed_scale",
        "* 1",
        "draft.proposal",
    ),
}


@pytest.mark.parametrize("case", [GEMMA4_CHAIN, GEMMA4_TREE], ids=lambda case: case.name)
def test_it_is_equal_and_the_draft_writes_nothing(run: Runner, case: Case) -> None:
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    stages = {record.stage for record in trace.header.records}
    assert {"draft.decode"} == {stage for stage in stages if stage.startswith("draft.")}
    assert {record.step for record in trace.header.records if record.stage == "draft.decode"} == {0, 1, 2}
    assert not any(name.startswith(("draft_", "scratch_")) for record in trace.header.records for name in record.tensors)
    assert min(verdict.checked[rule] for rule in ("draft.positions", "draft.hidden_in", "draft.proposal")) > 0
    assert not verdict.checked.get("draft.scratch_kv", 0)


@pytest.mark.parametrize("fault", spread(sorted(GEMMA4_PLANTED)))
def test_a_fault_is_named_in_gemma4(run: Runner, fault: str) -> None:
    target, match, replacement, rule = GEMMA4_PLANTED[fault]
    _, verdict = run(GEMMA4_CHAIN, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.long
def test_a_window_that_ends_is_a_row_short_in_the_draft_and_whole_with_the_remedy(run: Runner) -> None:
    """Live: PR 32087. The remedy is right in a chain and, but for what `tree-window` says, in a tree."""
    entry = LEDGER["decode-window"]
    assert entry.remedy is not None
    case = replace(GEMMA4_CHAIN, model=entry.case.model, exercises=())
    found = [run(case, *edits)[1] for edits in ((), entry.remedy.edits)]
    assert [(verdict.status, verdict.rule) for verdict in found] == [("diverged", "draft.proposal"), ("equal", "")]


@pytest.mark.parametrize("mended", [False, True])
def test_without_overlap_the_worker_is_called_with_an_argument_that_it_does_not_take(
    host: Host, tmp_path: Path, mended: bool
) -> None:
    """Live since 0.5.19: docs/explanation/frozen-kv.md."""
    call = Edit(
        target="sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPWorkerV2.forward_batch_generation",
        match="grammar_barrier=None",
        replacement="grammar_barrier=None, **_",
    )
    patch = Patch(name="without-overlap", edits=(call,) if mended else (), switches=("without-overlap",))
    trace = host.engine(GEMMA4_CHAIN, (patch,)).run(GEMMA4_CHAIN, tmp_path)
    verdict = judge(trace)
    if mended:
        assert verdict.status == "equal", verdict
        assert not trace.header.engine.overlap
    else:
        assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), verdict
        assert "unexpected keyword argument 'pp_proxy_tensors'" in verdict.reason


# A window of the draft alone (--speculative-draft-window-size, --speculative-draft-sink-size), in the real worker.


STEPS = "sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend.common_template"
DRAFT_CHAIN = Case(
    name="draft-window-chain",
    model="llama-tiny",
    num_steps=3,
    requests=(
        Request(id="a", prompt=tuple(range(1, 13)), max_new_tokens=10),
        Request(id="b", prompt=(1, 2, 3), max_new_tokens=8, arrive=2),
    ),
    engine=EngineSettings(sglang=SGLangSettings(draft_window=4, draft_sink=2)),
    exercises=("draft_decode", "batch"),
)
DRAFT_TREE = msgspec.structs.replace(
    DRAFT_CHAIN,
    name="draft-window-tree",
    num_steps=4,
    topk=3,
    num_draft_tokens=10,
    page_size=4,
    exercises=("tree", "branch_holes"),
)
LATENT = msgspec.structs.replace(DRAFT_CHAIN, name="draft-window-latent", model="deepseek-nextn")
LATENT_EAGLE3 = msgspec.structs.replace(DRAFT_CHAIN, name="draft-window-latent-eagle3", model="kimi-k2-eagle3")


def with_settings(**fields: int) -> Callable[[Case], Case]:
    settings = EngineSettings(sglang=SGLangSettings(**fields))  # type: ignore[arg-type]
    return lambda case: msgspec.structs.replace(case, engine=settings)


@pytest.mark.parametrize("case", [DRAFT_CHAIN, DRAFT_TREE, LATENT, LATENT_EAGLE3], ids=lambda case: case.name)
def test_the_release_is_right(run: Runner, case: Case) -> None:
    _, verdict = run(case)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("case", [*long(DRAFT_CHAIN), DRAFT_TREE], ids=lambda case: case.name)
@pytest.mark.parametrize(
    ("match", "replacement"),
    [
        ("self.draft_window_size,", "self.draft_window_size - 1,"),
        ("self.draft_window_size,", "self.draft_window_size + 1,"),
        ("self.draft_sink_size,", "0,"),
        ("self.draft_window_size,", "0,"),
    ],
    ids=["a row short", "a row long", "no sink", "no window"],
)
def test_another_window_is_seen(run: Runner, case: Case, match: str, replacement: str) -> None:
    _, verdict = run(case, Edit(target=STEPS, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal"), verdict


def test_a_head_with_a_window_of_its_own_is_wrong_in_draft_extend_and_right_with_the_fix(run: Runner) -> None:
    """Live: docs/findings/draft-window. A longer case than the entry's, in which draft decode runs as well."""
    remedy = LEDGER["draft-window"].remedy
    assert remedy is not None
    case = msgspec.structs.replace(
        DRAFT_CHAIN,
        name="draft-window-eagle3",
        model="llama-eagle3",
        engine=EngineSettings(sglang=SGLangSettings(draft_window=4)),
    )
    _, verdict = run(case)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.hidden_in"), verdict
    _, verdict = run(case, *remedy.edits)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize(
    ("model", "fields", "why"),
    [
        ("llama-tiny", {"draft_sink": 2}, "draft_sink 2 without draft_window"),
        ("llama-mtp", {"draft_window": 4}, "a multi-layer draft has no draft decode"),
        ("llama-standalone", {"draft_window": 4}, "STANDALONE has no window of draft decode"),
        ("llama-eagle3", {"draft_window": 4, "draft_sink": 1}, "the window of an EAGLE-3 head has no sink"),
    ],
)
def test_a_window_that_sglang_would_leave_out_is_refused(model: str, fields: dict[str, int], why: str) -> None:
    with pytest.raises(InputError, match=why):
        check_case(msgspec.structs.replace(with_settings(**fields)(DRAFT_CHAIN), model=model), "case")
