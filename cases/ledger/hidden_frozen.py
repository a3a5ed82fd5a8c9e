"""Live: with frozen-KV MTP and CUDA graphs, a request is given hidden states that the next replay has overwritten.

`FrozenKVMTPDraftWorker.draft` clears `return_hidden_states` of the scheduler's batch for its own forward, and leaves it so.
The scheduler then copies no hidden states to the host: a request gets a view of the graph's output buffer.
docs/findings/hidden-frozen.
"""

from ..entry import Edit, Entry, Needs, Patch, Request, SGLangSettings, small_case

_DRAFT = "sglang.srt.speculative.frozen_kv_mtp_worker_v2.FrozenKVMTPDraftWorker.draft"
_CLEARED = "batch.return_hidden_states = False"
_BUILT = "assert forward_batch.capture_hidden_mode == CaptureHiddenMode.LAST"

ENTRY = Entry(
    id="hidden-frozen",
    title="Restore the scheduler's return_hidden_states after a frozen-KV draft",
    rule="output.hidden",
    buggy="0.5.21 -",
    trigger="CUDA graphs, frozen-KV MTP (Gemma-4's assistant), and requests that ask for hidden states",
    needs=Needs(graphs=True),
    remedy=Patch(
        name="states-of-a-frozen-draft",
        edits=(
            Edit(target=_DRAFT, match=_CLEARED, replacement=f"return_hidden_states = batch.return_hidden_states\n{_CLEARED}"),
            Edit(target=_DRAFT, match=_BUILT, replacement=f"batch.return_hidden_states = return_hidden_states\n{_BUILT}"),
        ),
    ),
    case=small_case(
        Request(id="a", prompt=(7, 3, 9, 11, 5), max_new_tokens=10, hidden_states="all"),
        model="gemma-4-assistant",
        num_steps=3,
        sglang=SGLangSettings(graphs=(1, 2, 4)),
    ),
)
