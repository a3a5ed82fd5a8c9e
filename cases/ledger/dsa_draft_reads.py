"""Draft decode on the DSA backend (DeepSeek-V3.2, GLM-5) chooses among the committed rows alone, in every step.

The batch keeps the committed length M while the chain grows, and each step's plan takes it as it is: the step's number is kept,
and never read. So the indexer scores neither the step's own row nor those of the steps before. Before a CUDA graph is replayed,
one plan is made for all steps. Up to 0.5.12.post1 the backend is called NSA.
"""

from ..entry import Edit, FunctionCall, Patch, Probe
from .dsv4_draft_reads import READS
from .pr_26239 import COMMITTED, NUM_STEPS, kernel_inputs

_BACKEND = "sglang.srt.layers.attention.dsa_backend.DeepseekSparseAttnMultiStepBackend"

ENTRY = Probe(
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
    remedy=Patch(
        name="remedy-dsa-draft-reads",
        edits=(
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
            Edit(
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
            ),
        ),
    ),
)
