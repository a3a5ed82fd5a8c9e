"""Latent attention and experts: SGLang's own DeepSeek classes are equal, and a fault in each of their parts is named."""

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.sglang.boot import boot
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

MHA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mha.DeepseekMHAForwardMixin"
MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla.DeepseekMLAForwardMixin"
MOE = "sglang.srt.models.deepseek_v2.DeepseekV2MoE"
NEXTN = "sglang.srt.models.deepseek_nextn.DeepseekModelNextN.forward"
TOPK = "sglang.srt.layers.moe.topk.biased_grouped_topk_impl"
POOL = "sglang.srt.mem_cache.memory_pool.MLATokenToKVPool"

PROMPT = (17, 72, 8, 32, 15, 63, 57, 60, 48, 26, 12, 62, 3, 49, 55, 77, 89, 2, 34)


@pytest.fixture(scope="module")
def chain() -> Case:
    """Chunks (the first one plain, the others absorbed), pages, a batch, a prefix hit, every kind of round."""
    return Case(
        name="latent-chain",
        model="deepseek-nextn",
        num_steps=3,
        page_size=4,
        chunked_prefill_size=512,
        chunks=(8, 8),
        requests=(
            Request(id="a", prompt=PROMPT, max_new_tokens=10),
            Request(id="b", prompt=(*PROMPT[:10], 5, 7), max_new_tokens=5, arrive=5),
            Request(id="c", prompt=(*PROMPT[:14], 9), max_new_tokens=6, arrive=12),
        ),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
        exercises=("chunked_prefill", "batch", "radix_hit", "rejection", "accept_some", "page_crossed_in_draft"),
    )


@pytest.fixture(scope="module")
def tree() -> Case:
    """A tree with holes in its pages, whose accepted path is moved to the front."""
    return Case(
        name="latent-tree",
        model="deepseek-nextn",
        num_steps=3,
        topk=4,
        num_draft_tokens=12,
        page_size=4,
        chunked_prefill_size=512,
        requests=(Request(id="a", prompt=PROMPT, max_new_tokens=12),),
        exercises=("tree", "path_not_in_front", "branch_changes_parent", "branch_holes"),
    )


# What is wrong, where, and the rule that names it. `is_nextn`: in the draft alone.
OF_CHAINS = {
    "half of the turned key is stored": (
        f"{MHA}._set_mla_kv_buffer",
        "latent_cache[:, :, self.kv_lora_rank :] = k_pe.clone()",
        "latent_cache[:, :, self.kv_lora_rank : -32 if self.is_nextn else None] = k_pe[..., : 32 if self.is_nextn else None]",
        "draft.kv",
    ),
    "a first chunk stores the two parts of a row in the other order": (
        f"{MHA}._set_mla_kv_buffer",
        "latent_cache, None",
        "latent_cache.roll(64, -1) if self.is_nextn else latent_cache, None",
        "draft.kv",
    ),
    "a first chunk stores the latent row of the next position": (
        f"{MHA}._set_mla_kv_buffer",
        "latent_cache, None",
        "latent_cache.roll(-1, 0) if self.is_nextn else latent_cache, None",
        "draft.kv",
    ),
    "a first chunk of the target stores the latent row of the next position": (
        f"{MHA}._set_mla_kv_buffer",
        "latent_cache, None",
        "latent_cache if self.is_nextn else latent_cache.roll(-1, 0), None",
        "target.kv",
    ),
    "a latent vector is stored without its norm": (
        f"{MHA}._set_mla_kv_buffer",
        "latent_cache[:, :, : self.kv_lora_rank] = kv_a.unsqueeze(1)",
        "kv_a.mul_(1.01) if self.is_nextn else None; latent_cache[:, :, : self.kv_lora_rank] = kv_a.unsqueeze(1)",
        "draft.kv",
    ),
    "an absorbed forward has the two parts of a row in the other order": (
        f"{MLA}.forward_absorb_core",
        "k = torch.cat([k_nope, k_pe], dim=-1)",
        "k = torch.cat([k_pe, k_nope] if self.is_nextn else [k_nope, k_pe], dim=-1)",
        "draft.kv",
    ),
    "an absorbed forward stores the row of the next position": (
        f"{MLA}.forward_absorb_core",
        "k = torch.cat([k_nope, k_pe], dim=-1)",
        "k = torch.cat([k_nope, k_pe], dim=-1).roll(-1 if self.is_nextn else 0, 0)",
        "draft.kv",
    ),
    "draft decode stores the turned key of another row": (
        f"{MLA}.forward_absorb_core",
        "k = torch.cat([k_nope, k_pe], dim=-1)",
        "k = torch.cat([k_nope, k_pe.roll(1, 0) if forward_batch.forward_mode.is_decode() else k_pe], dim=-1)",
        "draft.scratch_kv",
    ),
    "draft decode has the matrix of another head": (
        f"{MLA}.forward_absorb_prepare",
        "q_nope_out = torch.bmm(q_nope.transpose(0, 1), self.w_kc)",
        "q_nope_out = torch.bmm("
        "q_nope.transpose(0, 1), self.w_kc.flip(0) if forward_batch.forward_mode.is_decode() else self.w_kc)",
        "draft.proposal",
    ),
    "the matrix that is moved to the query is transposed": (
        f"{MLA}.forward_absorb_prepare",
        "q_nope_out = torch.bmm(q_nope.transpose(0, 1), self.w_kc)",
        "q_nope_out = torch.bmm(q_nope.transpose(0, 1), self.w_kc.transpose(1, 2).reshape(self.w_kc.shape))",
        "target.kv",
    ),
    "the draft's matrix behind the sum over values is transposed": (
        f"{MLA}.forward_absorb_core",
        "attn_output.transpose(0, 1),\n            self.w_vc,\n",
        "attn_output.transpose(0, 1),\n"
        "            self.w_vc.transpose(1, 2).reshape(self.w_vc.shape) if self.is_nextn else self.w_vc,\n",
        "draft.hidden_in",
    ),
    "heads are swapped where their values are made": (
        f"{MLA}.forward_absorb_core",
        "attn_output.transpose(0, 1),\n            self.w_vc,\n",
        "attn_output.transpose(0, 1),\n            self.w_vc.flip(0),\n",
        "target.kv",
    ),
    "the state is joined without its norm": (
        NEXTN,
        "self.hnorm(previous_hidden_states),",
        "previous_hidden_states,",
        "draft.kv",
    ),
    "state and embedding have the norm of each other": (
        NEXTN,
        "self.enorm(hidden_states),\n                        self.hnorm(previous_hidden_states),",
        "self.hnorm(hidden_states),\n                        self.enorm(previous_hidden_states),",
        "draft.kv",
    ),
    "state and embedding are joined in the other order": (
        NEXTN,
        "self.enorm(hidden_states),\n                        self.hnorm(previous_hidden_states),",
        "self.hnorm(previous_hidden_states),\n                        self.enorm(hidden_states),",
        "draft.kv",
    ),
    "experts are swapped behind the router": (
        TOPK,
        "topk_weights, topk_ids = topk_weights.to(torch.float32), topk_ids.to(torch.int32)",
        "topk_weights, topk_ids = topk_weights.to(torch.float32), topk_ids.flip(-1).to(torch.int32)",
        "target.hidden",
    ),
    "a router forgets its bias": (TOPK, "+ correction_bias.view(", "+ 0 * correction_bias.view(", "target.hidden"),
    "a router forgets its groups": (TOPK, "~score_mask.bool()", "score_mask.bool() & False", "target.hidden"),
    "experts are weighted with the bias of the choice": (
        TOPK,
        "topk_weights = scores.gather(1, topk_ids)",
        "topk_weights = scores_for_choice.gather(1, topk_ids)",
        "target.hidden",
    ),
    "weights of experts do not sum to one": (TOPK, "if renormalize:", "if False:", "target.hidden"),
    "the shared expert is scaled as the routed ones are": (
        f"{MOE}._forward_shared_experts",
        "return self.shared_experts(\n            hidden_states, gemm_output_zero_allocator=",
        "return self.routed_scaling_factor * self.shared_experts(\n            hidden_states, gemm_output_zero_allocator=",
        "target.hidden",
    ),
    "the shared expert is added twice": (
        f"{MOE}._forward_shared_experts",
        "return self.shared_experts(\n            hidden_states, gemm_output_zero_allocator=",
        "return 2 * self.shared_experts(\n            hidden_states, gemm_output_zero_allocator=",
        "target.hidden",
    ),
    "the draft's routed experts are added twice": (
        f"{MOE}.forward_normal",
        "final_hidden_states *= self.routed_scaling_factor",
        "final_hidden_states *= self.routed_scaling_factor * (2 if self.is_nextn else 1)",
        "draft.hidden_in",
    ),
}
# Where the context was lengthened, as the real models' was: what a head would be wrong by that forgot it.
OF_LENGTHENED = {
    "the draft's scores lack their temperature": (
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.__init__",
        "self.scaling = compute_mla_mscale_scaling(rope_scaling, self.scaling)",
        "self.scaling = self.scaling if is_nextn else compute_mla_mscale_scaling(rope_scaling, self.scaling)",
        "draft.hidden_in",
    ),
    "scores are sharpened twice": (
        "sglang.srt.models.deepseek_v2.DeepseekV2AttentionMLA.__init__",
        "self.scaling = compute_mla_mscale_scaling(rope_scaling, self.scaling)",
        "self.scaling = compute_mla_mscale_scaling(rope_scaling, compute_mla_mscale_scaling(rope_scaling, self.scaling))",
        "target.kv",
    ),
    "no pair turns more slowly": (
        "sglang.srt.layers.rotary_embedding.rope_variant.DeepseekScalingRotaryEmbedding._compute_inv_freq",
        "inv_freq_interpolation = 1.0 / (scaling_factor * pos_freqs)",
        "inv_freq_interpolation = 1.0 / pos_freqs",
        "target.kv",
    ),
}
MOVE = (f"{POOL}.move_kv_cache", "kv_cache[tgt_loc_flat] = kv_cache[src_loc_flat]")
LATENT_ALONE = "kv_cache[tgt_loc_flat, :, :512] = kv_cache[src_loc_flat, :, :512]"
ROWS_BESIDE = "kv_cache[tgt_loc_flat] = kv_cache[src_loc_flat - 1]"
# Rows are moved at a commit, and copied for each branch that begins inside a page.
OF_TREES = {
    "the accepted path is moved without its turned keys": (1, LATENT_ALONE, "commit.path"),
    "the accepted path is moved from one row before it": (1, ROWS_BESIDE, "commit.path"),
    "a branch's copy of its page lacks the turned keys": (4, LATENT_ALONE, "draft.scratch_kv"),
    "a branch's copy of its page is of rows beside it": (4, ROWS_BESIDE, "draft.scratch_kv"),
}


def test_a_chain_is_equal(run: Runner, chain: Case) -> None:
    _, verdict = run(chain)
    assert verdict.status == "equal", verdict


def test_a_tree_is_equal(run: Runner, tree: Case) -> None:
    _, verdict = run(tree)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", spread(sorted(OF_CHAINS), lambda fault: OF_CHAINS[fault][-1] == "target.kv"))
def test_a_fault_is_named(run: Runner, chain: Case, fault: str) -> None:
    target, match, replacement, rule = OF_CHAINS[fault]
    trace, verdict = run(chain, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.parametrize("fault", spread([None, *sorted(OF_LENGTHENED)], lambda fault: fault is None))
def test_a_lengthened_context_is_equal_and_a_fault_in_it_is_named(run: Runner, chain: Case, fault: str | None) -> None:
    case = msgspec.structs.replace(chain, model="deepseek-nextn-yarn", exercises=("chunked_prefill", "radix_hit", "rejection"))
    if fault is None:
        assert run(case)[1].status == "equal"
        return
    target, match, replacement, rule = OF_LENGTHENED[fault]
    trace, verdict = run(case, Edit(target=target, match=match, replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.parametrize("fault", spread(sorted(OF_TREES), lambda fault: OF_TREES[fault][2]))
def test_a_fault_in_moving_latent_rows_is_named(run: Runner, tree: Case, fault: str) -> None:
    page_size, replacement, rule = OF_TREES[fault]
    features = tuple(name for name in tree.exercises if page_size > 1 or name != "branch_holes")
    case = msgspec.structs.replace(tree, page_size=page_size, exercises=features)
    trace, verdict = run(case, Edit(target=MOVE[0], match=MOVE[1], replacement=replacement))
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.long
def test_a_node_that_is_certain_is_selected_without_its_parent(run: Runner) -> None:
    """Live: docs/findings/certain-node. Candidate 6 has probability 1 behind candidate 1, and so the same value; of equal
    values torch.topk takes any. A stable order takes parents first, whose numbers are smaller."""
    entry = LEDGER["certain-node"]
    assert entry.remedy is not None
    _, verdict = run(entry.case)
    assert (verdict.status, verdict.rule) == ("diverged", "tree.parents"), verdict
    assert verdict.first is not None
    assert verdict.first.actual == "[0, 3, 6, 12, 13]"
    _, verdict = run(entry.case, *entry.remedy.edits)
    assert verdict.status == "equal", verdict


@pytest.mark.long
def test_a_read_of_an_unwritten_latent_row_is_seen(run: Runner, chain: Case) -> None:
    """A first chunk of the draft leaves its first row unwritten: its readers read poison, which no rule on inputs can see."""
    fault = Edit(
        target=f"{MHA}._set_mla_kv_buffer",
        match="latent_cache, None",
        replacement="torch.cat([torch.ones_like(latent_cache[:1]), latent_cache[1:]]) if self.is_nextn else latent_cache, None",
    )
    trace, verdict = run(chain, fault)
    assert (verdict.status, verdict.rule) == ("diverged", "draft.kv")
    blind = judge(trace, frozenset({"draft.kv"}))
    assert (blind.status, blind.rule) == ("diverged", "draft.hidden_in")  # the poison alone shows in what attention made of it


def test_bfloat16_is_refused_where_nobody_sees_how_experts_were_chosen(chain: Case) -> None:
    graphs = Mode(dtype="bfloat16", device="cuda", graphs=(1, 2, 4))
    with pytest.raises(boot.NotDriven, match="in a graph nobody sees"):
        boot._refuse_what_is_not_driven(chain, graphs, None)
    boot._refuse_what_is_not_driven(chain, replace(graphs, graphs=()), None)
    boot._refuse_what_is_not_driven(replace(chain, model="deepseek-nextn-wide"), graphs, None)  # both of its experts are chosen
