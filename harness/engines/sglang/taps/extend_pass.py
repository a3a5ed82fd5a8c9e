"""Draft extend after a verify: the draft takes over what was committed."""

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class ExtendPass:
    """Made when verify() returns, of what it decided; whole when the batch is done.

    requests  those that it runs for: v2 all of the batch, v1 those that have not ended
    rows      of each request in the forward: v2 all nodes of a tree, v1 the committed tokens
    defined   of these, how many at the front the sequence goes on with; None: all
    ends      v1 alone: length of each request when the round is over. v2 says so in the batch's result.
    in_graph  whether the layers of a multi-layer draft ran in CUDA graphs. A single head's graph is seen as one forward.
    """

    requests: list[Any]
    rows: list[int]
    defined: list[int] | None
    ends: list[int] | None = None
    in_graph: bool = False
