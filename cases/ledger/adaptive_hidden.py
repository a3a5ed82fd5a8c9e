"""Live, found by eagletwin on a GPU: with adaptive steps a request is given wrong hidden states of rows that a round verified.

All CUDA graphs share one memory pool. At start-up the target's graphs are captured before the draft's: nothing that they hand
out lies where the draft's work. Those of another number of steps are captured in the other order. The target's hidden states
may lie then where the graph of draft extend works, which is replayed before they are copied to the host.
docs/findings/adaptive-hidden.
"""

from ..entry import Adaptive, Bias, Edit, Entry, Needs, Patch, Request, SGLangSettings, Tier, small_case

_BUILD = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.build_adaptive_runtime_state"
_BACKEND = "self._draft_worker.init_attention_backend()"
_CAPTURE = "self._draft_worker._capture_cuda_graphs()"
_STATE = "state = SpecRuntimeState("

ENTRY = Entry(
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
)
