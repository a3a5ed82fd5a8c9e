"""Live, found by eagletwin: what adaptive steps (`--speculative-adaptive`) do wrong.

adaptive-rejection: adaptive steps and rejection sampling end the worker at the first round without drafts.

A round of 0 steps verifies a tree of the bonus token alone, whose input brings no distribution that drafts were drawn from.
Rejection sampling raises where it has none, though it would read no row of it: of a tree of one node there is one last draw.
No check of the arguments keeps the two apart, and the default table of adaptive steps has 0 for batches of 8 requests and more.

adaptive-scan: with adaptive steps Mamba-2 layers commit other requests' states, or memory that nobody wrote.

Verify leaves the state after each node in a buffer with room for the longest round there may be. The kernel of Mamba-2 is told
how many nodes this round has, and takes that for the distance from one request's states to the next's. The commit goes by the
buffer's own shape. In every round that is shorter than the longest, all requests of a batch but the first commit a state of
something else, and their output is wrong from there on. PR #23331 mended the same of the gated delta rule.

adaptive-bonus: two rounds without drafts, one behind the other, end a server without overlap.

A round of 0 steps verifies a tree of the bonus token alone, and hands that token on as the round before left it. A prefill of
greedy requests leaves it in int64 and verify in int32, and on CUDA the kernel of verify takes int64 alone. A round with drafts
joins it to drafts in int64, and with overlap it passes through a buffer in int64. On a CPU nothing shows: the kernel's stand-in
takes both. The default table of adaptive steps has 0 for batches of 8 requests and more. docs/findings/adaptive-bonus.

adaptive-hidden: with adaptive steps a request is given wrong hidden states of rows that a round verified.

All CUDA graphs share one memory pool. At start-up the target's graphs are captured before the draft's: nothing that they hand
out lies where the draft's work. Those of another number of steps are captured in the other order. The target's hidden states
may lie then where the graph of draft extend works, which is replayed before they are copied to the host.
docs/findings/adaptive-hidden.

adaptive-widths: adaptive steps capture a narrow graph of draft extend with the lengths of a wide one, and a kernel reads past
its end.

The runners of all numbers of steps share their buffers by name and shape. `extend_seq_lens` has the shape of the batch, and
its values are the width that a runner was made for. `select_index` was excluded for that reason; the lengths were not. Before a
replay they are filled. Deterministic inference reads as many slots as they say while the graph is captured.
docs/findings/adaptive-widths.
"""

from ..entry import (
    Adaptive,
    Bias,
    Case,
    Edit,
    Entry,
    Needs,
    Patch,
    Request,
    Sampling,
    SGLangSettings,
    Tier,
    small_case,
    small_patch,
)

_FULL = "capture_hidden_mode=CaptureHiddenMode.FULL,"
_NO_ROWS = """
# Rejection sampling reads a row for each draft token: there is none.
draft_probs=torch.empty(
    (bs, 0, self.target_worker.model_config.vocab_size), device=device
),"""


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


_HANDED_ON = "draft_token=draft_input.bonus_tokens"

_BUILD = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.build_adaptive_runtime_state"
_BACKEND = "self._draft_worker.init_attention_backend()"
_CAPTURE = "self._draft_worker._capture_cuda_graphs()"
_STATE = "state = SpecRuntimeState("


ENTRIES = (
    Entry(
        id="adaptive-rejection",
        title="Let a round without drafts sample where the draft samples too",
        rule="engine.crash",
        buggy="0.5.14 -",
        trigger="--speculative-adaptive with 0 among its steps, --speculative-use-rejection-sampling, and a request that "
        "samples",
        remedy=small_patch(
            "no-rows-of-no-drafts",
            "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2._build_trivial_verify_input",
            _FULL,
            f"{_FULL}{_NO_ROWS}",
        ),
        case=small_case(
            Request(id="a", prompt=(7,), max_new_tokens=2, sampling=Sampling()),
            sglang=SGLangSettings(
                rejection_sampling=True, adaptive=Adaptive(tiers=(Tier(batch=1, steps=(0,)), Tier(batch=2, steps=(1,))))
            ),
            exercises=("sampled_verify", "no_steps"),
        ),
    ),
    Entry(
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
    ),
    Entry(
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
            f"# Verify produces int32, but its kernel takes int64.\n{_HANDED_ON}.to(torch.int64),",
        ),
        case=small_case(
            Request(id="a", prompt=(7,), max_new_tokens=3),  # a token of the prefill, and of two rounds
            sglang=SGLangSettings(adaptive=Adaptive(tiers=(Tier(batch=1, steps=(0,)), Tier(batch=2, steps=(1,))))),
            exercises=("no_steps",),
        ),
    ),
    Entry(
        id="adaptive-hidden",
        title="Capture the target's graphs before the draft's for each number of adaptive steps",
        rule="output.hidden",
        buggy="0.5.23 -",
        trigger="CUDA graphs, --speculative-adaptive, and requests that ask for hidden states",
        needs=Needs(graphs=True),
        remedy=Patch(
            name="target-graphs-first",
            edits=(
                Edit(target=_BUILD, match=_BACKEND, replacement="pass"),
                Edit(target=_BUILD, match=_CAPTURE, replacement="pass"),
                Edit(target=_BUILD, match=_STATE, replacement=f"{_BACKEND}\n{_CAPTURE}\n{_STATE}"),
            ),
        ),
        case=small_case(
            Request(
                id="a",
                prompt=(16, 48),
                max_new_tokens=3,
                arrive=1,
                logit_bias=(
                    Bias(token=20, value=8.0),
                    Bias(token=31, value=-4.0),
                    Bias(token=85, value=-100.0),
                    Bias(token=103, value=-4.0),
                ),
                hidden_states="all",
                min_new_tokens=1,
            ),
            model="llama-gqa",
            chunked_prefill_size=512,
            sglang=SGLangSettings(
                radix_cache=True,
                max_total_tokens=144,
                graphs=(1, 2, 4),
                draft_window=4,
                draft_sink=1,
                adaptive=Adaptive(
                    tiers=(
                        Tier(batch=1, steps=(2, 3, 4, 5)),
                        Tier(batch=4, steps=(0, 1, 2, 4, 5)),
                        Tier(batch=64, steps=(0, 1, 2, 3, 4, 5)),
                    ),
                    alpha=0.5,
                    interval=1,
                    warmup=0,
                    down=-1.0,
                    ceiling=1.5,
                ),
            ),
        ),
    ),
    Entry(
        id="adaptive-widths",
        title="Give each width of a draft extend's graph its own lengths",
        rule="engine.crash",
        buggy="0.5.23 -",
        trigger="CUDA graphs, --speculative-adaptive with several numbers of steps, and --enable-deterministic-inference",
        needs=Needs(graphs=True),
        remedy=small_patch(
            "lengths-of-each-width",
            "sglang.srt.speculative.eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner.__init__",
            '(exclude={"select_index"})',
            """(
    exclude={
        "select_index",
        "extend_seq_lens",
        "num_correct_drafts",
        "num_accept_tokens",
    }
)""",
        ),
        case=small_case(
            Request(id="a", prompt=(7,), max_new_tokens=2),
            num_steps=1,
            sglang=SGLangSettings(
                graphs=(1, 2, 4),
                deterministic=True,
                adaptive=Adaptive(tiers=(Tier(batch=1, steps=(0, 1)), Tier(batch=64, steps=(0, 1)))),
            ),
        ),
    ),
)
