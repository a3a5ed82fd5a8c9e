"""PR #22832: a multi-layer draft kept the hidden states of the last CUDA graph, where the batch was too large for one.

CUDA graphs need a GPU. The draft extend that keeps the states does run alone: what it keeps of a request is the states of the
request's own last num_steps - 1 rows in this batch.
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
