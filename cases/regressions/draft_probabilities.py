"""Under rejection sampling, what draft decode drew from stayed in the memory of its CUDA graph up to 0.5.20.

The target's graph runs in the same memory before verify reads it. It takes a GPU, and no entry shows it alone: the patch below
fixes it where generated cases would meet it (`gpu plan --sampling`).
"""

from packaging.version import Version

from eagletwin.harness.core.patch import Edit, Patch

_FIXED = "0.5.21"

DRAFT_PROBABILITIES = Patch(
    name="draft-probabilities-copied",
    edits=(
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
            match="self.cuda_graph_runner.execute(forward_batch)",
            replacement="tuple(one if one is None else one.clone() for one in self.cuda_graph_runner.execute(forward_batch))",
        ),
    ),
)


def copies_nothing(release: str) -> bool:
    """Whether a release reads what draft decode drew from out of the graph's memory."""
    return Version(release) < Version(_FIXED)
