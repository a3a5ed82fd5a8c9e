"""Rules that no record breaks by itself: what ranks agree on (ranks.py), and what ends a run (judge.py)."""

from . import rule


@rule("ranks.agree", "4", weights="no")
def agree() -> None:
    """All ranks of a tensor-parallel worker come to the same integers: tokens, positions, slots, trees, paths, counts. All
    stages of a pipeline count the same slots, and send the same."""


@rule("kernel.memory", "5", weights="no")
def memory() -> None:
    """A kernel reads and writes only elements of the tensors it was given, and raw addresses only KV pools."""


@rule("kernel.undefined", "5", weights="no")
def undefined() -> None:
    """What a kernel stores does not depend on memory or lanes that nobody defined."""


@rule("kernel.order", "5", weights="no")
def order() -> None:
    """What a kernel stores does not depend on the order of its programs."""


@rule("kernel.shadow", "5", weights="no")
def shadow() -> None:
    """The fast runtime stores what Triton's interpreter stores."""


@rule("engine.crash", "4", weights="no")
def crash() -> None:
    """The worker survives every valid case."""


@rule("engine.hang", "4", weights="no")
def hang() -> None:
    """The worker finishes every valid case."""
