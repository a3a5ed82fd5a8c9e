"""Live, found by eagletwin: with adaptive steps Mamba-2 layers commit other requests' states, or memory that nobody wrote.

Verify leaves the state after each node in a buffer with room for the longest round there may be. The kernel of Mamba-2 is told
how many nodes this round has, and takes that for the distance from one request's states to the next's. The commit goes by the
buffer's own shape. In every round that is shorter than the longest, all requests of a batch but the first commit a state of
something else, and their output is wrong from there on. PR #23331 mended the same of the gated delta rule.
"""

from eagletwin.harness.core.case import Adaptive, Case, EngineSettings, Request, SGLangSettings, Tier
from eagletwin.harness.core.patch import Edit, Patch

from ..entry import Entry


def of_model(name: str, model: str) -> Case:
    """Two requests, and a round that is shorter than the longest."""
    tiers = (Tier(batch=1, steps=(1,)), Tier(batch=64, steps=(2,)))
    return Case(
        name=name,
        model=model,
        num_steps=1,
        requests=(Request(id="a", prompt=(49,), max_new_tokens=2), Request(id="b", prompt=(49,), max_new_tokens=2)),
        engine=EngineSettings(sglang=SGLangSettings(adaptive=Adaptive(tiers=tiers))),
        exercises=("batch",),
    )


ENTRY = Entry(
    id="adaptive-scan",
    title="Find each request's states of Mamba-2 in rounds that are shorter than the longest",
    rule="target.state",
    buggy="0.5.19 -",
    fixed="",
    trigger="--speculative-adaptive, layers of Mamba-2 (Nemotron-H), two requests in a batch",
    remedy=Patch(
        name="states-where-the-buffer-has-them",
        edits=(
            Edit(
                target="sglang.srt.layers.attention.mamba.mamba.MambaMixer2.forward",
                match="cache_steps=draft_token_num,",
                replacement="""# The buffer has room for the longest round; with adaptive
# steps this one may be shorter.
cache_steps=layer_cache.intermediate_ssm.shape[1],""",
            ),
        ),
    ),
    case=of_model("adaptive-scan", "nemotron-h-nextn"),
)
