"""Live: adaptive steps capture a narrow graph of draft extend with the lengths of a wide one, and a kernel reads past its end.

The runners of all numbers of steps share their buffers by name and shape. `extend_seq_lens` has the shape of the batch, and
its values are the width that a runner was made for. `select_index` was excluded for that reason; the lengths were not. Before a
replay they are filled. Deterministic inference reads as many slots as they say while the graph is captured.
docs/findings/adaptive-widths.
"""

from ..entry import Adaptive, Entry, Needs, Request, SGLangSettings, Tier, small_case, small_patch

ENTRY = Entry(
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
)
