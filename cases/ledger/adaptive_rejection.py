"""Live, found by eagletwin: adaptive steps and rejection sampling end the worker at the first round without drafts.

A round of 0 steps verifies a tree of the bonus token alone, whose input brings no distribution that drafts were drawn from.
Rejection sampling raises where it has none, though it would read no row of it: of a tree of one node there is one last draw.
No check of the arguments keeps the two apart, and the default table of adaptive steps has 0 for batches of 8 requests and more.
"""

from ..entry import Adaptive, Entry, Request, Sampling, SGLangSettings, Tier, small_case, small_patch

_FULL = "capture_hidden_mode=CaptureHiddenMode.FULL,"
_NO_ROWS = """
# Rejection sampling reads a row for each draft token: there is none.
draft_probs=torch.empty(
    (bs, 0, self.target_worker.model_config.vocab_size), device=device
),"""

ENTRY = Entry(
    id="adaptive-rejection",
    title="Let a round without drafts sample where the draft samples too",
    rule="engine.crash",
    buggy="0.5.14 -",
    trigger="--speculative-adaptive with 0 among its steps, --speculative-use-rejection-sampling, and a request that samples",
    remedy=small_patch(
        "no-rows-of-no-drafts",
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2._build_trivial_verify_input",
        _FULL,
        f"{_FULL}{_NO_ROWS}",
    ),
    case=small_case(
        Request(id="a", prompt=(7,), max_new_tokens=2, sampling=Sampling()),
        sglang=SGLangSettings(
            rejection_sampling=True,
            adaptive=Adaptive(tiers=(Tier(batch=1, steps=(0,)), Tier(batch=2, steps=(1,)))),
        ),
        exercises=("sampled_verify", "no_steps"),
    ),
)
