"""PR #26239: without a CUDA graph, DeepSeek-V4's backend planned the same slots for every step of draft decode.

`26239` asks the multi-step backend itself for the plan of a chain; `26239-worker` is a case, with SGLang's worker.
Step j writes each request's slot of column M + j - 1, and no other; the last step has no forward. Without the fix each step
is handed the slots of all, which the backend refuses by an assertion.
"""

from ..entry import Entry, FunctionCall, Needs, Patch, Probe, Request, small_case, small_patch

BACKEND = "sglang.srt.layers.attention.deepseek_v4_backend.DeepseekV4AttnBackend"
COMMITTED, NUM_STEPS = (5, 9), 3


def first_slot(request: int) -> int:
    """The slot of a request's position 0; those of its other positions follow."""
    return 1000 * (request + 1)


def kernel_inputs() -> dict[str, list[int]]:
    """Committed lengths, and the slots that the worker allots behind them."""
    # not of reference.layout, which imports torch: the ledger is read before anything slow is imported
    slots = [first_slot(request) + m + step for request, m in enumerate(COMMITTED) for step in range(NUM_STEPS)]
    return {"committed": list(COMMITTED), "slots": slots}


_REVERT = small_patch(
    "revert-26239", f"{BACKEND}._build_forward_metadata", "if self.topk > 0 and self.speculative_num_steps > 1:", "if False:"
)

ENTRY = Probe(
    id="26239",
    title="Plan each draft step's slots without a CUDA graph (DeepSeek-V4)",
    rule="draft.slots",
    buggy="0.5.12 - 0.5.12.post1",
    fixed="0.5.13",
    last_bad="0.5.12.post1",
    trigger="the DeepSeek-V4 backend, num_steps >= 2, no CUDA graph; here its plan alone",
    call=FunctionCall(
        name="step_slots",
        given=kernel_inputs(),
        expected=tuple([first_slot(r) + m + step for r, m in enumerate(COMMITTED)] for step in range(NUM_STEPS - 1)),
        what="slots planned for draft decode step",
        words=f"step_slots {COMMITTED} {NUM_STEPS}",
    ),
    revert=_REVERT,
)

# That a step does not read one row of a hundred, a live bug (dsv4-draft-reads-worker), is within the bound.
_LONG = tuple((7 * n * n + 3 * n + 5) % 90 for n in range(120))

WORKER = Entry(
    id="26239-worker",
    title="Plan each draft step's slots without a CUDA graph in a worker (DeepSeek-V4)",
    rule="engine.crash",
    buggy="0.5.12 - 0.5.12.post1",
    fixed="0.5.13",
    hidden="DeepSeek-V4's worker is driven on 0.5.23 alone",
    trigger="the DeepSeek-V4 backend, num_steps >= 3, no CUDA graph; on a CPU, by stand-ins for its kernels",
    needs=Needs(dtype="bfloat16"),
    revert=Patch(name="revert-26239-worker", edits=_REVERT.edits),
    case=small_case(
        Request(id="a", prompt=_LONG, max_new_tokens=3),
        Request(id="b", prompt=_LONG[5:110], max_new_tokens=3),
        model="deepseek-v4",
        num_steps=3,
        page_size=256,
        chunked_prefill_size=256,
    ),
)

ENTRIES = (ENTRY, WORKER)
