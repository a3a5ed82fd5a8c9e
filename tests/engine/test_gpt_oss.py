"""gpt-oss with an EAGLE-3 head: SGLang's own class is equal, a fault in each of its parts is named; trees of it are wrong."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit

from ..rows import spread
from .conftest import Runner

ATTENTION = "sglang.srt.models.gpt_oss.GptOssAttention.forward_core"
EXPERTS = "sglang.srt.layers.moe.fused_moe_native.moe_forward_native"
MODEL = "gpt-oss-eagle3"
# A node of a tree sees the window of its own path: live, docs/findings/tree-window.md.
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
