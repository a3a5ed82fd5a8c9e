"""PR #22832: a multi-layer draft kept the hidden states of the last CUDA graph, where the batch was too large for one.

Graphs on a CPU begin with 0.5.17, and since 0.5.15 no release keeps states for its graphs, so no case in graphs has it as it
was. The draft extend that keeps the states does run alone: what it keeps of a request is the states of the request's own last
num_steps - 1 rows in this batch. A fault like it, states of a graph that did not run given to the next layer, is planted in
0.5.23 by tests/engine/test_graphs.py, and found in graphs on a CPU.
"""

from ..entry import FunctionCall, Probe

_NUM_STEPS = 3


def _call() -> FunctionCall:
    rows = _NUM_STEPS + 1
    states = [10 * (request + 1) + row for request in range(2) for row in range(rows)]
    return FunctionCall(
        name="kept_states",
        given={"states": states, "stale": [900 + state for state in states], "num_steps": [_NUM_STEPS]},
        expected=tuple(states[rows * request :][:rows][1 - _NUM_STEPS :] for request in range(2)),
        what="states kept of request",
        words=f"kept_states {_NUM_STEPS}",
    )


ENTRY = Probe(
    id="22832",
    title="Keep the hidden states of the batch that ran, not of the last CUDA graph's (multi-layer)",
    rule="draft.hidden_in",
    buggy="0.5.9 - 0.5.10.post1",
    fixed="0.5.11",
    last_bad="0.5.10.post1",
    trigger="multi-layer EAGLE with CUDA graphs, and a batch that is too large for them; here its draft extend alone",
    call=_call(),
)
