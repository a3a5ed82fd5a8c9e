"""Draft decode on DeepSeek-V4's CUDA backend reads the committed rows alone, in every step.

`seq_lens` of the batch stays the committed length M while the chain grows. Each step's plan takes it as it is, so that a step
stands at M - 1 and its window ends there: it sees neither its own row nor those of the steps before. Step j must read up to
column M + j - 1. The twin for HIP adds the step's number since 0.5.20.
"""

from ..entry import FunctionCall, Probe, small_patch
from .pr_26239 import BACKEND, COMMITTED, NUM_STEPS, first_slot, kernel_inputs

READS = tuple(
    [first_slot(request) + column for request, m in enumerate(COMMITTED) for column in range(m + step)]
    for step in range(1, NUM_STEPS)
)

ENTRY = Probe(
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
    remedy=small_patch(
        "remedy-dsv4-draft-reads",
        f"{BACKEND}.make_forward_metadata_from_raw_decode",
        "seq_lens = raw_metadata.seq_lens",
        "seq_lens = raw_metadata.seq_lens\n"
        "if self.topk > 0 and self.speculative_num_steps > 1:\n"
        "    seq_lens = seq_lens + self.speculative_step_id + 1",
    ),
)
