"""What ran in a CUDA graph: no Python runs there, so no tap recorded what its forwards were given. Called by requests.py.

A wrong input shows in the rows that it led to (draft.scratch_kv, draft.kv) and in what was proposed; the verdict says how many
comparisons could not be made.
"""

from eagletwin.harness.core.trace import Trace

from .compare import Compare, Place
from .story import Round
from .trees import Trees

_INPUTS = ("draft.positions", "draft.hidden_in", "draft.slots")
INPUTS = ("draft.input_ids", *_INPUTS)
# Where a wrong input shows that a graph hides: in the rows that its forward wrote.
_SHOWS_INSTEAD = ("draft.scratch_kv", "draft.kv")


def shows_instead(broken: str, rule: str) -> bool:
    """Whether a bug that breaks `rule` may break this one, where a graph hides what `rule` looks at."""
    return rule in INPUTS and broken in _SHOWS_INSTEAD


def draft_decode_in_graph(trace: Trace, compare: Compare, trees: Trees, number: int, round: Round) -> None:
    """Draft record `number`. The tokens of a tree's frontiers are read from the memory of a graph that eagletwin captured, and
    not in a server, which captures its own; those of a chain are its proposals."""
    case, record = trace.header.case, trace.header.records[number]
    steps, seen = case.num_steps - 1, case.topk > 1 and "consumed" in record.tensors
    compare.not_seen(_INPUTS if seen else INPUTS, steps)
    if not seen:
        return
    consumed = trace.integers(number, "consumed")
    for step in range(1, steps + 1):
        ids = consumed[(step - 1) * case.topk : step * case.topk]
        tokens = trees.consumed(round, step, ids)
        compare.integers(Place(record, "draft", step), "draft.input_ids", tokens, ids, "branch", 0)


def layers_in_graph(trace: Trace, compare: Compare) -> None:
    """The layers of a multi-layer draft extend."""
    compare.not_seen(("draft.runner", *INPUTS), trace.header.case.num_steps)
