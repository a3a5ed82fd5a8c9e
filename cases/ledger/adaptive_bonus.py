"""Live, found by eagletwin on a GPU: two rounds without drafts, one behind the other, end a server without overlap.

A round of 0 steps verifies a tree of the bonus token alone, and hands that token on as the round before left it. A prefill of
greedy requests leaves it in int64 and verify in int32, and on CUDA the kernel of verify takes int64 alone. A round with drafts
joins it to drafts in int64, and with overlap it passes through a buffer in int64. On a CPU nothing shows: the kernel's stand-in
takes both. The default table of adaptive steps has 0 for batches of 8 requests and more. docs/findings/adaptive-bonus.
"""

from ..entry import Adaptive, Entry, Needs, Request, SGLangSettings, Tier, small_case, small_patch

_HANDED_ON = "draft_token=draft_input.bonus_tokens"

ENTRY = Entry(
    id="adaptive-bonus",
    title="Hand a round without drafts its bonus tokens in the type that verify's kernel takes",
    rule="engine.crash",
    buggy="0.5.23 -",
    trigger="a GPU, no overlap, --speculative-adaptive with 0 among its steps, and a round of 0 steps behind another round",
    needs=Needs(device="cuda", overlap=False),
    remedy=small_patch(
        "bonus-tokens-in-int64",
        "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2._build_trivial_verify_input",
        f"{_HANDED_ON},",
        f"# verify leaves int32, and its own kernel takes int64.\n{_HANDED_ON}.to(torch.int64),",
    ),
    case=small_case(
        Request(id="a", prompt=(7,), max_new_tokens=3),  # a token of the prefill, and of two rounds
        sglang=SGLangSettings(adaptive=Adaptive(tiers=(Tier(batch=1, steps=(0,)), Tier(batch=2, steps=(1,))))),
        exercises=("no_steps",),
    ),
)
