"""PR #26239: without a CUDA graph, DeepSeek-V4's backend planned the same slots for every step of draft decode.

No case reaches that backend without a GPU. Its planning function does run alone: step j of a chain writes each request's slot
of column M + j - 1, and no other; the last step has no forward.
"""

from eagletwin.cases.entry import FunctionCall, Probe

_COMMITTED, _NUM_STEPS = (5, 9), 3


def _call() -> FunctionCall:
    # not of reference.layout, which imports torch: the ledger is read before anything slow is imported
    columns = [range(committed, committed + _NUM_STEPS) for committed in _COMMITTED]
    slots = [[1000 * (request + 1) + column for column in one] for request, one in enumerate(columns)]
    return FunctionCall(
        name="step_slots",
        given={"committed": list(_COMMITTED), "slots": [slot for one in slots for slot in one]},
        expected=tuple([one[step] for one in slots] for step in range(_NUM_STEPS - 1)),
        what="slots planned for draft decode step",
        words=f"step_slots {_COMMITTED} {_NUM_STEPS}",
    )


PROBE = Probe(
    id="26239",
    title="Plan each draft step's slots without a CUDA graph (DeepSeek-V4)",
    rule="draft.slots",
    buggy="0.5.12 - 0.5.12.post1",
    fixed="0.5.13",
    last_bad="0.5.12.post1",
    trigger="the DeepSeek-V4 backend, num_steps >= 2, no CUDA graph; here its init_forward_metadata alone",
    call=_call(),
)
