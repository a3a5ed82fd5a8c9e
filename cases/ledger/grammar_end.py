"""Live: a text that ends with the token of a prefill does not end its request, which gets a token more that nothing constrains.

The end of a request is looked for before its grammar reads the token. A round's tokens are read first. An end-of-sequence token
ends the request all the same, but for `ignore_eos`. A prefill after a retraction is one, too.
"""

from eagletwin.harness.core.case import Case, Grammar, Request
from eagletwin.harness.core.patch import Edit, Patch

from ..entry import Entry, OnCuda

ENTRY = Entry(
    id="grammar-end",
    title="End a request whose grammar ends with the token of a prefill",
    rule="output.grammar",
    buggy="0.5.9 -",
    fixed="",
    trigger="a grammar with ignore_eos, whose text a prefill's token ends: an empty one, or one after a retraction",
    remedy=Patch(
        name="grammar-before-finish",
        edits=(
            Edit(
                target="sglang.srt.managers.scheduler_components.batch_result_processor."
                "SchedulerBatchResultProcessor.process_batch_result_prefill",
                match="logprob_pt = 0\n",
                replacement="logprob_pt = 0\nself.advance_grammar_fsm(result, batch)\n",
            ),
        ),
    ),
    on_cuda=OnCuda(
        hidden={"overlap": "the next launch has the grammar read the prefill's token before the request's end is looked for"}
    ),
    recorded="output.tokens",
    case=Case(
        name="grammar-end",
        model="llama-tiny",
        num_steps=1,
        requests=(Request(id="a", prompt=(7,), max_new_tokens=2, grammar=Grammar(rules=("()",))),),
    ),
)
