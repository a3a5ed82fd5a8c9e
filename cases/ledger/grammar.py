"""Live: what ends a request with a grammar, and where its mask is laid.

grammar-end: A text that ends with the token of a prefill does not end its request, which gets a token more that nothing
constrains.

The end of a request is looked for before its grammar reads the token. A round's tokens are read first. An end-of-sequence token
ends the request all the same, but for `ignore_eos`. A prefill after a retraction is one, too.

grammar-stride: Found by eagletwin on a GPU: the mask of a grammar is laid over the wrong places of float32 logits.

SGLang pads the vocabulary of a head to a multiple of 64, and cuts logits to the vocabulary's own size: rows of the cut logits
are as far apart as before. The kernel that applies a mask takes the vocabulary's size for that distance. So the mask of row 1
falls into the padding of row 0 and onto other tokens of row 1, and row 1 may get tokens that its grammar does not allow.
Logits of 16 bits are copied as they become float32, and a copy has no gaps. docs/findings/grammar-stride.
"""

from ..entry import Entry, Grammar, Needs, OnCuda, Request, small_case, small_patch

BY_DISTANCE = small_patch(
    "masks-by-the-distance-of-rows",
    "sglang.kernels.ops.grammar.bitmask_ops.apply_token_bitmask_inplace_triton",
    "logits_shape[1],\n        bitmask_shape[1],\n        NUM_SMS",
    """# Logits cut to the vocabulary are a view of padded ones: their rows are
# farther apart than the vocabulary is long.
logits.stride(0) if logits.ndim > 1 else logits_shape[1],
bitmask_shape[1],
NUM_SMS""",
)

ENTRIES = (
    Entry(
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
            hidden={
                "overlap": "the next launch has the grammar read the prefill's token before the request's end is looked for"
            }
        ),
        recorded="output.tokens",
        case=small_case(Request(id="a", prompt=(7,), max_new_tokens=2, grammar=Grammar(rules=("()",)))),
    ),
    Entry(
        id="grammar-stride",
        title="Apply the mask of a grammar by the distance between rows of logits",
        rule="output.grammar",
        buggy="0.5.23 -",
        trigger="a GPU, logits in float32, a vocabulary that is no multiple of 64, a batch of two requests with grammars",
        needs=Needs(device="cuda", dtype="float32"),
        remedy=BY_DISTANCE,
        case=small_case(
            Request(id="a", prompt=(15,), max_new_tokens=1, grammar=Grammar(kind="regex", rules=("a",))),
            Request(id="b", prompt=(15,), max_new_tokens=1, grammar=Grammar(kind="regex", rules=("(b)?",))),
            num_steps=2,
        ),
    ),
)
