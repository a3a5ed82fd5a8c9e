"""Rows that attend to chosen rows (DSA): SGLang's own worker is equal but for a live bug, and a fault in each part is named."""

import pytest

from eagletwin.cases.ledger import PROBES
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.families.dimensions.dimension import tokens

from ..rows import spread
from .conftest import Runner

INDEXER = "sglang.srt.layers.attention.dsa.dsa_indexer.Indexer"
BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnBackend"
CHOICE = "sglang.srt.layers.attention.dsa.dsa_topk_backend._topk_unfused"

_REMEDY = PROBES["dsa-draft-reads"].remedy
assert _REMEDY is not None
REMEDY = _REMEDY.edits
LONG = tokens(3, 70, 96)


@pytest.fixture(scope="module")
def chain() -> Case:
    """Chunks, a batch, a prefix hit of a page, rounds of every kind; all but the first rows choose."""
    return Case(
        name="chosen-rows",
        model="deepseek-dsa",
        num_steps=3,
        page_size=64,
        chunked_prefill_size=512,
        chunks=(64,),
        requests=(
            Request(id="a", prompt=LONG, max_new_tokens=8),
            Request(id="b", prompt=tokens(5, 19, 96), max_new_tokens=8),
            Request(id="c", prompt=(*LONG[:66], 9, 4), max_new_tokens=4, arrive=12),
        ),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=1024)),
        exercises=("chunked_prefill", "batch", "radix_hit", "rejection", "accept_some"),
    )


_OF_KEY = (f"{INDEXER}._store_index_k_cache", "k_fp8, k_scale = act_quant(key, self.block_size, self.scale_fmt)")
# What is wrong, where, and the rule that names it.
FAULTS = {
    "a key is stored for the row before its own": (*_OF_KEY, _OF_KEY[1].replace("(key,", "(key.roll(-1, 0),"), "target.kv"),
    "draft extend stores the keys of another row": (
        *_OF_KEY,
        _OF_KEY[1].replace("(key,", "(key.roll(int(forward_batch.forward_mode.is_draft_extend_v2()), 0),"),
        "draft.kv",
    ),
    "draft decode stores the keys of another request": (
        *_OF_KEY,
        _OF_KEY[1].replace("(key,", "(key.flip(0) if forward_batch.forward_mode.is_decode() else key,"),
        "draft.scratch_kv",
    ),
    "a choice is one short": (CHOICE, "valid_topk = min(topk,", "valid_topk = min(topk - 1,", "target.kv"),
    "a head has the weight of another": (
        f"{INDEXER}._weights_proj_bf16_in_fp32_out",
        "return weights.float()",
        "return weights.float().roll(1, -1)",
        "target.kv",
    ),
    "keys turn in attention's own pairs": (
        f"{INDEXER}.__init__",
        "is_neox_style=is_neox_style,\n        device",
        "is_neox_style=False,\n        device",
        "target.kv",
    ),
    "draft decode attends to the choice of another request": (
        f"{BACKEND}.forward_decode",
        "page_table=metadata.page_table_1,\n            topk_indices=topk_indices,",
        "page_table=metadata.page_table_1,\n            topk_indices=topk_indices.flip(0).contiguous(),",
        "draft.proposal",
    ),
    "verify attends to the rows of another node": (
        f"{BACKEND}.forward_extend",
        "topk_indices=topk_indices,\n                extend_lens_cpu",
        "topk_indices=topk_indices.roll(int(forward_batch.forward_mode.is_target_verify()), 0),\n"
        "                extend_lens_cpu",
        "target.kv",
    ),
}


def test_a_chain_is_equal_with_the_candidate_fix_of_a_live_bug(run: Runner, chain: Case) -> None:
    trace, verdict = run(chain, *REMEDY)
    assert verdict.status == "equal", (verdict, trace.header.ending)


def test_a_step_does_not_choose_its_own_rows(run: Runner, chain: Case) -> None:
    """Live: docs/findings/dsa-draft-reads. A step scores the committed rows alone."""
    _, verdict = run(chain)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal"), verdict


@pytest.mark.parametrize("fault", spread(sorted(FAULTS), lambda fault: FAULTS[fault][-1]))
def test_a_fault_is_named(run: Runner, chain: Case, fault: str) -> None:
    target, match, replacement, rule = FAULTS[fault]
    trace, verdict = run(chain, *REMEDY, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)
