"""PR #23331: with adaptive steps layers of the gated delta rule committed other requests' states, or memory nobody wrote.

Verify leaves the state after each node in a buffer with room for the longest round there may be. The kernel took the number of
nodes of this round for the distance from one request's states to the next's. The commit goes by the buffer's own shape. In
every round that is shorter than the longest, all requests of a batch but the first committed a state of something else, and
their output is wrong. Mamba-2's kernel still does (entry `adaptive-scan`).
"""

from ..entry import Entry, small_patch
from . import adaptive

ENTRY = Entry(
    id="23331",
    title="Find each request's states of the gated delta rule in rounds that are shorter than the longest",
    rule="target.state",
    buggy="0.5.11 - 0.5.12.post1",
    fixed="0.5.13",
    hidden="releases before 0.5.13 have these layers elsewhere, and choose the number of steps otherwise: they are not driven",
    trigger="--speculative-adaptive, layers of the gated delta rule (Qwen3-Next), two requests in a batch",
    revert=small_patch(
        "revert-23331",
        "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent.fused_sigmoid_gating_delta_rule_update",
        "cache_stride_steps = intermediate_states_buffer.stride(0) // (HV * K * V)",
        "cache_stride_steps = cache_steps",
    ),
    case=adaptive.of_model("qwen3-next-nextn"),
)
