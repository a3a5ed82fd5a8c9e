"""Live, found by eagletwin: with adaptive steps Mamba-2 layers commit other requests' states, or memory that nobody wrote.

Verify leaves the state after each node in a buffer with room for the longest round there may be. The kernel of Mamba-2 is told
how many nodes this round has, and takes that for the distance from one request's states to the next's. The commit goes by the
buffer's own shape. In every round that is shorter than the longest, all requests of a batch but the first commit a state of
something else, and their output is wrong from there on. PR #23331 mended the same of the gated delta rule.
"""

from ..entry import Adaptive, Case, Entry, Request, SGLangSettings, Tier, small_case, small_patch


def of_model(model: str) -> Case:
    """Two requests, and a round that is shorter than the longest."""
    tiers = (Tier(batch=1, steps=(1,)), Tier(batch=64, steps=(2,)))
    return small_case(
        Request(id="a", prompt=(49,), max_new_tokens=2),
        Request(id="b", prompt=(49,), max_new_tokens=2),
        model=model,
        sglang=SGLangSettings(adaptive=Adaptive(tiers=tiers)),
        exercises=("batch",),
    )


ENTRY = Entry(
    id="adaptive-scan",
    title="Find each request's states of Mamba-2 in rounds that are shorter than the longest",
    rule="target.state",
    buggy="0.5.19 -",
    trigger="--speculative-adaptive, layers of Mamba-2 (Nemotron-H), two requests in a batch",
    remedy=small_patch(
        "states-where-the-buffer-has-them",
        "sglang.srt.layers.attention.mamba.mamba.MambaMixer2.forward",
        "cache_steps=draft_token_num,",
        """# The buffer has room for the longest round; with adaptive
# steps this one may be shorter.
cache_steps=layer_cache.intermediate_ssm.shape[1],""",
    ),
    case=of_model("nemotron-h-nextn"),
)
