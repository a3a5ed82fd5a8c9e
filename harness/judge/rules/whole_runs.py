"""Rules that no record breaks by itself: what ranks agree on (ranks.py), and what ends a run (judge.py)."""

from . import rule


@rule(
    "ranks.agree",
    "4",
    "All ranks of a tensor-parallel worker come to the same integers: tokens, positions, slots, trees, paths, counts. All "
    "stages of a pipeline count the same slots, and send the same.",
    weights="no",
)
@rule(
    "kernel.memory",
    "5",
    "A kernel reads and writes only elements of the tensors it was given, and raw addresses only KV pools.",
    weights="no",
)
@rule("kernel.undefined", "5", "What a kernel stores does not depend on memory or lanes that nobody defined.", weights="no")
@rule("kernel.order", "5", "What a kernel stores does not depend on the order of its programs.", weights="no")
@rule("kernel.shadow", "5", "The fast runtime stores what Triton's interpreter stores.", weights="no")
@rule("engine.crash", "4", "The worker survives every valid case.", weights="no")
@rule("engine.hang", "4", "The worker finishes every valid case.", weights="no")
def whole_runs() -> None: ...
