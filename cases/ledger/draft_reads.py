"""Live, found by eagletwin: draft decode of four attention backends does not read the rows of its own chain.

`draft-plan, draft-plan-flashmla`: two backends of latent attention draft without their own drafts.

Each step of draft decode should attend to the committed rows and to those of the drafts so far, its own among them.
FlashInfer's MLA backend and FlashMLA attend to the committed rows alone, and in a graph FlashInfer's lists of rows are shifted
besides, in a batch. Output is right. docs/explanation/latent-attention.md.

They do not say how a server `loses` by it: `acceptance` asks no server with these backends.

`dsv4-draft-reads`: Draft decode on DeepSeek-V4's CUDA backend reads the committed rows alone, in every step.

`seq_lens` of the batch stays the committed length M while the chain grows. Each step's plan takes it as it is, so that a step
stands at M - 1 and its window ends there: it sees neither its own row nor those of the steps before. Step j must read up to
column M + j - 1. The twin for HIP adds the step's number since 0.5.20.
`dsv4-draft-reads-worker` is a case, with SGLang's worker.

`dsa-draft-reads`: Draft decode on the DSA backend (DeepSeek-V3.2, GLM-5) chooses among the committed rows alone, in every step.

The batch keeps the committed length M while the chain grows, and each step's plan takes it as it is: the step's number is kept,
and never read. So the indexer scores neither the step's own row nor those of the steps before. Before a CUDA graph is replayed,
one plan is made for all steps. Up to 0.5.12.post1 the backend is called NSA. This is the probe, which asks each release for its
plan; `dsa-draft-reads-worker` is a case, with SGLang's worker and scheduler on a CPU, `dsa-draft-reads-graphs` one in graphs.
"""

from msgspec.structs import replace

from eagletwin.harness.core.run_spec import FLASHMLA_PAGE

from ..entry import (
    Edit,
    EngineSettings,
    Entry,
    FunctionCall,
    Needs,
    OnCuda,
    Patch,
    Probe,
    Request,
    SGLangSettings,
    small_case,
    small_patch,
)
from .pr_26239 import BACKEND, COMMITTED, NUM_STEPS, first_slot, kernel_inputs

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
        _CASE, page_size=FLASHMLA_PAGE, engine=EngineSettings(sglang=replace(_CASE.engine.sglang, max_total_tokens=2048))
    ),
)

READS = tuple(
    [first_slot(request) + column for request, m in enumerate(COMMITTED) for column in range(m + step)]
    for step in range(1, NUM_STEPS)
)

_DSV4_REMEDY = small_patch(
    "remedy-dsv4-draft-reads",
    f"{BACKEND}.make_forward_metadata_from_raw_decode",
    "seq_lens = raw_metadata.seq_lens",
    "seq_lens = raw_metadata.seq_lens\n"
    "if self.topk > 0 and self.speculative_num_steps > 1:\n"
    "    seq_lens = seq_lens + self.speculative_step_id + 1",
)

DSV4 = Probe(
    id="dsv4-draft-reads",
    title="Draft decode reads its own rows (DeepSeek-V4 on CUDA)",
    rule="draft.positions",
    buggy="0.5.12 -",
    trigger="the DeepSeek-V4 backend on CUDA, num_steps >= 2; here its plan alone",
    call=FunctionCall(
        name="step_reads",
        given=kernel_inputs(),
        expected=READS,
        what="slots read by draft decode step",
        words=f"step_reads {COMMITTED} {NUM_STEPS}",
    ),
    remedy=_DSV4_REMEDY,
)

DSV4_WORKER = Entry(
    id="dsv4-draft-reads-worker",
    title="Draft decode reads its own rows in a worker (DeepSeek-V4)",
    rule="draft.proposal",
    buggy="0.5.12 -",
    trigger="the DeepSeek-V4 backend, num_steps >= 2; on a CPU, by stand-ins for its kernels",
    needs=Needs(dtype="bfloat16"),
    remedy=Patch(name="remedy-dsv4-draft-reads-worker", edits=_DSV4_REMEDY.edits),
    case=small_case(
        Request(id="a", prompt=(5, 9, 33, 12, 7, 80, 41, 22, 3), max_new_tokens=12),
        model="deepseek-v4",
        num_steps=3,
        page_size=256,
        chunked_prefill_size=256,
    ),
)

_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnMultiStepBackend"

_DSA_EAGER = (
    Edit(  # one choice of rows, which draft extend makes for the whole chain, goes with lengths of its own
        target=f"{_BACKEND}.__init__",
        match="self.topk = topk",
        replacement="self.topk = topk\nself.seeded = seed_dsa_topk_from_draft_extend",
    ),
    Edit(
        target=f"{_BACKEND}.init_forward_metadata",
        match="for i in range(self.speculative_num_steps - 1):\n"
        "        self.attn_backends[i].init_forward_metadata(forward_batch)",
        replacement="import copy\n"
        "for i in range(self.speculative_num_steps - 1):\n"
        "    step = copy.copy(forward_batch)\n"
        "    if not self.seeded:\n"
        "        # The batch keeps the committed lengths through the whole chain; each\n"
        "        # draft step adds a row, its own, and reads up to that.\n"
        "        step.seq_lens = forward_batch.seq_lens + (i + 1)\n"
        "        if forward_batch.seq_lens_cpu is not None:\n"
        "            step.seq_lens_cpu = forward_batch.seq_lens_cpu + (i + 1)\n"
        "    self.attn_backends[i].init_forward_metadata(step)",
    ),
)
_DSA_GRAPHS = Edit(
    target=f"{_BACKEND}.init_forward_metadata_out_graph",
    match="bs = forward_batch.batch_size",
    replacement="bs = forward_batch.batch_size\n"
    "if not self.seeded:\n"
    "    # No two steps have the same lengths, so they share no plan.\n"
    "    for i, backend in enumerate(self.attn_backends):\n"
    "        precomputed = backend._precompute_replay_metadata(\n"
    "            bs=bs,\n"
    "            req_pool_indices=forward_batch.req_pool_indices,\n"
    "            seq_lens=forward_batch.seq_lens + (i + 1),\n"
    "            seq_lens_cpu=None,\n"
    "            forward_mode=ForwardMode.DECODE,\n"
    "        )\n"
    "        backend.init_forward_metadata_replay_cuda_graph_from_precomputed(\n"
    "            bs=bs, precomputed=precomputed, forward_mode=ForwardMode.DECODE\n"
    "        )\n"
    "    return",
)

DSA = Probe(
    id="dsa-draft-reads",
    title="Draft decode may choose its own rows (DSA: DeepSeek-V3.2, GLM-5)",
    rule="draft.positions",
    buggy="0.5.9 -",
    trigger="the DSA backend on a GPU, num_steps >= 2; here its plan alone",
    call=FunctionCall(
        name="dsa_step_reads",
        given=kernel_inputs(),
        expected=READS,
        what="slots that may be chosen by draft decode step",
        words=f"dsa_step_reads {COMMITTED} {NUM_STEPS}",
    ),
    remedy=Patch(name="remedy-dsa-draft-reads", edits=(*_DSA_EAGER, _DSA_GRAPHS)),
)

DSA_WORKER = Entry(
    id="dsa-draft-reads-worker",
    title="Draft decode chooses its own rows in a worker (DSA)",
    rule="draft.selection",
    buggy="0.5.9 -",
    trigger="the DSA backend, num_steps >= 2; on a CPU, by stand-ins for its kernels",
    remedy=Patch(name="remedy-dsa-draft-reads-worker", edits=_DSA_EAGER),  # its proof has no graphs
    case=small_case(
        Request(id="a", prompt=(5, 9, 33, 12, 7, 80, 41, 22, 3), max_new_tokens=2),
        model="deepseek-dsa",
        num_steps=2,
        page_size=64,
    ),
)

DSA_IN_GRAPHS = Entry(
    id="dsa-draft-reads-graphs",
    title="Draft decode chooses its own rows in a CUDA graph (DSA)",
    rule="draft.selection",
    buggy="0.5.9 -",
    trigger="the DSA backend, num_steps >= 2, draft decode in a CUDA graph; on a CPU, by stand-ins for its kernels",
    needs=Needs(graphs=True),
    remedy=Patch(name="remedy-dsa-draft-reads-graphs", edits=(_DSA_EAGER[0], _DSA_GRAPHS)),
    case=small_case(  # of a recipe that a GPU runs in bfloat16: more rows than its 128 chosen ones
        Request(id="a", prompt=tuple((7 * n * n + 3 * n + 5) % 90 for n in range(150)), max_new_tokens=3),
        model="deepseek-dsa-wide",
        num_steps=3,
        page_size=64,
        sglang=SGLangSettings(graphs=(1, 2), max_total_tokens=1024),
    ),
)

ENTRIES = (FLASHINFER, FLASHMLA, DSV4, DSV4_WORKER, DSA, DSA_WORKER, DSA_IN_GRAPHS)
