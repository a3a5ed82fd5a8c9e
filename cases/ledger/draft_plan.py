"""Live, found by eagletwin on a GPU: two backends of latent attention draft without their own drafts.

Each step of draft decode should attend to the committed rows and to those of the drafts so far, its own among them.
FlashInfer's MLA backend and FlashMLA attend to the committed rows alone, and in a graph FlashInfer's lists of rows are shifted
besides, in a batch. Output is right. docs/findings/draft-plan.md.

They do not say how a server `loses` by it: `acceptance` asks no server with these backends.
"""

from msgspec.structs import replace

from eagletwin.harness.core.run_spec import FLASHMLA_PAGE

from ..entry import Edit, EngineSettings, Entry, Needs, OnCuda, Patch, Request, small_case

_FLASHINFER = "sglang.srt.layers.attention.flashinfer_mla_backend"
_FLASHMLA = "sglang.srt.layers.attention.flashmla_backend"

_CASE = small_case(Request(id="a", prompt=(15, 28, 80, 80), max_new_tokens=6), model="deepseek-nextn-wide", num_steps=5)

_LISTS = Edit(  # with a graph the kernel's lists are what the host says of them
    target=f"{_FLASHINFER}.FlashInferMLAIndicesUpdaterDecode.call_begin_forward",
    match="kv_indptr, kv_indices = spec_info.kv_indptr, spec_info.kv_indices",
    replacement="kv_indptr, kv_indices = spec_info.kv_indptr, spec_info.kv_indices\n"
    "begins = kv_indptr.cpu()\n"
    "fast_decode_kwargs.update(kv_indptr_cpu=begins, kv_len_arr_cpu=begins[1:] - begins[:-1])",
)
_HANDED_ON = Edit(  # without one the lists that were made for each step are handed on
    target=f"{_FLASHINFER}.FlashInferMLAAttnBackend.init_forward_metadata",
    match="init_metadata_replay=False,\n            req_pool_indices",
    replacement="init_metadata_replay=False,\nspec_info=forward_batch.spec_info,\nreq_pool_indices",
)

FLASHINFER = Entry(
    id="draft-plan",
    title="Plan draft decode of FlashInfer's MLA backend with the rows of the drafts so far",
    rule="draft.proposal",
    buggy="0.5.23 -",
    trigger="a GPU, --attention-backend flashinfer, latent attention (DeepSeek, Kimi K2), num_steps >= 2",
    needs=Needs(device="cuda", dtype="bfloat16", attention="flashinfer"),
    remedy=Patch(name="drafts-in-the-plan", edits=(_LISTS,)),
    on_cuda=OnCuda(eager=Patch(name="drafts-in-the-plan-eagerly", edits=(_LISTS, _HANDED_ON))),
    case=_CASE,
)

_TOLD = Edit(
    target=f"{_FLASHMLA}.FlashMLAMultiStepDraftBackend.common_template",
    match="call_fn(i, forward_batch)",
    replacement="self.attn_backends[i].drafts = i + 1\ncall_fn(i, forward_batch)",
)
_READS = Edit(
    target=f"{_FLASHMLA}.FlashMLABackend.forward_decode",
    match="q=reshape_q,\n            k_cache=paged_view(k_cache, PAGE_SIZE),\n"
    "            block_table=self.forward_metadata.block_kv_indices[:bs],\n"
    "            cache_seqlens=forward_batch.seq_lens.to(torch.int32),",
    replacement="q=reshape_q,\nk_cache=paged_view(k_cache, PAGE_SIZE),\n"
    "block_table=self.forward_metadata.block_kv_indices[:bs],\n"
    'cache_seqlens=forward_batch.seq_lens.to(torch.int32) + getattr(self, "drafts", 0),',
)
_EAGER = Edit(
    target=f"{_FLASHMLA}.FlashMLABackend.init_forward_metadata",
    match="bs = forward_batch.batch_size",
    replacement="""bs = forward_batch.batch_size
import copy
drafts, forward_batch = getattr(self, "drafts", 0), copy.copy(forward_batch)
forward_batch.seq_lens = forward_batch.seq_lens + drafts
if forward_batch.seq_lens_cpu is not None:
    forward_batch.seq_lens_cpu = forward_batch.seq_lens_cpu + drafts""",
)
_IN_A_GRAPH = Edit(
    target=f"{_FLASHMLA}.FlashMLABackend._apply_decode_target_verify_metadata",
    match="seq_lens = seq_lens[:bs]",
    replacement="""drafts = getattr(self, "drafts", 0)
seq_lens = seq_lens[:bs] + drafts
seq_lens_cpu = seq_lens_cpu + drafts if seq_lens_cpu is not None else None""",
)

FLASHMLA = Entry(
    id="draft-plan-flashmla",
    title="Count the drafts so far among the rows of FlashMLA's draft decode",
    rule="draft.proposal",
    buggy="0.5.23 -",
    trigger="a GPU, --attention-backend flashmla, num_steps >= 2",
    needs=Needs(device="cuda", dtype="bfloat16", attention="flashmla"),
    remedy=Patch(name="drafts-among-the-rows", edits=(_TOLD, _READS, _IN_A_GRAPH)),
    on_cuda=OnCuda(eager=Patch(name="drafts-among-the-rows-eagerly", edits=(_TOLD, _READS, _EAGER))),
    case=replace(
        _CASE,
        page_size=FLASHMLA_PAGE,
        engine=EngineSettings(sglang=replace(_CASE.engine.sglang, max_total_tokens=2048)),
    ),
)

ENTRIES = (FLASHINFER, FLASHMLA)
