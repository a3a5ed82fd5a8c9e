"""Live: a text that ends with the token of a prefill does not end its request, which gets a token more that nothing constrains.

The end of a request is looked for before its grammar reads the token. A round's tokens are read first. An end-of-sequence token
ends the request all the same, but for `ignore_eos`. A prefill after a retraction is one, too.
"""

from ..entry import Entry, Grammar, OnCuda, Request, small_case, small_patch

ENTRY = Entry(
    id="grammar-end",
    title="End a request whose grammar ends with the token of a prefill",
    rule="output.grammar",
    buggy="0.5.9 -",
    trigger="a grammar with ignore_eos, whose text a prefill's token ends: an empty one, or one after a retraction",
    remedy=small_patch(
        "grammar-before-finish",
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor.process_batch_result_prefill",
        "logprob_pt = 0\n",
        "logprob_pt = 0\nself.advance_grammar_fsm(result, batch)\n",
    ),
    on_cuda=OnCuda(
        hidden={"overlap": "the next launch has the grammar read the prefill's token before the request's end is looked for"}
    ),
    recorded="output.tokens",
    case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2, grammar=Grammar(rules=("()",)))),
)
